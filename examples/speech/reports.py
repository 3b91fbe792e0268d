"""Word and character error rates, and a report of the worst, median and best transcripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jiwer


class Transcribed(NamedTuple):
    """The reference transcript of a file, and the model's transcript."""

    name: str
    reference: str
    hypothesis: str
    loss: float
    finite: bool = True  # whether the model's outputs are


class ErrorRates(NamedTuple):
    """Errors per word and per character of the references; they can exceed 1."""

    wer: float
    cer: float


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorRates:
    """Error rates over all utterances together, so that long utterances have more weight.

    Args:
        references: The reference transcripts.
        hypotheses: The model's transcripts, in the same order.
    """
    return ErrorRates(jiwer.wer(list(references), list(hypotheses)), jiwer.cer(list(references), list(hypotheses)))


def transcript_report(transcribed: Sequence[Transcribed], count: int = 5) -> str:
    """The `count` worst, median and best transcripts, by word error rate and then by loss.

    No utterance is shown twice, so a small set shows fewer.
    """
    rated = [(error_rates([item.reference], [item.hypothesis]), item) for item in transcribed]
    # NaN would make the order arbitrary, so a NaN loss counts as the worst.
    rated.sort(key=lambda pair: (-pair[0].wer, -math.inf if math.isnan(pair[1].loss) else -pair[1].loss))
    middle = max(0, (len(rated) - count) // 2)
    parts = {
        "worst": range(min(count, len(rated))),
        "median": range(middle, min(middle + count, len(rated))),
        "best": range(max(0, len(rated) - count), len(rated)),
    }
    lines: list[str] = []
    shown: set[int] = set()
    for title, places in parts.items():
        new = [place for place in places if place not in shown]
        shown.update(new)
        if new:
            lines += [f"{title}:", *(line for place in new for line in _lines(*rated[place]))]
    return "\n".join(lines)


def _lines(rates: ErrorRates, item: Transcribed) -> list[str]:
    return [
        f"  WER {rates.wer:6.1%}  CER {rates.cer:6.1%}  loss {item.loss:8.3f}  {item.name}",
        f"    spoken   {item.reference!r}",
        f"    written  {item.hypothesis!r}",
    ]
