"""The output characters of a model as labels, and DeepSpeech's alphabet file format."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from examples.common.cli import UsageError

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
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise UsageError(f"alphabet {str(path)!r} cannot be read: {reason}.") from error
        while lines and not lines[-1]:
            lines.pop()
        found: dict[str, int] = {}
        for number, raw in enumerate(lines, start=1):
            line = raw.removesuffix("\r")
            if line.startswith("#"):
                continue
            character = line.removeprefix("\\") if line == "\\#" else line
            if len(character) != 1:
                what = "is empty; the space is a line with one space in it" if not character else f"has {character!r}"
                raise UsageError(f"alphabet {str(path)!r}, line {number} {what}: give one character per line.")
            if character in found:
                raise UsageError(
                    f"alphabet {str(path)!r}: {character!r} is in line {found[character]} and again in line {number}; "
                    "remove one of them."
                )
            found[character] = number
        if not found:
            raise UsageError(f"alphabet {str(path)!r} has no characters: give one per line (# starts a comment).")
        return cls("".join(found))

    def unknown(self, text: str) -> str:
        """The distinct characters of `text` without a label, in order."""
        return "".join(dict.fromkeys(character for character in text if character not in self._label_of))

    def encode(self, text: str) -> np.ndarray:
        """The labels of a text, [characters], int32; raises KeyError with a character that has no label."""
        return np.array([self._label_of[character] for character in text], np.int32)

    def decode(self, labels: Iterable[int]) -> str:
        """The text of labels; blanks are skipped."""
        return "".join(self.characters[label - 1] for label in labels if label)
