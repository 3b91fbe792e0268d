"""Reads audio files as mono float32 samples at 16 kHz, with soundfile and polyphase resampling."""

from __future__ import annotations

import functools
import io
import re
from fractions import Fraction
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
# Beyond these, in Hz, a header is damaged, and resampling would take any amount of memory.
RATES = 4_000, 400_000


def audio_length(path: File) -> int:
    """The length of an audio file at 16 kHz, from its header.

    Raises:
        UnusableFileError: The file is missing, empty, or has an unknown format.
    """
    with _open(path) as file:
        return resampled_length(file.frames, Fraction(SAMPLE_RATE, file.samplerate))


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
    return resample(mono, Fraction(SAMPLE_RATE, rate))


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
    if problem := _problem(file, path):
        file.close()
        raise UnusableFileError(problem)
    return file


def _problem(file: soundfile.SoundFile, path: File) -> str | None:
    """What is wrong with the sample rate or the length in the header, as far as the file itself can tell."""
    # libsndfile reads truncated WAV files, and reports the truncation only in its log.
    if (cut := _CUT_SHORT.search(file.extra_info)) and int(cut[1]) < _STREAMED:
        return f"damaged: cut short, {cut[2]} bytes of audio but its header says {cut[1]}"
    if file.frames <= 0:
        return "it holds no samples"
    if not RATES[0] <= file.samplerate <= RATES[1]:
        return f"its sample rate of {file.samplerate} Hz is not plausible"
    if file.format == "OGG" and (streams := len(_OGG_STREAM.findall(path.read_bytes()))) > 1:
        return f"it holds {streams} streams, of which only the first would be read"
    if file.format in ("MP3", "MPEG"):
        samples = mp3_samples(path.read_bytes())
        if abs(samples - file.frames) > _MP3_PADDING:
            there, said = samples / file.samplerate, file.frames / file.samplerate
            return f"it holds {there:.1f} s but its header says {said:.1f} s: joined files, or no Xing header"
    return None


# A page that begins a stream of an Ogg file: its flags have bit 2.
_OGG_STREAM = re.compile(rb"OggS\0[\x02\x03\x06\x07]")
# Bits per second by index, in thousands, and samples per second: of MPEG 1 layer III, and of MPEG 2 and 2.5.
_MP3_BITS = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
_MP3_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_MP3_PADDING = 6 * 1152  # encoders add silence at both ends, which decoders remove


def mp3_samples(data: bytes) -> int:
    """The number of samples in the frames of an MP3 file, which its header may not tell.

    Source: ISO/IEC 11172-3, section 2.4.1.3, and 13818-3.
    """
    samples, at = 0, 0
    if data.startswith(b"ID3"):  # A tag may hold a picture. Its size has seven bits a byte.
        at = 10 + int("".join(f"{byte:07b}" for byte in data[6:10]), 2)
    while (at := data.find(b"\xff", at)) >= 0 and at + 4 <= len(data):
        one, two = data[at + 1], data[at + 2]
        version, layer, bits, rate = one >> 3 & 3, one >> 1 & 3, two >> 4, two >> 2 & 3
        if one < 0xE0 or layer != 1 or version == 1 or rate == 3 or bits in (0, 15):
            at += 1
            continue
        frame = 1152 if version == 3 else 576
        samples += frame
        at += frame // 8 * _MP3_BITS[version != 3][bits] * 1000 // _MP3_RATES[version][rate] + (two >> 1 & 1)
    return samples


def resample(samples: np.ndarray, ratio: Fraction) -> np.ndarray:
    """Resamples float32 samples with a polyphase filter (Kaiser window)."""
    if ratio == 1:
        return samples
    # Imported lazily: the import takes longer than reading thousands of files.
    from scipy.signal import resample_poly

    up, down = ratio.as_integer_ratio()
    return resample_poly(samples, up, down, window=_filter(max(up, down))).astype(np.float32)


@functools.lru_cache(maxsize=32)
def _filter(widest: int) -> np.ndarray:
    """The low-pass filter of `resample_poly` (Kaiser, 10 zero crossings), cached because it designs one per call."""
    from scipy.signal import firwin

    return firwin(20 * widest + 1, 1 / widest, window=("kaiser", 5.0)).astype(np.float32)


def resampled_length(samples: Any, ratio: Fraction) -> Any:
    """Number of samples after `resample`, rounded up, of an integer or an array."""
    return -(-samples * ratio.numerator // ratio.denominator)


def _reason(error: Exception) -> str:
    # soundfile's message repeats the path before the reason.
    return str(getattr(error, "error_string", error)).strip().rstrip(".")
