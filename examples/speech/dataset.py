"""Utterances with transcripts, from the files that list them; audio is loaded one utterance at a time."""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.common.cli import SkippedFiles, UnusableFileError, UsageError, listing
from examples.common.flags import several
from examples.common.records import Entry, Records, fingerprint, open_records
from examples.speech.audio import SAMPLE_RATE, File, audio_length, read_audio


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
        max_seconds: Longest utterance; longer ones are skipped.

    Attributes:
        paths: Paths of the audio files.
        transcripts: Transcripts of the audio files.
        labels: The transcripts as labels, each [characters], int32.
        samples: [utterances], int64: lengths at 16 kHz.
        skipped: The skipped files and the reasons.

    Raises:
        UsageError: Transcripts have characters that are not in the alphabet, or too many files are unusable.
    """

    def __init__(
        self, name: str, utterances: Sequence[Utterance], alphabet: Alphabet, max_skipped: float, max_seconds: float
    ) -> None:
        self.name, self.alphabet = name, alphabet
        self.skipped = SkippedFiles(len(utterances), max_skipped, "--max-skipped")
        _check_characters(name, utterances, alphabet)
        kept, length = [], functools.partial(_length, max_seconds)
        with ThreadPoolExecutor() as executor:
            for utterance, found in zip(utterances, executor.map(length, utterances), strict=True):
                # Not in the threads, so that messages are in the order of the manifest.
                if isinstance(found, UnusableFileError):
                    self.skipped.add(str(utterance.path), str(found))
                else:
                    kept.append((utterance, found))
        self._keep(kept)

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
    def identity(self) -> str:
        """Changes if utterances or transcripts change, or the contents of a sampled file, but not if they are moved."""
        utterances = zip(_portable_names(self.paths), self.transcripts, self.samples, strict=True)
        names = [f"{name}\t{transcript}\t{samples}" for name, transcript, samples in utterances]
        digest = fingerprint(names, len(self), lambda index: self.paths[index].read_bytes())
        return f"{len(self)} utterances with digest {digest[:16]}"

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
            given = f"{have[index]} for {self.samples[index] / SAMPLE_RATE:.2f} s of audio"
            long = f"its transcript is too long: it needs {need[index]} frames but the model outputs {given}"
            self.skipped.add(str(self.paths[index]), f"{long}: {self.transcripts[index]!r}")
        kept = np.flatnonzero(need <= have)
        self._keep([(Utterance(self.paths[i], self.transcripts[i]), self.samples[i]) for i in kept])

    def _keep(self, kept: Sequence[tuple[Utterance, int]]) -> None:
        if not kept:
            raise UsageError(f"{self.name!r} has no utterance that can be used.")
        self.paths = [utterance.path for utterance, _ in kept]
        self.transcripts = [utterance.transcript for utterance, _ in kept]
        self.labels = [self.alphabet.encode(transcript) for transcript in self.transcripts]
        self.samples = np.array([samples for _, samples in kept], np.int64)


def _portable_names(paths: Sequence[File]) -> list[str]:
    """The part of each path that does not change if the data is moved."""
    root = os.path.commonpath([path.parent.absolute() for path in paths if isinstance(path, Path)] or [Path("/")])
    return [os.path.relpath(x, root) if isinstance(x, Path) else x.records.name(x.number) for x in paths]


def _length(max_seconds: float, utterance: Utterance) -> int | UnusableFileError:
    if not utterance.transcript:
        return UnusableFileError("its transcript is empty")
    try:
        samples = audio_length(utterance.path)
    except UnusableFileError as error:
        return error
    if samples > max_seconds * SAMPLE_RATE:
        return UnusableFileError(f"its {samples / SAMPLE_RATE:.0f} s are more than --max-seconds {max_seconds:g}")
    return samples


def frames_needed(labels: np.ndarray) -> int:
    """Number of frames that CTC needs for labels: one each, and a blank between two equal ones."""
    return len(labels) + int(np.count_nonzero(labels[1:] == labels[:-1]))


def _check_characters(name: str, utterances: Sequence[Utterance], alphabet: Alphabet) -> None:
    unknown = {*"".join(utterance.transcript for utterance in utterances)}.difference(alphabet.characters)
    if unknown:
        first = next(utterance for utterance in utterances if unknown.intersection(utterance.transcript))
        found = f"{listing(sorted(unknown), 20)}, first in {first.transcript!r} of {str(first.path)!r}"
        ways = "Give an alphabet that has them (--alphabet FILE, one character per line), leave them out"
        to = f"or change the transcripts (lower case, numbers as words) to {alphabet.characters!r}."
        lacking = f"transcripts have characters that are not in the alphabet: {found}"
        raise UsageError(f"{name!r}: {lacking}. {ways} (--drop-characters), {to}")


# The output characters of a model as labels, and DeepSpeech's alphabet file format.

ENGLISH = " abcdefghijklmnopqrstuvwxyz'"


class Alphabet:
    """Maps characters, in order, to labels 1, 2, ...; label 0 is CTC's blank.

    Attributes:
        characters: The characters of labels 1, 2, ...
        labels: Number of labels including the blank, which is the number of model outputs.
    """

    def __init__(self, characters: str = ENGLISH) -> None:
        self.characters = characters
        self.labels = len(characters) + 1
        self._label_of = {character: label for label, character in enumerate(characters, start=1)}

    @classmethod
    def read(cls, path: Path) -> Alphabet:
        r"""Reads DeepSpeech's `alphabet.txt`: UTF-8, one character a line, `#` starts a comment, `\#` is `#`.

        A line that contains only a space is the space.

        Raises:
            UsageError: The file cannot be read, or a line is not a single character or repeats one.
        """
        try:
            lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise UsageError(f"alphabet {str(path)!r} cannot be read: {reason}.") from error
        found: dict[str, int] = {}
        for number, raw in enumerate(lines, start=1):
            line = raw.removesuffix("\r")
            if line.startswith("#"):
                continue
            character = "#" if line == "\\#" else line
            if len(character) != 1 or character in found:
                what = f"repeats line {found[character]}" if character in found else "must be one character"
                hint = "a space is a line with a space in it."
                raise UsageError(f"alphabet {str(path)!r}, line {number} {what}: {line!r}; {hint}")
            found[character] = number
        return cls("".join(found))

    def encode(self, text: str) -> np.ndarray:
        """The labels of a text, [characters], int32; raises KeyError with a character that has no label."""
        return np.array([self._label_of[character] for character in text], np.int32)

    def decode(self, labels: Iterable[int]) -> str:
        """The text of labels; blanks are skipped."""
        return "".join(self.characters[label - 1] for label in labels if label)


# Speech on disk: Mozilla's CSV, LibriSpeech's tree, and shards.

# Field names in WebDataset and the Hugging Face hub.
_AUDIO = ("audio", "wav", "flac", "mp3", "ogg", "opus")
_TEXT = ("transcript", "text", "txt", "sentence", "transcription", "normalized_text")


def read_speech(
    path: Path, audio_field: str | None = None, text_field: str | None = None, drop: str = ""
) -> list[Utterance]:
    """Reads CSV files (Mozilla's), a TSV file (Common Voice's), a folder (LibriSpeech's), or shards.

    Args:
        path: Path of the file, the folder or the shards (one file, or all in a folder), or CSV files joined by commas.
        audio_field, text_field: Names of the fields in shards, if they are not the usual ones.
        drop: Characters to leave out of the transcripts.

    Raises:
        UsageError: The path is none of these, is empty, or is unusable.
    """
    if path.exists() and (records := open_records(path)) is not None:
        utterances = read_records(records, audio_field, text_field)
    elif audio_field or text_field:
        raise UsageError(f"--audio-field and --text-field are for shards, and {str(path)!r} holds none.")
    elif path.is_dir():
        utterances = read_librispeech(path)
    elif all(part.is_file() for part in several(path)):
        utterances = [utterance for part in several(path) for utterance in read_csv(part)]
    else:
        table = "a CSV file with columns wav_filename,wav_filesize,transcript, the folder of a LibriSpeech tree"
        shards = "shards (*.tfrecord, *.array_record, *.tar, a saved Hugging Face dataset)"
        raise UsageError(f"there is no {str(path)!r}; give {table}, or {shards}.")
    if not drop:
        return utterances
    without = str.maketrans("", "", drop)
    return [Utterance(file, " ".join(text.translate(without).split())) for file, text in utterances]


def read_records(records: Records, audio_field: str | None = None, text_field: str | None = None) -> list[Utterance]:
    """Reads the utterances of shards whose entries contain an audio file and its transcript."""
    audio = records.fields((audio_field,) if audio_field else _AUDIO, "audio")
    text, *_ = records.fields((text_field,) if text_field else _TEXT, "text")
    values = (x.decode(errors="replace") if isinstance(x, bytes) else x or "" for x in records.column(text))
    return [Utterance(Entry(records, index, audio), text.strip()) for index, text in enumerate(values)]


def read_csv(path: Path) -> list[Utterance]:
    """Reads Mozilla's `wav_filename,wav_filesize,transcript`; paths are relative to the file's folder.

    The file size and further columns are ignored. A `.tsv` file is Common Voice's: its files are in `clips`, and the
    sentences become lower case.

    Raises:
        UsageError: The file is not such a CSV file, or has no rows.
    """
    tabs = path.suffix == ".tsv"
    names, folder = (("path", "sentence"), "clips") if tabs else (("wav_filename", "transcript"), "")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            dialect: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {}
            reader = csv.DictReader(file, **dialect)
            columns = list(reader.fieldnames or names)
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{str(path)!r} cannot be read as a CSV file in UTF-8: {error}.") from error
    if missing := [name for name in names if name not in columns]:
        first = f"its first line is {','.join(columns)!r}, expected {','.join(names)}."
        raise UsageError(f"{str(path)!r} has no column {' and no column '.join(missing)}; {first}")
    if not rows:
        raise UsageError(f"{str(path)!r} is empty: expected a line {','.join(names)} and one for each audio file.")
    utterances = []
    for line, row in rows:
        name, transcript = (row[column] for column in names)
        if not name or transcript is None:
            raise UsageError(f"{str(path)!r}, line {line} lacks a {names[bool(name)]}; repair or remove the line.")
        text = transcript.strip()
        utterances.append(Utterance(path.parent / folder / name, text.lower() if tabs else text))
    return utterances


def read_librispeech(folder: Path) -> list[Utterance]:
    """Reads a LibriSpeech tree: `*.trans.txt` below `folder` with FLAC files beside each; transcripts are lower-cased.

    Source: V. Panayotov et al., "LibriSpeech: an ASR corpus based on public domain audio books", ICASSP 2015.

    Raises:
        UsageError: There are no transcripts, or a file cannot be read.
    """
    utterances = []
    for path in sorted(folder.rglob("*.trans.txt")):
        try:
            lines = [line.strip().partition(" ") for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{str(path)!r} cannot be read as UTF-8: {error}.") from error
        utterances += [Utterance(path.parent / f"{name}.flac", text.strip().lower()) for name, _, text in lines if name]
    if not utterances:
        tree = "a LibriSpeech tree, SPEAKER/CHAPTER/*.trans.txt with the FLAC files beside them"
        shards = "shards (*.tfrecord, *.array_record, *.tar), or give a CSV file"
        raise UsageError(f"{str(folder)!r} has no transcripts: expected {tree}, or {shards}.")
    return utterances
