"""Gradients and updates of other libraries' parameters: Equinox models, NNX modules, states and optimizers."""

import functools
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys
from testing.random_programs.evaluate import in_numpy

X = jax.device_put(np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32))
TX = mpjax.dynamic_loss_scale(optax.adam(1e-2))


class Counting(eqx.Module):
    """An Equinox model with static leaves: an activation, an integer array, a name."""

    mlp: eqx.nn.MLP
    table: jax.Array
    activation: object
    name: str

    def __init__(self):
        self.mlp = eqx.nn.MLP(4, 1, 4, 1, key=cheap_keys.key(0))
        self.table = jnp.arange(3)
        self.activation, self.name = jax.nn.tanh, "counting"

    def __call__(self, x):
        return self.activation(self.mlp(x)) + self.table[1]


def eqx_loss(model, x):
    return jnp.mean(jax.vmap(model)(x).astype(jnp.float32) ** 2)


@pytest.mark.standard_promotion  # half weights and float32 inputs
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_equinox_models_with_static_leaves(dtype):
    cast = lambda model: jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, model)
    model = eqx.filter_jit(lambda: cast(Counting()))()
    tx = TX if dtype == jnp.float32 else mpjax.static_loss_scale(mpjax.master_weights(optax.adam(1e-2)), 2.0**8)
    state = tx.init(model)
    filtered = jax.eval_shape(tx.init, eqx.filter(model, eqx.is_inexact_array))
    assert jax.tree.structure(state) == jax.tree.structure(filtered)

    @eqx.filter_jit
    def step(model, state, x):
        loss, grads = mpjax.value_and_grad(eqx_loss, state)(model, x)
        return *mpjax.apply_gradients(tx, grads, state, model, value=loss), loss, grads

    expected = eqx.filter_jit(eqx.filter_grad(eqx_loss))(model, X)
    new, state, loss, grads = step(model, state, X)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2 if dtype == jnp.float16 else 1e-6)
    assert (new.name, new.activation) == ("counting", jax.nn.tanh)
    np.testing.assert_array_equal(new.table, model.table)
    assert new.mlp.layers[0].weight.dtype == dtype
    updates, _ = eqx.filter_eval_shape(tx.update, grads, state, new)
    assert jax.tree.structure(updates) == jax.tree.structure(grads)
    _, _, less, _ = step(new, state, X)
    assert float(less) < float(loss)
    skipped, _, _, _ = step(new, state, jax.device_put(np.where(np.arange(8)[:, None] == 0, np.float32(np.nan), X)))
    jax.tree.map(np.testing.assert_array_equal, eqx.filter(skipped, eqx.is_array), eqx.filter(new, eqx.is_array))


class Net(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        self.linear = nnx.Linear(4, 1, param_dtype=dtype, rngs=nnx.Rngs(0))
        self.extra = nnx.LoRAParam(jnp.ones((1,), dtype))
        self.norm = nnx.BatchNorm(1, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.norm(self.linear(x)) * self.extra[...]


@functools.cache
def _built(dtype):
    return nnx.jit(lambda: Net(dtype))()


def net(dtype=jnp.float32):
    """A `Net` whose initialisation is compiled once."""
    return nnx.clone(_built(dtype))


def loss_fn(model, x):
    return jnp.mean((model(x).astype(jnp.float32) - 1) ** 2)


def plain(tree):
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]


def test_argnums_may_be_integers_of_any_type_and_each_argument_once():
    product = lambda a, b: a * b
    assert mpjax.grad(product, argnums=(np.int64(1), -2))(2.0, 3.0) == (2.0, 3.0)
    for argnums in ((0, 0), (0, -2)):
        with pytest.raises(ValueError, match="names an argument twice"):
            mpjax.grad(product, argnums=argnums)(2.0, 3.0)


@pytest.mark.standard_promotion  # half weights and float32 inputs
@pytest.mark.parametrize(
    ("argnums", "dtype"),
    [
        (nnx.DiffState(0, nnx.LoRAParam), jnp.float16),
        (0, jnp.float16),
        ((0,), jnp.float32),
        ((nnx.DiffState(0, nnx.Param), 1), jnp.float16),
    ],
)
def test_nnx_diff_states(dtype, argnums):
    state = mpjax.static_loss_scale(optax.sgd(0.1), 2.0**8).init({})
    transforms = nnx.value_and_grad(loss_fn, argnums=argnums), mpjax.value_and_grad(loss_fn, state, argnums=argnums)
    models = net(), net(dtype)
    expected, found = nnx.jit(lambda *m: [f(m, X) for f, m in zip(transforms, m, strict=True)])(*models)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(plain(found), plain(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}


def test_nnx_states_are_trees_of_params():
    model = net()
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params):
        state = TX.init(params)
        loss = lambda params: loss_fn(nnx.merge(graph, params, rest, copy=True), X)
        _, grads = mpjax.value_and_grad(loss, state)(params)
        return mpjax.apply_gradients(TX, grads, state, params)[0]

    assert jax.tree.structure(jax.eval_shape(step, params)) == jax.tree.structure(params)


def test_keyword_arguments_reach_an_nnx_loss():
    loss = lambda model, *, x, flag: loss_fn(model, x) if flag == "on" else 0.0
    found = jax.jit(lambda: mpjax.value_and_grad(loss, TX.init({}))(net(), x=X, flag="on")[0])()
    np.testing.assert_allclose(found, nnx.jit(loss_fn)(net(), X), rtol=1e-6)


def test_threads_that_share_a_half_nnx_model_keep_it_half():
    model = net(jnp.float16)
    state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init({})
    seen, errors = set(), []

    def work():
        try:
            for _ in range(3):
                mpjax.grad(lambda m: jnp.sum(m.linear.kernel[...].astype(jnp.float32)), state)(model)
                seen.add(model.linear.kernel[...].dtype)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert seen == {jnp.dtype("float16")}


@pytest.mark.standard_promotion  # half weights and float32 inputs
def test_the_callers_half_module_is_unchanged_while_the_loss_is_traced():
    seen = []

    def step(model):
        def loss(m, x):
            seen.append((model.linear.kernel[...].dtype, m.linear.kernel[...].dtype, m is model))
            return loss_fn(m, x)

        return mpjax.grad(loss, TX.init({}))(model, X)

    nnx.eval_shape(step, net(jnp.float16))
    assert seen == [(jnp.float16, jnp.float16, False)]


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.hessian])
def test_scale_loss_in_forward_mode(transform):
    loss = lambda w: jnp.sum(jnp.tanh(w) ** 3)
    scaled, w = mpjax.scale_loss(loss, TX.init({})), np.linspace(-1.0, 1.0, 5, dtype=np.float32)
    found, expected = (in_numpy(transform(f))(w) for f in (scaled, loss))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
