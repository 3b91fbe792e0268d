"""What the image script shares with every script: its names, its data, and the facts for its output files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from examples.common.devices import DataParallel
from examples.common.plots import Panel
from examples.common.task import Task
from examples.common.training import Variables
from examples.imagenet.config import Config
from examples.imagenet.data import Batch, Description, check_batch_size, empty_batch
from examples.imagenet.datasets import Data, open_data, random_batch
from examples.imagenet.pipeline import Shard
from examples.imagenet.pretrained import read_pretrained


class ImageData(Task):
    """The images of a task and how they are loaded; `examples.imagenet.train` adds the model."""

    config_type, unit = Config, "images"
    metric, metric_name, table = ("test_accuracy", 1), "test accuracy", {"test_accuracy": "test accuracy"}
    line = {
        "train_loss": "train {:.4f}",
        "train_accuracy": "{:.2%}",
        "test_loss": " test {:.4f}",
        "test_accuracy": "{:.2%}",
    }
    final_line = {"test_accuracy": "test accuracy {:.2%}", "train_accuracy": "train accuracy {:.2%}"}
    alternatives = ("data_dir", "dataset")

    def __init__(self, config: Config, parallel: DataParallel, data: Data) -> None:
        super().__init__(config, parallel, data)
        self.about = data.about
        self.train_set: Any = data.train
        self.test_set: Any = data.test
        known: Any = data.train or data.test
        if data.train is not None:
            check_batch_size(data.train, self.batch_size)
            self.steps, self.max_batch_size = len(data.train) // self.batch_size, len(data.train)
        parallel.check(self.batch_size)
        if data.test is not None:
            # A test set smaller than a batch is not padded to a full batch.
            self.test_count = len(data.test)
            self.test_batch_size = min(self.batch_size, -(-self.test_count // parallel.count) * parallel.count)
        self.from_files = config.data_dir is not None
        self.title = f"{config.model_name} on {known.name if known else 'images'}, policy {config.policy}"
        smoothing = config.preset.label_smoothing
        train = f"train (label smoothing {smoothing:g})" if smoothing else "train"
        self.panels = (
            Panel("loss", {train: "train_loss", "test": "test_loss"}),
            Panel("accuracy", {"train": "train_accuracy", "test": "test_accuracy"}, percent=True),
        )
        self._stream: Any = None

    @classmethod
    def open(cls, config: Config, description: dict[str, Any] | None = None) -> Data:
        return open_data(config, None if description is None else Description.from_json(description))

    def loading(self) -> dict[str, Any]:
        """How this process loads its part of each batch."""
        shard = Shard(jax.process_index(), jax.process_count())
        return {"shard": shard, "workers": self.config.workers, "put": self.parallel.put}

    def facts(self) -> dict[str, Any]:
        sets = {"train": self.train_set, "test": self.test_set}
        sizes = {f"{name}_images": len(images) for name, images in sets.items() if images is not None}
        unreadable = sum(images.unreadable for images in sets.values() if images is not None)
        return {"model": self.config.model_name, **sizes, "unreadable_images": unreadable}

    def data_text(self) -> str:
        return f"{len(self.train_set):,} training and {len(self.test_set):,} test images"

    def description(self) -> dict[str, Any]:
        return self.about._asdict()

    def data_state(self) -> dict[str, Any]:
        sets = {"train_set": self.train_set, "test_set": self.test_set}
        return {name: images.state() for name, images in sets.items() if images is not None}

    def restore_data(self, state: dict[str, Any]) -> None:
        self.train_set.restore(state["train_set"])
        self.test_set.restore(state["test_set"])

    def read_initial(self, path: Any, like: Variables) -> Variables:
        return read_pretrained(path, like, self.config.model_name)

    def put(self, batch: Batch) -> Batch:
        return batch  # the pipeline has already done it

    def example_batches(self, batch_size: int) -> Sequence[Batch]:
        return [empty_batch(batch_size, self.about.image_shape)]

    def synthetic_batch(self) -> Batch:
        return random_batch(self.about, self.batch_size // jax.process_count())

    def benchmark_settings(self) -> dict[str, Any]:
        data = {"data": self.train_set.name, "image_shape": self.about.image_shape}
        return {"model": self.config.model_name, **data}

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
