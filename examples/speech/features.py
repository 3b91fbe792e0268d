"""Log-mel features, computed in float32 on the device; augmentation of audio and features."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import mpjax
from examples.speech.audio import SAMPLE_RATE, resample, resampled_length

# Band energies below this are rounding noise.
_FLOOR = 1e-10
# Slaney's mel scale: linear step in Hz, frequency in Hz where it becomes logarithmic, and logarithmic step.
_LINEAR_STEP, _BREAK, _LOG_STEP = 200 / 3, 1000.0, np.log(6.4) / 27


# 25 ms windows every 10 ms, and mel bands from 0 Hz to 8 kHz (Slaney's scale and area normalisation, as in librosa).
MELS, WINDOW, HOP = 40, 400, 160  # the last two in samples


def features_of(audio: ArrayLike, lengths: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Features of a batch; each coefficient has mean 0 and deviation 1 over the frames of an utterance.

    Only full windows yield frames, so padding does not change them. The computation is in float32 under any autocast.

    Args:
        audio: [batch, samples], float32.
        lengths: [batch], integers, in samples.

    Returns:
        [batch, frames, mels], float32, 0 past each utterance's frames; and the numbers of frames, [batch], int32.
    """
    frames = frames_of(jnp.asarray(lengths)).astype(jnp.int32)
    return normalize(log_mel(jnp.asarray(audio, jnp.float32)), frames), frames


def frames_of(samples: Any) -> Any:
    """Number of frames for a number of samples: integers, NumPy or JAX arrays."""
    counts = 1 + (samples - WINDOW) // HOP
    return counts * (counts > 0)


def samples_of(frames: int) -> int:
    """The smallest number of samples that yields `frames` frames (1 or more)."""
    return WINDOW + (frames - 1) * HOP


@mpjax.float_function
def log_mel(audio: jax.Array) -> jax.Array:
    """Features without normalisation, [..., frames, mels], of audio [..., samples], float32."""
    places = jnp.arange(frames_of(audio.shape[-1]))[:, None] * HOP + jnp.arange(WINDOW)
    # The FFT's length is a power of two. The window is periodic, as is usual for spectra.
    size = 1 << (WINDOW - 1).bit_length()
    window = np.hanning(WINDOW + 1)[:-1].astype(np.float32)
    spectrum = jnp.fft.rfft(audio[..., places] * window, size)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    # "highest": a GPU would otherwise multiply in TF32, with ten mantissa bits.
    bands = jnp.matmul(power, mel_filters(MELS, size), precision="highest")
    return jnp.log(jnp.maximum(bands, _FLOOR))


@mpjax.float_function
def normalize(features: jax.Array, lengths: jax.Array) -> jax.Array:
    """Normalises each coefficient to mean 0 and deviation 1 over the first `lengths` frames; later frames are 0."""
    inside = (jnp.arange(features.shape[1]) < lengths[:, None])[:, :, None]
    count = jnp.maximum(lengths, 1)[:, None, None]
    mean = jnp.sum(features, axis=1, keepdims=True, where=inside) / count
    centred = jnp.where(inside, features - mean, 0)
    variance = jnp.sum(jnp.square(centred), axis=1, keepdims=True) / count
    return centred / jnp.sqrt(variance + 1e-5)


def mel_filters(mels: int, fft_size: int) -> np.ndarray:
    """Triangular filters of equal area over the bins of a spectrum, [bins, mels], float32.

    Source: M. Slaney, "Auditory Toolbox", Interval Research 1998.
    """
    top = _BREAK / _LINEAR_STEP + np.log(SAMPLE_RATE / 2 / _BREAK) / _LOG_STEP  # in the logarithmic part
    mel = np.linspace(0, top, mels + 2)
    above = mel - _BREAK / _LINEAR_STEP
    edges = np.where(above < 0, mel * _LINEAR_STEP, _BREAK * np.exp(_LOG_STEP * above))  # in Hz
    bins = np.linspace(0, SAMPLE_RATE / 2, fft_size // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return (np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])).astype(np.float32)


# SpecAugment on the device; speed and volume perturbation on the host.
#
# Audio augmentation libraries (torchaudio, audiomentations) depend on torch or run on the host, so the code is here.
# SciPy does the resampling.


# Bands of an utterance and their largest width: in frames, which is also at most this share of it; in coefficients.
TIME_MASKS, MAX_TIME, MAX_SHARE = 2, 10, 0.2
FREQUENCY_MASKS, MAX_FREQUENCY = 2, 8


def spec_augment(key: jax.Array, features: jax.Array, lengths: jax.Array) -> jax.Array:
    """Sets random time and frequency bands to 0, the mean of normalised features.

    Time bands lie within the length of each utterance, so that short utterances do not lose too much.

    Args:
        key: Random key.
        features: [batch, frames, size].
        lengths: [batch], in frames.

    Source: D. S. Park et al., "SpecAugment", Interspeech 2019 (without time warping, which brought little gain there).
    """
    batch, frames, size = features.shape
    time_key, frequency_key = jax.random.split(key)
    widest = jnp.minimum(MAX_TIME, jnp.floor(MAX_SHARE * lengths))
    in_time = _bands(time_key, frames, widest, lengths, (batch, TIME_MASKS))
    whole, widest = jnp.full((batch,), size), jnp.full((batch,), min(MAX_FREQUENCY, size))
    in_frequency = _bands(frequency_key, size, widest, whole, (batch, FREQUENCY_MASKS))
    return jnp.where(in_time[:, :, None] | in_frequency[:, None, :], 0, features)


def _bands(key: jax.Array, size: int, widest: jax.Array, extent: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Random bands of width 0 to `widest` within the first `extent` positions: [batch, size], bool, true inside."""
    draws = jax.random.uniform(key, (2, *shape))
    width = jnp.floor(draws[0] * (widest[:, None] + 1))
    start = jnp.floor(draws[1] * (extent[:, None] - width + 1))
    places = jnp.arange(size)[None, None, :]
    return jnp.any((places >= start[..., None]) & (places < (start + width)[..., None]), axis=1)


# Random speeds and gains of utterances: indices into `Perturbation.speeds`, int, and factors, float32.
Draw = tuple[np.ndarray, np.ndarray]


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

    def draw(self, rng: np.random.Generator, count: int) -> Draw:
        """Draws speeds and gains for `count` utterances."""
        decibels = rng.uniform(-self.volume, self.volume, count)
        return rng.integers(len(self.speeds), size=count), (10 ** (decibels / 20)).astype(np.float32)

    def lengths(self, samples: Any, speeds: Any) -> np.ndarray:
        """Lengths of utterances at the drawn speeds."""
        return np.choose(speeds, [resampled_length(samples, _ratio(speed)) for speed in self.speeds])

    def apply(self, audio: np.ndarray, speed: int, gain: float) -> np.ndarray:
        """The samples of an utterance at the drawn speed and gain."""
        return resample(audio, _ratio(self.speeds[speed])) * np.float32(gain)


NO_PERTURBATION = Perturbation(speeds=(1.0,), volume=0.0)


def _ratio(speed: float) -> Fraction:
    """The resampling ratio in small integers: a filter for large ones would be longer than the audio."""
    return 1 / Fraction(speed).limit_denominator(40)
