"""The example's synthetic corpus: digits, dates and commands spoken by espeak-ng, stored in Mozilla's format.

The training and test sets share no speakers and no texts.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
from calendar import monthrange
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from tqdm import tqdm

from examples.common.cli import UsageError, optional
from examples.speech.audio import SAMPLE_RATE, resample

DEFAULT_CACHE = Path("runs/speech-corpus")
_REMEDY = "Install it with pip install espeakng-loader, or give your own speech (--train-data, --test-data)."

# espeak-ng voice variants that speak clearly; a speaker is a variant with an accent, a tempo and a pitch. Variants with
# `breath` in their definition (f2, f3, f5, Alicia, ...) are excluded, since their samples are not reproducible.
_TRAIN_VARIANTS = (
    "m1 m3 m4 m7 m8 f1 f4 aunty klatt klatt4 Alex Andrea Annie Denis Gene Jacky Mario Michael adam belinda edward "
    "gustave john linda max pablo quincy rob steph zac"
).split()
_TEST_VARIANTS = "m2 m5 anika shelby klatt2 Lee".split()
_ACCENTS = "en-us en en-gb-scotland en-gb-x-rp en-us-nyc en-gb-x-gbcwmd".split()

_DIGITS = "zero one two three four five six seven eight nine".split()
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth"
).split()
_MONTHS = "january february march april may june july august september october november december".split()
_DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
_ROOMS = "kitchen bedroom hall garden office".split()
_DEVICES = "light fan heater radio".split()
_CARDINALS = [*_DIGITS, *_TEENS, *(f"{ten} {unit}".rstrip() for ten in _TENS for unit in ["", *_DIGITS[1:]])]
_DAYS_OF_MONTH = [*_ORDINALS, "twentieth", *(f"twenty {unit}" for unit in _ORDINALS[:9]), "thirtieth", "thirty first"]


class Spoken(NamedTuple):
    """A text, and the voice that speaks it."""

    text: str
    voice: str  # espeak-ng's name: language+variant
    rate: int  # words per minute
    pitch: int  # 0..99, 50 is the voice's default


def make_corpus(cache: Path = DEFAULT_CACHE, train: int = 2400, test: int = 240) -> tuple[Path, Path]:
    """Returns two files in Mozilla's CSV format, of training and test; synthesises those that are not cached.

    The result is reproducible bit for bit.

    Args:
        cache: Folder with one subfolder per corpus, named by a hash of its utterances and espeak-ng's version.
        train, test: Numbers of utterances; the templates make some 20,000 distinct texts.

    Raises:
        UsageError: Espeak-ng is not usable, or the folder is not writable.
    """
    plan = _plan(train, test)
    optional("espeakng_loader", f"the corpus is spoken by espeak-ng. {_REMEDY}")
    key = hashlib.sha256(json.dumps([plan, version("espeakng-loader"), SAMPLE_RATE]).encode()).hexdigest()[:12]
    folder = cache / key
    if not folder.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f"{key}.part-", dir=cache) as part:
                _write(Path(part) / key, plan)
                if not folder.is_dir():  # unless another process has written the same corpus
                    os.rename(Path(part) / key, folder)
        except OSError as error:
            why = f"{error.strerror}. Give another folder with --cache-dir."
            raise UsageError(f"the corpus cannot be kept in {str(cache)!r}: {why}") from error
    return folder / "train.csv", folder / "test.csv"


def _plan(train: int, test: int) -> dict[str, list[Spoken]]:
    """Distinct texts with their speakers, by split: half digits, a quarter dates, a quarter commands."""
    rng = np.random.default_rng(0)
    kinds = (_digits, _digits, _date, _command)
    texts: dict[str, None] = {}
    while len(texts) < train + test:
        texts[kinds[rng.integers(4)](rng)] = None
    return {
        "train": [_spoken(rng, text, _TRAIN_VARIANTS) for text in list(texts)[test:]],
        "test": [_spoken(rng, text, _TEST_VARIANTS) for text in list(texts)[:test]],
    }


def _digits(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(_DIGITS) for _ in range(rng.integers(3, 6)))


def _date(rng: np.random.Generator) -> str:
    month = int(rng.integers(12))
    day = rng.choice(_DAYS_OF_MONTH[: monthrange(2024, month + 1)[1]])
    form = rng.integers(3)
    if form == 0:
        return f"{_MONTHS[month]} {day}"
    return f"{day} of {_MONTHS[month]}" if form == 1 else f"{rng.choice(_DAYS)} the {day}"


def _command(rng: np.random.Generator) -> str:
    number = rng.choice(_CARDINALS)
    forms = (
        f"turn {rng.choice(('on', 'off'))} the {rng.choice(_ROOMS)} {rng.choice(_DEVICES)}",
        f"set the {rng.choice(_DEVICES)} to {number}",
        f"{rng.choice(('play', 'stop'))} {rng.choice(('song', 'channel'))} {number}",
        f"wake me at {rng.choice(_CARDINALS[1:13])} {rng.choice(('fifteen', 'thirty', 'forty five'))}",
        f"call {rng.choice(_ROOMS)} {number}",
    )
    return forms[rng.integers(len(forms))]


def _spoken(rng: np.random.Generator, text: str, variants: Sequence[str]) -> Spoken:
    """Assigns a text to a random speaker, with small random changes of tempo and pitch."""
    number = int(rng.integers(len(variants)))
    voice = f"{_ACCENTS[number % len(_ACCENTS)]}+{variants[number]}"
    tempo, pitch = 145 + 10 * (number * 3 % 5), 35 + 6 * (number * 2 % 6)
    return Spoken(text, voice, tempo + int(rng.integers(-8, 9)), pitch + int(rng.integers(-4, 5)))


def _write(folder: Path, plan: dict[str, list[Spoken]]) -> None:
    everything = [(split, number, spoken) for split, part in plan.items() for number, spoken in enumerate(part)]
    # In a log file each update is a new line, so update less often.
    pace = 0.2 if sys.stderr.isatty() else 10.0
    voices = synthesize([spoken for _, _, spoken in everything])
    bar = tqdm(voices, "speaking", len(everything), unit="utterance", leave=False, mininterval=pace)
    lines = {split: ["wav_filename,wav_filesize,transcript"] for split in plan}
    try:
        for (split, number, spoken), (samples, rate) in zip(everything, bar, strict=True):
            path = folder / split / spoken.voice.replace("+", "-").lower() / f"{number:05d}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            wave = resample(samples.astype(np.float32) / 2**15, Fraction(SAMPLE_RATE, rate))
            # Encoded in memory, because soundfile waits for the disk after each file.
            content = io.BytesIO()
            soundfile.write(content, wave, SAMPLE_RATE, format="WAV", subtype="PCM_16")
            size = path.write_bytes(content.getvalue())
            lines[split].append(f"{path.relative_to(folder).as_posix()},{size},{spoken.text}")
    except SynthesisError as error:
        raise UsageError(f"espeak-ng cannot speak the corpus: {error}. {_REMEDY}") from error
    for split, rows in lines.items():
        (folder / f"{split}.csv").write_text("\r\n".join(rows) + "\r\n", newline="")


# Speech synthesis with espeak-ng in a separate process.
#
# The library keeps state between utterances (noise, flutter). Samples are reproducible bit for bit only in a new
# process that speaks the same utterances in the same order.

# From espeak-ng's speak_lib.h.
_AUDIO_OUTPUT_SYNCHRONOUS, _CHARS_UTF8, _RATE, _PITCH = 2, 1, 1, 3


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
    espeak, variants, rate, pieces, _ = _espeak()
    # The library silently ignores an unknown variant.
    variant = variants / spoken.voice.partition("+")[2]
    if espeak.espeak_SetVoiceByName(spoken.voice.encode()) != 0 or not variant.exists():
        raise SynthesisError(f"it has no voice {spoken.voice!r}")
    espeak.espeak_SetParameter(_RATE, spoken.rate, 0)
    espeak.espeak_SetParameter(_PITCH, spoken.pitch, 0)
    text = spoken.text.encode()
    pieces.clear()
    espeak.espeak_Synth(text, ctypes.c_size_t(len(text) + 1), 0, 0, 0, _CHARS_UTF8, None, None)
    return b"".join(pieces), rate


@functools.cache
def _espeak() -> tuple[Any, Path, int, list[bytes], Any]:
    """The initialised library, its voice variants, its sample rate, and where it puts the pieces of an utterance."""
    import espeakng_loader

    library, data = ctypes.CDLL(espeakng_loader.get_library_path()), Path(espeakng_loader.get_data_path())
    rate = library.espeak_Initialize(_AUDIO_OUTPUT_SYNCHRONOUS, 0, str(data).encode(), 0)
    pieces: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def take(samples: Any, count: int, events: object) -> int:
        if count > 0 and samples:
            pieces.append(ctypes.string_at(samples, count * 2))
        return 0

    library.espeak_SetSynthCallback(take)
    return library, data / "voices" / "!v", rate, pieces, take  # C holds no reference to the callback, so Python must
