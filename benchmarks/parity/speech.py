"""Spoken words by espeak-ng: log-mel spectrograms with their spelling, and waveforms."""

from __future__ import annotations

import functools
import math
import re

import jiwer
import numpy as np

from benchmarks.parity.sources import manual
from examples.speech.corpus import Spoken, synthesize

RATE = 16_000

NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve twenty thirty hundred".split()
TRAIN_VOICES, TEST_VOICES = "m1 m3 m4 m7 m8 f1 f4 aunty Andrea Annie adam belinda".split(), "m2 m5 anika Lee".split()
MELS, FRAMES, HOP, WINDOW, LETTERS = 26, 48, 320, 512, 12
BLANK, SYMBOLS = 0, 27
Utterances = dict[str, np.ndarray]


def letter_codes(word: str) -> list[int]:
    """Letters as 1 to 26, padded with the blank."""
    return [ord(letter) - 96 for letter in word] + [BLANK] * (LETTERS - len(word))


def _synthesized(words: list[str], voices: list[str]) -> list[np.ndarray]:
    from scipy.signal import resample_poly  # takes a second to import

    inputs = [Spoken(word, f"en-us+{voice}", 170, 50) for word, voice in zip(words, voices, strict=True)]
    waves = []
    for samples, rate in synthesize(inputs):
        common = math.gcd(RATE, rate)
        wave = resample_poly(samples.astype(np.float32) / 2**15, RATE // common, rate // common)
        # espeak-ng ends a phrase with silence.
        waves.append(wave[: int(np.flatnonzero(np.abs(wave) > 0.01)[-1]) + 400])
    return waves


@functools.cache
def _mel_filters() -> np.ndarray:
    """Triangles over the bins of a spectrum, evenly spaced on the mel scale: [bins, mels]."""
    top = 2595 * math.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, MELS + 2) / 2595) - 1)
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    left, middle, right = edges[:-2], edges[1:-1], edges[2:]
    return np.clip(np.minimum((bins - left) / (middle - left), (right - bins) / (right - middle)), 0, None)


def spectrogram(wave: np.ndarray) -> np.ndarray:
    """Log-mel energies every 20 ms: [frames, mels]."""
    starts = np.arange(0, max(len(wave) - WINDOW, 1), HOP)[:FRAMES]
    frames = np.pad(wave, (0, WINDOW))[starts[:, None] + np.arange(WINDOW)] * np.hanning(WINDOW)
    energy = np.abs(np.fft.rfft(frames)) ** 2 @ _mel_filters()
    return np.log(energy + 1e-6).astype(np.float32)


def _utterances(words: list[str], voices: list[str]) -> Utterances:
    mels = [spectrogram(wave) for wave in _synthesized(words, voices)]
    padded = np.zeros((len(mels), FRAMES, MELS), np.float32)
    for row, mel in zip(padded, mels, strict=True):
        row[: len(mel)] = (mel + 2) / 4
    lengths = np.array([len(mel) for mel in mels], np.int32)
    return {"mel": padded, "frames": lengths, "text": np.array([letter_codes(word) for word in words], np.int32)}


@functools.cache
def speakers() -> tuple[Utterances, Utterances]:
    """Number words: twelve voices for training, four others held out."""
    parts = []
    for voices in (TRAIN_VOICES, TEST_VOICES):
        pairs = [(word, voice) for voice in voices for word in NUMBERS]
        parts.append(_utterances([word for word, _ in pairs], [voice for _, voice in pairs]))
    return parts[0], parts[1]


@functools.cache
def vocabulary() -> tuple[Utterances, Utterances]:
    """The Python manual's most frequent words by one voice: 240 for training, 60 others held out."""
    text = "".join(chr(code + 31) for code in manual()[0]).lower()
    counts: dict[str, int] = {}
    for word in re.findall(rf"\b[a-z]{{3,{LETTERS}}}\b", text):
        counts[word] = counts.get(word, 0) + 1
    frequent = sorted(sorted(counts), key=lambda word: -counts[word])[:300]
    words = [frequent[i] for i in np.random.default_rng(0).permutation(300)]
    return _utterances(words[:240], ["m3"] * 240), _utterances(words[240:], ["m3"] * 60)


@functools.cache
def waves() -> tuple[np.ndarray, np.ndarray]:
    """Number words of four voices as waveforms at 8 kHz with standard deviation 1; every fifth word is held out."""
    voices = [v for v in TRAIN_VOICES[:4] for _ in NUMBERS]
    wave = [x[::2] for x in _synthesized(NUMBERS * 4, voices)]
    train = [x for i, x in enumerate(wave) if i % 5]
    test = [x for i, x in enumerate(wave) if not i % 5]
    scale = np.concatenate(wave).std()
    return np.concatenate(train) / scale, np.concatenate(test) / scale


def character_error_rate(logits: np.ndarray, test: Utterances) -> float:
    """Character error rate of the best path, in percent."""
    best = np.asarray(logits).argmax(-1)
    # A step of a strided model is of several frames.
    lengths = -(-test["frames"] // (FRAMES // best.shape[1]))
    paths = [path[:length] for path, length in zip(best, lengths, strict=True)]
    written = [_word(path[np.diff(path, prepend=-1) != 0]) for path in paths]
    errors = jiwer.process_characters([_word(text) for text in test["text"]], written)
    wrong = errors.substitutions + errors.deletions + errors.insertions
    return 100 * wrong / int((test["text"] != BLANK).sum())


def _word(codes: np.ndarray) -> str:
    return "".join(chr(code + 96) for code in codes if code != BLANK)
