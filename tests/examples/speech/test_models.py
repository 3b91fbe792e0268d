"""The speech models: padding changes no result, and all of their matmuls run in half."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from examples.speech.config import Config
from examples.speech.deepspeech import CELLS, Recurrent, recur, recur_by_scan
from examples.speech.models import create_network
from testing import cheap_keys
from testing.measures import MATMULS, equations, matmuls, risky_in_half
from testing.random_programs.evaluate import arrays_in_numpy, in_numpy

LABELS = 12
CONFIG = Config(policy="float32", hidden=8, dropout=0.0, stride=2, cell="lstm", context=2)


def loss_and_logits(network, params, batch, labels, train):
    logits, lengths = network.apply(params, *batch, jax.random.key(0) if train else None)
    inside = jnp.arange(logits.shape[1]) < lengths[:, None]
    logits = logits.astype(jnp.float32)
    losses = optax.ctc_loss(logits, 1.0 - inside, labels, jnp.zeros(labels.shape))
    return jnp.mean(losses), (losses, jnp.where(inside[..., None], logits, 0))


def test_masked_and_silent_frames_do_not_amplify_the_gradient():
    """Their variance is zero, where a norm divides by the root of its epsilon."""
    config = dataclasses.replace(CONFIG, hidden=32, cell="gru", context=5, stride=3)
    network = create_network(config, LABELS)
    params = arrays_in_numpy(network.init)(cheap_keys.key(0)).params
    features = np.random.default_rng(0).normal(size=(4, 60, 40)).astype(np.float32)
    masked, silent = features.copy(), features.copy()
    masked[:, 20:40] = 0  # two bands of SpecAugment side by side
    silent[0] = 0
    labels = np.array([[1, 2], [3, 3], [4, 5], [6, 1]])

    @jax.jit
    def norm(features):
        batch = features, np.full(4, 60)
        return optax.tree.norm(jax.grad(lambda p: loss_and_logits(network, p, batch, labels, train=True)[0])(params))

    plain = norm(features)
    # Ten million times with an epsilon of 1e-6.
    assert norm(masked) < 10 * plain
    assert norm(silent) < 50 * plain


@pytest.fixture(scope="module")
def inputs():
    features = np.random.default_rng(1).normal(size=(3, 24, 40)).astype(np.float32)
    return (features, np.array([24, 21, 13])), np.array([[1, 2], [3, 3], [4, 5]])


def test_padding_changes_no_result(inputs):
    network = create_network(CONFIG, LABELS)
    params = arrays_in_numpy(network.init)(cheap_keys.key(0)).params
    (features, lengths), labels = inputs

    @in_numpy
    def both_modes(features):
        batch = features, lengths
        train = jax.value_and_grad(partial(loss_and_logits, network, train=True), has_aux=True)
        test = loss_and_logits(network, params, batch, labels, train=False)
        return train(params, batch, labels), test

    # Not zeros: values after the end of a sequence must not be read.
    padded = np.full((3, 37, 40), 7.0, np.float32)
    for row, length in enumerate(lengths):
        padded[row, :length] = features[row, :length]
    plain, with_padding = both_modes(features), both_modes(padded)
    frames = plain[1][1][1].shape[1]
    cut = jax.tree.map(
        lambda x, like: x[:, :frames] if x.ndim == 3 and like.shape != x.shape else x, with_padding, plain
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), cut, plain)


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_each_sequence_of_a_batch_is_independent(name):
    create = lambda key: nnx.split(Recurrent(name, 5, 4, bidirectional=True, rngs=nnx.Rngs(key)))
    graph = nnx.graphdef(nnx.eval_shape(lambda: Recurrent(name, 5, 4, bidirectional=True, rngs=nnx.Rngs(0))))
    layer = nnx.merge(graph, arrays_in_numpy(lambda key: create(key)[1])(cheap_keys.key(0)))
    x, lengths = np.random.default_rng(0).normal(size=(2, 7, 5)).astype(np.float32), (7, 4)
    call = in_numpy(layer)
    together = call(x, np.arange(7) < np.array(lengths)[:, None])
    for row, length in enumerate(lengths):
        alone = call(x[row : row + 1, :length], np.ones((1, length), bool))
        np.testing.assert_allclose(together[row, :length], alone[0], rtol=1e-5, atol=1e-6)
        assert not np.any(together[row, length:])


def recurrence(time, dtype):
    """The kernel, mask and gates of a GRU."""
    rng = np.random.default_rng(0)
    kernel, gates = rng.normal(size=(4, 12)) / 2, rng.normal(size=(time, 2, 12))
    return kernel.astype(dtype), np.ones((time, 2, 1), bool), gates.astype(dtype)


def kernel_gradient(run, time, dtype):
    total = lambda kernel, mask, gates: jnp.sum(run(kernel, mask, gates).astype(jnp.float32))
    return in_numpy(jax.grad(total))(*recurrence(time, dtype))


def of_layer(kernel, mask, gates):
    return recur(CELLS["gru"], False, gates, kernel, mask)


def of_plain_scan(kernel, mask, gates):
    return recur_by_scan(CELLS["gru"], False, kernel, mask, gates, jnp.zeros_like(gates))[0]


def test_gradient_of_the_recurrent_kernel_equals_that_of_the_scan():
    ours, plain = (kernel_gradient(run, 9, jnp.float32) for run in (of_layer, of_plain_scan))
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_gradient_of_the_recurrent_kernel_accumulates_in_float32():
    exact = kernel_gradient(of_layer, 400, jnp.float32)
    error = lambda run: np.linalg.norm(kernel_gradient(run, 400, jnp.bfloat16) - exact) / np.linalg.norm(exact)
    assert error(of_layer) < 0.02
    # What the layer avoids: the gradient of a scan, accumulated in the kernel's dtype.
    assert error(of_plain_scan) > 5 * error(of_layer)


@pytest.mark.parametrize("amp", ["module", "autocast"])
def test_all_matmuls_run_in_half_and_no_sum_does(amp, inputs):
    network = create_network(dataclasses.replace(CONFIG, policy="mixed_float16", amp=amp), LABELS)
    variables = jax.eval_shape(lambda: network.init(0))
    (features, lengths), _ = inputs

    def total(params, features):
        return jnp.sum(network.apply(params, features, lengths, jax.random.key(0))[0].astype(jnp.float32))

    gradient = jax.jit(jax.grad(total))  # traced once for both
    mpjax.audit(gradient, variables.params, features).assert_half()
    assert not risky_in_half(gradient, variables.params, features)


def test_inputs_of_all_time_steps_are_one_matmul():
    layer = Recurrent("gru", 5, 4, bidirectional=True, rngs=nnx.Rngs(0))
    found = matmuls(layer, jnp.ones((2, 7, 5)), jnp.ones((2, 7), bool))
    inside = [e for e in found if "scan" in e.path]
    outside = [e for e in found if "scan" not in e.path]
    # One per step and direction for the state, and one outside for the inputs of both directions.
    assert [e.times for e in inside] == [7, 7]
    assert [e.eqn.outvars[0].aval.shape for e in outside] == [(2, 7, 24)]


def test_state_is_float32_under_a_half_policy():
    layer = mpjax.with_policy(Recurrent("lstm", 5, 4, bidirectional=False, rngs=nnx.Rngs(0)), "O3")
    jaxpr = jax.make_jaxpr(layer)(jnp.ones((2, 7, 5)), jnp.ones((2, 7), bool))
    scan = next(e.eqn for e in equations(jaxpr) if e.name == "scan")
    states = [v.aval for v in scan.outvars if v.aval.shape == (2, 4)]
    assert [state.dtype for state in states] == [jnp.float32, jnp.float32]
    assert {d for e in equations(jaxpr) if e.name in MATMULS for d in e.in_dtypes} == {np.dtype(jnp.float16)}
