"""Speech synthesis with espeak-ng in a separate process.

The library keeps state between utterances (noise, flutter). Samples are reproducible bit for bit only in a new process
that speaks the same utterances in the same order.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

# From espeak-ng's speak_lib.h.
_AUDIO_OUTPUT_SYNCHRONOUS, _CHARS_UTF8, _RATE, _PITCH = 2, 1, 1, 3


class Spoken(NamedTuple):
    """A text, and the voice that speaks it."""

    text: str
    voice: str  # espeak-ng's name: language+variant
    rate: int  # words per minute
    pitch: int  # 0..99, 50 is the voice's default


class SynthesisError(Exception):
    """espeak-ng failed; the text is its message."""


def synthesize(utterances: Sequence[Spoken]) -> Iterator[tuple[np.ndarray, int]]:
    """Speaks utterances in order; yields the samples ([samples], int16) and sample rate in Hz of each.

    Raises:
        SynthesisError: The library is missing, or does not know a voice.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            for samples, rate in process.map(_speak, utterances, chunksize=16):
                yield np.frombuffer(samples, "<i2"), rate
        except Exception as error:  # of the process, or its end
            raise SynthesisError(str(error)) from error
        finally:
            process.shutdown(cancel_futures=True)


def _speak(spoken: Spoken) -> tuple[bytes, int]:
    espeak = _espeak()
    return espeak.speak(spoken), espeak.rate


@functools.cache
def _espeak() -> _Espeak:
    return _Espeak()


class _Espeak:
    """The initialised espeak-ng library."""

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = Path(espeakng_loader.get_data_path())
        self._variants = data / "voices" / "!v"
        self.rate = self._library.espeak_Initialize(_AUDIO_OUTPUT_SYNCHRONOUS, 0, str(data).encode(), 0)
        self._pieces: list[bytes] = []
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._callback = kind(self._take)  # C holds no reference, so Python must
        self._library.espeak_SetSynthCallback(self._callback)

    def speak(self, spoken: Spoken) -> bytes:
        # The library silently ignores an unknown variant.
        variant = self._variants / spoken.voice.partition("+")[2]
        if self._library.espeak_SetVoiceByName(spoken.voice.encode()) != 0 or not variant.exists():
            raise SynthesisError(f"it has no voice {spoken.voice!r}")
        self._library.espeak_SetParameter(_RATE, spoken.rate, 0)
        self._library.espeak_SetParameter(_PITCH, spoken.pitch, 0)
        text = spoken.text.encode()
        self._library.espeak_Synth(text, ctypes.c_size_t(len(text) + 1), 0, 0, 0, _CHARS_UTF8, None, None)
        samples = b"".join(self._pieces)
        self._pieces.clear()
        return samples

    def _take(self, samples: ctypes._Pointer, count: int, events: object) -> int:
        if count > 0 and samples:
            self._pieces.append(ctypes.string_at(samples, count * 2))
        return 0
