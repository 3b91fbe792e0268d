"""Speech on disk: Mozilla's CSV, LibriSpeech's tree, and shards."""

from __future__ import annotations

import csv
from pathlib import Path

from examples.common.cli import UsageError
from examples.common.records import Entry, Records
from examples.common.shards import open_records
from examples.speech.alphabet import Alphabet
from examples.speech.dataset import Speech, Utterance

# Mozilla's columns, and Common Voice's, whose files are in the folder `clips`.
_COLUMNS = {",": ("wav_filename", "transcript"), "\t": ("path", "sentence")}
# Field names in WebDataset and the Hugging Face hub.
_AUDIO = ("audio", "wav", "flac", "mp3", "ogg", "opus")
_TEXT = ("transcript", "text", "txt", "sentence", "transcription", "normalized_text")


def open_speech(
    path: Path,
    alphabet: Alphabet | None = None,
    max_skipped: float = 0.01,
    audio_field: str | None = None,
    text_field: str | None = None,
) -> Speech:
    """Opens CSV files (Mozilla's), a TSV file (Common Voice's), a folder (LibriSpeech's), or shards.

    Args:
        path: Path of the file, the folder or the shards (one file, or all in a folder), or CSV files joined by commas.
        alphabet: Alphabet of the transcripts; by default English.
        max_skipped: Share of the utterances that may be skipped as unusable.
        audio_field, text_field: Names of the fields in shards, if they are not the usual ones.

    Raises:
        UsageError: The path is none of these, is empty, or is unusable.
    """
    if path.exists() and (records := open_records(path)) is not None:
        utterances = read_records(records, audio_field, text_field)
    elif path.is_dir():
        utterances = read_librispeech(path)
    elif path.is_file():
        utterances = read_csv(path)
    elif "," in str(path) and all(part.is_file() for part in map(Path, str(path).split(","))):
        utterances = [utterance for part in str(path).split(",") for utterance in read_csv(Path(part))]
    else:
        raise UsageError(
            f"there is no {str(path)!r}; give a CSV file with columns wav_filename,wav_filesize,transcript, the "
            "folder of a LibriSpeech tree, or shards (*.tfrecord, *.array_record, *.tar, a saved Hugging Face dataset)."
        )
    return Speech(str(path), utterances, alphabet or Alphabet(), max_skipped)


def read_records(records: Records, audio_field: str | None = None, text_field: str | None = None) -> list[Utterance]:
    """Reads the utterances of shards whose entries contain an audio file and its transcript."""
    audio = records.fields((audio_field,) if audio_field else _AUDIO, "audio")
    text, *_ = records.fields((text_field,) if text_field else _TEXT, "text")
    transcripts = (
        value.decode(errors="replace") if isinstance(value, bytes) else value or "" for value in records.column(text)
    )
    return [Utterance(Entry(records, index, audio), text.strip()) for index, text in enumerate(transcripts)]


def read_csv(path: Path) -> list[Utterance]:
    """Reads Mozilla's `wav_filename,wav_filesize,transcript`; paths are relative to the file's folder.

    The file size and further columns are ignored. A `.tsv` file is Common Voice's: its files are in `clips`, and the
    sentences become lower case.

    Raises:
        UsageError: The file is not such a CSV file, or has no rows.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            tabs = path.suffix == ".tsv"
            reader = csv.DictReader(
                file, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
            )
            columns, names = reader.fieldnames or (), _COLUMNS["\t" if tabs else ","]
            missing = [name for name in names if name not in columns]
            if missing and columns:
                raise UsageError(
                    f"{str(path)!r} has no column {' and no column '.join(missing)}; its first line is "
                    f"{','.join(columns)!r}, expected {','.join(names)}."
                )
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{str(path)!r} cannot be read as a CSV file in UTF-8: {error}.") from error
    if not rows:
        raise UsageError(
            f"{str(path)!r} is empty: expected a line wav_filename,wav_filesize,transcript and one for each audio file."
        )
    return [_utterance(path, names, line, row) for line, row in rows]


def _utterance(path: Path, names: tuple[str, str], line: int, row: dict[str, str | None]) -> Utterance:
    name, transcript = (row[column] for column in names)
    if not name or transcript is None:
        raise UsageError(f"{str(path)!r}, line {line} lacks a {names[bool(name)]}; repair or remove the line.")
    if path.suffix == ".tsv":
        return Utterance(path.parent / "clips" / name, transcript.strip().lower())
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
