"""float16 that is differentiated without a loss scale warns, in every way to differentiate, and nothing else does."""

from __future__ import annotations

import functools
import gc
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import mpjax

W, X = jnp.full((8, 8), 0.1), jnp.ones((4, 8))
WARNS = functools.partial(pytest.warns, mpjax.UnscaledGradientWarning, match="mpjax.value_and_grad.loss_fn, opt_state")


def loss(w, x):
    return jnp.mean(jax.nn.sigmoid(x @ w) ** 2)


half = mpjax.autocast(loss, "mixed_float16")


def state(**options):
    return mpjax.dynamic_loss_scale(optax.sgd(0.1), **options).init(W)


def in_scan(w, x):
    return jax.lax.scan(lambda total, row: (total + half(w, row[None]), None), 0.0, x)[0]


def in_shard_map(w, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = PartitionSpec("data")
    parts = jax.shard_map(lambda w, x: half(w, x)[None], mesh=mesh, in_specs=(PartitionSpec(), data), out_specs=data)
    return jnp.sum(parts(w, x))


class Linear(eqx.Module):
    w: jax.Array


def of_nnx(w, x):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return nnx.grad(mpjax.autocast(lambda model, x: jnp.mean(model(x) ** 2)))(model, x)


def of_linen(w, x):
    model = nn.Dense(8)
    apply = mpjax.autocast(model.apply)
    return jax.grad(lambda params: jnp.mean(apply(params, x) ** 2))(model.init(jax.random.key(0), x))


def of_equinox(w, x):
    return eqx.filter_grad(mpjax.autocast(lambda model, x: loss(model.w, x)))(Linear(w), x)


def of_linen_with_policy(w, x, policy="mixed_float16"):
    model = mpjax.with_policy(nn.Dense(8), policy)
    params = model.init(jax.random.key(0), x)
    return jax.grad(jax.jit(lambda params: jnp.mean(model.apply(params, x) ** 2)))(params)


def of_nnx_with_policy(w, x, policy="mixed_float16"):
    model = mpjax.with_policy(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), policy)
    return nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)


DIFFERENTIATED = {
    "grad": jax.grad(half),
    "value_and_grad": jax.value_and_grad(half),
    "jit of grad": jax.jit(jax.grad(half)),
    "grad of jit": jax.grad(jax.jit(half)),
    "vjp": lambda w, x: jax.vjp(half, w, x)[1](jnp.ones(())),
    "vjp of jit": lambda w, x: jax.vjp(jax.jit(half), w, x)[1](jnp.ones(())),
    "linearize": lambda w, x: jax.linear_transpose(jax.linearize(half, w, x)[1], w, x)(jnp.ones(())),
    "jacrev": jax.jacrev(half),
    "hessian": jax.hessian(half),
    "per example": jax.vmap(jax.grad(lambda w, x: half(w, x[None])), (None, 0)),
    "vmap inside": jax.grad(lambda w, x: jnp.sum(jax.vmap(lambda row: half(w, row[None]))(x))),
    "scan": jax.grad(in_scan),
    "remat": jax.grad(jax.checkpoint(half)),
    "cond": jax.grad(lambda w, x: jax.lax.cond(x[0, 0] > 0, half, lambda w, x: 0.0, w, x)),
    "shard_map": jax.grad(in_shard_map),
    "jit of shard_map": jax.grad(jax.jit(in_shard_map)),
    "the loss outside": jax.grad(lambda w, x: jnp.mean(mpjax.autocast(jnp.matmul)(x, w) ** 2)),
    "a gradient inside": mpjax.autocast(jax.grad(loss)),
    "a step inside": jax.jit(mpjax.autocast(lambda w, x: w - 0.1 * jax.jit(jax.grad(loss))(w, x))),
    "mpjax.value_and_grad": mpjax.value_and_grad(loss, policy="mixed_float16"),
    "mpjax.grad": mpjax.grad(half),
    "everything half": mpjax.grad(loss, policy="O3"),
    "nnx.grad": of_nnx,
    "linen": of_linen,
    "eqx.filter_grad": of_equinox,
    "with_policy of Linen": of_linen_with_policy,
    "with_policy of NNX": of_nnx_with_policy,
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_differentiated_float16_warns(name):
    with WARNS():
        jax.block_until_ready(DIFFERENTIATED[name](W, X))


def quiet(name, how):
    with warnings.catch_warnings():
        warnings.simplefilter("error", mpjax.UnscaledGradientWarning)
        how(W, X)


def by_hand(w, x):
    opt_state = state()
    return mpjax.unscale(jax.grad(lambda w: half(w, x) * opt_state.loss_scale)(w), opt_state)


in_bfloat16 = mpjax.autocast(loss, "mixed_bfloat16")
QUIET = {
    "evaluation": half,
    "compiled evaluation": jax.jit(half),
    "mapped evaluation": jax.vmap(half, (None, 0)),
    "forward mode": lambda w, x: jax.jvp(half, (w, x), (w, x)),
    "compiled forward mode": jax.jit(lambda w, x: jax.jvp(jax.jit(half), (w, x), (w, x))),
    "bfloat16": jax.grad(in_bfloat16),
    "bfloat16 inside": mpjax.autocast(jax.grad(loss), "mixed_bfloat16"),
    "with_policy of Linen in bfloat16": functools.partial(of_linen_with_policy, policy="mixed_bfloat16"),
    "with_policy of NNX in bfloat16": functools.partial(of_nnx_with_policy, policy="mixed_bfloat16"),
    "float32": jax.grad(loss),
    "disabled": lambda w, x: jax.grad(mpjax.autocast(mpjax.float_function(loss)))(w, x),
    "scale_loss": lambda w, x: jax.grad(mpjax.scale_loss(half, state()))(w, x),
    "scale_loss of jit": lambda w, x: jax.grad(mpjax.scale_loss(jax.jit(half), state()))(w, x),
    "jit of scale_loss": lambda w, x: jax.grad(jax.jit(mpjax.scale_loss(half, state())))(w, x),
    "autocast of scale_loss": lambda w, x: jax.grad(mpjax.autocast(mpjax.scale_loss(loss, state())))(w, x),
    "a scaled gradient inside": lambda w, x: mpjax.autocast(mpjax.value_and_grad(loss, state()))(w, x),
    "a compiled one inside": lambda w, x: mpjax.autocast(jax.jit(mpjax.grad(loss, state())))(w, x),
    "value_and_grad": lambda w, x: mpjax.value_and_grad(loss, state(), policy="mixed_float16")(w, x),
    "value_and_grad of jit": lambda w, x: mpjax.value_and_grad(jax.jit(half), state())(w, x),
    "value_and_grad of remat": lambda w, x: mpjax.value_and_grad(jax.checkpoint(half), state())(w, x),
    "value_and_grad of scan": lambda w, x: mpjax.value_and_grad(in_scan, state())(w, x),
    "per example": lambda w, x: jax.vmap(jax.grad(mpjax.scale_loss(half, state())), (None, 0))(w, x[:, None]),
    "audit of a loss": lambda w, x: mpjax.audit(half, w, x),
    "numerics": lambda w, x: mpjax.numerics(half, w, x),
}


@pytest.mark.filterwarnings("ignore::mpjax.AutocastWarning")
@pytest.mark.parametrize("name", QUIET)
def test_nothing_else_warns(name):
    quiet(name, QUIET[name])


def test_a_loop_that_scales_by_itself_is_quiet():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), grads_are_scaled=True)
    opt_state = tx.init(W)

    @jax.jit
    def step(w, opt_state):
        grads = jax.grad(lambda w: half(w, X) * opt_state.loss_scale)(w)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    with warnings.catch_warnings():
        warnings.simplefilter("error", mpjax.UnscaledGradientWarning)
        step(W, opt_state)
        assert not mpjax.audit(step, W, opt_state).risks
    step = tx = None
    gc.collect()
    with WARNS():
        jax.grad(half)(W, X)


