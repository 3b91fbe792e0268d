"""The models by name; each becomes two pure functions, whether it is written in Linen or NNX."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import mpjax
from examples.common.cli import UsageError
from examples.common.training import Variables
from examples.imagenet.convnets import ConvNet, MnistCNN, NNXConvNet
from examples.imagenet.resnet import BasicBlock, Bottleneck, ResNet

# Random number streams available to a module in training.
_STREAMS = ("dropout", "stochastic_depth")


class Network(NamedTuple):
    """A stateless network as two pure functions."""

    init: Callable[[jax.Array, jax.Array], Variables]  # (key, images) -> variables, float32
    # (variables, images, key) -> (logits, stats); training if a key is given.
    apply: Callable[[Variables, jax.Array, jax.Array | None], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model's constructor and arguments, and the data for which its authors designed it."""

    make: Callable[..., Any]
    arguments: dict[str, Any]
    image_shape: tuple[int, int, int] = (224, 224, 3)
    classes: int = 1000


def _resnet(block: type[Any], *stage_sizes: int, **arguments: Any) -> Kind:
    return Kind(ResNet, {"block": block, "stage_sizes": stage_sizes, **arguments})


def _small_resnet(*stage_sizes: int) -> Kind:
    # The narrow networks of the paper's CIFAR-10 section, for small images.
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


def check_model(name: str) -> None:
    """Raises `UsageError` if `name` is not a model."""
    _kind(name)


def _kind(name: str) -> Kind:
    if name in KINDS:
        return KINDS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(f"--model {name!r}: give {', '.join(KINDS)}, or MODULE:CLASS for your own module.")
    try:
        return Kind(getattr(importlib.import_module(module), attribute), {})
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--model {name!r} can't be imported: {error}. Its folder must be on PYTHONPATH.") from error


def create_model(name: str, num_classes: int, channels: int = 3) -> Any:
    """The Flax module of that name; an NNX module is initialised, and needs the number of image channels."""
    kind = _kind(name)
    if _is_nnx(kind):
        return kind.make(num_classes, channels, rngs=nnx.Rngs(0), **kind.arguments)
    return kind.make(num_classes=num_classes, **kind.arguments)


def network(name: str, num_classes: int, channels: int, policy: mpjax.Policy | None = None) -> Network:
    """The model of that name as functions, with the policy, if any, set on its modules."""
    kind = _kind(name)
    if _is_nnx(kind):
        return _nnx_network(lambda rngs: kind.make(num_classes, channels, rngs=rngs, **kind.arguments), policy)
    return _linen_network(create_model(name, num_classes), policy)


def _is_nnx(kind: Kind) -> bool:
    return isinstance(kind.make, type) and issubclass(kind.make, nnx.Module)


def _linen_network(module: nn.Module, policy: mpjax.Policy | None) -> Network:
    if policy is not None:
        module = mpjax.with_policy(module, policy)
    # A module that behaves the same in training and evaluation may omit the argument.
    knows_train = "train" in inspect.signature(type(module).__call__).parameters

    def init(key: jax.Array, images: jax.Array) -> Variables:
        train: Any = {"train": False} if knows_train else {}
        variables = module.init(key, images, **train)
        return Variables(variables["params"], variables.get("batch_stats", {}))

    def apply(variables: Variables, images: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Any]:
        streams = {} if key is None else {name: jax.random.fold_in(key, i) for i, name in enumerate(_STREAMS)}
        train: Any = {"train": key is not None} if knows_train else {}
        collections = {"params": variables.params, "batch_stats": variables.stats}
        logits, new = module.apply(collections, images, rngs=streams, mutable=["batch_stats"], **train)
        return logits, new.get("batch_stats", {})

    return Network(init, apply)


def _nnx_network(make: Callable[[nnx.Rngs], nnx.Module], policy: mpjax.Policy | None) -> Network:
    def split(rngs: nnx.Rngs) -> tuple[Any, ...]:
        module = make(rngs)
        if policy is not None:
            module = mpjax.with_policy(module, policy)
        return nnx.split(module, nnx.Param, nnx.BatchStat, ...)

    graphdef, *like, rest = nnx.eval_shape(lambda: split(nnx.Rngs(0)))

    def init(key: jax.Array, images: jax.Array) -> Variables:
        _, params, stats, _ = split(nnx.Rngs(key))
        # Plain dictionaries: a checkpoint should not depend on Flax classes.
        return Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(stats))

    def apply(variables: Variables, images: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Any]:
        states = [jax.tree.map(lambda x: x, state) for state in like]  # copies, since the next line fills them in place
        for state, numbers in zip(states, variables, strict=True):
            nnx.replace_by_pure_dict(state, numbers)
        module: Any = nnx.merge(graphdef, *states, _fresh(rest, jax.random.key(0) if key is None else key))
        module.eval() if key is None else module.train()
        logits = module(images)
        return logits, nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

    return Network(init, apply)


def _fresh(abstract: Any, key: jax.Array) -> Any:
    """Fresh state other than parameters and statistics: random streams seeded by the step's key, and zeros."""

    def make(index: int, leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.fold_in(key, index)
        return jnp.zeros(leaf.shape, leaf.dtype)

    leaves, treedef = jax.tree.flatten(abstract)
    return jax.tree.unflatten(treedef, [make(index, leaf) for index, leaf in enumerate(leaves)])
