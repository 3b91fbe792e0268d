"""Word and character error rates, and a report of the worst, median and best transcripts."""

from __future__ import annotations

from collections.abc import Sequence


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> tuple[float, float]:
    """Word and character error rate over all utterances together (by jiwer)."""
    raise NotImplementedError


def transcript_report(
    references: Sequence[str], hypotheses: Sequence[str], losses: Sequence[float], names: Sequence[str], count: int = 5
) -> str:
    """The `count` worst, median and best transcripts with WER, CER, loss and file."""
    raise NotImplementedError
