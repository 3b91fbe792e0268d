"""Speech on disk: Mozilla's CSV, LibriSpeech's tree, and shards."""

from __future__ import annotations

import csv
from pathlib import Path

from examples.common.cli import UsageError
from examples.common.records import Entry, Records
from examples.common.shards import open_records
from examples.speech.alphabet import Alphabet
from examples.speech.dataset import Speech, Utterance

_COLUMNS = ("wav_filename", "transcript")
# Field names in WebDataset and the Hugging Face hub.
_AUDIO = ("audio", "wav", "flac", "mp3", "ogg", "opus")
_TEXT = ("transcript", "text", "txt", "sentence", "transcription", "normalized_text")


def open_speech(path: Path, alphabet: Alphabet | None = None, max_skipped: float = 0.01) -> Speech:
    """Opens a CSV file (Mozilla's), a folder (LibriSpeech's), or shards with audio files and transcripts.

    Args:
        path: Path of the CSV file, the folder or the shards; shards may be one file, or all files in a folder.
        alphabet: Alphabet of the transcripts; by default English.
        max_skipped: Share of the utterances that may be skipped as unusable.

    Raises:
        UsageError: The path is none of these, is empty, or is unusable.
    """
    if path.exists() and (records := open_records(path)) is not None:
        utterances = read_records(records)
    elif path.is_dir():
        utterances = read_librispeech(path)
    elif path.is_file():
        utterances = read_csv(path)
    else:
        raise UsageError(
            f"there is no {str(path)!r}; give a CSV file with columns wav_filename,wav_filesize,transcript, the "
            "folder of a LibriSpeech tree, or shards (*.tfrecord, *.array_record, *.tar, a saved Hugging Face dataset)."
        )
    return Speech(str(path), utterances, alphabet or Alphabet(), max_skipped)


def read_records(records: Records) -> list[Utterance]:
    """Reads the utterances of shards whose entries contain an audio file and its transcript."""
    audio, text = records.field(_AUDIO, "audio"), records.field(_TEXT, "transcript")
    transcripts = (
        value.decode(errors="replace") if isinstance(value, bytes) else value or "" for value in records.column(text)
    )
    return [Utterance(Entry(records, index, audio), text.strip()) for index, text in enumerate(transcripts)]


def read_csv(path: Path) -> list[Utterance]:
    """Reads Mozilla's `wav_filename,wav_filesize,transcript`; paths are relative to the file's folder.

    The file size and further columns are ignored.

    Raises:
        UsageError: The file is not such a CSV file, or has no rows.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            missing = [name for name in _COLUMNS if name not in columns]
            if missing and columns:
                raise UsageError(
                    f"{str(path)!r} has no column {' and no column '.join(missing)}; its first line is "
                    f"{','.join(columns)!r}, expected wav_filename,wav_filesize,transcript."
                )
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{str(path)!r} cannot be read as a CSV file in UTF-8: {error}.") from error
    if not rows:
        raise UsageError(
            f"{str(path)!r} is empty: expected a line wav_filename,wav_filesize,transcript and one for each audio file."
        )
    return [_utterance(path, line, row) for line, row in rows]


def _utterance(path: Path, line: int, row: dict[str, str | None]) -> Utterance:
    name, transcript = (row[column] for column in _COLUMNS)
    if not name or transcript is None:
        raise UsageError(f"{str(path)!r}, line {line} lacks a {_COLUMNS[bool(name)]}; repair or remove the line.")
    return Utterance(path.parent / name, transcript.strip())


def read_librispeech(folder: Path) -> list[Utterance]:
    """Reads a LibriSpeech tree: `*.trans.txt` below `folder` with FLAC files beside each; transcripts are lower-cased.

    Source: V. Panayotov et al., "LibriSpeech: an ASR corpus based on public domain audio books", ICASSP 2015.

    Raises:
        UsageError: There are no transcripts, or a file cannot be read.
    """
    utterances = [utterance for path in sorted(folder.rglob("*.trans.txt")) for utterance in _transcripts(path)]
    if not utterances:
        raise UsageError(
            f"{str(folder)!r} has no transcripts: expected a LibriSpeech tree, SPEAKER/CHAPTER/*.trans.txt with the "
            "FLAC files beside them, or shards (*.tfrecord, *.array_record, *.tar), or give a CSV file."
        )
    return utterances


def _transcripts(path: Path) -> list[Utterance]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read as UTF-8: {error}.") from error
    fields = [line.partition(" ") for line in lines if line]
    return [Utterance(path.parent / f"{name}.flac", transcript.strip().lower()) for name, _, transcript in fields]
