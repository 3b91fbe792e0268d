"""The benchmark modes: one policy in detail, several as a table; on made-up audio of always the same lengths."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.common.benchmarking import (
    Case,
    DoesNotFit,
    compare,
    comparison_table,
    compile_step,
    measure,
    plot_comparison,
)
from examples.common.hosts import say
from examples.common.loop import open_folder, parameter_count
from examples.common.run_folder import RunFolder, write_json
from examples.speech.audio import SAMPLE_RATE
from examples.speech.batching import Batch, Shape
from examples.speech.config import Config
from examples.speech.task import open_alphabet
from examples.speech.training import Variables, create_training, create_transcribe_step
from perf.environment import environment
from perf.memory import is_out_of_memory

RUNS = Path("runs/speech-benchmarks")
UNIT = "utterances"

# About as many characters as are read aloud in a second.
_CHARACTERS = 14
_WARMUP_ROUNDS = 3  # of the comparison, whose steps have been compiled and run once by then


def made_up_batch(config: Config, labels: int) -> Batch:
    """Noise with random transcripts; lengths are spread evenly from a quarter of the longest to the longest."""
    rng = np.random.default_rng(config.seed)
    size = config.batch_size
    seconds = np.linspace(config.longest / 4, config.longest, size)
    lengths, spoken = (seconds * SAMPLE_RATE).astype(np.int32), (seconds * _CHARACTERS).astype(np.int32)
    batch = Shape(size, int(lengths[-1]), int(spoken[-1])).zeros()
    batch.audio[:] = rng.uniform(-0.1, 0.1, batch.audio.shape) * (np.arange(lengths[-1]) < lengths[:, None])
    batch.labels[:] = rng.integers(1, labels, batch.labels.shape) * (np.arange(spoken[-1]) < spoken[:, None])
    return batch._replace(
        audio_lengths=lengths, label_lengths=spoken, weights=np.ones(size, np.float32), indices=np.arange(size)
    )


class Bench:
    """A state and a batch on the device, and the step that the mode measures."""

    def __init__(self, config: Config) -> None:
        labels = open_alphabet(config).labels
        self.training = config.mode != "inference_benchmark"
        self.batch = jax.device_put(made_up_batch(config, labels))
        self.hours = float(np.sum(self.batch.audio_lengths)) / SAMPLE_RATE / 3600
        training = create_training(config, labels, config.batch_size, steps=1000, epoch_steps=100)
        state = jax.jit(training.init)(config.seed)
        self.parameters = parameter_count(state.params)
        self.state: Any = state if self.training else Variables(state.params, state.stats)
        step = training.train_step if self.training else create_transcribe_step(config, labels, config.last_beam)
        self.compiled = compile_step(step, self.state, *self._inputs(self.batch))

    def step(self, state: Any, batch: Batch) -> tuple[Any, Any]:
        """The next state, and what says that the step is done."""
        result = self.compiled.call(state, *self._inputs(batch))
        return result if self.training else (state, result)

    def run(self) -> Any:
        """A step on the same batch again."""
        self.state, shown = self.step(self.state, self.batch)
        return shown

    def _inputs(self, batch: Batch) -> tuple[Any, ...]:
        return (batch,) if self.training else (batch.audio, batch.audio_lengths)


def run_benchmark(config: Config) -> dict[str, Any]:
    """Measures one policy and writes benchmark.json."""
    folder = _folder(config)
    bench = Bench(config)
    bench.state, measured = measure(
        bench.step,
        bench.state,
        itertools.repeat(bench.batch),
        warmup=config.warmup_steps,
        iterations=config.num_iter,
        items=config.batch_size,
        unit=UNIT,
        one_by_one=not bench.training,
    )
    results = {
        "mode": config.mode,
        "policy": config.policy,
        "amp": config.amp,
        "model": config.model,
        "parameters": bench.parameters,
        "batch_size": config.batch_size,
        "longest_seconds": config.longest,
        "warmup_steps": config.warmup_steps,
        "iterations": config.num_iter,
        "compile_seconds": bench.compiled.seconds,
        "program_bytes": bench.compiled.bytes,
        **measured,
        "audio_hours_per_hour": _audio_hours(bench.hours, config.batch_size, measured[f"{UNIT}_per_second"]),
        "environment": environment(),
    }
    write_json(folder.path / "benchmark.json", results)
    latency = ", ".join(f"{name} {value:.1f}" for name, value in results["latency_milliseconds"].items())
    say(f"latency in ms: {latency}; compiled in {bench.compiled.seconds:.1f} s; output in {folder.path}")
    return results


def run_comparison(config: Config) -> dict[str, Any]:
    """Measures every policy of `--compare` at every batch size, in turns, and leaves the table in three forms."""
    folder = _folder(config)
    sizes = [int(size) for size in (config.batch_sizes or str(config.batch_size)).split(",")]
    hours: dict[int, float] = {}

    def cases() -> Iterator[Case | DoesNotFit]:
        for size, policy in itertools.product(sizes, config.policies):
            yield _case(dataclasses.replace(config, policy=policy, batch_size=size, compare=None), hours)

    rows = compare(cases(), config.num_iter, _WARMUP_ROUNDS)
    for row in rows:
        if "items_per_second" in row:
            size = row["batch_size"]
            row["audio_hours_per_hour"] = _audio_hours(hours[size], size, row["items_per_second"])
    text = comparison_table(rows, UNIT)
    results = {
        "mode": config.mode,
        "model": config.model,
        "longest_seconds": config.longest,
        "rounds": config.num_iter,
        "rows": rows,
        "environment": environment(),
    }
    write_json(folder.path / "comparison.json", results)
    (folder.path / "comparison.md").write_text(text + "\n")
    device = jax.devices()[0].device_kind
    plot_comparison(folder.path / "comparison.png", rows, f"{config.model}, {config.mode} on {device}")
    say(f"{text}\noutput in {folder.path}")
    return results


def _case(config: Config, hours: dict[int, float]) -> Case | DoesNotFit:
    """The policy and batch size of the flags, their step run once; or that it does not fit."""
    try:
        bench = Bench(config)
        jax.block_until_ready(bench.run())
    except Exception as error:
        if is_out_of_memory(error):
            return DoesNotFit(config.policy, config.batch_size)
        raise
    hours[config.batch_size] = bench.hours
    return Case(config.policy, config.batch_size, bench.run, bench.compiled.seconds, bench.compiled.bytes)


def _audio_hours(hours: float, utterances: int, per_second: float) -> float:
    """Hours of audio in an hour, at a speed in utterances, of which so many have so many hours."""
    return hours / utterances * per_second * 3600


def _folder(config: Config) -> RunFolder:
    return open_folder(config.output, RUNS, config.settings(), resume=False)
