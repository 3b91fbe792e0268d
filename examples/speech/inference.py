"""What a trained model is used for: testing, and writing down what is said in a file."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mpjax
from examples.common.benchmarking import compile_step
from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError
from examples.common.hosts import say
from examples.speech.audio import SAMPLE_RATE, AudioError, read_audio
from examples.speech.config import Config
from examples.speech.reports import transcript_report
from examples.speech.task import Tester, open_alphabet, open_data, test_metrics
from examples.speech.training import Variables, create_training, create_transcribe_step

# Of a checkpoint these may be others: what the model computes in, and how its outputs are read.
_MAY_CHANGE = ("policy", "amp", "decoder", "beam", "report", "batch_size", "buckets", "max_skipped")
_RUNS = 5  # of which the latency is the median


def trained_config(config: Config) -> Config:
    """The flags that the run in `--output` was trained with.

    Raises:
        UsageError: there is no run.
    """
    assert config.output is not None
    try:
        saved = json.loads((config.output / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--output {str(config.output)!r} holds no run (no readable config.json).") from error
    for name in ("train_data", "test_data", "alphabet"):
        saved[name] = None if saved[name] is None else Path(saved[name])
    return dataclasses.replace(config, **saved)


def in_precision(trained: Config, config: Config) -> Config:
    """The flags of a trained model, in the precision and with the decoder of other flags."""
    own = {name: getattr(config, name) for name in _MAY_CHANGE}
    if config.train_data is not None:
        own |= {"train_data": config.train_data, "test_data": config.test_data}
    return dataclasses.replace(trained, **own)


def trained_variables(trained: Config, policy: str, labels: int) -> Variables:
    """The newest checkpoint of a run, its parameters as another policy stores them.

    Raises:
        UsageError: there is none, or it is of another model.
    """
    assert trained.output is not None
    folder = trained.output / "checkpoints"
    if not folder.is_dir():
        raise UsageError(f"--output {str(trained.output)!r} holds no checkpoints; give the folder of a training.")

    def like(position: dict[str, Any]) -> Any:
        # Of the data only the number of utterances is in the state; of the schedule nothing.
        training = create_training(trained, labels, position["utterances"], steps=2, epoch_steps=1)
        return jax.eval_shape(training.init, 0)

    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(like)
    if restored is None:
        raise UsageError(f"--output {str(trained.output)!r} holds no checkpoint yet: it was ended before the first.")
    state = restored[0]
    return Variables(mpjax.get_policy(policy).cast_to_param(state.params), state.stats)


def evaluate(config: Config) -> dict[str, Any]:
    """Tests a trained model in the precision of the flags, whatever it was trained in."""
    trained = trained_config(config)
    own = in_precision(trained, config)
    _, test_set = open_data(own)
    variables = trained_variables(trained, own.policy, test_set.alphabet.labels)
    transcribed = Tester(own, test_set).run(variables, own.last_beam)
    say(transcript_report(transcribed, own.report))
    return {
        "policy": own.policy,
        "amp": own.amp,
        "decoder": own.decoder,
        **test_metrics(transcribed),
        "test_utterances": len(test_set),
    }


def infer(config: Config) -> dict[str, Any]:
    """Writes down what is said in a file; the latency is that of features, model and decoder, from samples to text."""
    assert config.infer is not None
    trained = trained_config(config)
    own = in_precision(trained, config)
    try:
        audio = read_audio(config.infer)
    except AudioError as error:
        raise UsageError(f"--infer {str(config.infer)!r}: {error}.") from error
    if own.output_frames(len(audio)) < 1:
        raise UsageError(f"--infer {str(config.infer)!r}: {len(audio) / SAMPLE_RATE:.3f} s are too short for a frame.")
    alphabet = open_alphabet(own)
    variables = trained_variables(trained, own.policy, alphabet.labels)
    inputs = variables, audio[None], np.array([len(audio)], np.int32)
    step = compile_step(create_transcribe_step(own, alphabet.labels, own.last_beam), *inputs).call
    seconds = []
    for _ in range(_RUNS + 1):
        started = time.perf_counter()
        decoded = jax.device_get(step(*inputs))
        text = alphabet.decode(decoded.labels[0, : decoded.lengths[0]])
        seconds.append(time.perf_counter() - started)
    latency = statistics.median(seconds[1:])  # the first one warms up
    length = len(audio) / SAMPLE_RATE
    say(text)
    return {
        "text": text,
        "policy": own.policy,
        "trained_policy": trained.policy,
        "audio_seconds": length,
        "latency_milliseconds": latency * 1e3,
        "real_time_factor": latency / length,
    }
