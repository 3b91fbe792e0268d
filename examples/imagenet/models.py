"""The models by name, each as two pure functions, whether it is written in Linen or NNX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import flax.linen as nn
import jax
from flax import nnx

import mpjax
from examples.imagenet.convnets import ConvNet, MnistCNN, NNXConvNet
from examples.imagenet.resnet import BasicBlock, Bottleneck, ResNet

ModelName = Literal[
    "resnet8",
    "resnet20",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "convnet",
    "convnet_nnx",
    "mnist_cnn",
]
MODEL_NAMES: tuple[str, ...] = get_args(ModelName)

Variables = dict[str, Any]  # "params" and "batch_stats"


class Model(NamedTuple):
    """A network without state of its own."""

    init: Callable[[jax.Array, jax.Array], Variables]  # (key, images) -> variables, float32
    apply: Callable[[Variables, jax.Array, bool], tuple[jax.Array, Any]]  # (.., train) -> (logits, batch_stats)


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a model is made of, and the data that its authors made it for."""

    make: Callable[..., Any]
    arguments: dict[str, Any]
    image_shape: tuple[int, int, int] = (224, 224, 3)
    classes: int = 1000


def _resnet(block: type[Any], *stage_sizes: int, **arguments: Any) -> Kind:
    return Kind(ResNet, {"block": block, "stage_sizes": stage_sizes, **arguments})


def _small_resnet(*stage_sizes: int) -> Kind:
    # The narrow ones of the paper's CIFAR-10 section, for images of a few pixels.
    kind = _resnet(BasicBlock, *stage_sizes, width=16)
    return dataclasses.replace(kind, image_shape=(32, 32, 3), classes=10)


KINDS: dict[str, Kind] = {
    "resnet8": _small_resnet(1, 1, 1),
    "resnet20": _small_resnet(3, 3, 3),
    "resnet18": _resnet(BasicBlock, 2, 2, 2, 2),
    "resnet34": _resnet(BasicBlock, 3, 4, 6, 3),
    "resnet50": _resnet(Bottleneck, 3, 4, 6, 3),
    "resnet101": _resnet(Bottleneck, 3, 4, 23, 3),
    "convnet": Kind(ConvNet, {}, (256, 256, 3), 10),
    "convnet_nnx": Kind(NNXConvNet, {}, (256, 256, 3), 10),
    "mnist_cnn": Kind(MnistCNN, {}, (28, 28, 1), 10),
}


def create_model(name: str, num_classes: int, channels: int, policy: mpjax.Policy | None = None) -> Model:
    """The model of that name, with the policy set on its modules where there is one."""
    kind = KINDS[name]
    if issubclass(kind.make, nnx.Module):  # type: ignore[arg-type]
        return _nnx_model(lambda rngs: kind.make(num_classes, channels, rngs=rngs, **kind.arguments), policy)
    return _linen_model(kind.make(num_classes=num_classes, **kind.arguments), policy)


def _linen_model(module: nn.Module, policy: mpjax.Policy | None) -> Model:
    if policy is not None:
        module = mpjax.with_policy(module, policy)

    def init(key: jax.Array, images: jax.Array) -> Variables:
        return {"batch_stats": {}, **module.init(key, images)}

    def apply(variables: Variables, images: jax.Array, train: bool) -> tuple[jax.Array, Any]:
        logits, new = module.apply(variables, images, train=train, mutable=["batch_stats"])
        return logits, new.get("batch_stats", {})

    return Model(init, apply)


def _nnx_model(make: Callable[[nnx.Rngs], nnx.Module], policy: mpjax.Policy | None) -> Model:
    def split(rngs: nnx.Rngs) -> tuple[Any, ...]:
        module = make(rngs)
        if policy is not None:
            module = mpjax.with_policy(module, policy)
        return nnx.split(module, nnx.Param, nnx.BatchStat)

    graphdef, *like = split(nnx.Rngs(0))

    def init(key: jax.Array, images: jax.Array) -> Variables:
        _, params, batch_stats = split(nnx.Rngs(key))
        # Plain dictionaries: a checkpoint should not depend on a class of Flax.
        return {"params": nnx.to_pure_dict(params), "batch_stats": nnx.to_pure_dict(batch_stats)}

    def apply(variables: Variables, images: jax.Array, train: bool) -> tuple[jax.Array, Any]:
        states = [jax.tree.map(lambda x: x, state) for state in like]  # copies: the next line fills them
        for state, name in zip(states, ("params", "batch_stats"), strict=True):
            nnx.replace_by_pure_dict(state, variables[name])
        module: Any = nnx.merge(graphdef, *states)
        module.train() if train else module.eval()
        logits = module(images)
        return logits, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

    return Model(init, apply)