def test_a_line_warns_once_and_is_named():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for size in (2, 3, 4):
            jax.grad(half)(W, jnp.ones((size, 8)))
            jax.jit(jax.grad(lambda w, x: half(w, x)))(W, jnp.ones((size, 8)))
    lines = [(record.filename, record.lineno) for record in caught]
    assert len(lines) == len(set(lines)) == 2
    assert {file for file, _ in lines} == {__file__}


def test_the_compiled_program_is_unchanged(monkeypatch):
    def compiled(function):
        return jax.jit(function).lower(W, X).compile().as_text()

    def fresh():  # JAX caches what it traced
        return mpjax.autocast(lambda w, x: loss(w, x))

    marked = [compiled(fresh()), compiled(jax.grad(fresh()))]
    monkeypatch.setattr("mpjax.kernels.unscaled.marked", lambda x, backward: x)
    plain = [compiled(fresh()), compiled(jax.grad(fresh()))]
    instructions = [[line.split("metadata=")[0] for line in text.splitlines() if " = " in line] for text in marked]
    assert instructions == [
        [line.split("metadata=")[0] for line in text.splitlines() if " = " in line] for text in plain
    ]


def test_first_layers_lose_their_gradient_and_audit_says_so():
    def deep(w, x):
        for _ in range(8):
            x = jax.nn.sigmoid(x @ w[_])
        return jnp.mean(x)

    w = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64, 64)) * 0.05, jnp.float32)
    x = jnp.ones((64, 64))
    unscaled = jax.grad(mpjax.autocast(deep))
    with WARNS():
        assert not np.any(unscaled(w, x)[0])
    with WARNS():
        report = mpjax.audit(unscaled, w, x)
    assert [(risk.kind, risk.dtype, risk.phases) for risk in report.risks] == [("unscaled", "float16", ("backward",))]
    assert report.risks[0].source.startswith("test_unscaled.py:")
    assert "without loss scaling" in str(report)
    opt_state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init(w)
    scaled = mpjax.grad(mpjax.autocast(deep), opt_state)
    assert np.mean(scaled(w, x)[0] != 0) > 0.5
    assert not mpjax.audit(scaled, w, x).risks
