"""SpecAugment on the device; speed and volume perturbation on the host.

Audio augmentation libraries (torchaudio, audiomentations) depend on torch or run on the host, so the code is here.
SciPy does the resampling.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.common.cli import UsageError
from examples.speech.audio import resample, resampled_length


def spec_augment(
    key: jax.Array,
    features: jax.Array,
    lengths: jax.Array,
    *,
    time_masks: int = 2,
    max_time: int = 10,
    frequency_masks: int = 2,
    max_frequency: int = 8,
    max_share: float = 0.2,
) -> jax.Array:
    """Sets random time and frequency bands to 0, the mean of normalised features.

    Time bands lie within the length of each utterance, so that short utterances do not lose too much.

    Args:
        key: Random key.
        features: [batch, frames, size].
        lengths: [batch], in frames.
        time_masks: Number of time bands per utterance.
        max_time: Maximum width of a time band in frames.
        frequency_masks: Number of frequency bands per utterance.
        max_frequency: Maximum width of a frequency band in coefficients.
        max_share: Maximum width of a time band as a share of the utterance.

    Source: D. S. Park et al., "SpecAugment", Interspeech 2019 (without time warping, which brought little gain there).
    """
    batch, frames, size = features.shape
    time_key, frequency_key = jax.random.split(key)
    widest = jnp.minimum(max_time, jnp.floor(max_share * lengths))
    in_time = _bands(time_key, frames, widest, lengths, (batch, time_masks))
    whole = jnp.full((batch,), size)
    widest = jnp.full((batch,), min(max_frequency, size))
    in_frequency = _bands(frequency_key, size, widest, whole, (batch, frequency_masks))
    return jnp.where(in_time[:, :, None] | in_frequency[:, None, :], 0, features)


def _bands(key: jax.Array, size: int, widest: jax.Array, extent: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Random bands of width 0 to `widest` within the first `extent` positions: [batch, size], bool, true inside."""
    draws = jax.random.uniform(key, (2, *shape))
    width = jnp.floor(draws[0] * (widest[:, None] + 1))
    start = jnp.floor(draws[1] * (extent[:, None] - width + 1))
    places = jnp.arange(size)[None, None, :]
    return jnp.any((places >= start[..., None]) & (places < (start + width)[..., None]), axis=1)


class Draw(NamedTuple):
    """Random speeds and gains for the utterances of an epoch or a batch."""

    speeds: np.ndarray  # [utterances], int: indices into `Perturbation.speeds`
    gains: np.ndarray  # [utterances], float32: factors


@dataclasses.dataclass(frozen=True)
class Perturbation:
    """Random changes of speed, by resampling (which also changes the pitch), and of volume.

    Attributes:
        speeds: Factors from which one is drawn per utterance; 1.1 is a tenth faster.
        volume: Maximum change of volume, up or down, in dB.

    Source: T. Ko et al., "Audio augmentation for speech recognition", Interspeech 2015.
    """

    speeds: tuple[float, ...] = (0.9, 1.0, 1.1)
    volume: float = 6.0

    def __post_init__(self) -> None:
        if not self.speeds or not all(0.5 <= speed <= 2 for speed in self.speeds):
            raise UsageError(f"speeds {self.speeds}: give one or more, each between 0.5 and 2 (1 is no change).")
        if not 0 <= self.volume < math.inf:
            raise UsageError(f"volume perturbation of {self.volume} dB: it must be 0 or more.")

    @property
    def fastest(self) -> float:
        """The highest speed, which leaves the fewest frames for a transcript."""
        return max(self.speeds)

    def draw(self, rng: np.random.Generator, count: int) -> Draw:
        """Draws speeds and gains for `count` utterances."""
        decibels = rng.uniform(-self.volume, self.volume, count)
        return Draw(rng.integers(len(self.speeds), size=count), (10 ** (decibels / 20)).astype(np.float32))

    def lengths(self, samples: np.ndarray, speeds: np.ndarray) -> np.ndarray:
        """Lengths of utterances at the drawn speeds."""
        ratios = np.array([_ratio(speed) for speed in self.speeds])[speeds]
        return resampled_length(samples, ratios[..., 0], ratios[..., 1])

    def apply(self, audio: np.ndarray, speed: int, gain: float) -> np.ndarray:
        """The samples of an utterance at the drawn speed and gain."""
        return resample(audio, *_ratio(self.speeds[speed])) * np.float32(gain)


NO_PERTURBATION = Perturbation(speeds=(1.0,), volume=0.0)


def _ratio(speed: float) -> tuple[int, int]:
    """The resampling ratio in small integers: a filter for large ones would be longer than the audio."""
    fraction = Fraction(speed).limit_denominator(40)
    return fraction.denominator, fraction.numerator
