"""Trained weights: out of a run's checkpoint, in a file for inference, and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp

import mpjax
from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError
from examples.imagenet.data import Dataset
from examples.imagenet.models import ModelName, Variables
from examples.imagenet.precision_change import float32_params
from examples.imagenet.task import ImageTask


class About(NamedTuple):
    """What a file of weights says of itself."""

    model: ModelName
    dtype: str
    image_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, model: ModelName, dtype: str, data: Dataset) -> About:
        return cls(model, dtype, data.image_shape, tuple(data.classes), tuple(data.mean), tuple(data.std))


def trained_variables(task: ImageTask, folder: Path) -> Variables:
    """The float32 variables of a run's newest checkpoint: the moving average where there is one.

    Raises:
        UsageError: there is no checkpoint, or it is of another model.
    """
    path = folder / "checkpoints"
    if not path.is_dir():
        raise UsageError(f"--output {str(folder)!r} holds no checkpoints; give the folder of a training.")
    with Checkpoints(path) as checkpoints:
        restored = task.restore_as_saved(checkpoints)
    if restored is None:
        raise UsageError(f"--output {str(folder)!r} holds no checkpoint yet: the run was ended before its first.")
    state, _ = restored
    return state.ema or {"params": float32_params(state), "batch_stats": state.batch_stats}


def cast_weights(variables: Variables, dtype: str) -> Variables:
    """Variables for inference: parameters in `dtype`, statistics in float32.

    Raises:
        UsageError: a parameter is out of the range of `dtype`; it is named.
    """
    policy = mpjax.get_policy(f"params={dtype},compute={dtype},output=float32")
    params = policy.cast_to_param(variables["params"])
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not bool(jnp.isfinite(leaf).all()):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise UsageError(f"--export {dtype}: the parameter {name} is out of its range; take bfloat16 or float32.")
    return {"params": params, "batch_stats": variables["batch_stats"]}


def write_weights(path: Path, variables: Variables, about: About) -> None:
    """Writes one file, whole or not at all: MessagePack, as Flax reads it, with what is needed to use the weights."""
    data = flax.serialization.msgpack_serialize({"about": about._asdict(), **jax.device_get(variables)})
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def read_weights(path: Path) -> tuple[Variables, About]:
    """What `write_weights` wrote.

    Raises:
        UsageError: the file can not be read, or is something else.
    """
    try:
        tree = flax.serialization.msgpack_restore(path.read_bytes())
        about = About(**{name: _tuple(value) for name, value in tree.pop("about").items()})
        return {"params": tree["params"], "batch_stats": tree["batch_stats"]}, about
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--weights {str(path)!r} is not a file that --export wrote: {error}") from error


def _tuple(value: Any) -> Any:
    # MessagePack has no tuples: Flax makes dictionaries of them.
    if isinstance(value, dict):
        return tuple(value[str(index)] for index in range(len(value)))
    return tuple(value) if isinstance(value, list) else value
