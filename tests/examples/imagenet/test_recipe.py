"""The recipe of the image example: effects of its flags on loss, gradients and weights."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from examples.common.cli import UsageError
from examples.common.optimizers import create_optimizer, learning_rate_schedule, update_ema
from examples.imagenet.config import Config
from examples.imagenet.decoding import erase, mix_up

FLOAT32, O2 = "float32", "O2"
PARAMS = {"kernel": jnp.full((2, 2), 0.5), "bias": jnp.full(2, 0.5)}


def hyperparameters(**flags):
    return Config(recipe="imagenet", epochs=2, warmup_epochs=0, **flags)


def moves_average(state):
    """Whether a step of two that are accumulated changes the average of the weights."""
    hyper = hyperparameters(ema=0.75, accumulate=2)
    return bool(update_ema({"w": jnp.zeros(())}, {"w": jnp.ones(())}, jnp.int32(0), hyper, state)["w"])


def apply(hyper, policy, grads, loss_scale=None, params=PARAMS):
    """The params after one step per tree of gradients, and the optimizer state."""
    flags = dataclasses.replace(hyper, policy=policy, loss_scale=loss_scale)
    tx = create_optimizer(flags, optax.constant_schedule(1.0))
    params = mpjax.get_policy(policy).cast_to_param(params)
    state = tx.init(params)
    for g in grads:
        params, state = mpjax.apply_gradients(tx, g, state, params)
    return params, state


def full(value):
    return jax.tree.map(lambda x: jnp.full(x.shape, value), PARAMS)


def test_published_recipe():
    config = Config(mode="training_benchmark", batch_size=512, accumulate=2)
    assert config.learning_rate == 0.256 * 4
    assert (config.momentum, config.nesterov, config.label_smoothing) == (0.875, False, 0.1)
    assert config.weight_decay == 1 / 32768
    schedule = learning_rate_schedule(config, 100)
    assert schedule(125) == pytest.approx(0.512)
    assert schedule(250) == pytest.approx(1.024)
    assert schedule(4500) == pytest.approx(0.0, abs=1e-6)
    # A given rate is the peak itself.
    assert Config(learning_rate=0.5, batch_size=512).learning_rate == 0.5


def test_digits_use_their_recipe_by_default():
    assert Config().epochs == 40
    assert Config().learning_rate == 0.1
    assert Config(recipe="imagenet").momentum == 0.875
    assert Config(momentum=0.5).momentum == 0.5


def test_only_kernels_decay():
    params, _ = apply(hyperparameters(weight_decay=0.1), FLOAT32, [full(0.0)])
    np.testing.assert_allclose(params["kernel"], 0.45)
    np.testing.assert_array_equal(params["bias"], 0.5)


def test_large_gradients_are_clipped_to_the_norm():
    params, _ = apply(hyperparameters(clip_norm=1.0, weight_decay=0), FLOAT32, [full(100.0)])
    change = jnp.concatenate([(p - 0.5).ravel() for p in params.values()])
    assert jnp.linalg.norm(change) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("policy", [FLOAT32, O2])
def test_accumulated_steps_equal_one_step_with_their_mean(policy):
    hyper = hyperparameters(accumulate=2)
    overflow = full(jnp.inf)
    # With a skipped step in between.
    params, state = apply(hyper, policy, [full(0.1), overflow, full(0.3)], "128")
    expected, _ = apply(dataclasses.replace(hyper, accumulate=1), policy, [full(0.2)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, expected)
    assert int(state.skipped_steps) == 1
    assert moves_average(state)
    _, halfway = apply(hyper, policy, [full(0.1)])
    assert not moves_average(halfway)


@pytest.mark.parametrize(("flag", "expected"), [(None, 2.0**15), ("dynamic", 2.0**15), ("256", 256.0)])
def test_loss_scale_follows_the_flag(flag, expected):
    _, state = apply(hyperparameters(), "mixed_float16", [], flag)
    assert float(state.loss_scale) == expected
    tx = create_optimizer(hyperparameters(policy=FLOAT32, loss_scale=flag), optax.constant_schedule(1.0))
    _, after = tx.update(full(jnp.inf), state, PARAMS)
    assert float(after.loss_scale) == (256.0 if flag == "256" else 1.0 if flag is None else 2.0**14)


def test_mixup_blends_images_and_targets_alike():
    images, targets = np.arange(8, dtype=np.float32).reshape(8, 1, 1, 1), np.eye(8, dtype=np.float32)

    @jax.jit
    def mixed(key):
        blend = mix_up(key, 0.2, 8)
        return blend(jnp.asarray(images)), blend(jnp.asarray(targets))

    mixed_images, mixed_targets = map(np.asarray, mixed(jax.random.key(0)))
    np.testing.assert_allclose(mixed_targets.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(mixed_targets @ np.arange(8.0), mixed_images[:, 0, 0, 0], rtol=1e-5)
    assert not np.array_equal(mixed_images, images)
    assert mix_up(jax.random.key(0), 0.0, 8)(images) is images


def test_random_erasing_sets_a_rectangle_of_some_images_to_zero():
    images = jnp.ones((400, 20, 30, 3))
    erased = np.asarray(jax.jit(lambda key: erase(key, images, 0.25))(jax.random.key(0))) == 0
    assert (erased.all(axis=3) == erased.any(axis=3)).all()
    rows, columns = erased[..., 0].any(axis=2), erased[..., 0].any(axis=1)
    np.testing.assert_array_equal(erased[..., 0], rows[:, :, None] & columns[:, None, :])
    assert rows.any(axis=1).mean() == pytest.approx(0.25, abs=0.06)
    share = erased[..., 0].mean(axis=(1, 2))
    assert share.max() < 0.4
    assert share[share > 0].mean() == pytest.approx(0.175, abs=0.03)
    assert erase(jax.random.key(0), images, 0.0) is images


@pytest.mark.parametrize("policy", [FLOAT32, O2])
def test_frozen_parameters_stay_as_they_are(policy):
    hyper = hyperparameters(freeze="^ker", weight_decay=0.1, accumulate=2, clip_norm=0.2)
    params, _ = apply(hyper, policy, [full(1.0), full(1.0)], "128")
    np.testing.assert_array_equal(params["kernel"], PARAMS["kernel"])
    np.testing.assert_allclose(params["bias"], 0.5 - 0.2 / 2**0.5, rtol=1e-3)  # clipped without the frozen gradients
    with pytest.raises(UsageError, match="--freeze 'stem' matches no parameter; some are 'bias', 'kernel'"):
        apply(hyperparameters(freeze="stem"), policy, [])
    with pytest.raises(UsageError, match=r"--freeze '\(' is not a regular expression"):
        hyperparameters(freeze="(")


def test_average_of_weights_follows_only_updates():
    ema, weights = {"w": jnp.zeros(2)}, {"w": jnp.array([1.0, jnp.nan])}
    hyper, skipped, taken = hyperparameters(ema=0.75), *(SimpleNamespace(last_finite=x) for x in (False, True))
    kept = update_ema(ema, weights, jnp.int32(10**6), hyper, skipped)
    np.testing.assert_array_equal(kept["w"], 0.0)
    moved = update_ema(ema, {"w": jnp.ones(2, jnp.float16)}, jnp.int32(10**6), hyper, taken)
    np.testing.assert_array_equal(moved["w"], 0.25)
    assert moved["w"].dtype == jnp.float32
    # The random initial weights are forgotten faster at the start.
    first = update_ema(ema, {"w": jnp.ones(2)}, jnp.int32(0), hyper, taken)
    assert float(first["w"][0]) == pytest.approx(0.9)
