"""Speech recognition as what `examples.common.loop` trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from examples.common.benchmarking import compile_step
from examples.common.checkpoints import Checkpoints
from examples.common.hosts import say
from examples.common.loop import Task
from examples.common.plots import Panel
from examples.speech.alphabet import Alphabet
from examples.speech.batching import Batch, Buckets, Shape, check_batch_size
from examples.speech.config import Config
from examples.speech.corpus import make_corpus
from examples.speech.dataset import Speech
from examples.speech.manifests import open_speech
from examples.speech.reports import ErrorRates, Transcribed, error_rates
from examples.speech.training import Totals, TrainState, Variables, create_test_step, create_training


def open_data(config: Config) -> tuple[Speech, Speech]:
    """The training and the test speech that the flags name, without what the model can not align."""
    train, test = config.train_data, config.test_data
    if train is None or test is None:
        train, test = make_corpus(config.cache_dir)
    alphabet = open_alphabet(config)
    sets = [open_speech(path, alphabet, config.max_skipped) for path in (train, test)]
    sets[0].keep_decodable(config.output_frames, config.perturbation.fastest)
    sets[1].keep_decodable(config.output_frames)
    return sets[0], sets[1]


def open_alphabet(config: Config) -> Alphabet:
    """The characters of the model's outputs."""
    return Alphabet() if config.alphabet is None else Alphabet.read(config.alphabet)


class SpeechTask(Task):
    """A model with its data.

    Attributes:
        transcribed: what the last test came to, by utterance.
        not_finite: of each training utterance, how often its loss was inf or NaN by the end of the last epoch.
    """

    unit = "utterances"
    panels = (
        Panel("loss", {"train": "train_loss", "test": "test_loss"}),
        Panel("error rate, test", {"words": "wer", "characters": "cer"}, percent=True),
    )

    def __init__(self, config: Config, train_set: Speech, test_set: Speech) -> None:
        self.config, self.train_set, self.test_set = config, train_set, test_set
        check_batch_size(train_set, config.batch_size)
        self.epochs, self.policy = config.epochs, config.policy
        features, workers = config.front_end, config.workers
        self._train_buckets = Buckets(
            train_set, config.batch_size, features, config.buckets, config.perturbation, workers
        )
        self._test = Tester(config, test_set)
        self.steps = self._train_buckets.steps
        self.training = create_training(
            config, train_set.alphabet.labels, len(train_set), self.steps * self.epochs, self.steps
        )
        self.title = f"{config.model} on {train_set.name}, policy {config.policy}"
        self.transcribed: list[Transcribed] = []
        self.not_finite = np.zeros(len(train_set), np.int32)
        self._steps: dict[int, Any] = {}

    def initial_state(self) -> TrainState:
        # Runs once, and optimising its random numbers would take longer than all the rest of the start.
        init = jax.jit(self.training.init, compiler_options={"xla_backend_optimization_level": 0})
        return init(self.config.seed)

    def compile(self) -> None:
        """Executables, before the clock runs; they refuse any other shape or dtype."""
        config, train, test = self.config, self.train_set, self.test_set
        say(
            f"{config.model}, policy {self.policy}, {len(train):,} training utterances ({train.hours:.2f} h) and "
            f"{len(test):,} test utterances ({test.hours:.2f} h), on {jax.devices()[0].device_kind}"
        )
        state = jax.eval_shape(self.training.init, 0)
        self._steps = compile_shapes(self.training.train_step, state, self._train_buckets.shapes)
        self._test.compile(Variables(state.params, state.stats))

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        return self._train_buckets.train_batches(self.config.seed, epoch, first)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        return self._steps[batch.audio.shape[1]](state, batch)

    def epoch_metrics(self, state: TrainState, between_steps: Callable[[], None]) -> dict[str, Any]:
        last = int(state.step) >= self.steps * self.epochs
        beam = self.config.last_beam if last else 0
        self.transcribed = self._test.run(Variables(state.params, state.stats), beam, between_steps)
        self.not_finite = np.asarray(state.not_finite)
        return {
            "train_loss": state.totals.mean(),
            **test_metrics(self.transcribed),
            "not_finite": int(np.count_nonzero(self.not_finite)),
            "learning_rate": float(self.training.learning_rate(int(state.step))),
        }

    def next_epoch(self, state: TrainState) -> TrainState:
        return state._replace(totals=Totals.zero())

    def items(self, batch: Batch) -> int:
        return int(np.sum(batch.weights))

    def bar_text(self, shown: Any) -> str:
        mean = shown["totals"].mean()
        return f"loss {mean:.3f}, loss scale {shown['loss_scale']:g}, skipped steps {shown['skipped_steps']}"

    def epoch_text(self, line: dict[str, Any]) -> str:
        return (
            f"loss: train {line['train_loss']:.3f} test {line['test_loss']:.3f}  WER {line['wer']:.2%} "
            f"CER {line['cer']:.2%}"
        )

    def summary(self, last: dict[str, Any]) -> dict[str, Any]:
        config = self.config
        return {
            "amp": config.amp,
            **{name: last[name] for name in ("wer", "cer", "test_loss", "train_loss")},
            "seed": config.seed,
            "model": config.model,
            "decoder": config.decoder,
            "batch_size": config.batch_size,
            "learning_rate": config.learning_rate,
            "train_utterances": len(self.train_set),
            "test_utterances": len(self.test_set),
            "train_hours": self.train_set.hours,
            "skipped_files": len(self.train_set.skipped) + len(self.test_set.skipped),
            "not_finite_files": last["not_finite"],
        }

    def position(self) -> dict[str, Any]:
        return {"utterances": len(self.train_set)}

    def restore(self, checkpoints: Checkpoints) -> tuple[TrainState, dict[str, Any]] | None:
        return checkpoints.restore(lambda position: jax.eval_shape(self.training.init, 0))


