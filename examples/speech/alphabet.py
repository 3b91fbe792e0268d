"""The characters that a model writes, as labels; a file of them in DeepSpeech's format."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class Alphabet:
    """Labels 1, 2, ... for characters; 0 is CTC's blank, so a model has `len(alphabet) + 1` outputs (`labels`)."""

    characters: str
    labels: int

    def encode(self, text: str) -> np.ndarray:  # [characters], int32
        raise NotImplementedError

    def decode(self, labels: Iterable[int]) -> str:
        raise NotImplementedError
