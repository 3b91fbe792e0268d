"""Derivative rules in a scaled loss: one that is not linear is named, and one may contain `true_cotangents`."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl

import mpjax
from mpjax import NonlinearRuleWarning
from testing.measures import relative_error
from testing.random_programs.evaluate import in_numpy

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)) * 0.3, jnp.float32)
X = jnp.full((4, 8), 0.5)
STORED = jnp.full((4, 8), 2.0)
STATE = mpjax.static_loss_scale(optax.sgd(0.1), 1024.0).init({})


def rule(backward, primal=lambda x: x):
    """A function of x whose backward rule is `backward(x, cotangent)`."""
    f = jax.custom_vjp(primal)
    f.defvjp(lambda x: (primal(x), x), lambda x, ct: (backward(x, ct),))
    return f


distilled = rule(lambda x, ct: STORED, lambda x: jnp.float32(0.0))  # score distillation
clipped = rule(lambda x, ct: jnp.clip(ct, -1e-3, 1e-3))


def kernel(ct, out):
    out[...] = ct[...] * 2


def in_kernel(x, ct):
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(ct.shape, ct.dtype), interpret=True)(ct)


NONLINEAR = {
    "ignored": distilled,
    "clipped": clipped,
    "noise": rule(lambda x, ct: ct + jax.random.normal(jax.random.key(0), ct.shape)),
    "normalised": rule(lambda x, ct: ct / jnp.max(jnp.abs(ct))),
    "in a scan": rule(lambda x, ct: jax.lax.scan(lambda c, _: (jnp.clip(c, -1.0, 1.0), None), ct, None, length=2)[0]),
    "in jit": rule(lambda x, ct: jax.jit(jnp.sign)(ct)),
}
LINEAR = {
    "a product": rule(lambda x, ct: ct * x),
    "reversed": rule(lambda x, ct: -ct),
    "zero": rule(lambda x, ct: jnp.zeros_like(ct)),
    "a mask": rule(lambda x, ct: jnp.where(x > 0, ct, 0.0)),
    "a solve": rule(lambda x, ct: jnp.linalg.solve(jnp.eye(4) * 2, ct)),
    "a loop": rule(lambda x, ct: jax.lax.fori_loop(0, 2, lambda _, c: c * 0.5, ct)),
    "a kernel, whose work is not visible": rule(in_kernel),
}
SCALED = {
    "value_and_grad": lambda loss: mpjax.grad(loss, STATE, policy="mixed_float16"),
    "autocast": lambda loss: mpjax.grad(mpjax.autocast(loss), STATE),
    "jit of autocast": lambda loss: mpjax.grad(jax.jit(mpjax.autocast(loss)), STATE),
    "scale_loss": lambda loss: jax.grad(mpjax.scale_loss(loss, STATE)),
    "jit of scale_loss": lambda loss: jax.grad(jax.jit(mpjax.scale_loss(loss, STATE))),
    "scale_loss of autocast": lambda loss: jax.grad(mpjax.scale_loss(mpjax.autocast(loss), STATE)),
    "autocast of scale_loss": lambda loss: jax.grad(mpjax.autocast(mpjax.scale_loss(loss, STATE))),
}


def loss_of(f):
    return lambda w: jnp.sum(f(jnp.tanh(X @ w)) * 3)


@pytest.mark.parametrize("how", SCALED)
@pytest.mark.parametrize("name", NONLINEAR)
def test_a_rule_that_the_scale_changes_is_named_with_the_remedy(name, how):
    # Outside of `jit`, each operation is compiled.
    call = (lambda f, w: f(w)) if name == "ignored" else jax.eval_shape
    with pytest.warns(NonlinearRuleWarning, match=r"\(test_rules.py:\d+\).*mpjax.true_cotangents\(.*, opt_state\)"):
        call(SCALED[how](loss_of(NONLINEAR[name])), W)


@pytest.mark.parametrize("how", SCALED)
def test_other_rules_are_not(how):
    with warnings.catch_warnings():
        warnings.simplefilter("error", NonlinearRuleWarning)
        for f in LINEAR.values():
            jax.eval_shape(SCALED[how](loss_of(f)), W)
        for f in NONLINEAR.values():
            jax.eval_shape(SCALED[how](loss_of(mpjax.true_cotangents(f, STATE))), W)


def test_without_a_loss_scale_no_rule_is():
    with warnings.catch_warnings():
        warnings.simplefilter("error", NonlinearRuleWarning)
        for f in NONLINEAR.values():
            jax.eval_shape(jax.grad(loss_of(f)), W)
            jax.eval_shape(mpjax.grad(loss_of(f), policy="mixed_bfloat16"), W)


@pytest.mark.parametrize("how", SCALED)
def test_a_stored_gradient_is_returned_as_it_is(how):
    def loss(w):
        return mpjax.true_cotangents(distilled, STATE)(X * w)

    found = SCALED[how](lambda x: loss(x) + jnp.sum(jnp.float32(0) * (x @ W)))(X)
    np.testing.assert_array_equal(found, X * STORED)


def recomputed(layer):
    """A layer whose backward pass computes it again."""
    f = jax.custom_vjp(layer)
    f.defvjp(lambda w, y: (layer(w, y), (w, y)), lambda saved, ct: jax.vjp(layer, *saved)[1](ct))
    return f


def reversible(layer):
    """A residual block whose backward pass computes its input from its output, by iterations."""
    f = jax.custom_vjp(lambda w, y: y + 0.1 * layer(w, y))

    def backward(saved, ct):
        w, out = saved
        y = jax.lax.fori_loop(0, 30, lambda _, y: out - 0.1 * layer(w, y), out)
        of_w, of_y = jax.vjp(layer, w, y)[1](0.1 * ct)
        return of_w, ct + of_y

    f.defvjp(lambda w, y: (f(w, y), (w, f(w, y))), backward)
    return f


def looped(layer):
    """A recomputed layer in the body of a scan."""
    f = recomputed(layer)
    return lambda w, y: jax.lax.scan(lambda y, _: (f(w, y), None), y, None, length=2)[0]


def with_clip(clip, block, jitted):
    def layer(w, y):
        return clip(jnp.tanh(y @ w))

    f = block(jax.jit(layer) if jitted else layer)
    return lambda w: jnp.sum(f(w, f(w, X)) ** 2) * 3


BLOCKS = {"recomputed": recomputed, "reversible": reversible, "in a scan": looped}


@functools.cache
def without_scale(block, jitted):
    return in_numpy(jax.grad(with_clip(clipped, BLOCKS[block], jitted)))(W)


@pytest.mark.parametrize("jitted", [False, True], ids=["", "jit"])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("how", SCALED)
def test_true_cotangents_inside_a_rule_are_true(how, block, jitted):
    expected = without_scale(block, jitted)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NonlinearRuleWarning)
        # Outside of a trace, each operation is compiled.
        for wrap in (lambda f: f, in_numpy) if block == "recomputed" else (in_numpy,):
            loss = with_clip(mpjax.true_cotangents(clipped, STATE), BLOCKS[block], jitted)
            found = wrap(SCALED[how](loss))(W)
            tolerance = 1e-6 if how in ("scale_loss", "jit of scale_loss") else 4 * float(jnp.finfo(jnp.float16).eps)
            assert relative_error(found, expected) < tolerance


def test_the_scale_of_each_step_reaches_a_compiled_rule():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), init_scale=64.0, growth_interval=1)
    expected = jax.grad(with_clip(clipped, recomputed, True))(W)

    @jax.jit
    def step(w, opt_state):
        loss = with_clip(mpjax.true_cotangents(clipped, opt_state), recomputed, True)
        grads = mpjax.grad(loss, opt_state)(w)
        return grads, tx.update(grads, opt_state, w)[1]

    opt_state = tx.init(W)
    for _ in range(3):
        grads, opt_state = step(W, opt_state)
        assert relative_error(grads, expected) < 1e-6
    assert opt_state.loss_scale == 512


class Recomputed(nn.Module):
    clip: object

    @nn.compact
    def __call__(self, x):
        def forward(layer, x):
            return self.clip(jnp.tanh(layer(x)))

        def forward_rule(layer, x):
            return nn.vjp(forward, layer, x)

        def backward(pullback, ct):
            return pullback(ct)

        layer = nn.Dense(8)
        return jnp.sum(nn.custom_vjp(forward, forward_rule, backward)(layer, x) ** 2) * 3


@pytest.mark.parametrize("how", ["value_and_grad", "autocast", "scale_loss", "scale_loss of autocast"])
def test_true_cotangents_inside_a_rule_of_linen_are_true(how):
    model, plain = Recomputed(mpjax.true_cotangents(clipped, STATE)), Recomputed(clipped)
    params = plain.init(jax.random.key(0), X)
    expected = jax.grad(plain.apply)(params, X)
    found = SCALED[how](lambda params: model.apply(params, X))(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 4 * float(jnp.finfo(jnp.float16).eps)
