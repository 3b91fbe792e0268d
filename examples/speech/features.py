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

# Band energies below this are rounding noise.
_FLOOR = 1e-10
# Slaney's mel scale: linear step in Hz, frequency in Hz where it becomes logarithmic, and logarithmic step.
_LINEAR_STEP, _BREAK, _LOG_STEP = 200 / 3, 1000.0, np.log(6.4) / 27


@dataclasses.dataclass(frozen=True)
class Features:
    """Audio features, by default of 25 ms windows every 10 ms; hashable.

    features, lengths = Features()(audio, lengths)

    Only full windows yield frames, so padding does not change them. The computation is in float32 under any autocast.

    Attributes:
        kind: log_mel, the log energy of mel bands, or mfcc, the first coefficients of its cosine transform.
        mels: Number of mel bands from 0 Hz to 8 kHz (Slaney's scale and area normalisation, as in librosa).
        coefficients: Number of mfcc coefficients.
        window: Length of the Hann window in samples.
        hop: Samples from one frame to the next.
    """

    kind: Literal["log_mel", "mfcc"] = "log_mel"
    mels: int = 40
    coefficients: int = 26
    window: int = 400
    hop: int = 160

    @property
    def size(self) -> int:
        """Number of features per frame."""
        return self.mels if self.kind == "log_mel" else self.coefficients

    def __call__(self, audio: ArrayLike, lengths: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Features of a batch; each coefficient has mean 0 and deviation 1 over the frames of an utterance.

        Args:
            audio: [batch, samples], float32.
            lengths: [batch], integers, in samples.

        Returns:
            [batch, frames, size], float32, 0 past each utterance's frames; and the numbers of frames, [batch], int32.
        """
        frames = self.frames(jnp.asarray(lengths)).astype(jnp.int32)
        return normalize(self.compute(audio), frames), frames

    def compute(self, audio: ArrayLike) -> jax.Array:
        """Features without normalisation, [..., frames, size], of audio [..., samples]."""
        log_mel = _log_mel(jnp.asarray(audio, jnp.float32), self)
        return log_mel if self.kind == "log_mel" else _cosine_transform(log_mel)[..., : self.coefficients]

    def frames(self, samples: Any) -> Any:
        """Number of frames for a number of samples: integers, NumPy or JAX arrays."""
        counts = 1 + (samples - self.window) // self.hop
        return counts * (counts > 0)

    def samples(self, frames: int) -> int:
        """The smallest number of samples that yields `frames` frames (1 or more)."""
        return self.window + (frames - 1) * self.hop


@mpjax.float_function
def _log_mel(audio: jax.Array, features: Features) -> jax.Array:
    count = features.frames(audio.shape[-1])
    places = jnp.arange(count)[:, None] * features.hop + jnp.arange(features.window)
    # The FFT's length is a power of two. The window is periodic, as is usual for spectra.
    size = 1 << (features.window - 1).bit_length()
    window = np.hanning(features.window + 1)[:-1].astype(np.float32)
    spectrum = jnp.fft.rfft(audio[..., places] * window, size)
    power = jnp.square(spectrum.real) + jnp.square(spectrum.imag)
    # "highest": a GPU would otherwise multiply in TF32, with ten mantissa bits.
    bands = jnp.matmul(power, mel_filters(features.mels, size), precision="highest")
    return jnp.log(jnp.maximum(bands, _FLOOR))


@mpjax.float_function
def _cosine_transform(log_mel: jax.Array) -> jax.Array:
    return jax.scipy.fft.dct(log_mel, norm="ortho")


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
