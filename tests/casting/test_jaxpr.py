"""The rewritten program is the same for the same function, and keeps what the user specified."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax import Rules
from mpjax.program import compat
from mpjax.program.graph import walk
from testing import measures

W, X = jnp.full((8, 8), 0.125), jnp.ones((4, 8))
FULL = Rules(residuals="full")


def equations(fun, *args):
    """All equations of an autocast function, and their primitives' names."""
    return [e.eqn for e in measures.equations(jax.make_jaxpr(lambda *args: fun(*args))(*args))]


def named(fun, name, *args):
    return [eqn for eqn in equations(fun, *args) if eqn.primitive.name == name]


def test_same_program_gives_the_same_text():
    def model(params, x):
        for name in ("b", "a"):
            x = jax.nn.gelu(jax.jit(lambda x, w: x @ w)(x, params[name]))
        return jnp.mean(jax.nn.softmax(x) ** 2)

    texts = {
        str(jax.make_jaxpr(jax.grad(mpjax.autocast(lambda p, x: model(p, x))))(dict(params), X))
        for params in ({"a": W, "b": W}, {"b": W, "a": W}, {"a": W, "b": W})
    }
    assert len(texts) == 1


def test_steps_are_not_traced_again():
    count = []

    @jax.jit
    def step(w, x):
        count.append(0)
        return w - 0.1 * jax.grad(mpjax.autocast(lambda w, x: jnp.mean((x @ w) ** 2)))(w, x)

    w = W
    for _ in range(3):
        w = step(w, X)
    assert len(count) == 1


def test_repeated_layer_is_one_function_of_the_rewritten_program():
    layer = jax.jit(lambda w, x: jnp.abs(x @ w))

    def model(w, x):
        for _ in range(4):
            x = layer(w, x)
        return jnp.mean(x @ w)

    # The first call takes a float32 batch; the others are alike.
    calls = [eqn for eqn in named(mpjax.autocast(model), "jit", W, X) if eqn.params["name"] == "<lambda>"]
    assert len(calls) == 4
    assert len({id(eqn.params["jaxpr"]) for eqn in calls[1:]}) == 1


def test_jit_keeps_its_name_and_donation():
    @functools.partial(jax.jit, donate_argnums=1)
    def layer(w, x):
        return x @ w

    (call,) = named(mpjax.autocast(lambda w, x: jnp.mean(layer(w, x * 1.0))), "jit", W, X)
    assert call.params["name"] == "layer"
    assert sum(call.params["donated_invars"]) == 1


def test_jit_keeps_its_shardings():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    layer = jax.jit(lambda w, x: x @ w, in_shardings=(None, rows), out_shardings=rows)
    (call,) = named(mpjax.autocast(lambda w, x: jnp.mean(layer(w, x) @ w)), "jit", W, X)
    assert rows in call.params["in_shardings"]
    assert call.params["out_shardings"] == (rows,)


def test_remat_keeps_its_policy():
    policy = jax.checkpoint_policies.dots_saveable
    block = jax.checkpoint(lambda w, x: jnp.abs(x @ w), policy=policy)
    (call,) = named(mpjax.autocast(lambda w, x: jnp.mean(block(w, x) @ w), rules=FULL), "remat2", W, X)
    assert call.params["policy"] is policy


def test_value_is_cast_once_per_dtype():
    def model(w, x):
        return jnp.sum((x @ w + x) @ w + jnp.abs(x @ w.T) @ w)

    casts = [eqn for eqn in equations(mpjax.autocast(model), W, X) if eqn.primitive.name == "convert_element_type"]
    assert len({eqn.invars[0] for eqn in casts}) == len(casts)


def test_weights_of_a_loop_over_time_are_cast_before_it():
    def model(w, x):
        h, _ = jax.lax.scan(lambda h, x: (jnp.abs(x @ w + h @ w), None), jnp.zeros(8), x)
        return jnp.sum(h)

    jaxpr = jax.make_jaxpr(mpjax.autocast(model, rules=FULL))(W, jnp.ones((16, 8)))
    weight_casts = [
        e
        for e in measures.equations(jaxpr)
        if e.name == "convert_element_type" and e.eqn.invars[0].aval.shape == (8, 8)
    ]
    assert [e.times for e in weight_casts] == [1]


def test_gradients_of_a_loop_over_time_are_summed_in_float32():
    def model(w, x):
        return jnp.sum(jax.lax.scan(lambda h, x: (h, x @ w), 0.0, x)[1])

    # Each iteration adds 1 to the gradient of each weight: float16 would stop at 2048.
    x = jnp.ones((4096, 1, 8))
    grads = jax.jit(jax.grad(mpjax.autocast(model)))(W, x)
    np.testing.assert_allclose(grads, 4096.0)