class Tester:
    """Transcribes a set of utterances with a model."""

    def __init__(self, config: Config, speech: Speech) -> None:
        self._config, self._speech = config, speech
        # A small set is not filled up to a whole batch.
        batch_size = min(config.batch_size, len(speech))
        self._buckets = Buckets(speech, batch_size, config.front_end, config.buckets, workers=config.workers)
        self._steps: dict[int, dict[int, Any]] = {}

    def compile(self, variables: Any, beam: int = 0) -> None:
        """Makes the steps of a decoder, for variables or their `ShapeDtypeStruct`s."""
        step = create_test_step(self._config, self._speech.alphabet.labels, beam)
        self._steps[beam] = compile_shapes(step, variables, self._buckets.shapes)

    def run(
        self, variables: Variables, beam: int = 0, between_steps: Callable[[], None] = lambda: None
    ) -> list[Transcribed]:
        """What the model writes for each utterance, with `beam` prefixes, or greedily for 0."""
        if beam not in self._steps:
            self.compile(variables, beam)
        found: list[Transcribed] = []
        for batch in self._buckets.evaluation_batches():
            between_steps()
            outputs = jax.device_get(self._steps[beam][batch.audio.shape[1]](variables, batch))
            found += self._transcribed(batch, *outputs)
        return found

    def _transcribed(self, batch: Batch, losses: Any, decoded: Any) -> Iterator[Transcribed]:
        speech = self._speech
        for row in np.flatnonzero(batch.weights):
            index = batch.indices[row]
            text = speech.alphabet.decode(decoded.labels[row, : decoded.lengths[row]])
            yield Transcribed(str(speech.paths[index]), speech.transcripts[index], text, float(losses[row]))


def test_metrics(transcribed: Iterable[Transcribed]) -> dict[str, Any]:
    """Mean loss (over those that have one), and error rates."""
    items = list(transcribed)
    losses = [item.loss for item in items if np.isfinite(item.loss)]
    rates: ErrorRates = error_rates([item.reference for item in items], [item.hypothesis for item in items])
    return {"test_loss": float(np.mean(losses)) if losses else float("nan"), **rates._asdict()}


def compile_shapes(step: Any, first: Any, shapes: Iterable[Shape]) -> dict[int, Any]:
    """Executables of a step `(first, batch)` by the samples of the batch."""
    with ThreadPoolExecutor() as executor:
        made = {shape.samples: executor.submit(compile_step, step, first, shape.zeros()) for shape in shapes}
        return {samples: future.result().call for samples, future in made.items()}
