"""Speech recognition as a task for `examples.common.loop`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import mpjax
from examples.common.benchmarking import compile_step
from examples.common.cli import UsageError
from examples.common.config import RunConfig
from examples.common.devices import DataParallel
from examples.common.hosts import gather_to_host
from examples.common.plots import Panel
from examples.common.task import Task, shape_of
from examples.common.training import Training, TrainState, Variables, check_outputs, create_training
from examples.speech.alphabet import Alphabet
from examples.speech.audio import SAMPLE_RATE
from examples.speech.batching import Array, Batch, Buckets, Shape, check_batch_size
from examples.speech.config import Config
from examples.speech.corpus import make_corpus
from examples.speech.dataset import Speech
from examples.speech.manifests import open_speech
from examples.speech.reports import ErrorRates, Transcribed, error_rates
from examples.speech.training import create_speech_model, create_test_step, create_transcribe_step

# Approximate number of characters spoken per second.
_CHARACTERS = 14


def open_data(
    config: Config, splits: Sequence[str] = ("train", "test", "dev"), alphabet: Alphabet | None = None
) -> dict[str, Speech]:
    """Opens the speech given by the flags, without utterances that CTC cannot align; `alphabet` overrides the flag."""
    paths = {"train": config.train_data, "test": config.test_data, "dev": config.dev_data}
    if paths["test"] is None:
        paths["train"], paths["test"] = make_corpus(config.cache_dir)
    alphabet = alphabet or open_alphabet(config)
    sets: dict[str, Speech] = {}
    for split in splits:
        if (path := paths[split]) is None:
            continue
        speech = sets[split] = open_speech(path, alphabet, config.max_skipped)
        if split == "train" and config.longest_seconds is not None:
            speech.keep_shorter(config.longest_seconds)
        speech.keep_decodable(config.output_frames, config.perturbation.fastest if split == "train" else 1.0)
    return sets


def open_alphabet(config: Config) -> Alphabet:
    """The characters of the model's outputs."""
    return Alphabet() if config.alphabet is None else Alphabet.read(config.alphabet)