def test_accumulator_that_starts_as_zeros_stays_float32():
    def model(w, x):
        total, _ = jax.lax.scan(lambda total, x: (total + x @ w, None), jnp.zeros((8,)), x)
        return jnp.sum(total @ w)

    (scan,) = named(mpjax.autocast(model, rules=FULL), "scan", W, jnp.ones((16, 8)))
    assert [v.aval.dtype for v in scan.outvars] == [jnp.float32]


def test_state_carried_by_a_loop_of_steps_stays_float32():
    def train(w, x):
        def step(w, x):
            return w - 1e-4 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), None

        return jax.lax.scan(step, w, x)[0]

    x = jnp.ones((3, 4, 8))
    trained = jax.jit(mpjax.autocast(train))(W, x)
    assert float(jnp.abs(trained - W).max()) > 0
    np.testing.assert_allclose(trained - W, jax.jit(train)(W, x) - W, rtol=1e-2)


def test_literal_that_half_cannot_represent_keeps_float32():
    def model(w, x):
        y = x @ w
        return jnp.sum((y + 1e-9) @ w) + jnp.sum(jnp.where(y > 0, y, -1e9) @ w)

    jaxpr = jax.make_jaxpr(mpjax.autocast(model))(W, X)
    dtypes = {e.name: e.in_dtypes[0] for e in measures.equations(jaxpr) if e.name in ("add", "select_n")}
    assert dtypes["add"] == jnp.float32


@pytest.mark.parametrize("shape", [(), (8,), (4, 1)])
def test_gradient_of_a_broadcast_factor_is_summed_in_float32(shape):
    def model(params, x):
        return jnp.sum((x @ params["w"] * params["scale"]) @ params["w"])

    params = {"w": W, "scale": jnp.ones(shape)}
    step = jax.grad(mpjax.autocast(model))
    assert measures.risky_in_half(step, params, X) == []
    expected = jax.grad(model)(params, X)
    assert measures.relative_error(step(params, X), expected) < 2e-3


def test_casts_of_the_user_are_kept():
    def model(w, x):
        y = (x @ w).astype(jnp.bfloat16)
        return jnp.sum(y.astype(jnp.float32)), y

    loss, y = mpjax.autocast(model)(W, X)
    assert (loss.dtype, y.dtype) == (jnp.float32, jnp.bfloat16)


def test_arguments_that_are_not_arrays_are_passed_on():
    def model(w, x, *, train, name):
        y = x @ w if train else x
        return {"loss": jnp.sum(y), "name": name + "!", "scale": 2.0, "none": None}

    out = mpjax.autocast(model)(W, X, train=True, name="run")
    assert (out["name"], out["scale"], out["none"]) == ("run!", 2.0, None)


def test_callback_is_called_with_the_dtypes_it_was_traced_for():
    def double(x):
        assert x.dtype == np.float32
        return 2 * np.asarray(x)

    def model(w, x):
        y = x @ w
        y = jax.pure_callback(double, jax.ShapeDtypeStruct(y.shape, y.dtype), y, vmap_method="sequential")
        return jnp.sum(y @ w)

    np.testing.assert_allclose(jax.jit(mpjax.autocast(model))(W, X), jax.jit(model)(W, X), rtol=1e-3)
    (row,) = mpjax.explain(model, W, X).opaque
    assert row.op == "pure_callback"
    assert row.why.startswith("opaque")


def test_gelu_exponent_overflow_does_not_reach_the_output():
    x = 60.0 * jnp.ones((4, 8))  # its cube is beyond float16

    def model(w, x):
        return jnp.sum(jax.nn.gelu(x @ w) @ w)

    value, grad = jax.value_and_grad(mpjax.autocast(model))(jnp.eye(8), x)
    assert bool(jnp.isfinite(value))
    assert bool(jnp.isfinite(grad).all())


def test_inserted_casts_have_the_line_and_the_module_of_their_consumer():
    def loss(w, x):
        with jax.named_scope("gate"):
            h = x @ w
        h = jnp.tanh(h)
        y = lax.scan(lambda c, _: (jnp.tanh(c @ w) * jnp.exp(c), None), h, None, length=2)[0]
        return jnp.exp(y @ w), y @ w

    def scalar(w, x):
        return sum(map(jnp.mean, mpjax.autocast(loss)(w, x)))

    for fun in (mpjax.autocast(loss), jax.grad(scalar)):
        casts = [site for site in walk(compat.trace(fun, W, X)) if site.name == "convert_element_type"]
        assert len(casts) > 5
        assert all(site.source.startswith("test_jaxpr.py:") for site in casts), [site.place for site in casts]
    first = next(site for site in walk(compat.trace(mpjax.autocast(loss), W, X)))
    assert (first.name, first.path) == ("convert_element_type", "gate")
