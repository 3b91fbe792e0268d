"""Transcribes audio files."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import numpy as np

from examples.common.benchmarking import compile_step
from examples.common.hosts import say
from examples.common.skipped import UnusableFileError, each_readable
from examples.common.training import Variables
from examples.common.use import cast_to_policy
from examples.speech.audio import SAMPLE_RATE, read_audio
from examples.speech.batching import Shape
from examples.speech.config import Config
from examples.speech.models import create_transcribe_step

_RUNS = 5  # the latency is their median
_STEP = SAMPLE_RATE  # audio lengths are rounded up to whole seconds, to compile few programs for many files


def transcribe_files(task: Any, variables: Variables) -> dict[str, Any]:
    """Transcribes the files of --infer; the latency covers features, model and decoder, from samples to text."""
    config, device = task.config, jax.local_devices()[0]
    readable, unreadable = each_readable(config.infer, lambda path: _read(config, path), "--infer")
    paths, audio = list(readable), list(readable.values())
    weights = jax.device_put(cast_to_policy(task, variables), device)
    transcribe = create_transcribe_step(config, task.alphabet.labels, config.final_beam)
    programs: dict[int, Any] = {}
    texts, latencies = [], []
    for path, samples in zip(paths, audio, strict=True):
        # One file keeps its length; several are padded to a few lengths, which does not change the results.
        length = len(samples) if len(audio) == 1 else -(-len(samples) // _STEP) * _STEP
        batch = Shape(1, length, 1).zeros()
        batch.audio[0, : len(samples)], batch.audio_lengths[0] = samples, len(samples)
        inputs = weights, jax.device_put(batch, device)
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
        "unreadable_files": unreadable,
        "text": texts[0] if len(texts) == 1 else texts,
        "policy": config.policy,
        "audio_seconds": total,
        "latency_milliseconds": float(np.mean(latencies)) * 1e3,
        "real_time_factor": sum(latencies) / total,
    }


def _read(config: Config, path: Any) -> np.ndarray:
    audio = read_audio(path)
    if config.output_frames(len(audio)) < 1:
        raise UnusableFileError(f"{len(audio) / SAMPLE_RATE:.3f} s are too short for a frame")
    return audio
