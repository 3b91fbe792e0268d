"""The flags of `python -m examples.imagenet`."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import mpjax
from examples.common.cli import UsageError

ModelName = Literal["resnet8", "resnet20", "resnet18", "resnet34", "resnet50", "resnet101"]

# Flags that say where and how to run but leave the result bit for bit the same: --resume may change them.
_NOT_PART_OF_THE_RUN = ("output", "resume", "workers", "save_every", "audit", "profile")


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains a ResNet on images in mixed precision and reports its test accuracy."""

    policy: str = "mixed_float16"
    """Precision: float32, mixed_float16, mixed_bfloat16, O0, O1, O2, O3, or dtypes such as
    "params=float32,compute=float16,output=float32"."""

    amp: Literal["module", "autocast"] = "module"
    """How the policy comes to the model: set on its modules (mpjax.with_policy), or on the traced operations
    (mpjax.autocast, for policies with float32 parameters)."""

    data_dir: Path | None = None
    """Folder with train/CLASS/*.jpg|jpeg|png and val/CLASS/... (ImageNet, Imagenette). Without it:
    the 1,797 handwritten digits that come with scikit-learn."""

    output: Path | None = None
    """Folder for the checkpoint, metrics.jsonl, summary.json and curves.png; new or empty. Without
    it: the next number in runs/imagenet."""

    resume: bool = False
    """Continue the interrupted run in --output from its newest checkpoint."""

    model: ModelName | None = None
    """Without it: resnet8 for the digits, resnet50 for --data-dir."""

    image_size: int | None = None
    """Side in pixels that images are cropped and resized to. Without it: 8 for the digits (their
    own), 224 for --data-dir."""

    epochs: int = 40
    """Passes over the training images."""

    batch_size: int = 64
    """Images in a step."""

    learning_rate: float = 0.1
    """Peak of the cosine schedule."""

    warmup_epochs: float = 2.0
    """Epochs over which the learning rate rises from zero to its peak."""

    momentum: float = 0.9
    """Nesterov momentum of SGD."""

    weight_decay: float = 5e-4
    """Weight decay on kernels (not on biases and normalisation)."""

    label_smoothing: float = 0.1
    """Share of each label that is spread over all classes."""

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
    """Threads that decode images of --data-dir."""

    audit: bool = False
    """Instead of training, print what of the training step runs in which precision (mpjax.audit)."""

    profile: bool = False
    """Instead of training, print where the time of some training steps goes (mpjax.profile)."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "workers"):
            self._require(name, getattr(self, name) >= 1, "must be 1 or more")
        self._require("image_size", self.image_size is None or self.image_size >= 8, "must be 8 or more")
        self._require("seed", 0 <= self.seed < 2**31, "must be between 0 and 2147483647")
        self._require("learning_rate", 0 < self.learning_rate < math.inf, "must be a positive number")
        for name in ("warmup_epochs", "weight_decay", "save_every"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "must be 0 or more")
        for name in ("momentum", "label_smoothing", "max_unreadable"):
            self._require(name, 0 <= getattr(self, name) < 1, "must be at least 0 and below 1")
        if self.data_dir is None and self.image_size not in (None, 8):
            raise UsageError(f"--image-size {self.image_size}: the digits are 8x8; leave it out or give --data-dir.")
        if self.resume and self.output is None:
            raise UsageError("--resume needs the folder of the run to continue: add --output DIR.")
        try:
            policy = mpjax.get_policy(self.policy)
        except ValueError as error:
            raise UsageError(f"--policy {self.policy!r}: {error}") from error
        if self.amp == "autocast" and policy.param_dtype != "float32":
            raise UsageError(
                f"--amp autocast keeps the parameters in float32, and --policy {self.policy!r} asks for "
                f"{policy.param_dtype} ones; take --amp module, or a policy such as mixed_float16."
            )

    @property
    def model_name(self) -> str:
        """The model's name, chosen by the data where no flag says it."""
        return self.model or ("resnet8" if self.data_dir is None else "resnet50")

    def settings(self) -> dict[str, Any]:
        """What decides the result, as JSON: what a resumed run must have in common with its first part."""
        settings = dataclasses.asdict(self)
        for name in _NOT_PART_OF_THE_RUN:
            del settings[name]
        return settings | {
            "data_dir": None if self.data_dir is None else str(self.data_dir.absolute()),
            "model": self.model_name,
        }

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {getattr(self, name)}: {what}.")
