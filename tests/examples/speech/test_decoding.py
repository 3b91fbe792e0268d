"""The speech example's CTC decoders and its error rates."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.speech.decoding import beam_search, greedy
from examples.speech.testing import Transcribed, error_rates, transcript_report

jit_beam_search = jax.jit(beam_search, static_argnums=2)
jit_greedy = jax.jit(greedy)


def random_logits(shape, spread):
    return (np.random.default_rng(0).normal(size=shape) * spread).astype(np.float32)


def collapsed(path):
    """The labels of an alignment."""
    return tuple(label for label, _ in itertools.groupby(path) if label)


def all_texts(log_probs):
    """Log probability of every text, summed over all alignments: labels**frames of them."""
    frames, labels = log_probs.shape
    texts = {}
    for path in itertools.product(range(labels), repeat=frames):
        score = sum(log_probs[frame, label] for frame, label in enumerate(path))
        text = collapsed(path)
        texts[text] = np.logaddexp(texts.get(text, -np.inf), score)
    return texts


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def texts_of(decoded):
    return [tuple(labels[:length].tolist()) for labels, length in zip(*map(np.asarray, decoded[:2]), strict=True)]


def test_beam_search_finds_the_most_probable_of_all_texts():
    logits = random_logits((30, 5, 3), 2)
    lengths = np.arange(30, dtype=np.int32) % 6
    # Values after the end of a sequence are arbitrary.
    logits[np.arange(5) >= lengths[:, None]] = np.nan
    decoded = jit_beam_search(logits, lengths, 64)
    for item, (text, length) in enumerate(zip(texts_of(decoded), lengths, strict=True)):
        texts = all_texts(log_softmax(logits[item, :length]))
        best = max(texts, key=texts.__getitem__)
        assert text == best
        np.testing.assert_allclose(decoded.scores[item], texts[best], atol=1e-5)
        assert not decoded.labels[item, len(text) :].any()


def test_greedy_collapses_the_best_alignment():
    logits = random_logits((30, 12, 3), 2)
    lengths = np.arange(30, dtype=np.int32) % 13  # after them are valid labels
    decoded = jit_greedy(logits, lengths)
    for item, (text, length) in enumerate(zip(texts_of(decoded), lengths, strict=True)):
        log_probs = log_softmax(logits[item, :length])
        assert text == collapsed(log_probs.argmax(axis=-1).tolist())
        np.testing.assert_allclose(decoded.scores[item], log_probs.max(axis=-1).sum(), atol=1e-4)


def test_beam_search_is_never_less_probable_than_greedy_on_confident_logits():
    # 20 frames of 8 labels, of which two or three contend for each frame.
    logits = random_logits((16, 20, 8), 4)
    lengths = np.full(16, 20, np.int32)
    found, best_alignment = jit_beam_search(logits, lengths, 16), jit_greedy(logits, lengths)

    @jax.jit
    def log_likelihood(decoded):
        padding = (jnp.arange(20) >= decoded.lengths[:, None]).astype(jnp.float32)
        return -optax.ctc_loss(logits, jnp.zeros((16, 20)), decoded.labels, padding)

    beam_likelihood = np.asarray(log_likelihood(found))
    greedy_likelihood = np.asarray(log_likelihood(best_alignment))
    assert (beam_likelihood >= greedy_likelihood - 1e-4).all()
    assert (beam_likelihood > greedy_likelihood + 1e-4).any()
    # A beam drops alignments, so its score never exceeds the exact one.
    assert (found.scores <= beam_likelihood + 1e-3).all()


def test_half_logits_are_decoded_in_float32():
    logits = jnp.asarray(random_logits((2, 6, 4), 2), jnp.float16)
    lengths = np.full(2, 6, np.int32)
    wanted = jit_greedy(logits.astype(jnp.float32), lengths)
    found = jit_greedy(logits, lengths)
    assert found.scores.dtype == jnp.float32
    np.testing.assert_array_equal(found.scores, wanted.scores)


def test_empty_beam_is_refused():
    with pytest.raises(ValueError, match="a beam of 0"):
        beam_search(np.zeros((1, 2, 3), np.float32), np.array([2]), 0)


def test_error_rates_pool_all_utterances():
    rates = error_rates(["one two three", "four"], ["one too three", "four five"])
    assert rates.wer == pytest.approx(2 / 4)  # a substitution and an insertion
    assert rates.cer == pytest.approx(6 / 17)
    assert error_rates(["one"], [""]) == (1, 1)


def test_report_shows_worst_median_and_best_once_each():
    words = "one two three four".split()
    transcribed = [
        Transcribed(f"{wrong}.wav", " ".join(words), " ".join(["x"] * wrong + words[wrong:]), loss=float(wrong))
        for wrong in (2, 0, 4, 1, 3)
    ]
    report = transcript_report(transcribed, count=1)
    assert [line.split()[-1] for line in report.splitlines() if "loss" in line] == ["4.wav", "2.wav", "0.wav"]
    assert "WER 100.0%" in report
    assert "'x x three four'" in report
    # Three utterances fill the section of the worst. At equal WER, a NaN loss ranks worst.
    few = [*transcribed[:2], Transcribed("nan.wav", "one two", "one x", float("nan"))]
    report = transcript_report(few, count=3)
    assert report.startswith("worst:\n  WER  50.0%  CER")
    assert [line.split()[-1] for line in report.splitlines() if "loss" in line] == ["nan.wav", "2.wav", "0.wav"]
    assert "median" not in report
