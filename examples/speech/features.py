"""Log-mel and MFCC features, computed in float32 on the device."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

SAMPLE_RATE = 16_000


@dataclasses.dataclass(frozen=True)
class Features:
    """What is computed of audio; hashable, so that it can be closed over or static.

    Features()(audio, lengths) -> (features, frame lengths):
        audio: [batch, samples], float32; lengths: [batch], int32.
        features: [batch, frames, size], float32, normalised per utterance over its own frames (mean 0, deviation 1 for
        each coefficient), 0 behind its length; frame lengths: [batch], int32, 1 + (samples - window) // hop, at least 0.
    """

    kind: Literal["log_mel", "mfcc"] = "log_mel"
    size: int = 40  # mel bands, or cepstral coefficients
    window: int = 400  # samples: 25 ms
    hop: int = 160  # samples: 10 ms

    def __call__(self, audio: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        raise NotImplementedError

    def frames(self, samples):
        """The number of frames of so many samples; takes ints, numpy and JAX arrays."""
        raise NotImplementedError
