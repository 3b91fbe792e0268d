"""The models by name; each becomes two pure functions, whether it is written in Linen or NNX."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from examples.common.cli import UsageError, one_line, say
from examples.common.training import Variables
from examples.common.weights import named, open_arrays
from examples.imagenet.networks import BasicBlock, Bottleneck, ConvNet, MnistCNN, ResNet

# Random number streams available to a module in training.
_STREAMS = ("dropout", "stochastic_depth")
# The arguments by which Linen modules are told that they train, with the value in training.
_TRAIN_FLAGS = {"train": True, "training": True, "is_training": True, "deterministic": False}
# What an NNX module holds beside parameters: statistics, constants, tables. Random streams get new keys at each step.
_STATE = nnx.Not(nnx.Any(nnx.Param, nnx.RngState))


class Network(NamedTuple):
    """A stateless network as two pure functions."""

    init: Callable[[jax.Array, jax.Array], Variables]  # (key, images) -> variables, float32
    # (variables, images, key) -> (logits, stats); training if a key is given.
    apply: Callable[[Variables, jax.Array, jax.Array | None], tuple[jax.Array, Any]]


class Kind(NamedTuple):
    """A model's constructor and arguments, and the data for which its authors designed it."""

    make: Callable[..., Any]
    arguments: dict[str, Any]
    image_shape: tuple[int, int, int] = (224, 224, 3)
    classes: int = 1000


def _resnet(block: type[Any], *stage_sizes: int) -> Kind:
    return Kind(ResNet, {"block": block, "stage_sizes": stage_sizes})


def _small_resnet(*stage_sizes: int) -> Kind:
    # The narrow networks of the paper's CIFAR-10 section, for small images.
    return Kind(ResNet, {"block": BasicBlock, "stage_sizes": stage_sizes, "width": 16}, (32, 32, 3), 10)


KINDS: dict[str, Kind] = {
    "resnet8": _small_resnet(1, 1, 1),
    "resnet20": _small_resnet(3, 3, 3),
    "resnet18": _resnet(BasicBlock, 2, 2, 2, 2),
    "resnet34": _resnet(BasicBlock, 3, 4, 6, 3),
    "resnet50": _resnet(Bottleneck, 3, 4, 6, 3),
    "resnet101": _resnet(Bottleneck, 3, 4, 23, 3),
    "convnet": Kind(ConvNet, {}, (256, 256, 3), 10),
    "mnist_cnn": Kind(MnistCNN, {}, (28, 28, 1), 10),
}


def kind_of(name: str) -> Kind:
    """The model of that name; raises `UsageError` if there is none."""
    if name in KINDS:
        return KINDS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(f"--model {name!r}: give {', '.join(KINDS)}, or MODULE:CLASS for your own module.")
    try:
        return Kind(getattr(importlib.import_module(module), attribute), {})
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--model {name!r} can't be imported: {error}. Its folder must be on PYTHONPATH.") from error


def create_model(name: str, num_classes: int, channels: int = 3, rngs: nnx.Rngs | None = None) -> Any:
    """The Flax module of that name; an NNX module is initialised, and needs the number of image channels."""
    kind = kind_of(name)
    try:
        if _is_nnx(kind):
            return kind.make(num_classes, channels, rngs=rngs or nnx.Rngs(0), **kind.arguments)
        return kind.make(num_classes=num_classes, **kind.arguments)
    except TypeError as error:
        form = "NAME(num_classes, channels, *, rngs)" if _is_nnx(kind) else "NAME(num_classes=...)"
        raise UsageError(f"--model {name}: it is made as {form}, but: {one_line(error)}") from error


def network(name: str, num_classes: int, channels: int, policy: mpjax.Policy | None = None) -> Network:
    """The model of that name as functions, with the policy, if any, set on its modules."""
    kind = kind_of(name)
    if _is_nnx(kind):
        return _nnx_network(lambda rngs: create_model(name, num_classes, channels, rngs), policy)
    return _linen_network(name, create_model(name, num_classes), policy)


