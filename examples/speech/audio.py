"""Reads audio files as mono float32 samples at 16 kHz, with soundfile and polyphase resampling."""

from __future__ import annotations

import functools
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from examples.common.cli import UnusableFileError
from examples.common.records import Entry

SAMPLE_RATE = 16_000

_CUT_SHORT = re.compile(r"^data : (\d+) \(should be (\d+)\)", re.MULTILINE)
# Programs that write to a pipe do not know the length, and declare about the largest that the header can hold.
_STREAMED = 0x7FFF_0000


File = Path | Entry


def audio_length(path: File) -> int:
    """The length of an audio file at 16 kHz, from its header.

    Raises:
        UnusableFileError: The file is missing, empty, or has an unknown format.
    """
    with _open(path) as file:
        return resampled_length(file.frames, *resampling_ratio(file.samplerate))


def read_audio(path: File) -> np.ndarray:
    """Reads the samples of a file, [samples], float32, -1..1, resampled to 16 kHz with channels averaged.

    Raises:
        UnusableFileError: As for `audio_length`, or the file cannot be decoded, or contains NaN or infinite samples.
    """
    with _open(path) as file:
        promised, rate = file.frames, file.samplerate
        try:
            channels = file.read(dtype="float32", always_2d=True)
        except soundfile.SoundFileError as error:
            raise UnusableFileError(f"damaged: {_reason(error)}") from error
    if len(channels) != promised:
        raise UnusableFileError(f"damaged: {len(channels)} samples but its header says {promised}")
    if not np.isfinite(channels).all():
        raise UnusableFileError("it holds NaN or infinite samples")
    mono = channels[:, 0] if channels.shape[1] == 1 else channels.mean(axis=1)
    return resample(mono, *resampling_ratio(rate))


def _open(path: File) -> soundfile.SoundFile:
    try:
        content = path.read_bytes() if isinstance(path, Entry) else None
        if not (path.stat().st_size if isinstance(path, Path) else content):
            raise UnusableFileError("the file is empty (0 bytes)")
        file = soundfile.SoundFile(path if content is None else io.BytesIO(content))
    except OSError as error:
        raise UnusableFileError(f"it cannot be opened: {error.strerror}") from error
    except soundfile.SoundFileError as error:
        raise UnusableFileError(f"not readable as audio: {_reason(error)}") from error
    # libsndfile reads truncated WAV files, and reports the truncation only in its log.
    cut = _CUT_SHORT.search(file.extra_info)
    if cut and int(cut[1]) < _STREAMED:
        file.close()
        raise UnusableFileError(f"damaged: cut short, {cut[2]} bytes of audio but its header says {cut[1]}")
    if file.frames <= 0:
        file.close()
        raise UnusableFileError("it holds no samples")
    return file


def resample(samples: np.ndarray, up: int, down: int) -> np.ndarray:
    """Resamples float32 samples by the ratio up/down with a polyphase filter (Kaiser window)."""
    if up == down:
        return samples
    # Imported lazily: the import takes longer than reading thousands of files.
    from scipy.signal import resample_poly

    return resample_poly(samples, up, down, window=_filter(up, down)).astype(np.float32)


@functools.lru_cache(maxsize=32)
def _filter(up: int, down: int) -> np.ndarray:
    """The low-pass filter of `resample_poly` (Kaiser, 10 zero crossings), cached because it designs one per call."""
    from scipy.signal import firwin

    widest = max(up, down)
    return firwin(20 * widest + 1, 1 / widest, window=("kaiser", 5.0)).astype(np.float32)


def resampled_length(samples: Any, up: Any, down: Any) -> Any:
    """Number of samples after `resample`, rounded up; accepts integers or arrays."""
    return -(-samples * up // down)


def resampling_ratio(rate: int) -> tuple[int, int]:
    """The ratio (up, down), in lowest terms, that resamples `rate` to 16 kHz."""
    common = math.gcd(rate, SAMPLE_RATE)
    return SAMPLE_RATE // common, rate // common


def _reason(error: Exception) -> str:
    # soundfile's message repeats the path before the reason.
    return str(getattr(error, "error_string", error)).strip().rstrip(".")
