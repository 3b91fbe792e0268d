"""`Rules(residual_stream=...)`: the value to which each layer adds stays float32 on request."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mpjax
from mpjax.casting.streams import residual_additions
from testing import measures

W = (np.random.default_rng(0).normal(size=(3, 8, 8)) / 3).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 4, 8)).astype(np.float32)
FLOAT32 = mpjax.Rules(residual_stream="float32")


def normalised(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def layer(h, w):
    h = h + jax.nn.gelu(normalised(h) @ w) @ w.T
    return h + jax.nn.gelu(normalised(h) @ w) @ w.T


def repeated(transform):
    def program(w, x):
        h = x @ w[0]
        for each in w:
            h = transform(layer)(h, each)
        return jnp.mean(normalised(h) @ w[0])

    return program


plain = repeated(lambda layer: layer)


def scanned(w, x):
    h, _ = lax.scan(lambda h, each: (layer(h, each), None), x @ w[0], w)
    return jnp.mean(normalised(h) @ w[0])


def one_addition(w, x):
    """Each iteration adds once, so the chain is the loop's."""
    h, _ = lax.scan(lambda h, each: (h + normalised(h) @ each, None), x @ w[0], w)
    return jnp.mean(normalised(h) @ w[0])


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8)(x)
        for _ in range(3):
            h = h + nn.Dense(8)(nn.gelu(nn.Dense(8)(nn.LayerNorm()(h))))
        return jnp.mean(nn.Dense(4)(nn.LayerNorm()(h)))


def linen(w, x):
    model = Linen()
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return model.apply(jax.tree.map(lambda p: jnp.full(p.shape, 0.1) * w[0, 0, 0], params), x)


def in_nnx(w, x):
    graph, params = nnx.split(nnx.Sequential(nnx.LayerNorm(8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))))
    model = nnx.merge(graph, jax.tree.map(lambda p: p + w[0, 0, 0], params))
    h = x @ w[0]
    for _ in range(3):
        h = h + model(h)
    return jnp.mean(h @ w[0])


PROGRAMS = {"plain": plain, "called": repeated(jax.jit), "checkpointed": repeated(jax.checkpoint)}
PROGRAMS |= {"scanned": scanned, "one_addition": one_addition, "linen": linen, "nnx": in_nnx}


def float32_streams(jaxpr):
    """The residual additions in float32 of a jaxpr and of its sub-jaxprs."""
    inside = [part for e in measures.equations(jaxpr) for part in e.eqn.params.values() if hasattr(part, "eqns")]
    return [v for program in (jaxpr, *inside) for v in residual_additions(program)]


@pytest.mark.parametrize("fun", PROGRAMS.values(), ids=PROGRAMS)
def test_the_stream_is_float32_if_requested(fun):
    float32 = mpjax.autocast(fun, rules=FLOAT32)
    assert float32_streams(jax.make_jaxpr(float32)(W, X))
    assert not float32_streams(jax.make_jaxpr(mpjax.autocast(fun))(W, X))
    assert measures.half_share(float32, W, X) == 1.0
    kept = measures.residual_bytes(float32, W, X)
    assert measures.residual_bytes(mpjax.autocast(fun), W, X) <= kept <= measures.residual_bytes(fun, W, X)


def test_other_additions_stay_half():
    def fun(w, x):
        h = x @ w[0]
        gate = h + 0.5 * h**3  # read twice, but multiplied next
        bias = h @ w[1] + jnp.ones(8)
        return (gate * bias) @ w[2]

    jaxpr = jax.make_jaxpr(fun)(W, X)
    assert not residual_additions(jaxpr)
    cast = [str(jax.make_jaxpr(mpjax.autocast(fun, rules=rules))(W, X)) for rules in (None, FLOAT32)]
    assert cast[0] == cast[1]


def test_explain_names_the_stream_and_rules_take_precedence():
    assert "residual stream" in str(mpjax.explain(mpjax.autocast(plain, rules=FLOAT32), W, X))
    rules = mpjax.Rules(residual_stream="float32", infer=["add"])
    assert "residual stream" not in str(mpjax.explain(mpjax.autocast(plain, rules=rules), W, X))


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="residual_stream='full'"):
        mpjax.Rules(residual_stream="full")


def test_an_equation_without_results_is_no_addition():
    def fun(w, x):
        jax.debug.callback(lambda h: None, x)
        return plain(w, x)

    jax.make_jaxpr(mpjax.autocast(fun, rules=FLOAT32))(W, X)
