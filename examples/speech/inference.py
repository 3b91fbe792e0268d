"""Evaluates a trained recogniser, and transcribes audio files."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import numpy as np

from examples.common.benchmarking import compile_step
from examples.common.cli import UsageError
from examples.common.devices import DataParallel
from examples.common.hosts import say
from examples.common.skipped import UnusableFileError
from examples.common.training import Variables
from examples.common.use import cast_to_policy, export, open_model
from examples.speech.alphabet import Alphabet
from examples.speech.audio import SAMPLE_RATE, read_audio
from examples.speech.batching import Shape
from examples.speech.config import Config
from examples.speech.reports import transcript_report
from examples.speech.task import SpeechTask, open_data
from examples.speech.training import create_transcribe_step

_RUNS = 5  # the latency is their median
_STEP = SAMPLE_RATE  # audio lengths are rounded up to whole seconds, to compile few programs for many files


def load(config: Config) -> tuple[SpeechTask, Variables]:
    """Loads the model given by the flags with its variables; opens the test speech unless --infer is given."""

    def make(trained: Config, description: dict[str, Any]) -> SpeechTask:
        characters = description.get("characters")
        if not isinstance(characters, str) or not characters:
            raise UsageError("the model's description of its alphabet is damaged.")
        alphabet = Alphabet(characters)
        sets = {} if trained.infer else open_data(trained, ["test"], alphabet)
        return SpeechTask(trained, DataParallel(1 if trained.infer else trained.devices), alphabet, **sets)

    return open_model(config, make)


def evaluate(config: Config) -> dict[str, Any]:
    """Evaluates a trained model in the precision of the flags, regardless of the precision in training."""
    task, variables = load(config)
    metrics = task.test(cast_to_policy(task, variables))
    say(transcript_report(task.transcribed, config.report))
    results = {
        "policy": config.policy,
        "amp": config.amp,
        "decoder": config.decoder,
        **metrics,
        "test_utterances": len(task.test_set),
    }
    if config.export is not None:
        assert config.output is not None
        results |= export(task, variables, config.output, config.export)
    return results


def infer(config: Config) -> dict[str, Any]:
    """Transcribes the files of --infer; the latency covers features, model and decoder, from samples to text."""
    task, variables = load(config)
    audio = [_read(task.config, path) for path in config.infer]
    weights = cast_to_policy(task, variables)
    transcribe = create_transcribe_step(task.config, task.alphabet.labels, config.final_beam)
    programs: dict[int, Any] = {}
    texts, latencies = [], []
    for path, samples in zip(config.infer, audio, strict=True):
        # One file keeps its length; several are padded to a few lengths, which does not change the results.
        length = len(samples) if len(audio) == 1 else -(-len(samples) // _STEP) * _STEP
        batch = Shape(1, length, 1).zeros()
        batch.audio[0, : len(samples)], batch.audio_lengths[0] = samples, len(samples)
        inputs = weights, task.parallel.put(batch)
        if length not in programs:
            programs[length] = compile_step(transcribe, *inputs).call
        seconds = []
        for _ in range(_RUNS + 1 if len(audio) == 1 else 2):
            started = time.perf_counter()
            decoded = jax.device_get(programs[length](*inputs))
            text = task.alphabet.decode(decoded.labels[0, : decoded.lengths[0]])
            seconds.append(time.perf_counter() - started)
        latencies.append(statistics.median(seconds[1:]))  # the first run is a warm-up
        texts.append(text)
        say(text if len(audio) == 1 else f"{path}: {text}")
    total = sum(map(len, audio)) / SAMPLE_RATE
    return {
        "text": texts[0] if len(texts) == 1 else texts,
        "policy": config.policy,
        "audio_seconds": total,
        "latency_milliseconds": float(np.mean(latencies)) * 1e3,
        "real_time_factor": sum(latencies) / total,
    }


def _read(config: Config, path: Any) -> np.ndarray:
    try:
        audio = read_audio(path)
    except UnusableFileError as error:
        raise UsageError(f"--infer {str(path)!r}: {error}.") from error
    if config.output_frames(len(audio)) < 1:
        raise UsageError(f"--infer {str(path)!r}: {len(audio) / SAMPLE_RATE:.3f} s are too short for a frame.")
    return audio
