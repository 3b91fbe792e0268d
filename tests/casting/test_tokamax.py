"""tokamax's attention, where it is installed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import Rules

pytestmark = pytest.mark.standard_promotion
B, T, N, K, H = 2, 16, 4, 2, 16


def attend(q, k, v, bias, cap=False):
    """A causal window with shared keys, and a bias or a cap."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4
    scores = 3 * jnp.tanh(scores / 3) if cap else scores + bias
    seen = np.tri(T, dtype=bool) & ~np.tri(T, k=-6, dtype=bool)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(seen, scores, -1e30)), v)


def arguments():
    rng = np.random.default_rng(0)
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H), (1, N, T, T)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def row(choice, fun=attend):
    fun = mpjax.autocast(fun, "mixed_bfloat16", rules=Rules(attention=choice))
    (found,) = [row for row in mpjax.explain(fun, *arguments()).rows if "attention" in row.op]
    return found


def test_a_bias_before_a_cap_stays_as_it_is():
    pytest.importorskip("tokamax")
    both = lambda q, k, v, bias: jnp.einsum(
        "bhts,bshd->bthd", jax.nn.softmax(3 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, q) / 3) + bias), q
    )
    assert row("tokamax", both).why == "tokamax refuses it: it adds a bias before it caps"


def test_without_it_attention_stays_as_it_is_and_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokamax", None)
    assert row("tokamax").op == "attention"
    assert row("tokamax").why.startswith("tokamax refuses it: pip install tokamax")


@pytest.mark.parametrize("cap", [False, True])
def test_it_is_as_exact_as_unfused(cap):
    pytest.importorskip("tokamax")
    fun = functools.partial(attend, cap=cap)
    assert row("tokamax", fun).op == "fused_attention", row("tokamax", fun).why
    loss = lambda *args: jnp.mean(jnp.sin(3 * fun(*args)) ** 2)
    gradient = lambda fun: jax.jit(jax.grad(fun, (0, 1, 2) if cap else (0, 1, 2, 3)))(*arguments())
    exact = gradient(loss)

    def error(choice):
        found = gradient(mpjax.autocast(loss, "mixed_bfloat16", rules=Rules(attention=choice)))
        return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(found, exact, strict=True)]

    fused, today = error("tokamax"), error("unfused")
    assert all(new <= 1.5 * old for new, old in zip(fused, today, strict=True)), (fused, today)
