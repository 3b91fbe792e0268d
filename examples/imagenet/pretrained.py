"""Loads torchvision and timm weights, which share parameter names, into the ResNets of this example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from examples.common.cli import UsageError
from examples.common.devices import say
from examples.common.training import Variables
from examples.common.weights import file_shapes, file_variables, named
from examples.imagenet.models import KINDS

# Names of Flax parameters and statistics in torch.
_LEAVES = {
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}


def read_pretrained(path: Path, like: Variables, model: str) -> Variables:
    """Reads variables from a file with the names of an export, or of torchvision and timm.

    If a torch file has a different number of classes, its head is skipped, and the model's keeps its random weights.

    Args:
        path: A .safetensors or .pth file.
        like: The model's variables; they must be concrete if the head may have to be kept.
        model: The model's name.

    Raises:
        UsageError: The file belongs to another model.
    """
    shapes = file_shapes(path, "--init-from")
    if "fc.weight" not in shapes or "layer1.0.conv1.weight" not in shapes:
        return file_variables(path, like, "--init-from")
    if not model.startswith("resnet"):
        raise UsageError(f"--init-from {str(path)!r} is a torchvision ResNet, but --model {model} is not a ResNet.")
    stages = enumerate(KINDS[model].arguments["stage_sizes"], start=1)
    blocks = [f"layer{stage}.{index}" for stage, count in stages for index in range(count)]
    names = {name: _torch_name(name, blocks) for name in named(like._asdict())}
    keep: tuple[str, ...] = ()
    classes = shapes["fc.weight"][0]
    if classes != like.params["Dense_0"]["bias"].shape[0]:
        say(f"{path} has {classes} classes: the last layer starts from random weights")
        keep = ("params/Dense_0/kernel", "params/Dense_0/bias")
    return file_variables(path, like, "--init-from", names, _to_flax, keep)


def _torch_name(name: str, blocks: Sequence[str]) -> str:
    """`params/BasicBlock_3/Conv_1/kernel` as `layer2.1.conv2.weight`."""
    _, *path, leaf = name.split("/")
    leaf = _LEAVES[leaf]
    if path == ["stem"]:
        return f"conv1.{leaf}"
    if path == ["stem_norm"]:
        return f"bn1.{leaf}"
    if path == ["Dense_0"]:
        return f"fc.{leaf}"
    block, layer = path
    torch_layer = {"shortcut": "downsample.0", "shortcut_norm": "downsample.1"}.get(layer)
    if torch_layer is None:
        kind, number = layer.split("_")
        torch_layer = f"{'conv' if kind == 'Conv' else 'bn'}{int(number) + 1}"
    return f"{blocks[int(block.split('_')[1])]}.{torch_layer}.{leaf}"


def _to_flax(array: np.ndarray | jax.Array) -> np.ndarray:
    """Convolutions from [out, in, height, width] to [height, width, in, out], matmuls from [out, in] to [in, out]."""
    array = np.asarray(array)
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
