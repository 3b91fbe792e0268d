"""SpecAugment on the device; speed and volume perturbation on the host."""

from __future__ import annotations

import jax


def spec_augment(
    key: jax.Array,
    features: jax.Array,  # [batch, frames, size], float32
    lengths: jax.Array,  # [batch], int32, in frames
    *,
    time_masks: int = 2,
    max_time: int = 10,
    frequency_masks: int = 2,
    max_frequency: int = 8,
) -> jax.Array:
    """Sets random bands of time (within each utterance's length) and frequency to 0, the features' mean."""
    raise NotImplementedError