def check_outputs_of(name: str, net: Network, num_classes: int, image_shape: tuple[int, ...]) -> None:
    """Checks that a user's model returns a score for each class.

    Raises:
        UsageError: It returns something else.
    """
    if name in KINDS:
        return
    images = jax.ShapeDtypeStruct((2, *image_shape), jnp.float32)
    out: Any = jax.eval_shape(lambda key, x: net.apply(net.init(key, x), x, None)[0], jax.random.key(0), images)
    if getattr(out, "shape", None) != (2, num_classes):
        found = jax.tree.map(lambda x: x.shape, out)
        where = f"for 2 images of {num_classes} classes"
        raise UsageError(f"--model {name}: {where} it returns {found}, not (2, {num_classes}).")


def _is_nnx(kind: Kind) -> bool:
    return isinstance(kind.make, type) and issubclass(kind.make, nnx.Module)


def _train_flag(name: str, module: nn.Module) -> str | None:
    """The argument that tells a Linen module that it trains. One that behaves the same in evaluation may omit it."""
    _, _, *parameters = inspect.signature(type(module).__call__).parameters.values()  # beside self and the images
    flags = [p.name for p in parameters if p.name in _TRAIN_FLAGS]
    for p in parameters:
        variadic = p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if p.name not in flags and not variadic and (p.default is p.empty or isinstance(p.default, bool)):
            known = f"the flag for training is one of {', '.join(_TRAIN_FLAGS)}."
            raise UsageError(f"--model {name}: its argument {p.name!r} is not known; {known}")
    return flags[0] if flags else None


def _linen_network(name: str, module: nn.Module, policy: mpjax.Policy | None) -> Network:
    flag = _train_flag(name, module)
    if policy is not None:
        module = mpjax.with_policy(module, policy)

    def mode(train: bool) -> Any:
        return {} if flag is None else {flag: _TRAIN_FLAGS[flag] == train}

    def init(key: jax.Array, images: jax.Array) -> Variables:
        variables = module.init(key, images, **mode(train=False))
        if others := sorted(set(variables) - {"params", "batch_stats"}):
            kept = "this script keeps params and batch_stats."
            raise UsageError(f"--model {name}: it has the collections {', '.join(others)}; {kept}")
        return Variables(variables["params"], variables.get("batch_stats", {}))

    def apply(variables: Variables, images: jax.Array, key: jax.Array | None) -> tuple[jax.Array, Any]:
        streams = {} if key is None else {name: jax.random.fold_in(key, i) for i, name in enumerate(_STREAMS)}
        collections = {"params": variables.params, "batch_stats": variables.stats}
        logits, new = module.apply(collections, images, rngs=streams, mutable=["batch_stats"], **mode(key is not None))
        return logits, new.get("batch_stats", {})

    return Network(init, apply)


def _nnx_network(make: Callable[[nnx.Rngs], nnx.Module], policy: mpjax.Policy | None) -> Network:
    def split(rngs: nnx.Rngs) -> tuple[Any, ...]:
        module = make(rngs)
        if policy is not None:
            module = mpjax.with_policy(module, policy)
        return nnx.split(module, nnx.Param, _STATE, ...)

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
        return logits, nnx.to_pure_dict(nnx.state(module, _STATE))

    return Network(init, apply)


def _fresh(abstract: Any, key: jax.Array) -> Any:
    """Fresh random streams: keys from the step's key, and counts of zero."""

    def make(index: int, leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.fold_in(key, index)
        return jnp.zeros(leaf.shape, leaf.dtype)

    leaves, treedef = jax.tree.flatten(abstract)
    return jax.tree.unflatten(treedef, [make(index, leaf) for index, leaf in enumerate(leaves)])


# Weights of torchvision and timm, which share parameter names, for the ResNets.

# Names of Flax parameters and statistics in torch.
_TORCH_ENDS = {"stem": "conv1", "stem_norm": "bn1", "Dense_0": "fc"}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


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
    arrays = open_arrays(path, "--init-from")
    shapes = arrays.shapes
    if "fc.weight" not in shapes or "layer1.0.conv1.weight" not in shapes:
        return arrays.variables(like)
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
    return arrays.variables(like, names, _to_flax, keep)


def _torch_name(name: str, blocks: Sequence[str]) -> str:
    """`params/BasicBlock_3/Conv_1/kernel` as `layer2.1.conv2.weight`."""
    _, *path, leaf = name.split("/")
    leaf = _LEAVES[leaf]
    if len(path) == 1:
        return f"{_TORCH_ENDS[path[0]]}.{leaf}"
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
