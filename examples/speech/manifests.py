"""Speech on disk: Mozilla's CSV, LibriSpeech's tree, and the corpus that the example makes itself."""

from __future__ import annotations

from pathlib import Path

from examples.speech.alphabet import Alphabet
from examples.speech.batching import Speech


def open_speech(path: Path, alphabet: Alphabet | None = None, max_skipped: float = 0.01) -> Speech:
    """A `.csv` (Mozilla) or a folder (LibriSpeech). Raises UsageError; skips are named on stderr, counted.

    The example's own corpus: `train, test = corpus.make_corpus(cache, corpus.CorpusSize(...))` are paths of two CSVs.
    """
    raise NotImplementedError
