"""Audio files as float32 samples at 16 kHz, one channel, by soundfile and polyphase resampling."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile

SAMPLE_RATE = 16_000


class AudioError(Exception):
    """A file that is no usable audio; the text is the reason, without the file's name."""


class AudioInfo(NamedTuple):
    """What the header of a file says."""

    samples: int  # at 16 kHz
    sample_rate: int  # of the file
    channels: int


def probe(path: Path) -> AudioInfo:
    """Reads the header of an audio file.

    Raises:
        AudioError: it is missing, of no known format, or empty.
    """
    if not path.is_file():
        raise AudioError("there is no such file")
    if path.stat().st_size == 0:
        raise AudioError("the file is empty (0 bytes)")
    try:
        info = soundfile.info(path)
    except soundfile.SoundFileError as error:
        raise AudioError(f"not readable as audio: {_reason(error)}") from error
    if info.frames <= 0:
        raise AudioError("it holds no samples")
    up, down = _ratio(info.samplerate, SAMPLE_RATE)
    return AudioInfo(resampled_length(info.frames, up, down), info.samplerate, info.channels)


def read_audio(path: Path) -> np.ndarray:
    """The samples of a file, [samples], float32, -1..1: resampled to 16 kHz, channels averaged.

    Raises:
        AudioError: as for `probe`, or it can not be decoded, or holds NaN or infinite samples.
    """
    expected = probe(path).samples
    try:
        channels, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise AudioError(f"damaged: {_reason(error)}") from error
    if not np.isfinite(channels).all():
        raise AudioError("it holds NaN or infinite samples")
    samples = resample(channels.mean(axis=1), *_ratio(rate, SAMPLE_RATE))
    if len(samples) != expected:
        raise AudioError(f"damaged: {len(samples)} samples where its header promises {expected}")
    return samples


def resample(samples: np.ndarray, up: int, down: int) -> np.ndarray:
    """Resamples by the ratio up/down with a polyphase filter (Kaiser window), in float32."""
    if up == down:
        return samples
    # Only here: importing it takes longer than reading thousands of files.
    from scipy.signal import resample_poly

    return resample_poly(samples, up, down, window=_filter(up, down)).astype(np.float32)


@functools.lru_cache(maxsize=32)
def _filter(up: int, down: int) -> np.ndarray:
    """The low-pass filter that resample_poly would design again for each file (Kaiser, 10 zero crossings)."""
    from scipy.signal import firwin

    widest = max(up, down)
    return firwin(20 * widest + 1, 1 / widest, window=("kaiser", 5.0)).astype(np.float32)


def resampled_length(samples: int | np.ndarray, up: int | np.ndarray, down: int | np.ndarray) -> int | np.ndarray:
    """How many samples `resample` makes of so many: rounded up."""
    return -(-samples * up // down)


def _ratio(rate: int, wanted: int) -> tuple[int, int]:
    common = math.gcd(rate, wanted)
    return wanted // common, rate // common


def _reason(error: Exception) -> str:
    # soundfile's own text repeats the path before the reason.
    return str(getattr(error, "error_string", error)).strip().rstrip(".")
