"""Log-mel and MFCC features, computed in float32 on the device."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

import mpjax
from examples.speech.audio import SAMPLE_RATE

# Energy of a band below which its logarithm says nothing but rounding.
_FLOOR = 1e-10
# Where Slaney's mel scale turns from linear to logarithmic, in Hz, and its steps.
_LINEAR_STEP, _BREAK, _LOG_STEP = 200 / 3, 1000.0, np.log(6.4) / 27


@dataclasses.dataclass(frozen=True)
class Features:
    """What is computed of audio, 25 ms of it at every 10 ms unless told otherwise; hashable.

    features, lengths = Features()(audio, lengths)

    Only whole windows make frames, so padding changes none of them. All is float32, under any autocast.

    Attributes:
        kind: log_mel, the logarithm of mel bands' energy; mfcc, the first coefficients of its cosine transform.
        mels: mel bands (Slaney's scale and area normalisation, as librosa's), from 0 Hz to 8 kHz.
        coefficients: of mfcc.
        window: length of the Hann window, in samples.
        hop: samples from one frame to the next.
    """

    kind: Literal["log_mel", "mfcc"] = "log_mel"
    mels: int = 40
    coefficients: int = 26
    window: int = 400
    hop: int = 160

    @property
    def size(self) -> int:
        """Numbers in a frame."""
        return self.mels if self.kind == "log_mel" else self.coefficients

    def __call__(self, audio: ArrayLike, lengths: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Features of a batch, with mean 0 and deviation 1 of each coefficient over an utterance's own frames.

        Args:
            audio: [batch, samples], float32.
            lengths: [batch], integers, in samples.

        Returns:
            [batch, frames, size], float32, 0 behind the utterance's frames; and their lengths, [batch], int32.
        """
        frames = self.frames(jnp.asarray(lengths)).astype(jnp.int32)
        return normalize(self.compute(audio), frames), frames

    def compute(self, audio: ArrayLike) -> jax.Array:
        """Features as they are, [..., frames, size] of audio [..., samples]."""
        log_mel = _log_mel(jnp.asarray(audio, jnp.float32), self)
        return log_mel if self.kind == "log_mel" else _cosine_transform(log_mel)[..., : self.coefficients]

    def frames(self, samples: Any) -> Any:
        """Frames of so many samples: integers, NumPy or JAX arrays."""
        counts = 1 + (samples - self.window) // self.hop
        return counts * (counts > 0)

    def samples(self, frames: int) -> int:
        """The fewest samples that make so many frames, 1 or more."""
        return self.window + (frames - 1) * self.hop


@mpjax.float_function
def _log_mel(audio: jax.Array, features: Features) -> jax.Array:
    count = features.frames(audio.shape[-1])
    places = jnp.arange(count)[:, None] * features.hop + jnp.arange(features.window)
    # The FFT's length is a power of two; a periodic window, as spectra have it.
    size = 1 << (features.window - 1).bit_length()
    window = np.hanning(features.window + 1)[:-1].astype(np.float32)
    spectrum = jnp.fft.rfft(audio[..., places] * window, size)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    # "highest": a GPU would else multiply in TF32, with ten bits.
    bands = jnp.matmul(power, mel_filters(features.mels, size), precision="highest")
    return jnp.log(jnp.maximum(bands, _FLOOR))


@mpjax.float_function
def _cosine_transform(log_mel: jax.Array) -> jax.Array:
    return jax.scipy.fft.dct(log_mel, norm="ortho")


@mpjax.float_function
def normalize(features: jax.Array, lengths: jax.Array) -> jax.Array:
    """Mean 0 and deviation 1 of each coefficient over the first `lengths` frames; 0 behind them."""
    inside = (jnp.arange(features.shape[1]) < lengths[:, None])[:, :, None]
    count = jnp.maximum(lengths, 1)[:, None, None]
    mean = jnp.sum(features, axis=1, keepdims=True, where=inside) / count
    centred = jnp.where(inside, features - mean, 0)
    variance = jnp.sum(jnp.square(centred), axis=1, keepdims=True) / count
    return centred / jnp.sqrt(variance + 1e-5)


def mel_filters(mels: int, fft_size: int) -> np.ndarray:
    """Triangles of equal area over the bins of a spectrum, [bins, mels], float32.

    Source: M. Slaney, "Auditory Toolbox", Interval Research 1998.
    """
    top = _hz_to_mel(SAMPLE_RATE / 2)
    edges = _mel_to_hz(np.linspace(0, top, mels + 2))
    bins = np.linspace(0, SAMPLE_RATE / 2, fft_size // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return (np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])).astype(np.float32)


def _hz_to_mel(hertz: float) -> float:
    if hertz < _BREAK:
        return hertz / _LINEAR_STEP
    return _BREAK / _LINEAR_STEP + np.log(hertz / _BREAK) / _LOG_STEP


def _mel_to_hz(mels: np.ndarray) -> np.ndarray:
    above = mels - _BREAK / _LINEAR_STEP
    return np.where(above < 0, mels * _LINEAR_STEP, _BREAK * np.exp(_LOG_STEP * above))
