"""Where a gradient goes decides whether it is in half: into an update that can skip, or anywhere else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.example_libraries import optimizers
from jax.flatten_util import ravel_pytree

from mpjax.launcher.casts import running_sites
from mpjax.launcher.session import NONFINITE, NOT_UPDATED

# Each test clears JAX's caches; without this, the same small programs would be compiled again.
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def params():
    rng = np.random.default_rng(1)
    return {name: jax.device_put(rng.normal(size=(16, 16)).astype(np.float32) / 4) for name in ("a", "b")}


def loss_fn(p, x):
    return jnp.mean(jnp.sum((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2, -1))


def steep(p, x):
    """Overflows float16 in the forward pass for data of 1e5."""
    return jnp.mean((x @ p["a"] @ p["b"]) ** 2) / 1e10


def minus(p, g, rate=1e-2):
    return jax.tree.map(lambda p, g: p - rate * g, p, g)


def updated(tx, g, s, p, **extra):
    updates, s = tx.update(g, s, p, **extra)
    return optax.apply_updates(p, updates), s


def share_in_half(fun, *args):
    """The share of the matmuls in half."""
    dtypes = [site.eqn.invars[0].aval.dtype for site in running_sites(jax.make_jaxpr(fun)(*args)) if site.flops]
    return sum(dtype.itemsize == 2 for dtype in dtypes) / len(dtypes)


# Programs `(tx, p, s, x) → anything` whose gradients do not go, whole and only, into an update that can skip a step.
def sgd_by_hand(tx, p, s, x):
    return minus(p, jax.grad(loss_fn)(p, x))


def adam_by_hand(tx, p, s, x):
    g = jax.grad(loss_fn)(p, x)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, s["m"], g)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, s["m"], g)
    return jax.tree.map(lambda p, m, v: p - 1e-2 * m / (jnp.sqrt(v) + 1e-6), p, m, v), m, v


def langevin(tx, p, s, x):
    g, noise = jax.grad(loss_fn)(p, x), jax.random.normal(jax.random.key(0), (16, 16))
    return jax.tree.map(lambda p, g: p - 1e-2 * g + noise, p, g)


def in_a_scan_by_hand(tx, p, s, x):
    return jax.lax.scan(lambda p, x: (minus(p, jax.grad(loss_fn)(p, x)), None), p, x[None])[0]


def a_part_by_hand(tx, p, s, x):
    g = jax.grad(loss_fn)(p, x)
    return updated(optax.sgd(0.1), {"a": g["a"]}, optax.sgd(0.1).init({"a": g["a"]}), {"a": p["a"]}), minus(
        p["b"], g["b"]
    )


def flattened(tx, p, s, x):
    flat, unravel = ravel_pytree(p)
    return unravel(flat - 1e-2 * ravel_pytree(jax.grad(loss_fn)(p, x))[0])


def an_average_beside_the_update(tx, p, s, x):
    g = jax.grad(loss_fn)(p, x)
    return updated(tx, g, s["tx"], p), jax.tree.map(lambda m, g: 0.9 * m + g, s["m"], g)


def a_line_search(tx, p, s, x):
    tx = optax.lbfgs()
    value, g = jax.value_and_grad(loss_fn)(p, x)
    return updated(tx, g, tx.init(p), p, value=value, grad=g, value_fn=lambda p: loss_fn(p, x))


def attacked_data_returned(tx, p, s, x):
    return x + 0.1 * jnp.sign(jax.grad(loss_fn, 1)(p, x))


def a_pullback_by_hand(tx, p, s, x):
    value, pullback = jax.vjp(lambda p: loss_fn(p, x), p)
    return minus(p, pullback(jnp.ones_like(value))[0])


def adapted_without_training(tx, p, s, x):
    return loss_fn(minus(p, jax.grad(loss_fn)(p, x)), x)


def unused(tx, p, s, x):
    return jax.value_and_grad(loss_fn)(p, x)[0]


def late_by_three_steps_beside_the_update(tx, p, s, x):
    def body(carry, x):
        (p, s), m, *late = carry
        g = jax.grad(loss_fn)(p, x)
        return (updated(tx, g, s, p), minus(m, late[-1], -0.1), g, *late[:-1]), None

    none = jax.tree.map(jnp.zeros_like, p)
    (p, _), m, *_ = jax.lax.scan(body, ((p, s["tx"]), s["m"], none, none, none), jnp.stack([x] * 5))[0]
    return p, m


IN_FLOAT32 = [
    sgd_by_hand,
    adam_by_hand,
    langevin,
    in_a_scan_by_hand,
    a_part_by_hand,
    flattened,
    an_average_beside_the_update,
    late_by_three_steps_beside_the_update,
    a_line_search,
    attacked_data_returned,
    a_pullback_by_hand,
    adapted_without_training,
    unused,
]


ARGS = params(), {"tx": optax.adam(1e-2).init(params()), "m": params()}, X


@functools.cache
def without_the_launcher(program):
    return jax.device_get(jax.jit(functools.partial(program, optax.adam(1e-2)))(*ARGS))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("program", IN_FLOAT32, ids=lambda f: f.__name__)
def test_a_gradient_with_another_fate_is_that_of_float32_and_named(launched, program, policy):
    want = without_the_launcher(program)  # before JAX is patched
    session = launched(policy=policy)
    step = jax.jit(functools.partial(program, optax.adam(1e-2)))
    for _ in range(2):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), step(*ARGS), want)
    assert list(session.kept[NOT_UPDATED].values()) in (["loss_fn"], ["<lambda>"])
    assert list(session.kept) == [NOT_UPDATED] or program is a_line_search  # optax differentiates in it
    assert not session.sites


# Programs whose gradients go into updates alone.
def by_an_optimizer(tx, p, s, x):
    return updated(tx, jax.grad(loss_fn)(p, x), s, p)


def with_metrics(tx, p, s, x):
    value, g = jax.value_and_grad(loss_fn)(p, x)
    norms = jax.tree.map(jnp.linalg.norm, g)
    return updated(tx, g, s, p), value, norms, optax.tree.norm(g), jax.tree.map(lambda p, g: jnp.sum(p * g), p, g)


def logged(tx, p, s, x):
    g = jax.grad(loss_fn)(p, x)
    return updated(tx, g, s, p), g


def accumulated(tx, p, s, x):
    zeros = jax.tree.map(jnp.zeros_like, p)
    add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss_fn)(p, x)), None)
    return updated(tx, jax.lax.scan(add, zeros, x.reshape(2, 4, 16))[0], s, p)


def clipped_and_decayed(tx, p, s, x):
    g = jax.grad(loss_fn)(p, x)
    scale = jnp.minimum(1.0, 1.0 / optax.tree.norm(g))
    return updated(tx, jax.tree.map(lambda g, p: g * scale + 1e-4 * p, g, p), s, p)


def sharpness_aware(tx, p, s, x):
    around = minus(p, jax.grad(loss_fn)(p, x), -1e-2)
    return updated(tx, jax.grad(loss_fn)(around, x), s, p)


def in_a_scan(tx, p, s, x):
    return jax.lax.scan(lambda c, x: (updated(tx, jax.grad(loss_fn)(c[0], x), c[1], c[0]), None), (p, s), x[None])[0]


def in_a_loop(tx, p, s, x):
    return jax.lax.fori_loop(0, 2, lambda i, c: updated(tx, jax.grad(loss_fn)(c[0], x), c[1], c[0]), (p, s))


def in_a_branch(tx, p, s, x):
    step = lambda p, s: updated(tx, jax.grad(loss_fn)(p, x), s, p)
    return jax.lax.cond(x[0, 0] > -9, step, lambda p, s: (p, s), p, s)


def by_nested_jits(tx, p, s, x):
    return jax.jit(functools.partial(updated, tx))(jax.jit(jax.grad(loss_fn))(p, x), s, p)


def per_example(tx, p, s, x):
    grads = jax.vmap(jax.grad(loss_fn), (None, 0))(p, x[:, None])
    return updated(tx, jax.tree.map(lambda g: g.mean(0), grads), s, p)


def by_a_pullback(tx, p, s, x):
    value, pullback = jax.vjp(lambda p: loss_fn(p, x), p)
    return updated(tx, pullback(jnp.ones_like(value))[0], s, p)


def meta(tx, p, s, x):
    return updated(tx, jax.grad(lambda p: loss_fn(minus(p, jax.grad(loss_fn)(p, x)), x))(p), s, p)


IN_HALF = [
    by_an_optimizer,
    with_metrics,
    logged,
    accumulated,
    clipped_and_decayed,
    sharpness_aware,
    in_a_scan,
    in_a_loop,
    in_a_branch,
    by_nested_jits,
    per_example,
    by_a_pullback,
    meta,
]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("program", IN_HALF, ids=lambda f: f.__name__)
def test_a_gradient_that_goes_into_an_update_is_in_half(launched, program, policy):
    session = launched(policy=policy)
    step = jax.jit(functools.partial(program, optax.adam(1e-2)))
    assert share_in_half(step, ARGS[0], ARGS[1]["tx"], X) == 1.0
    assert not session.kept
    assert session.sites


def test_each_gradient_of_a_program_has_its_own_fate(launched):
    session = launched()
    tx = optax.adam(1e-2)

    def other_loss(p, x):
        return steep(p, x)

    @jax.jit
    def step(p, q, s, x):
        return updated(tx, jax.grad(steep)(p, x), s, p), minus(q, jax.grad(other_loss)(q, x))

    assert share_in_half(step, params(), params(), tx.init(params()), X) == 0.5
    (p, _), q = step(params(), params(), tx.init(params()), X * 1e5)  # the forward pass overflows float16
    assert np.array_equal(p["a"], params()["a"])  # skipped
    assert np.isfinite(q["a"]).all()
    assert not np.array_equal(q["a"], params()["a"])
    assert list(session.sites.values()) == ["steep"]
    ((reason, functions),) = session.kept.items()
    assert (reason, list(functions.values())) == (NOT_UPDATED, ["other_loss"])


def test_a_persistent_chain_is_in_float32_and_its_model_in_half(launched):
    """The samples of an energy model go into its loss, and are kept: a NaN among them would stay."""
    launched()
    tx = optax.adam(1e-2)

    @jax.jit
    def step(p, s, chain):
        chain = chain - 1e-2 * jax.grad(steep, 1)(p, chain)
        return updated(tx, jax.grad(steep)(p, chain), s, p), chain

    assert 0 < share_in_half(step, params(), tx.init(params()), X) < 1
    _, chain = step(params(), tx.init(params()), X * 1e5)
    assert np.isfinite(chain).all()


# ---- Gradients that a program hands out ----


def differs(a, b):
    return not np.array_equal(a, b)


@pytest.mark.parametrize("update", ["eager", "jitted", "of equinox"])
def test_gradients_handed_to_an_update_are_in_half_from_the_second_call_on(launched, update):
    import equinox as eqx

    want = jax.jit(jax.value_and_grad(steep))
    session = launched()
    tx = optax.adam(1e-2)
    gradient = jax.jit(jax.value_and_grad(steep))
    step = functools.partial(updated, tx)
    if update == "jitted":
        step = jax.jit(step)
    elif update == "of equinox":
        step = lambda g, s, p: (lambda u, s: (eqx.apply_updates(p, u), s))(*tx.update(g, s, p))
    p, s = params(), tx.init(params())
    in_half = []
    for _ in range(4):
        value, g = gradient(p, X)
        in_half.append(differs(value, want(p, X)[0]))
        p, s = step(g, s, p)
    assert in_half == [False, True, True, True]
    assert not any(session.kept.values())
    before = jax.device_get((p, s))
    _, g = gradient(p, X * 1e5)  # overflows float16
    assert not np.isfinite(g["a"]).all()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(step(g, s, p)), before)


def test_a_solver_that_uses_the_function_of_the_training_is_given_float32(launched):
    want = jax.jit(jax.value_and_grad(loss_fn))
    launched()
    tx = optax.adam(1e-2)
    gradient = jax.jit(jax.value_and_grad(loss_fn))
    p, s = params(), tx.init(params())
    for _ in range(3):
        value, g = gradient(p, X)
        p, s = updated(tx, g, s, p)
    assert differs(value, want(p, X)[0])
    for _ in range(3):  # new arrays, as a solver makes them
        p = jax.tree.map(lambda p: p * 1.0, p)
        value, g = gradient(p, X)
        assert not differs(value, want(p, X)[0])
        assert not differs(g["a"], want(p, X)[1]["a"])


def test_a_gradient_of_a_compiled_loss_is_handed_out_too(launched):
    session = launched()
    tx, loss = optax.adam(1e-2), jax.jit(loss_fn)
    p, s = params(), tx.init(params())
    for _ in range(3):
        p, s = updated(tx, jax.grad(loss)(p, X), s, p)
    assert session.sites
    assert session.steps[0].counts[0, NONFINITE] == 0


def test_nnx_gradients_handed_to_its_optimizer_are_in_half(launched):
    session = launched()
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    gradient = nnx.jit(nnx.grad(lambda m, x: jnp.mean(m(x) ** 2)))
    for _ in range(3):
        optimizer.update(model, gradient(model, X))
    assert session.sites
    assert not any(session.kept.values())


def test_an_optimizer_of_jax_example_libraries_is_an_update(launched):
    launched()
    init, update, get_params = optimizers.adam(1e-2)
    step = jax.jit(lambda i, s, x: update(i, jax.grad(loss_fn)(get_params(s), x), s))
    assert share_in_half(step, 0, init(params()), X) == 1.0
    by_hand = jax.jit(lambda i, s, x: minus(get_params(s), jax.grad(loss_fn)(get_params(s), x)))
    assert share_in_half(by_hand, 0, init(params()), X) == 0.0


def test_a_nan_of_float32_reaches_parameters_that_nothing_in_half_trains(launched):
    """A script that stays in float32 diverges as it would."""
    launched()
    tx = optax.sgd(0.1)

    def kept(tx, p, s, x):
        g = jax.grad(loss_fn)(p, x)
        return updated(tx, g, s, p), minus(p, g)

    step = jax.jit(functools.partial(kept, tx))
    (p, _), _ = step(params(), tx.init(params()), X * np.nan)
    assert np.isnan(p["a"]).all()
