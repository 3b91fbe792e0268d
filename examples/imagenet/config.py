"""The flags of `python -m examples.imagenet`."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import optax
import tyro

import mpjax
from examples.common.cli import UsageError
from examples.common.policies import check_policies
from examples.imagenet.models import KINDS, ModelName
from examples.imagenet.recipe import RECIPES, Hyperparameters, Recipe, RecipeName

Mode = Literal["train_and_evaluate", "train", "evaluate", "predict", "training_benchmark", "inference_benchmark"]

# What decides the result of a training, and so what a resumed run must have in common with its first part; but
# for the precision, which may change at any checkpoint.
_OF_THE_RUN = ("mode", "mixup", "ema", "accumulate", "clip_norm", "augment", "flip", "seed", "max_unreadable")
BENCHMARKS = ("training_benchmark", "inference_benchmark")
PRECISION = ("policy", "amp", "loss_scale")


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains image classifiers in mixed precision, tests them, and measures how fast they are."""

    mode: Mode = "train_and_evaluate"
    """What to do: train with a test after each epoch or without, test or use a trained model in --output, or
    measure speed (of made-up images without --data-dir)."""

    policy: str = "mixed_float16"
    """Precision: float32, mixed_float16, mixed_bfloat16, O0, O1, O2, O3, or dtypes such as
    "params=float32,compute=float16,output=float32"."""

    amp: Literal["module", "autocast"] = "module"
    """How the policy comes to the model: set on its modules (mpjax.with_policy), or on the traced operations
    (mpjax.autocast, for policies with float32 parameters)."""

    loss_scale: str | None = None
    """dynamic, or a number that stays. Without it: dynamic where the policy computes in float16, else 1."""

    data_dir: Path | None = None
    """Folder with train/CLASS/*.jpg|jpeg|png and val/CLASS/... (ImageNet, Imagenette). Without it:
    the 1,797 handwritten digits that come with scikit-learn."""

    output: Annotated[Path | None, tyro.conf.arg(aliases=["--results-dir"])] = None
    """Folder for checkpoints, metrics, summary.json, curves.png and event files; new or empty for a training.
    Without it: the next number in runs/imagenet."""

    resume: bool = False
    """Continue the interrupted run in --output from its newest checkpoint, in the same precision or another."""

    model: ModelName | None = None
    """Without it: resnet8 for the digits, else resnet50."""

    image_size: int | None = None
    """Side in pixels that images are cropped and resized to. Without it: 8 for the digits (their own), else what the
    model was made for, such as 224."""

    recipe: RecipeName | None = None
    """What the flags below are where they are not given. Without it: digits for the digits, else imagenet."""

    epochs: int | None = None
    """Passes over the training images; digits: 40, imagenet: 90."""

    batch_size: int | None = None
    """Images in a step, on all devices together; digits: 64, imagenet: 256."""

    learning_rate: float | None = None
    """Peak of the cosine schedule; digits: 0.1, imagenet: 0.256 for each 256 images of a batch."""

    warmup_epochs: float | None = None
    """Epochs over which the learning rate rises from zero to its peak; digits: 2, imagenet: 5."""

    momentum: float | None = None
    """Momentum of SGD; digits: 0.9, imagenet: 0.875."""

    nesterov: bool | None = None
    """Nesterov's momentum; digits: yes, imagenet: no."""

    weight_decay: float | None = None
    """Weight decay on kernels (not on biases and normalisation); digits: 5e-4, imagenet: 1/32768."""

    label_smoothing: float | None = None
    """Share of each label that is spread over all classes; 0.1."""

    mixup: float = 0.0
    """Blend images and their labels with weights from Beta(MIXUP, MIXUP); ImageNet: 0.2. 0 blends nothing."""

    ema: float = 0.0
    """Decay of a moving average of the weights, which is then what is tested; such as 0.9999. 0 keeps none."""

    accumulate: int = 1
    """Steps whose gradients are averaged to one update."""

    clip_norm: float | None = None
    """Largest norm of all gradients together; longer ones are shortened to it."""

    augment: bool = True
    """Shift the digits by a pixel; crop images of --data-dir at random."""

    flip: bool = True
    """Mirror images of --data-dir at random; --no-flip where left and right matter."""

    seed: int = 0
    """Of the initial weights, the order of the images and their augmentation."""

    max_unreadable: float = 0.01
    """Share of images in --data-dir that may fail to decode and are skipped; more is an error."""

    save_every: float = 60.0
    """Seconds between two checkpoints (there is one at the end and on interruption anyway)."""

    workers: Annotated[int, tyro.conf.arg(help_behavior_hint="(default: number of cores)")] = os.cpu_count() or 1
    """Threads or processes that decode images of --data-dir."""

    worker_kind: Literal["thread", "process"] = "thread"
    """Processes take seconds to start, and pay where many cores decode small images."""

    cache: bool = False
    """Decode all images of --data-dir once, at the start, and keep them in memory."""

    warmup_steps: int = 200
    """Benchmarks: steps before those that are measured."""

    num_iter: int = 500
    """Benchmarks: how much is measured, in the unit of --iter-unit."""

    iter_unit: Literal["batch", "epoch"] = "batch"
    """Benchmarks: whether --num-iter counts steps, or passes over the images of --data-dir."""

    compare: str | None = None
    """Policies, with commas between: measure all of them, in turns in one process, and print and plot a table. With
    --mode train_and_evaluate each is trained too, and the table has its accuracy."""

    batch_sizes: str | None = None
    """Batch sizes of --compare, with commas between. Without it: --batch-size alone."""

    find_batch_size: bool = False
    """Print the largest power of two of images that a training step has memory for, in each policy."""

    memory_limit: float | None = None
    """GiB that --find-batch-size and --compare may take. Without it: what the device has; on a CPU the machine's."""

    images: tuple[Path, ...] = ()
    """--mode predict: files to name the classes of. Without it: the test images."""

    weights: Path | None = None
    """--mode evaluate or predict: a file that --export wrote, instead of the checkpoint in --output."""

    export: Literal["float16", "bfloat16", "float32"] | None = None
    """Write the trained weights in this dtype for inference, and test them against the weights they are made of."""

    audit: bool = False
    """Instead of training, print what of a step runs in which precision (mpjax.audit); in --output, audit.html."""

    profile: bool = False
    """Instead of training, print where the time of some steps goes (mpjax.profile); in --output, profile.html."""

    devices: int | None = None
    """Devices of each process that share a batch; all without it."""

    coordinator: str | None = None
    """Several processes: HOST:PORT of process 0, or auto where JAX knows the cluster."""

    processes: int | None = None
    """How many processes there are in all."""

    process_id: int | None = None
    """Which of them this is, from 0."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_precision()
        self._check_together()

    def _check_numbers(self) -> None:
        for name in ("epochs", "batch_size", "workers", "accumulate", "num_iter"):
            self._require(name, lambda x: x >= 1, "must be 1 or more")
        self._require("image_size", lambda x: x >= 8, "must be 8 or more")
        self._require("seed", lambda x: 0 <= x < 2**31, "must be between 0 and 2147483647")
        for name in ("learning_rate", "clip_norm", "memory_limit"):
            self._require(name, lambda x: 0 < x < math.inf, "must be a positive number")
        for name in ("warmup_epochs", "weight_decay", "save_every", "mixup", "warmup_steps"):
            self._require(name, lambda x: 0 <= x < math.inf, "must be 0 or more")
        for name in ("momentum", "label_smoothing", "max_unreadable", "ema"):
            self._require(name, lambda x: 0 <= x < 1, "must be at least 0 and below 1")
        if self.batch_sizes is not None and not all(x.isdecimal() and int(x) for x in self.batch_sizes.split(",")):
            raise UsageError(
                f"--batch-sizes {self.batch_sizes!r}: give numbers with commas between, such as 32,64,128."
            )

    def _check_precision(self) -> None:
        check_policies(self.policies, "--policy" if self.compare is None else "--compare", self.amp)
        if self.loss_scale not in (None, "dynamic"):
            try:
                mpjax.static_loss_scale(optax.identity(), float(self.loss_scale or ""))
            except ValueError as error:
                raise UsageError(
                    f"--loss-scale {self.loss_scale!r}: give dynamic, or a number from 2**-126 to 2**126."
                ) from error

    def _check_together(self) -> None:
        if self.on_digits and self.image_size not in (None, 8):
            raise UsageError(f"--image-size {self.image_size}: the digits are 8x8; leave it out or give --data-dir.")
        if self.output is None:
            if self.resume:
                raise UsageError("--resume needs the folder of the run to continue: add --output DIR.")
            if self.mode in ("evaluate", "predict") and self.weights is None:
                raise UsageError(f"--mode {self.mode} needs a trained model: add --output DIR or --weights FILE.")
        if self.export is not None and (self.weights is not None or self.mode in ("predict", *BENCHMARKS)):
            raise UsageError(
                "--export writes the weights of a run: give it to a training, or to --mode evaluate --output DIR."
            )
        if self.iter_unit == "epoch" and self.data_dir is None:
            raise UsageError("--iter-unit epoch counts passes over --data-dir: give one, or --iter-unit batch.")

    @property
    def policies(self) -> tuple[str, ...]:
        """All that are asked for."""
        return (self.policy,) if self.compare is None else tuple(self.compare.split(","))

    @property
    def is_benchmark(self) -> bool:
        """Whether only speed counts, not what is learned."""
        return self.mode in BENCHMARKS

    @property
    def on_digits(self) -> bool:
        """Whether the images are the digits."""
        return self.data_dir is None and not self.is_benchmark

    @property
    def model_name(self) -> ModelName:
        """The model's name, chosen by the data where no flag says it."""
        return self.model or ("resnet8" if self.on_digits else "resnet50")

    @property
    def side(self) -> int:
        """Of an image, in pixels."""
        return self.image_size or (8 if self.on_digits else KINDS[self.model_name].image_shape[0])

    @property
    def preset(self) -> Recipe:
        """The recipe, with the flags of its fields in place."""
        recipe = RECIPES[self.recipe or ("digits" if self.on_digits else "imagenet")]
        given = {name: getattr(self, name) for name in recipe._fields if getattr(self, name, None) is not None}
        if "learning_rate" in given:
            given["per_256_images"] = False
        return recipe._replace(**given)

    def hyperparameters(self, steps_per_epoch: int) -> Hyperparameters:
        """What optimizer and loss are made of, for epochs of so many steps."""
        preset = self.preset
        images = preset.batch_size * self.accumulate
        return Hyperparameters(
            learning_rate=preset.learning_rate * (images / 256 if preset.per_256_images else 1),
            warmup_steps=round(preset.warmup_epochs * steps_per_epoch / self.accumulate),
            updates=max(1, preset.epochs * steps_per_epoch // self.accumulate),
            momentum=preset.momentum,
            nesterov=preset.nesterov,
            weight_decay=preset.weight_decay,
            label_smoothing=preset.label_smoothing,
            mixup=self.mixup,
            ema=self.ema,
            accumulate=self.accumulate,
            clip_norm=self.clip_norm,
        )

    def settings(self) -> dict[str, Any]:
        """What decides the result, as JSON: what a resumed run must have in common with its first part."""
        return {
            **{name: getattr(self, name) for name in (*PRECISION, *_OF_THE_RUN)},
            **self.preset._asdict(),
            "data_dir": None if self.data_dir is None else str(self.data_dir.absolute()),
            "model": self.model_name,
            "image_size": self.side,
        }

    def with_precision(self, precision: dict[str, Any]) -> Config:
        """The same flags but for those of `PRECISION`."""
        return dataclasses.replace(self, compare=None, **precision)

    def _require(self, name: str, holds: Any, what: str) -> None:
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise UsageError(f"--{name.replace('_', '-')} {value}: {what}.")
