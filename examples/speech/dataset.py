"""Utterances with transcripts; audio is loaded one utterance at a time."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from examples.common.cli import UsageError, listing
from examples.common.fingerprint import fingerprint
from examples.common.skipped import SkippedFiles, UnusableFileError
from examples.speech.alphabet import Alphabet
from examples.speech.audio import SAMPLE_RATE, AudioInfo, File, probe, read_audio


class Utterance(NamedTuple):
    """Audio with its transcript."""

    path: File
    transcript: str


class Speech:
    """Utterances with their transcripts; `load` may be called from any thread.

    Unusable files are skipped: they are reported once on stderr and recorded in `skipped`. More than `max_skipped` of
    them are an error.

    Args:
        name: Name in titles and messages.
        utterances: The entries of the manifest.
        alphabet: Alphabet of the transcripts.
        max_skipped: Share of the utterances that may be skipped.

    Attributes:
        paths: Paths of the audio files.
        transcripts: Transcripts of the audio files.
        labels: The transcripts as labels, each [characters], int32.
        samples: [utterances], int64: lengths at 16 kHz.
        skipped: The skipped files and the reasons.

    Raises:
        UsageError: Transcripts have characters that are not in the alphabet, or too many files are unusable.
    """

    def __init__(self, name: str, utterances: Sequence[Utterance], alphabet: Alphabet, max_skipped: float) -> None:
        self.name, self.alphabet = name, alphabet
        self.skipped = SkippedFiles(len(utterances), max_skipped, "--max-skipped")
        _check_characters(name, utterances, alphabet)
        kept, infos = self._probe(utterances)
        _report_conversions(name, infos)
        self._keep(kept, [info.samples for info in infos])

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def hours(self) -> float:
        """Hours of audio."""
        return float(self.samples.sum()) / SAMPLE_RATE / 3600

    def load(self, index: int) -> np.ndarray | None:
        """Loads the samples of an utterance, [samples], float32; returns None if the file is unusable.

        Raises:
            UsageError: Too many files have been skipped.
        """
        path = self.paths[index]
        try:
            audio = read_audio(path)
        except UnusableFileError as error:
            self.skipped.add(str(path), str(error))
            return None
        if len(audio) != self.samples[index]:
            self.skipped.add(str(path), "its length has changed since the start of the run")
            return None
        return audio

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes if utterances or transcripts change, or the contents of a sampled file."""
        utterances = zip(self.paths, self.transcripts, self.samples, strict=True)
        names = [f"{_portable_name(path)}\t{transcript}\t{samples}" for path, transcript, samples in utterances]
        return fingerprint(names, len(self), lambda index: self.paths[index].read_bytes())

    def keep_shorter(self, seconds: float) -> None:
        """Leaves out longer utterances, without counting them as skipped."""
        kept = np.flatnonzero(self.samples <= seconds * SAMPLE_RATE)
        left = len(self) - len(kept)
        if left:
            tqdm.write(f"{self.name}: {left} utterances longer than {seconds:g} s are left out", file=sys.stderr)
        self._keep([Utterance(self.paths[i], self.transcripts[i]) for i in kept], self.samples[kept])

    def keep_decodable(self, frames: Callable[[np.ndarray], np.ndarray], fastest: float = 1.0) -> None:
        """Skips utterances whose transcripts are too long for CTC (see `frames_needed`).

        Args:
            frames: Maps lengths in samples to numbers of output frames of the model.
            fastest: Highest speed factor of the perturbation.

        Raises:
            UsageError: Too many utterances are skipped.
        """
        have = np.asarray(frames(np.floor(self.samples / fastest).astype(np.int64)))
        need = np.array([frames_needed(labels) for labels in self.labels], np.int64)
        for index in np.flatnonzero(need > have):
            self.skipped.add(
                str(self.paths[index]),
                f"its transcript is too long: it needs {need[index]} frames but the model outputs {have[index]} for "
                f"{self.samples[index] / SAMPLE_RATE:.2f} s of audio: {self.transcripts[index]!r}",
            )
        kept = np.flatnonzero(need <= have)
        self._keep([Utterance(self.paths[i], self.transcripts[i]) for i in kept], self.samples[kept])

    def _probe(self, utterances: Sequence[Utterance]) -> tuple[list[Utterance], list[AudioInfo]]:
        """The utterances whose headers are valid, and their headers."""
        kept, infos = [], []
        with ThreadPoolExecutor() as executor:
            for utterance, found in zip(utterances, executor.map(_probe, utterances), strict=True):
                # Not in the threads, so that messages are in the order of the manifest.
                if isinstance(found, UnusableFileError):
                    self.skipped.add(str(utterance.path), str(found))
                else:
                    kept.append(utterance)
                    infos.append(found)
        return kept, infos

    def _keep(self, utterances: Sequence[Utterance], samples: Sequence[int] | np.ndarray) -> None:
        if not utterances:
            raise UsageError(f"{self.name!r} has no utterance that can be used.")
        self.paths = [utterance.path for utterance in utterances]
        self.transcripts = [utterance.transcript for utterance in utterances]
        self.labels = [self.alphabet.encode(transcript) for transcript in self.transcripts]
        self.samples = np.asarray(samples, np.int64)


def _portable_name(path: File) -> str:
    """The part of a path that does not change if the data is moved."""
    return f"{path.parent.name}/{path.name}" if isinstance(path, Path) else path.records.name(path.number)


def _probe(utterance: Utterance) -> AudioInfo | UnusableFileError:
    if not utterance.transcript:
        return UnusableFileError("its transcript is empty")
    try:
        return probe(utterance.path)
    except UnusableFileError as error:
        return error


def frames_needed(labels: np.ndarray) -> int:
    """Number of frames that CTC needs for labels: one each, and a blank between two equal ones."""
    return len(labels) + int(np.count_nonzero(labels[1:] == labels[:-1]))


def _check_characters(name: str, utterances: Sequence[Utterance], alphabet: Alphabet) -> None:
    unknown = Counter(character for utterance in utterances for character in alphabet.unknown(utterance.transcript))
    if not unknown:
        return
    first = next(utterance for utterance in utterances if alphabet.unknown(utterance.transcript))
    raise UsageError(
        f"{name!r}: transcripts have characters that are not in the alphabet: {listing(sorted(unknown), 20)}, first in "
        f"{first.transcript!r} of {str(first.path)!r}. Give an alphabet that has them (--alphabet FILE, one character "
        f"per line), or change the transcripts (lower case, numbers as words) to {alphabet.characters!r}."
    )


def _report_conversions(name: str, found: Sequence[AudioInfo]) -> None:
    rates = Counter(info.sample_rate for info in found if info.sample_rate != SAMPLE_RATE)
    mixed = sum(info.channels > 1 for info in found)
    said = [f"{count} at {rate} Hz resampled to {SAMPLE_RATE}" for rate, count in sorted(rates.items())]
    said += [f"{mixed} with several channels mixed down to one"] if mixed else []
    if said:
        tqdm.write(f"{name}: of {len(found)} files, {', '.join(said)}", file=sys.stderr)
