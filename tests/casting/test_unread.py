"""Equations that nothing reads, but that a function of programs may look for, stay in the program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

import mpjax
from mpjax.program import compat
from testing import measures
from testing.random_programs.namespace import marked

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def layer(w, x):
    """K-FAC's form of a layer: the loss is marked by an equation without results."""
    y = x @ w
    marked(y)
    checkpoint_name(jnp.exp(y), "unread")
    return y


PROGRAMS = {
    "top": layer,
    "jit": jax.jit(layer),
    "unread jit": lambda w, x: (jax.jit(layer)(w, x), x @ w)[1],
    "jit without results": lambda w, x: (jax.jit(lambda: marked(x))(), x @ w)[1],
    "remat": lambda w, x: (jax.checkpoint(layer)(w, x), x @ w)[1],
    "scan": lambda w, x: (lax.scan(lambda c, _: (layer(w, c), None), x, length=2), x @ w)[1],
    "cond": lambda w, x: (lax.cond(w[0, 0] > 0, layer, lambda w, x: x, w, x), x @ w)[1],
    "between recomputed operations": lambda w, x: jax.nn.softmax(jnp.exp(layer(w, x))) @ w,
}


def looked_for(fun):
    with compat.present_primitives():  # an upcoming primitive is written as the present one
        jaxpr = jax.make_jaxpr(lambda *args: fun(*args))(W, X)
    return [e.name for e in measures.equations(jaxpr) if e.name in NAMES]


NAMES = ("mark", "name")


@pytest.mark.parametrize("name", PROGRAMS)
def test_marks_and_names_stay(name):
    fun = PROGRAMS[name]
    expected = looked_for(fun)
    assert expected
    assert looked_for(mpjax.autocast(fun)) == expected
    gradient = jax.grad(lambda w, x: jnp.sum(fun(w, x)))
    assert looked_for(mpjax.autocast(gradient)) == looked_for(gradient)


def test_arithmetic_that_nothing_reads_is_dropped():
    fun = lambda w, x: (jnp.exp(x @ w), jax.jit(jnp.sin)(x), x @ w)[2]
    found = {e.name for e in measures.equations(jax.make_jaxpr(mpjax.autocast(fun))(W, X))}
    assert not found & {"exp", "sin"}


def test_opaque_kernels_in_a_jit_are_not_recomputed():
    doubled = lambda i, o: o.__setitem__(..., i[...] * 2)
    kernel = jax.jit(lambda x: pl.pallas_call(doubled, out_shape=x, interpret=True)(x))
    fun = lambda w, x: jnp.sum(jnp.exp(kernel(jnp.exp(x @ w))) @ w)
    assert [row.recomputed for row in mpjax.explain(fun, W, X).rows if row.op == "pallas_call"] == [False]
