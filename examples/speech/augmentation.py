"""SpecAugment on the device; speed and volume perturbation on the host.

Our own, because the libraries for audio augmentation (torchaudio, audiomentations) bring torch or work on the host;
resampling, the hard part, is SciPy's.
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
    """Sets random bands of time and of frequency to 0, which is the mean of normalised features.

    Bands of time lie within each utterance's own length, so short ones lose no more than they should.

    Args:
        key: of the random numbers.
        features: [batch, frames, size].
        lengths: [batch], in frames.
        time_masks: bands of time for each utterance.
        max_time: their largest width, in frames.
        frequency_masks: bands of frequency for each utterance.
        max_frequency: their largest width, in coefficients.
        max_share: a band of time is no longer than this share of the utterance.

    Source: D. S. Park et al., "SpecAugment", Interspeech 2019 (without its time warping, which gained little there).
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
    """[batch, size], bool: true in bands of 0 to `widest` places that lie within the first `extent`."""
    draws = jax.random.uniform(key, (2, *shape))
    width = jnp.floor(draws[0] * (widest[:, None] + 1))
    start = jnp.floor(draws[1] * (extent[:, None] - width + 1))
    places = jnp.arange(size)[None, None, :]
    return jnp.any((places >= start[..., None]) & (places < (start + width)[..., None]), axis=1)


class Draw(NamedTuple):
    """How utterances are changed: the numbers of one epoch, or those of one batch."""

    speeds: np.ndarray  # [utterances], int: which of the speeds
    gains: np.ndarray  # [utterances], float32: factors


@dataclasses.dataclass(frozen=True)
class Perturbation:
    """Other speeds, by resampling (pitch changes with it), and other volumes.

    Attributes:
        speeds: one of them is drawn for each utterance; 1.1 is a tenth faster.
        volume: utterances become up to so many dB louder or softer.

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
        """The highest speed, at which there are the fewest frames for a transcript."""
        return max(self.speeds)

    def draw(self, rng: np.random.Generator, count: int) -> Draw:
        """Draws for so many utterances."""
        decibels = rng.uniform(-self.volume, self.volume, count)
        return Draw(rng.integers(len(self.speeds), size=count), (10 ** (decibels / 20)).astype(np.float32))

    def lengths(self, samples: np.ndarray, speeds: np.ndarray) -> np.ndarray:
        """Lengths of utterances at the speeds drawn."""
        ratios = np.array([_ratio(speed) for speed in self.speeds])[speeds]
        return resampled_length(samples, ratios[..., 0], ratios[..., 1])

    def apply(self, audio: np.ndarray, speed: int, gain: float) -> np.ndarray:
        """The samples of an utterance at a speed drawn and with a gain."""
        return resample(audio, *_ratio(self.speeds[speed])) * np.float32(gain)


NO_PERTURBATION = Perturbation(speeds=(1.0,), volume=0.0)


def _ratio(speed: float) -> tuple[int, int]:
    """What to resample by. Small numbers: the filter of a long ratio would be longer than the audio."""
    fraction = Fraction(speed).limit_denominator(40)
    return fraction.denominator, fraction.numerator
