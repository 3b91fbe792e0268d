"""`python -m examples.speech`: trains speech recognisers. From top to bottom: data, model, loss, step, tests.

What all scripts share is in `examples/common/`: optimizers and loss scale (optimizers.py), and the loop over epochs
(loop.py). models.py sets the policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from examples.common import modes
from examples.common.cli import UsageError, say
from examples.common.run_folder import write_json
from examples.common.task import Program, Task
from examples.common.training import DataParallel, Model, Sums, TrainState, Variables, masked_sums
from examples.speech.audio import SAMPLE_RATE
from examples.speech.batching import Batch, Buckets, Shape
from examples.speech.config import Config
from examples.speech.corpus import make_corpus
from examples.speech.dataset import Alphabet, Speech, read_speech
from examples.speech.features import spec_augment
from examples.speech.models import create_network, create_transcribe_step, ctc_losses, finite_features
from examples.speech.testing import Tester, Transcribed, metrics_of_test, transcribe_files, worst_first

# Approximate number of characters spoken per second.
_CHARACTERS = 14


class Data(NamedTuple):
    """The speech of a run, of which some may not be needed, and the characters that a model writes."""

    alphabet: Alphabet
    train: Speech | None = None
    test: Speech | None = None
    dev: Speech | None = None  # for the test after each epoch; by default `test`


def open_sets(config: Config, alphabet: Alphabet, splits: Sequence[str] = ("train", "test", "dev")) -> Data:
    """Opens the speech given by the flags, without utterances that CTC cannot align."""
    paths = {"train": config.train_data, "test": config.test_data, "dev": config.dev_data}
    if paths["test"] is None:
        paths["train"], paths["test"] = make_corpus(config.cache_dir)
    sets: dict[str, Speech] = {}
    for split in splits:
        if (path := paths[split]) is None:
            continue
        utterances = read_speech(path, config.audio_field, config.text_field, config.drop_characters)
        speech = sets[split] = Speech(str(path), utterances, alphabet, config.max_skipped, config.max_seconds)
        # The fastest leaves the fewest frames for a transcript.
        speech.keep_decodable(config.output_frames, max(config.perturbation.speeds) if split == "train" else 1.0)
    return Data(alphabet, **sets)


class SpeechTask(Task):
    """A speech recogniser and its data, on all devices.

    Attributes:
        transcribed: The results of the last test, one per utterance.
    """

    config_type, unit = Config, "utterances"
    metric_name, table = "WER", {"wer": "WER", "cer": "CER"}

    def __init__(self, config: Config, parallel: DataParallel, data: Data) -> None:
        super().__init__(config, parallel, data)
        self.alphabet, dev = data.alphabet, data.dev
        self.sets = {name: x for name, x in data._asdict().items() if isinstance(x, Speech)}
        self._buckets: Any = None
        if data.train is not None:
            self.steps = self.steps_of(data.train.name, len(data.train))
            self._buckets = Buckets(data.train, self.batch_size, config.buckets, config.perturbation, self.loading)
        self._test, self._dev = (None if x is None else Tester(self, x) for x in (data.test, dev))
        self._epoch_tester: Any = self._dev or self._test
        self.test_count = 0 if data.test is None else len(data.test)
        self.prefix = "dev_" if dev else ""
        self.metric = (f"{self.prefix}wer", -1)
        self.title = f"DeepSpeech on {data.train.name if data.train else 'synthetic audio'}, policy {config.policy}"
        self.transcribed: list[Transcribed] = []

    @classmethod
    def open(cls, config: Config, description: dict[str, Any] | None = None) -> Data:
        if description is None:
            alphabet = Alphabet() if config.alphabet is None else Alphabet.read(config.alphabet)
            return Data(alphabet) if config.is_benchmark else open_sets(config, alphabet)
        characters = description.get("characters")
        if not isinstance(characters, str) or not characters:
            raise UsageError("the model's description of its alphabet is damaged.")
        alphabet = Alphabet(characters)
        return Data(alphabet) if config.infer else open_sets(config, alphabet, ["test"])

    def facts(self) -> dict[str, Any]:
        found = {**super().facts(), "skipped_files": sum(map(len, self.skipped.values()))}
        return found if self.data.train is None else found | {"train_hours": self.data.train.hours}

    def report(self, folder: Path | None) -> None:
        """Prints the worst, the median and the best transcript; in a folder, also writes all, the worst first."""
        if not self.transcribed:
            return
        ranked = worst_first(self.transcribed)
        for title, place in {"worst": 0, "median": len(ranked) // 2, "best": -1}.items():
            say(f"{title}: {ranked[place].text()}")
        if folder is not None:
            write_json(folder / "transcripts.json", {"transcripts": [x._asdict() for x in ranked]})

    def description(self) -> dict[str, Any]:
        return {"characters": self.alphabet.characters}

    def identity(self) -> dict[str, Any]:
        sets = {f"{name} speech": speech.identity for name, speech in self.sets.items()}
        return sets | {"characters": [*self.alphabet.characters]}

    def example_batches(self) -> Sequence[Batch]:
        return [shape.zeros() for shape in self._buckets.shapes] if self._buckets else [self.synthetic_batch()]

    def synthetic_batch(self) -> Batch:
        """Noise with random transcripts; lengths are spread evenly from a quarter of --longest to --longest."""
        config, size = self.config, self.batch_size
        rng = np.random.default_rng(config.seed)
        seconds = np.linspace(config.longest / 4, config.longest, size) if size > 1 else np.array([config.longest])
        lengths, spoken = (seconds * SAMPLE_RATE).astype(np.int32), (seconds * _CHARACTERS).astype(np.int32)
        batch = Shape(size, int(lengths[-1]), max(1, int(spoken[-1]))).zeros()
        batch.audio[:] = rng.uniform(-0.1, 0.1, batch.audio.shape) * (np.arange(lengths[-1]) < lengths[:, None])
        labels, places = rng.integers(1, self.alphabet.labels, batch.labels.shape), np.arange(batch.labels.shape[1])
        batch.labels[:] = labels * (places < spoken[:, None])
        weights, indices = np.ones(size, np.float32), np.arange(size, dtype=np.int32)
        return batch._replace(audio_lengths=lengths, label_lengths=spoken, weights=weights, indices=indices)

    def benchmark_facts(self, items_per_second: float) -> dict[str, Any]:
        seconds = float(np.mean(self.synthetic_batch().audio_lengths)) / SAMPLE_RATE
        return {"longest_seconds": self.config.longest, "audio_hours_per_hour": seconds * items_per_second}

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        return self._buckets.train_batches(self.config.seed, epoch, first)

    # Model, loss and step.

    def model(self) -> Model:
        config = self.config
        network = create_network(config, self.alphabet.labels)

        def loss(params: Any, stats: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, tuple[Sums, Any]]:
            masks, dropout = jax.random.split(key)
            features, lengths, readable = finite_features(batch.audio, batch.audio_lengths)
            if config.augment:
                features = spec_augment(masks, features, lengths)
            counted = readable & (batch.weights > 0)
            losses = ctc_losses(*network.apply(params, features, lengths, dropout), batch)
            mean = jnp.sum(jnp.where(counted, losses, 0)) / jnp.maximum(jnp.sum(counted), 1)
            sums = masked_sums(counted, loss=losses)
            return mean, ({**sums, "not_finite": jnp.sum(batch.weights) - sums["count"]}, stats)

        def update(tx: Any, state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Sums]:
            value_and_grad = mpjax.value_and_grad(loss, state.opt_state, has_aux=True)
            (mean, (sums, _)), grads = value_and_grad(state.params, state.stats, batch, key)
            params, opt_state = mpjax.apply_gradients(tx, grads, state.opt_state, state.params, value=mean)
            return state._replace(params=params, opt_state=opt_state), sums

        return Model(network.init, loss, update, ("loss", "not_finite", "count"))

    # Tests and predictions.

    def test_programs(self, weights: Variables) -> list[Program]:
        return self._epoch_tester.programs(weights)

    def test(self, weights: Variables, between_steps: Callable[[], None], *, last: bool = True) -> dict[str, Any]:
        self.transcribed = self._epoch_tester.run(weights, between_steps)
        return {f"{self.prefix}{name}": value for name, value in metrics_of_test(self.transcribed, last).items()}

    def final_metrics(self, state: TrainState, between_steps: Callable[[], None]) -> dict[str, Any]:
        if self._dev is None or self._test is None or self.best is None:
            return {}
        self.transcribed = self._test.run(self.training.weights(state), between_steps)
        return metrics_of_test(self.transcribed)

    def predict(self, variables: Variables) -> dict[str, Any]:
        return transcribe_files(self, variables)

    def inference_step(self) -> jax.stages.Wrapped:
        return create_transcribe_step(self.config, self.alphabet.labels)


main = functools.partial(modes.main, SpeechTask)
