"""`Trial`: the errors of gradients in half, from a float32 evaluation that rounds what half would round."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.inspection.trials import Loss, Trial, relative_error, rounding_scores
from mpjax.policy import get_policy


@functools.cache
def exact_gradient(fun):
    return jax.tree.leaves(jax.jit(jax.grad(fun))(*arguments()))


def compiled(fun, policy):
    """The gradients of the program as XLA compiles it, given a loss-scale state."""

    def gradients(state, *args):
        return mpjax.value_and_grad(fun, state, policy=policy)(*args)[1]

    return jax.jit(gradients, compiler_options={"xla_allow_excess_precision": False})


def error_when_compiled(run, scale, exact, *args):
    """The relative error of these gradients."""
    state = mpjax.static_loss_scale(optax.identity(), scale).init({})
    pairs = zip(jax.tree.leaves(run(state, *args)), exact, strict=True)
    pairs = [(np.asarray(f, float), np.asarray(e, float)) for f, e in pairs]
    return math.sqrt(sum(((f - e) ** 2).sum() for f, e in pairs) / sum((e**2).sum() for _, e in pairs))


def layers(w, x):
    """Unrolled layers, recomputed activations, a reduction in float32 and gradients that are subnormal in float16."""
    for i in range(2):
        x = jax.nn.gelu(x @ w["kernel"][i] + w["bias"])
    return jnp.mean(jax.nn.log_softmax(x) ** 2) * 1e-3


def scanned(w, x):
    x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel + w["bias"]), None), x, w["kernel"])
    return jnp.mean(x**2)


def arguments():
    rng = np.random.default_rng(0)
    w = {"kernel": rng.normal(size=(2, 16, 16)) / 4, "bias": rng.normal(size=16)}
    return jax.tree.map(lambda x: np.asarray(x, np.float32), (w, rng.normal(size=(8, 16))))


@pytest.mark.parametrize("fun", [layers, scanned])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_its_error_is_that_of_the_compiled_program(fun, dtype):
    policy, args = get_policy(f"mixed_{dtype}"), arguments()
    trial, run, exact = Trial("test", Loss(fun).under(policy), args), compiled(fun, policy), exact_gradient(fun)
    for scale in (1.0, 1024.0) if dtype == "float16" else (1.0,):
        expected = error_when_compiled(run, scale, exact, *args)
        assert expected > 0
        assert trial.error(scale, exact) == pytest.approx(expected, rel=0.2)


def test_an_overflow_is_an_infinite_error_and_an_override_takes_it_away():
    def hot(w, x):
        with jax.named_scope("hot"):
            x = (x @ (w["kernel"][0] * 1e6)) * 1e-6
        return jnp.mean((x @ w["kernel"][1]) ** 2)

    args, policy = arguments(), get_policy("mixed_float16")
    kept = mpjax.Policy("float32", "float16", "float32", overrides=(("*/hot", get_policy("float32")),))
    exact = exact_gradient(hot)
    assert Trial("test", Loss(hot).under(policy), args).error(1.0, exact) == math.inf
    trial = Trial("test", Loss(hot).under(kept), args)
    assert trial.error(1.0, exact) < 0.01
    assert trial.error(2.0**60, exact) == math.inf


@pytest.mark.filterwarnings("ignore:autocast. cpu is not known to")
@pytest.mark.parametrize("policy", ["mixed_float8", "mixed_mxfp8"])
def test_what_a_matmul_quantises_counts(policy):
    rng = np.random.default_rng(0)
    params = [(rng.normal(size=(32, 32)) / 6).astype(np.float32) for _ in range(4)]
    x = rng.normal(size=(64, 32)).astype(np.float32)

    def loss(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(jnp.sin(x) ** 2)

    rules = mpjax.Rules(float8=mpjax.Float8(min_size=(0, 0)))
    half = Loss(loss).under(policy, rules)
    exact = jax.jit(jax.grad(loss))(params, x)
    found = Trial("test", half, (params, x)).error(1.0, exact)
    assert found == pytest.approx(relative_error(jax.jit(jax.grad(half.fun))(params, x), exact), rel=0.05)
    scores = {}
    for site, score in rounding_scores("test", half, (params, x)):
        scores[site.path] = max(score, scores.get(site.path, 0.0))
    # The two layers between the first and the last are in float8.
    assert min(scores["layer_1"], scores["layer_2"]) > 3 * max(scores["layer_0"], scores["layer_3"])


@pytest.mark.parametrize("tool", [mpjax.layerwise_error, mpjax.numerics])
@pytest.mark.parametrize(
    ("fun", "returned"),
    [
        (jax.grad(lambda w: jnp.mean(w**2)), r"float32\[4,4\]"),
        (lambda w: (jnp.mean(w**2), w), r"float32\[\], float32\[4,4\]"),
        (lambda w: {"loss": jnp.mean(w**2)}, r"float32\[\]"),
    ],
)
def test_what_is_no_loss_is_refused_with_what_it_returned(tool, fun, returned):
    with pytest.raises(TypeError, match=rf"must return a loss of shape \(\).*has_aux.*It returned {returned}\."):
        tool(fun, np.ones((4, 4), np.float32))