class SpeechTask(Task):
    """A model with its data, on all devices.

    Args:
        config: The flags.
        parallel: The devices.
        alphabet: Alphabet of the transcripts.
        train, test: The speech; sets that are not needed may be None.
        dev: Speech for the test after each epoch; by default `test`.

    Attributes:
        transcribed: The results of the last test, one per utterance.
        not_finite: How often the loss of each training utterance was inf or NaN, by the end of the last epoch.
    """

    unit = "utterances"

    def __init__(
        self,
        config: Config,
        parallel: DataParallel,
        alphabet: Alphabet,
        train: Speech | None = None,
        test: Speech | None = None,
        dev: Speech | None = None,
    ) -> None:
        super().__init__(config, parallel)
        self.config: Config = config
        self.alphabet, self._sets = alphabet, (train, test, dev)
        self._buckets: Buckets | None = None
        self.steps = 1
        if train is not None:
            check_batch_size(train, self.batch_size)
            self._buckets = Buckets(
                train, self.batch_size, config.front_end, config.buckets, config.perturbation, config.workers
            )
            self.steps = self._buckets.steps
        parallel.check(self.batch_size)
        self._test = None if test is None else Tester(config, test, parallel)
        self._dev = None if dev is None else Tester(config, dev, parallel)
        prefix = "dev_" if dev else ""
        self.metric, self.metric_name = (f"{prefix}wer", -1), "WER"
        tested = config.mode != "train"
        self.panels: list[Panel] = [
            Panel("loss", {"train": "train_loss"} | ({"test": f"{prefix}test_loss"} if tested else {})),
        ]
        if tested:
            rates = {"words": f"{prefix}wer", "characters": f"{prefix}cer"}
            self.panels.append(Panel("error rate, test", rates, percent=True))
        self.title = f"{config.model} on {train.name if train else 'synthetic audio'}, policy {config.policy}"
        self.transcribed: list[Transcribed] = []
        self.not_finite = np.zeros(0, np.int32)

    @property
    def train_set(self) -> Speech:
        assert self._sets[0] is not None
        return self._sets[0]

    @property
    def test_set(self) -> Speech:
        assert self._sets[1] is not None
        return self._sets[1]

    @property
    def test_count(self) -> int:  # type: ignore[override]  # Task has it as an attribute
        return len(self.test_set)

    @property
    def table_metrics(self) -> dict[str, str]:
        return {"wer": "WER", "cer": "CER"}

    def with_config(self, config: RunConfig) -> SpeechTask:
        assert isinstance(config, Config)
        return SpeechTask(config, self.parallel, self.alphabet, *self._sets)

    def training_of(self, config: RunConfig, data: dict[str, Any]) -> Training:
        assert isinstance(config, Config)
        model = create_speech_model(config, self.alphabet.labels, data["utterances"])
        policy = mpjax.get_policy(config.policy)
        return create_training(model, config.hyperparameters(self.steps), policy, config.loss_scale, self.parallel)

    def headline(self) -> str:
        train, test = self.train_set, self.test_set
        return (
            f"{self.config.model}, policy {self.policy}, {len(train):,} training utterances ({train.hours:.2f} h) and "
            f"{len(test):,} test utterances ({test.hours:.2f} h), on {self.parallel.count} x "
            f"{jax.devices()[0].device_kind}"
        )

    def description(self) -> dict[str, Any]:
        return {"characters": self.alphabet.characters}

    def example_batches(self, batch_size: int) -> Sequence[Batch]:
        if self._buckets is None:
            return [synthetic_batch(self.config, batch_size, self.alphabet.labels)]
        return [shape._replace(batch=batch_size).zeros() for shape in self._buckets.shapes]

    def compile(self) -> None:
        super().compile()
        if self.config.mode != "train":
            self._epoch_tester.compile(self._abstract_weights())

    @property
    def _epoch_tester(self) -> Tester:
        """The tester that runs after each epoch."""
        tester = self._dev or self._test
        assert tester is not None
        return tester

    def _abstract_weights(self) -> Any:
        return self.parallel.like_state(jax.eval_shape(self.training.weights, self.abstract_state()))

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        assert self._buckets is not None
        return self._buckets.train_batches(self.config.seed, epoch, first)

    def epoch_metrics(self, state: TrainState, between_steps: Callable[[], None]) -> dict[str, Any]:
        line = super().epoch_metrics(state, between_steps)
        self.not_finite = np.asarray(state.extra)
        return line | {"not_finite": int(np.count_nonzero(self.not_finite))}

    def test(
        self, weights: Variables, between_steps: Callable[[], None] = lambda: None, *, last: bool = True
    ) -> dict[str, Any]:
        beam = self.config.final_beam if last and self._dev is None else 0
        self.transcribed = self._epoch_tester.run(weights, beam, between_steps)
        prefix = "dev_" if self._dev else ""
        return {f"{prefix}{name}": value for name, value in metrics_of_test(self.transcribed, last).items()}

    def final_metrics(self, state: TrainState, between_steps: Callable[[], None]) -> dict[str, Any]:
        if self._dev is None or self.config.mode == "train":
            return {}
        assert self._test is not None
        self.transcribed = self._test.run(self.training.weights(state), self.config.final_beam, between_steps)
        return metrics_of_test(self.transcribed)

    def items(self, batch: Batch) -> int:
        # Only the number of entries of the other processes' parts is known.
        return int(np.sum(batch.weights)) + self.batch_size - len(batch.weights)

    def epoch_text(self, line: dict[str, Any]) -> str:
        prefix = "dev_" if self._dev else ""
        text = f"loss {line['train_loss']:.3f}"
        if f"{prefix}wer" in line:
            text += (
                f" test {line[f'{prefix}test_loss']:.3f}  WER {line[f'{prefix}wer']:.2%} CER {line[f'{prefix}cer']:.2%}"
            )
        return text

    def summary(self, last: dict[str, Any]) -> dict[str, Any]:
        config, preset = self.config, self.config.preset
        names = ("wer", "cer", "test_loss", "dev_wer", "dev_cer", "dev_test_loss", "train_loss", "test_nonfinite")
        sets = [speech for speech in self._sets if speech is not None]
        return {
            "amp": config.amp,
            **{name: last[name] for name in names if name in last},
            "seed": config.seed,
            "model": config.model,
            "decoder": config.decoder,
            "batch_size": preset.batch_size,
            "learning_rate": preset.learning_rate,
            "train_utterances": len(self.train_set),
            "test_utterances": len(self.test_set),
            "train_hours": self.train_set.hours,
            "skipped_files": sum(len(speech.skipped) for speech in sets),
            "not_finite_files": last["not_finite"],
        }

    def data_state(self) -> dict[str, Any]:
        train, test, _ = self._sets
        if train is None:
            return {"utterances": self.batch_size}
        fingerprints = [None if speech is None else speech.fingerprint for speech in (train, test)]
        return {"utterances": len(train), "fingerprints": fingerprints}

    def restore_data(self, state: dict[str, Any]) -> None:
        current = self.data_state()
        for name, speech, before, now in zip(
            ("train", "test"), self._sets, state["fingerprints"], current["fingerprints"], strict=False
        ):
            if before != now and speech is not None:
                raise UsageError(
                    f"--{name}-data {speech.name}: the utterances or files differ from those of the run; a run can "
                    "only be resumed with the same data. Put them back, or start a new run with --init-from."
                )

    # Benchmarks.

    def synthetic_batch(self) -> Batch:
        return synthetic_batch(self.config, self.batch_size // jax.process_count(), self.alphabet.labels)

    def inference_step(self) -> jax.stages.Wrapped:
        return create_transcribe_step(self.config, self.alphabet.labels, self.config.final_beam)

    def benchmark_settings(self) -> dict[str, Any]:
        return {"model": self.config.model, "longest_seconds": self.config.longest}

    def benchmark_metrics(self, items_per_second: float) -> dict[str, Any]:
        seconds = float(np.mean(self.synthetic_batch().audio_lengths)) / SAMPLE_RATE
        return {"audio_hours_per_hour": seconds * items_per_second}


class Tester:
    """Transcribes a set of utterances with a model."""

    def __init__(self, config: Config, speech: Speech, parallel: DataParallel) -> None:
        self._config, self._speech, self._parallel = config, speech, parallel
        # A small set is not padded to a full batch.
        batch_size = -(-min(config.preset.batch_size, len(speech)) // parallel.count) * parallel.count
        self._buckets = Buckets(speech, batch_size, config.front_end, config.buckets, workers=config.workers)
        self._steps: dict[int, dict[Any, Any]] = {}

    def compile(self, variables: Any, beam: int = 0) -> None:
        """Compiles the steps of a decoder for variables or their `ShapeDtypeStruct`s."""
        step = create_test_step(self._config, self._speech.alphabet.labels, beam)
        batches = [self._parallel.like_batch(shape.zeros()) for shape in self._buckets.shapes]
        self._steps[beam] = {shape_of(batch): compile_step(step, variables, batch).call for batch in batches}

    def run(
        self, variables: Variables, beam: int = 0, between_steps: Callable[[], None] = lambda: None
    ) -> list[Transcribed]:
        """Transcribes each utterance by beam search with `beam` prefixes, or greedily if 0."""
        if beam not in self._steps:
            self.compile(variables, beam)
        found: list[Transcribed] = []
        for batch in self._buckets.evaluation_batches():
            between_steps()
            batch = self._parallel.put(batch)
            step = self._steps[beam][shape_of(batch)]
            found += self._transcribed(*gather_to_host((batch.weights, batch.indices, *step(variables, batch))))
        return found

    def _transcribed(
        self, weights: Array, indices: Array, losses: Any, finite: Any, decoded: Any
    ) -> Iterator[Transcribed]:
        speech = self._speech
        for row in np.flatnonzero(weights):
            index = indices[row]
            # Without finite logits there is no transcript: every word counts as wrong.
            text = speech.alphabet.decode(decoded.labels[row, : decoded.lengths[row]]) if finite[row] else ""
            yield Transcribed(
                str(speech.paths[index]), speech.transcripts[index], text, float(losses[row]), bool(finite[row])
            )


def metrics_of_test(transcribed: Iterable[Transcribed], last: bool = True) -> dict[str, Any]:
    """The mean of the finite losses, the error rates, and the number of utterances with non-finite logits."""
    items = list(transcribed)
    nonfinite = sum(not item.finite for item in items)
    check_outputs(nonfinite, len(items), "utterances", last)
    losses = [item.loss for item in items if np.isfinite(item.loss)]
    rates: ErrorRates = error_rates([item.reference for item in items], [item.hypothesis for item in items])
    return {
        "test_loss": float(np.mean(losses)) if losses else float("nan"),
        **rates._asdict(),
        "test_nonfinite": nonfinite,
    }


def synthetic_batch(config: Config, size: int, labels: int) -> Batch:
    """A batch of noise with random transcripts; lengths are spread evenly from a quarter of --longest to --longest."""
    rng = np.random.default_rng(config.seed)
    seconds = np.linspace(config.longest / 4, config.longest, size) if size > 1 else np.array([config.longest])
    lengths, spoken = (seconds * SAMPLE_RATE).astype(np.int32), (seconds * _CHARACTERS).astype(np.int32)
    batch = Shape(size, int(lengths[-1]), max(1, int(spoken[-1]))).zeros()
    batch.audio[:] = rng.uniform(-0.1, 0.1, batch.audio.shape) * (np.arange(lengths[-1]) < lengths[:, None])
    batch.labels[:] = rng.integers(1, labels, batch.labels.shape) * (np.arange(batch.labels.shape[1]) < spoken[:, None])
    indices = np.arange(size, dtype=np.int32)
    return batch._replace(
        audio_lengths=lengths, label_lengths=spoken, weights=np.ones(size, np.float32), indices=indices
    )
