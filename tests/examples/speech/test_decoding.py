"""The speech example's CTC decoder and its error rates."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from examples.speech.models import greedy
from examples.speech.testing import Transcribed, error_rates, worst_first

jit_greedy = jax.jit(greedy)


def random_logits(shape, spread):
    return (np.random.default_rng(0).normal(size=shape) * spread).astype(np.float32)


def collapsed(path):
    """The labels of an alignment."""
    return tuple(label for label, _ in itertools.groupby(path) if label)


def texts_of(decoded):
    return [tuple(labels[:length].tolist()) for labels, length in zip(*map(np.asarray, decoded[:2]), strict=True)]


def test_greedy_collapses_the_best_alignment():
    logits = random_logits((30, 12, 3), 2)
    lengths = np.arange(30, dtype=np.int32) % 13  # after them are valid labels
    decoded = jit_greedy(logits, lengths)
    for item, (text, length) in enumerate(zip(texts_of(decoded), lengths, strict=True)):
        assert text == collapsed(logits[item, :length].argmax(axis=-1).tolist())


def test_logits_without_finite_values_give_no_transcript():
    logits = np.zeros((3, 4, 3), np.float32)
    logits[:, :, 1] = 5
    logits[1, 2, 0] = np.nan
    logits[2, 3, 0] = np.inf  # past its length
    decoded = greedy(logits, np.array([4, 4, 3]))
    assert decoded.finite.tolist() == [True, False, True]
    assert decoded.lengths.tolist() == [1, 0, 1]


def test_error_rates_pool_all_utterances():
    rates = error_rates(["one two three", "four"], ["one too three", "four five"])
    assert rates["wer"] == pytest.approx(2 / 4)  # a substitution and an insertion
    assert rates["cer"] == pytest.approx(6 / 17)
    assert error_rates(["one"], [""]) == {"wer": 1, "cer": 1}


def test_worst_transcripts_come_first():
    words = "one two three four".split()
    transcribed = [
        Transcribed(f"{wrong}.wav", " ".join(words), " ".join(["x"] * wrong + words[wrong:]), loss=float(wrong))
        for wrong in (2, 0, 4, 1, 3)
    ]
    nan = Transcribed("nan.wav", "one two", "one x", float("nan"))  # at equal WER, a NaN loss ranks worst
    assert [item.name for item in worst_first([*transcribed, nan])] == [
        f"{name}.wav" for name in ("4", "3", "nan", "2", "1", "0")
    ]
    assert transcribed[0].text().startswith("WER 50.0%, CER ")
    assert "'x x three four'" in transcribed[0].text()
