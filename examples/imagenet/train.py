"""`python -m examples.imagenet`: trains image classifiers. From top to bottom: data, model, loss, step, tests.

`examples/common/` has what scripts share: the optimizer and its loss scale (optimizers.py), the loop (loop.py).
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from examples.common import modes, training
from examples.common.cli import UsageError, each_readable, listing, say
from examples.common.pictures import draw_confusion
from examples.common.records import read_file
from examples.common.run_folder import write_json
from examples.common.task import Program, Task
from examples.common.training import DataParallel, Model, Sums, TrainState, Variables, check_outputs
from examples.imagenet import data
from examples.imagenet.config import Config
from examples.imagenet.data import Array, Batch, Dataset, Description
from examples.imagenet.decoding import View, erase, mix_up, read_crop
from examples.imagenet.image_folder import open_image_folder
from examples.imagenet.models import KINDS, check_outputs_of, network, read_pretrained

# The images that the flags give: in folders or shards, of an installed package, or synthetic.

IMAGENET_IMAGES = 1_281_167  # for training


class Data(NamedTuple):
    """The images of a run, of which some may not be needed, and what a model must know about them."""

    about: Description
    train: Dataset | None = None
    test: Dataset | None = None


def open_data(config: Config, about: Description | None = None) -> Data:
    """Opens the images of the flags; `about` describes those of a trained model, which needs no training images."""
    if about is not None:
        whole = about.image_shape[-1] == 1  # a grey model sees the whole of each image of `--images`
        if whole if config.images else config.data_dir is None:
            config.refuse_flags_of_files()
        if config.images:
            return Data(about)
        (test,) = _open(config, ["val"], about.classes)
        if tuple(test.classes) != about.classes:
            differ = f"the classes {listing(about.classes)}, but {test.name} has {listing(test.classes)}"
            remedy = "Give the --data-dir that it was trained on, or one with the same class folders."
            raise UsageError(f"the model has {differ}. {remedy}")
        if test.image_shape != about.image_shape:
            raise UsageError(f"the model takes images of {about.image_shape}, but {test.name} has {test.image_shape}.")
        return Data(about, None, test)
    if config.is_benchmark:
        # A user's model is benchmarked with ImageNet's shape and classes.
        kind, side = KINDS.get(config.model_name, KINDS["resnet50"]), config.side
        names, channels = tuple(map(str, range(kind.classes))), kind.image_shape[-1]
        return Data(Description(names, (side, side, channels), (0.5,) * channels, (0.29,) * channels))
    train, test = _open(config, ["train", "val"])
    if len(train.classes) < 2:
        raise UsageError(f"{train.name} has one class, {train.classes[0]!r}: there is nothing to learn; add another.")
    if 2 * len(train.classes) > len(train):
        found = f"{train.name}: {len(train.classes)} classes for {len(train)} images"
        print(f"{found}: are the labels captions? --label-field names the field of shards.", file=sys.stderr)
    return Data(Description(tuple(train.classes), train.image_shape, train.mean, train.std), train, test)


def _open(config: Config, splits: Sequence[str], classes: Sequence[str] | None = None) -> Sequence[Dataset]:
    if config.data_dir is None:
        return [data.EMBEDDED[config.embedded]("train" if split == "train" else "test") for split in splits]
    fields = config.image_field, config.label_field
    return open_image_folder(config.data_dir, config.view, config.max_unreadable, splits, fields, classes)


class ImageTask(Task):
    """An image classifier and its data, on all devices."""

    config_type, unit = Config, "images"
    metric, metric_name, table = ("test_accuracy", 1), "test accuracy", {"test_accuracy": "test accuracy"}

    def __init__(self, config: Config, parallel: DataParallel, data: Data) -> None:
        super().__init__(config, parallel, data)
        self.about = data.about
        self.test_set: Any = data.test
        self.sets = {name: x for name, x in data._asdict().items() if isinstance(x, Dataset)}
        self.steps = IMAGENET_IMAGES // self.batch_size  # of a benchmark
        if data.train is not None:
            self.steps = self.steps_of(data.train.name, len(data.train))
        if data.test is not None:
            # A test set smaller than a batch is not padded to a full batch.
            self.test_count = len(data.test)
            self.test_batch_size = parallel.filled(min(self.batch_size, self.test_count))
        named = next((x.name for x in self.sets.values()), "synthetic images" if config.is_benchmark else "images")
        self.title = f"{config.model_name} on {named}, policy {config.policy}"
        self._stream: Any = None

    @classmethod
    def open(cls, config: Config, description: dict[str, Any] | None = None) -> Data:
        return open_data(config, None if description is None else Description.from_json(description))

    def facts(self) -> dict[str, Any]:
        unreadable = sum(map(len, self.skipped.values()))
        return {"model": self.config.model_name, **super().facts(), "unreadable_images": unreadable}

    def description(self) -> dict[str, Any]:
        return self.about._asdict()

    def identity(self) -> dict[str, Any]:
        return {f"{name} images": x.identity for name, x in self.sets.items()} | {"classes": self.about.classes}

    def read_initial(self, path: Any, like: Variables) -> Variables:
        return read_pretrained(path, like, self.config.model_name)

    def example_batches(self) -> Sequence[Batch]:
        return [data.empty_batch(self.batch_size, self.about.image_shape)]

    def synthetic_batch(self) -> Batch:
        rng, size = np.random.default_rng(0), self.batch_size
        images = rng.integers(0, 256, (size, *self.about.image_shape), np.uint8)
        return Batch(images, rng.integers(0, len(self.about.classes), size, np.int32), np.ones(size, np.float32))

    def benchmark_facts(self, items_per_second: float) -> dict[str, Any]:
        return {"model": self.config.model_name, "data": "synthetic images", "image_shape": self.about.image_shape}

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        if self._stream is None:
            # One stream over all epochs, so that the next epoch's first batches load during evaluation.
            last = self.epochs * self.steps if self.config.action == "train" else data.ENDLESS.stop
            order = self.config.seed, range(epoch * self.steps + first, last), self.config.augment
            self._stream = data.train_batches(self.data.train, self.batch_size, *order, self.loading)
        return itertools.islice(self._stream, self.steps - first)

    # Model, loss and step.

    @functools.cached_property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The model in the precision of the flags: its initialisation, its training form and its evaluation form."""
        config, about = self.config, self.about
        policy, by_modules = mpjax.get_policy(config.policy), config.amp == "module"
        net = network(config.model_name, len(about.classes), about.image_shape[-1], policy if by_modules else None)
        check_outputs_of(config.model_name, net, len(about.classes), about.image_shape)
        # Separate functions for training and evaluation, so that autocast sees the mode as a constant.
        train, use = net.apply, lambda variables, images: net.apply(variables, images, None)
        if not by_modules:
            train, use = mpjax.autocast(train, policy), mpjax.autocast(use, policy)
        return lambda key: net.init(key, jnp.zeros((1, *about.image_shape))), train, use

    def prepare(self, images: Any) -> jax.Array:
        """Normalises images on the device: transferring bytes takes a quarter of the bandwidth of float32."""
        mean, std = np.asarray(self.about.mean, np.float32), np.asarray(self.about.std, np.float32)
        return (jnp.asarray(images, jnp.float32) / 255 - mean) / std

    def model(self) -> Model:
        init, train, _ = self.functions

        def loss(params: Any, stats: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, tuple[Sums, Any]]:
            blend = mix_up(key, self.config.mixup, len(batch.labels))
            images = erase(jax.random.fold_in(key, 2), self.prepare(batch.images), self.config.random_erasing)
            logits, stats = train(Variables(params, stats), blend(images), jax.random.fold_in(key, 1))
            targets = optax.smooth_labels(_one_hot(batch, logits), self.config.label_smoothing)
            # Float32 even if the policy's output is half precision: the log-sum-exp needs the mantissa.
            losses = optax.softmax_cross_entropy(logits.astype(jnp.float32), blend(targets))
            sums = training.masked_sums(jnp.asarray(batch.mask), loss=losses, **correct(logits, batch.labels))
            return jnp.mean(losses), (sums, stats)

        def update(tx: Any, state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Sums]:
            value_and_grad = mpjax.value_and_grad(loss, state.opt_state, has_aux=True)
            (mean, (sums, stats)), grads = value_and_grad(state.params, state.stats, batch, key)
            params, opt_state = mpjax.apply_gradients(tx, grads, state.opt_state, state.params, value=mean)
            # A skipped step leaves the statistics as they were, too.
            stats = mpjax.keep_if_finite(opt_state, stats, state.stats)
            return state._replace(params=params, stats=stats, opt_state=opt_state), sums

        return Model(init, loss, update, self.sums)

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the sums over a batch."""
        return ("loss", "accuracy", *(("top5_accuracy",) if len(self.about.classes) > TOP else ()), "count")

    # Tests and predictions.

    @functools.cached_property
    def predict_step(self) -> jax.stages.Wrapped:
        """Jitted (variables, images) -> probabilities; NaN without finite logits."""
        use = self.functions[2]

        def predict_step(variables: Variables, images: Any) -> jax.Array:
            logits, _ = use(variables, self.prepare(images))
            finite = jnp.all(jnp.isfinite(logits), axis=-1, keepdims=True)
            return jnp.where(finite, jax.nn.softmax(logits.astype(jnp.float32)), jnp.nan)

        return jax.jit(predict_step)

    @functools.cached_property
    def _test_step(self) -> jax.stages.Wrapped:
        use = self.functions[2]

        def test_step(variables: Variables, sums: Sums, batch: Batch) -> Sums:
            logits, _ = use(variables, self.prepare(batch.images))
            finite = jnp.all(jnp.isfinite(logits), axis=-1)
            losses = optax.softmax_cross_entropy(logits.astype(jnp.float32), _one_hot(batch, logits))
            found = training.checked_sums(jnp.asarray(batch.mask), finite, loss=losses, **correct(logits, batch.labels))
            return jax.tree.map(jnp.add, sums, found)

        return jax.jit(test_step, donate_argnums=1)

    def _zero(self) -> Sums:
        return self.parallel.replicate(training.zeros((*self.sums, "nonfinite")))

    def test_programs(self, weights: Variables) -> list[Program]:
        batch = self.parallel.like_batch(data.empty_batch(self.test_batch_size, self.about.image_shape))
        return [(self._test_step, (weights, self._zero(), batch))]

    def test(self, weights: Variables, between_steps: Callable[[], None], *, last: bool = True) -> dict[str, Any]:
        sums = self._zero()
        for batch in data.evaluation_batches(self.test_set, self.test_batch_size, self.loading):
            between_steps()
            sums = self._test_step(weights, sums, batch)
        return training.test_metrics(sums, self.unit, last)

    def inference_step(self) -> jax.stages.Wrapped:
        return jax.jit(lambda variables, batch: self.predict_step(variables, batch.images))

    def predict(self, variables: Variables) -> dict[str, Any]:
        """Writes the predicted classes of `--images`, or else of all test images, to predictions.json."""
        config, classes = self.config, self.about.classes
        readable, unreadable = each_readable(config.images, self._read, "--images")
        images: Any = data.Files(self.about, readable) if config.images else self.test_set
        size = self.parallel.filled(min(self.batch_size, len(images)))
        weights, predictions = modes.cast_to_policy(self, variables), list[dict[str, Any]]()
        for number, batch in enumerate(data.evaluation_batches(images, size, self.loading)):
            found, mask = self.parallel.get((self.predict_step(weights, batch.images), batch.mask))
            for row in np.flatnonzero(mask):
                finite, best = bool(np.isfinite(found[row]).all()), int(np.argmax(found[row]))
                result = {"class": classes[best], "probability": float(found[row, best])}
                name, truth = images.name_of(number * size + int(row))
                of_file = {"image": name} | ({} if config.images else {"truth": truth})
                predictions.append(of_file | (result if finite else {"class": None, "probability": None}))
        nonfinite = sum(line["class"] is None for line in predictions)
        check_outputs(nonfinite, len(predictions), self.unit)
        for line in predictions if config.images else ():
            known = f"{line['class']} ({line['probability']:.1%})" if line["class"] else "inf or NaN"
            say(f"{line['image']}: {known}")
        pairs = [(line["truth"], line["class"]) for line in predictions if "truth" in line]
        truths, right = Counter(truth for truth, _ in pairs), Counter(truth for truth, found in pairs if truth == found)
        by_class = {name: {"images": truths[name], "accuracy": right[name] / truths[name]} for name in sorted(truths)}
        results = {"policy": config.policy, "model": config.model_name, "classes": by_class, "predictions": predictions}
        folder = config.output or Path()
        write_json(folder / "predictions.json", results)
        if pairs:
            draw_confusion(pairs, classes, folder / "confusion.png")
        say(f"{len(predictions)} predictions in {folder / 'predictions.json'}")
        return results | {"unreadable_files": unreadable, "test_nonfinite": nonfinite}

    def _read(self, path: Path) -> np.ndarray:
        """Reads an image as in evaluation, in the model's size and colours."""
        side, _, channels = self.about.image_shape
        # A digit fills its image; the subject of a photograph is in the centre.
        view = View(side, whole=True) if channels == 1 else self.config.view._replace(side=side)
        pixels = read_crop(read_file(path), view.crop())
        return np.round(pixels.mean(axis=-1, keepdims=True)).astype(np.uint8) if channels == 1 else pixels


# Top-1 and top-5 accuracy.

TOP = 5


def correct(logits: Array, labels: Array) -> dict[str, jax.Array]:
    """Whether each image's label is first, and with more than five classes whether it is among the first five.

    Ties are broken by the class, as a stable sort does, so that rounded logits gain nothing.
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)[:, None]
    own = jnp.take_along_axis(logits, labels, axis=-1)
    classes = jnp.arange(logits.shape[-1])
    rank = jnp.sum((logits > own) | ((logits == own) & (classes < labels)), axis=-1)
    tops = {"accuracy": 1, **({"top5_accuracy": TOP} if logits.shape[-1] > TOP else {})}
    return {name: (rank < top).astype(jnp.float32) for name, top in tops.items()}


def _one_hot(batch: Batch, logits: jax.Array) -> jax.Array:
    return jax.nn.one_hot(batch.labels, logits.shape[-1])


main = functools.partial(modes.main, ImageTask)
