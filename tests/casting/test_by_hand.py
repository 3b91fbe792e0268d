"""Gradients of programs that amplify a rounding are as accurate as with careful casts by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from testing.random_programs.evaluate import in_numpy
from testing.sensitive import KINDS, error_of_by_hand


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:autocast. .*% of the FLOPs of matmuls and convolutions stay in float32, because")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", KINDS)
def test_the_error_of_the_gradient_is_at_most_twice_that_of_casts_by_hand(name, dtype):
    found = error_of_by_hand(KINDS[name], lambda loss: mpjax.autocast(loss, f"mixed_{dtype}"), jnp.dtype(dtype))
    assert found <= 2.0


def softmax_of_bins(w, x):
    """The expected value of a distribution over bins, as in a distributional critic or MuZero."""
    return jnp.mean(jax.nn.softmax(x @ w) @ np.stack([np.linspace(0, 1e6, 16, dtype=np.float32)] * 2, -1))


@pytest.mark.filterwarnings("ignore:autocast. .*% of the FLOPs of matmuls and convolutions stay in float32, because")
def test_a_matmul_reads_constants_outside_the_range_of_half_in_float32():
    w, x = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((8, 16), (4, 8)))
    found, expected = (
        in_numpy(fun)(w, x) for fun in (mpjax.autocast(softmax_of_bins, "mixed_float16"), softmax_of_bins)
    )
    np.testing.assert_allclose(found, expected, rtol=4 * float(jnp.finfo(jnp.float16).eps))
    rows = mpjax.explain(mpjax.autocast(softmax_of_bins, "mixed_float16"), w, x).rows
    assert [row.why for row in rows if row.op == "dot_general"] == [
        "allow",
        "exact: a constant is outside the range of float16",
    ]
    half = mpjax.explain(mpjax.autocast(softmax_of_bins, "mixed_bfloat16"), w, x).rows
    assert {row.why for row in half if row.op == "dot_general"} == {"allow"}


def policy(p, observations):
    h = jnp.tanh(observations @ p["w"] + p["b"])
    return h, h @ p["mean"] + p["bias"]


def log_probability(mean, actions):
    return jnp.sum(-0.5 * ((actions - mean) / 0.4) ** 2, -1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_log_probability_is_the_same_alone_and_in_a_loss_that_reads_more(dtype):
    """The ratio of PPO's first step is 1."""
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 16), "b": (16,), "mean": (16, 4), "bias": (4,), "value": (20, 1)}
    p = {name: rng.normal(size=shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    observations, actions = (rng.normal(size=(32, n)).astype(np.float32) for n in (8, 4))

    def loss(p, old):
        h, mean = policy(p, observations)
        value = jnp.concatenate([h, jnp.tanh(mean)], -1) @ p["value"]
        ratio = jnp.exp(log_probability(mean, actions) - old)
        return jnp.mean(ratio) + jnp.mean(value**2), ratio

    cast = lambda fun: mpjax.autocast(fun, f"mixed_{dtype}")
    old = jax.jit(cast(lambda p: log_probability(policy(p, observations)[1], actions)))(p)
    (_, ratio), _ = jax.jit(jax.value_and_grad(cast(loss), has_aux=True))(p, old)
    np.testing.assert_array_equal(ratio, 1)


@pytest.mark.filterwarnings("error::mpjax.AutocastWarning")
def test_a_warning_says_how_many_flops_are_exact():
    def loss(w, x):
        f = x @ w
        return jnp.sum(jnp.log(jnp.diag(jnp.linalg.cholesky(f @ f.T + jnp.eye(8)))))

    w, x = np.eye(4, dtype=np.float32), np.ones((8, 4), np.float32)
    with pytest.warns(mpjax.AutocastWarning, match="67% of the FLOPs .* 1 dot_general .an index or a decomposition"):
        jax.make_jaxpr(mpjax.autocast(loss))(w, x)
