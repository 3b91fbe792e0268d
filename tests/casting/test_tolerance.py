"""A loop that ends when its matmuls meet a tolerance is float32, unless the user says otherwise."""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint

import mpjax
from mpjax import Rules, autocast
from testing import measures

LIMIT = 200
W = (np.random.default_rng(0).normal(size=(8, 8)) / 6).astype(np.float32)
X = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
SQUARE = (np.eye(8) + W @ W.T).astype(np.float32)


def fixed_point(w, x):
    """A deep equilibrium layer, and the number of its iterations."""

    def iteration(state):
        z, _, n = state
        new = jnp.tanh(z @ w + x)
        return new, jnp.linalg.norm(new - z), n + 1

    z, _, n = lax.while_loop(lambda state: (state[1] > 1e-5) & (state[2] < LIMIT), iteration, (x, jnp.float32(1), 0))
    return z, n


def gradient_descent(w, x):
    """Tests the gradient itself, so that the condition contains the matmuls."""

    def gradient(z):
        return (z @ SQUARE - x) @ SQUARE

    def unfinished(state):
        return (jnp.linalg.norm(gradient(state[0])) > 1e-3) & (state[1] < LIMIT)

    return lax.while_loop(unfinished, lambda state: (state[0] - 0.5 * gradient(state[0]), state[1] + 1), (x, 0))


def adaptive(w, x, loop=lax.while_loop):
    """Integrates an ODE: the steps that are rejected decide how many there are."""

    def step(state):
        t, y, dt, n = state
        full = y + dt * jnp.tanh(y @ w)
        halved = y + dt / 2 * jnp.tanh(y @ w)
        halved = halved + dt / 2 * jnp.tanh(halved @ w)
        error = jnp.max(jnp.abs(full - halved))
        t, y = lax.cond(error < 1e-5, lambda: (t + dt, halved), lambda: (t, y))
        return t, y, dt * jnp.clip(jnp.sqrt(0.8e-5 / error), 0.2, 2.0), n + 1

    _, y, _, n = loop(
        lambda s: (s[0] < 0.02) & (s[3] < LIMIT), jax.jit(step), (jnp.float32(0), x, jnp.float32(0.01), 0)
    )
    return y, n


def decay(x):
    return odeint(lambda y, t: -y @ SQUARE, x, jnp.array([0.0, 1.0]), rtol=1e-5)[1]


LOOPS = [fixed_point, gradient_descent, adaptive, jax.jit(fixed_point)]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("fun", LOOPS, ids=lambda fun: fun.__name__)
def test_a_loop_until_a_tolerance_takes_as_many_iterations_as_in_float32(fun, policy):
    with pytest.warns(mpjax.AutocastWarning, match=r"keeps the loop at test_tolerance.py:\d+ in float32"):
        result, count = autocast(fun, policy)(W, X)
    expected, expected_count = fun(W, X)
    assert count == expected_count < LIMIT
    np.testing.assert_allclose(result, expected, atol=1e-6)


def test_a_loop_in_a_function_of_jax_has_the_line_of_its_call():
    with pytest.warns(mpjax.AutocastWarning, match=r"keeps the loop at test_tolerance.py:\d+ in float32"):
        np.testing.assert_allclose(autocast(decay)(X), decay(X), atol=1e-5)


def test_a_backward_rule_takes_the_same_steps_again():
    """Equinox's loop recomputes them from checkpoints, in a loop that ends at a count."""
    loop = partial(eqx.internal.while_loop, kind="checkpointed", checkpoints=2)
    with pytest.warns(mpjax.AutocastWarning, match="keeps the loop"):
        gradient = jax.grad(lambda w: autocast(adaptive, "mixed_bfloat16")(w, X, loop)[0].sum())(W)
    np.testing.assert_allclose(gradient, jax.grad(lambda w: adaptive(w, X, loop)[0].sum())(W), rtol=1e-3)


def test_explain_gives_the_reason():
    rows = [row for row in mpjax.explain(fixed_point, W, X).rows if row.op == "dot_general"]
    assert [(row.dtypes_in[0], row.why) for row in rows] == [
        ("float32", "its loop ends when its matmuls meet a tolerance")
    ]


@pytest.mark.filterwarnings("ignore:autocast found no matmul")
@pytest.mark.parametrize(
    ("fun", "rules"), [(mpjax.float_function(fixed_point), Rules()), (fixed_point, Rules(deny=["while"]))]
)
def test_float32_can_be_asked_for(fun, rules):
    _, count = autocast(fun, rules=rules)(W, X)  # Other warnings are errors.
    assert count == fixed_point(W, X)[1]


@pytest.mark.parametrize(
    ("fun", "rules"),
    [
        (fixed_point, Rules(infer=["while"])),
        (fixed_point, Rules(level="half")),
        (mpjax.half_function(fixed_point), Rules()),
    ],
)
def test_half_can_be_asked_for(fun, rules):
    fun = autocast(fun, "mixed_bfloat16", rules=rules)
    assert measures.half_share(fun, W, X) == 1.0
    assert fun(W, X)[1] == LIMIT


def test_rules_hold_inside():
    with pytest.warns(mpjax.AutocastWarning, match="keeps the loop"):
        assert measures.half_share(autocast(fixed_point, rules=Rules(allow=["dot_general"])), W, X) == 1.0


def counted(w, x):
    return lax.fori_loop(0, 3, lambda _, z: jnp.tanh(z @ w), x)


def until_true_or_counted(w, x):
    """Its condition reads a carry, on which no matmul has an effect."""
    state = (x, jnp.float32(1))
    return lax.while_loop(lambda s: s[1] > 0.1, lambda s: (jnp.tanh(s[0] @ w), s[1] / 2), state)[0]


def sampled(w, x):
    """Decodes until the end of the text."""

    def step(state):
        key, token, n = state
        key, now = jax.random.split(key)
        return key, jax.random.categorical(now, jnp.take(x, token % 4, 0) @ w), n + 1

    return lax.while_loop(lambda s: (s[1] != 3) & (s[2] < 9), step, (jax.random.key(0), jnp.int32(0), 0))[1]


def beam(w, x):
    """Decodes while the best beam may become better."""

    def step(state):
        scores, n = state
        best, where = lax.top_k((scores @ w).ravel(), 4)
        return best[:, None] + x[where % 4], n + 1

    return lax.while_loop(lambda s: (s[0].max() > -9) & (s[1] < 9), step, (x, 0))[0]


@pytest.mark.parametrize("fun", [counted, until_true_or_counted, sampled, beam], ids=lambda fun: fun.__name__)
def test_other_loops_run_in_half(fun):
    assert measures.half_share(autocast(fun), W, X) == 1.0  # Warnings are errors.
