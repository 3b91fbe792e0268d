"""What the speech script shares with every script: its names, its data, and the facts for its output files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.common.cli import SkippedFiles, UsageError, say
from examples.common.run_folder import write_json
from examples.common.task import Task
from examples.common.training import DataParallel
from examples.speech.audio import SAMPLE_RATE
from examples.speech.batching import Batch, Buckets, Shape
from examples.speech.config import Config
from examples.speech.corpus import make_corpus
from examples.speech.dataset import Alphabet, Speech, open_speech
from examples.speech.testing import Tester, Transcribed, worst_first

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
        fields = config.audio_field, config.text_field
        limits: dict[str, Any] = {"drop": config.drop_characters, "max_seconds": config.max_seconds}
        speech = sets[split] = open_speech(path, alphabet, config.max_skipped, *fields, **limits)
        speech.keep_decodable(config.output_frames, config.perturbation.fastest if split == "train" else 1.0)
    return Data(alphabet, **sets)


class SpeechData(Task):
    """The speech of a task and the facts about it; `examples.speech.train` adds the model.

    Attributes:
        transcribed: The results of the last test, one per utterance.
    """

    config_type, unit = Config, "utterances"
    metric_name, table = "WER", {"wer": "WER", "cer": "CER"}

    def __init__(self, config: Config, parallel: DataParallel, data: Data) -> None:
        super().__init__(config, parallel, data)
        self.alphabet, dev = data.alphabet, data.dev
        self.train_set: Any = data.train
        self.test_set: Any = data.test
        self._buckets: Buckets | None = None
        if data.train is not None:
            self.check_batch_size(data.train.name, len(data.train))
            self._buckets = Buckets(data.train, self.batch_size, config.buckets, config.perturbation, self.loading)
            self.steps = self._buckets.steps
        self._test, self._dev = (None if x is None else Tester(self, x) for x in (data.test, dev))
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
        sizes = {f"{name}_utterances": len(speech) for name, speech in self._sets().items()}
        found = {**sizes, "skipped_files": sum(map(len, self.skipped().values()))}
        return found if self.train_set is None else found | {"train_hours": self.train_set.hours}

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

    def _sets(self) -> dict[str, Speech]:
        return {name: speech for name, speech in self.data._asdict().items() if isinstance(speech, Speech)}

    def identity(self) -> dict[str, Any]:
        sets = {f"{name} speech": speech.identity for name, speech in self._sets().items()}
        return sets | {"characters": [*self.alphabet.characters]}

    def skipped(self) -> dict[str, SkippedFiles]:
        return {name: speech.skipped for name, speech in self._sets().items()}

    def example_batches(self, batch_size: int) -> Sequence[Batch]:
        if self._buckets is None:
            return [synthetic_batch(self.config, batch_size, self.alphabet.labels)]
        return [shape._replace(batch=batch_size).zeros() for shape in self._buckets.shapes]

    def synthetic_batch(self) -> Batch:
        return synthetic_batch(self.config, self.batch_size, self.alphabet.labels)

    def benchmark_settings(self) -> dict[str, Any]:
        return {"longest_seconds": self.config.longest}

    def benchmark_metrics(self, items_per_second: float) -> dict[str, Any]:
        seconds = float(np.mean(self.synthetic_batch().audio_lengths)) / SAMPLE_RATE
        return {"audio_hours_per_hour": seconds * items_per_second}


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
