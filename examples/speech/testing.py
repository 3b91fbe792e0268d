"""Transcribes utterances and files with a model; its error rates and its report."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jiwer
import numpy as np

from examples.common.cli import UnusableFileError, each_readable, say
from examples.common.modes import cast_to_policy, time_steps
from examples.common.task import Program, Task
from examples.common.training import Variables, check_outputs
from examples.speech.audio import SAMPLE_RATE, read_audio
from examples.speech.batching import Buckets, Shape
from examples.speech.config import Config
from examples.speech.dataset import Speech
from examples.speech.models import Decoded, create_test_step, create_transcribe_step


class Tester:
    """Transcribes a set of utterances with a model."""

    def __init__(self, task: Task, speech: Speech) -> None:
        self._config, self._speech, self._parallel = task.config, speech, task.parallel
        # A small set is not padded to a full batch.
        batch_size = self._parallel.filled(min(task.batch_size, len(speech)))
        self._buckets = Buckets(speech, batch_size, self._config.buckets, loading=task.loading)
        self._step = create_test_step(self._config, speech.alphabet.labels)

    def programs(self, weights: Variables) -> list[Program]:
        """The programs of `run` for abstract weights: one for each length."""
        return [(self._step, (weights, self._parallel.like_batch(shape.zeros()))) for shape in self._buckets.shapes]

    def run(self, variables: Variables, between_steps: Callable[[], None]) -> list[Transcribed]:
        """Transcribes each utterance."""
        found: list[Transcribed] = []
        for batch in self._buckets.evaluation_batches():
            between_steps()
            every = batch.weights, batch.indices, *self._step(variables, batch)
            weights, indices, losses, decoded = self._parallel.get(every)
            for row in np.flatnonzero(weights):
                name, spoken = str(self._speech.paths[indices[row]]), self._speech.transcripts[indices[row]]
                text = self._speech.alphabet.decode(decoded.labels[row, : decoded.lengths[row]])
                found.append(Transcribed(name, spoken, text, float(losses[row]), bool(decoded.finite[row])))
        return found


def metrics_of_test(items: Sequence[Transcribed], last: bool = True) -> dict[str, Any]:
    """The mean of the finite losses, the error rates, and the number of utterances with non-finite logits."""
    nonfinite = sum(not item.finite for item in items)
    check_outputs(nonfinite, len(items), "utterances", last)
    losses = [item.loss for item in items if np.isfinite(item.loss)]
    rates = error_rates([item.reference for item in items], [item.hypothesis for item in items])
    return {"test_loss": float(np.mean(losses)) if losses else math.nan, **rates, "test_nonfinite": nonfinite}


# Word and character error rates.


class Transcribed(NamedTuple):
    """The reference transcript of a file, and the model's transcript."""

    name: str
    reference: str
    hypothesis: str
    loss: float
    finite: bool = True  # whether the model's outputs are

    def text(self) -> str:
        """The transcripts below each other."""
        rates = error_rates([self.reference], [self.hypothesis])
        first = f"WER {rates['wer']:.1%}, CER {rates['cer']:.1%}, loss {self.loss:.3f}, {self.name}"
        return f"{first}\n  spoken   {self.reference!r}\n  written  {self.hypothesis!r}"


def error_rates(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, float]:
    """Errors per word and per character of all references together; they can exceed 1.

    Args:
        references: The reference transcripts.
        hypotheses: The model's transcripts, in the same order.
    """
    return {"wer": jiwer.wer([*references], [*hypotheses]), "cer": jiwer.cer([*references], [*hypotheses])}


def worst_first(transcribed: Sequence[Transcribed]) -> list[Transcribed]:
    """Sorted by word error rate and then by loss, of which NaN is the worst."""
    rate = {item: error_rates([item.reference], [item.hypothesis])["wer"] for item in transcribed}
    return sorted(transcribed, key=lambda item: (-rate[item], -np.nan_to_num(item.loss, nan=math.inf)))


# Transcribes audio files.

_RUNS = 5  # the latency is their median
_STEP = SAMPLE_RATE  # audio lengths are rounded up to whole seconds, to compile few programs for many files


def transcribe_files(task: Any, variables: Variables) -> dict[str, Any]:
    """Transcribes the files of --infer; the latency covers features, model and decoder, from samples to text."""
    config, device = task.config, jax.local_devices()[0]
    readable, unreadable = each_readable(config.infer, lambda path: _read(config, path), "--infer")
    runs = _RUNS if len(readable) == 1 else 1
    weights = jax.device_put(task.parallel.get(cast_to_policy(task, variables)), device)
    transcribe = create_transcribe_step(config, task.alphabet.labels)
    texts, latencies, nonfinite = [], [], 0

    def transcribed(*inputs: Any) -> tuple[Decoded, str]:
        decoded = jax.device_get(transcribe(*inputs))
        return decoded, task.alphabet.decode(decoded.labels[0, : decoded.lengths[0]])

    for path, samples in readable.items():
        length = -(-len(samples) // _STEP) * _STEP  # padding does not change the results
        batch = Shape(1, length, 1).zeros()
        batch.audio[0, : len(samples)], batch.audio_lengths[0] = samples, len(samples)
        run = functools.partial(transcribed, weights, jax.device_put(batch, device))
        (decoded, text), seconds = time_steps(run, runs + 1, ahead=0)
        latencies.append(np.median(seconds[1:]))  # the first run is a warm-up
        texts.append(text)
        nonfinite += not decoded.finite[0]
        say(f"{path}: {text if decoded.finite[0] else 'inf or NaN'}")
    check_outputs(nonfinite, len(readable), "utterances")
    total = sum(map(len, readable.values())) / SAMPLE_RATE
    found = {"unreadable_files": unreadable, "test_nonfinite": nonfinite, "texts": texts, "policy": config.policy}
    speed = {"latency_milliseconds": float(np.mean(latencies)) * 1e3, "real_time_factor": sum(latencies) / total}
    return {**found, "audio_seconds": total, **speed}


def _read(config: Config, path: Any) -> np.ndarray:
    audio = read_audio(path)
    if config.output_frames(len(audio)) < 1:
        raise UnusableFileError(f"{len(audio) / SAMPLE_RATE:.3f} s are too short for a frame")
    return audio
