"""The classifier's loss, and its evaluation and prediction steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from examples.common.training import Loss, Model, Sums, Variables, evaluation_sums, masked_sums
from examples.imagenet.config import Config
from examples.imagenet.data import Array, Batch, Description
from examples.imagenet.models import check_outputs_of, network

_TOP = 5


class Classifier(NamedTuple):
    """A model in its precision: the training loss, and the jitted evaluation and prediction steps."""

    model: Model
    test_metrics: tuple[str, ...]  # the names of the test step's sums
    test_step: jax.stages.Wrapped  # (Variables, Sums, Batch) -> Sums; donates Sums
    predict_step: jax.stages.Wrapped  # (Variables, images) -> probabilities; NaN without finite logits


def create_classifier(config: Config, data: Description) -> Classifier:
    """Creates the model given by the flags for images with this description."""
    policy = mpjax.get_policy(config.policy)
    by_modules = config.amp == "module"
    net = network(config.model_name, len(data.classes), data.image_shape[-1], policy if by_modules else None)
    check_outputs_of(config.model_name, net, len(data.classes), data.image_shape)
    prepare = _normaliser(data.mean, data.std)
    smoothing, mixup = config.preset.label_smoothing, config.mixup

    # Separate functions for training and evaluation, so that autocast sees the mode as a constant.
    def train(variables: Variables, images: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        return net.apply(variables, images, key)

    def use(variables: Variables, images: jax.Array) -> tuple[jax.Array, Any]:
        return net.apply(variables, images, None)

    if not by_modules:
        train, use = mpjax.autocast(train, policy), mpjax.autocast(use, policy)

    def init(key: jax.Array) -> Variables:
        return net.init(key, jnp.zeros((1, *data.image_shape)))

    def loss(variables: Variables, batch: Batch, key: jax.Array, extra: Any) -> Loss:
        blend = mix_up(key, mixup, len(batch.labels))
        logits, stats = train(variables, blend(prepare(batch.images)), jax.random.fold_in(key, 1))
        targets = optax.smooth_labels(jax.nn.one_hot(batch.labels, logits.shape[-1]), smoothing)
        losses = _losses(logits, blend(targets))
        sums = masked_sums(jnp.asarray(batch.mask), loss=losses, **correct(logits, batch.labels))
        return Loss(jnp.mean(losses), sums, stats)

    def test_step(variables: Variables, sums: Sums, batch: Batch) -> Sums:
        logits, _ = use(variables, prepare(batch.images))
        finite = jnp.all(jnp.isfinite(logits), axis=-1)
        losses = _losses(jnp.where(finite[:, None], logits, 0), jax.nn.one_hot(batch.labels, logits.shape[-1]))
        found = evaluation_sums(jnp.asarray(batch.mask), finite, loss=losses, **correct(logits, batch.labels))
        return jax.tree.map(jnp.add, sums, found)

    def predict_step(variables: Variables, images: Array) -> jax.Array:
        logits, _ = use(variables, prepare(images))
        finite = jnp.all(jnp.isfinite(logits), axis=-1, keepdims=True)
        return jnp.where(finite, jax.nn.softmax(logits.astype(jnp.float32)), jnp.nan)

    names = ("loss", "accuracy", *(("top5_accuracy",) if len(data.classes) > _TOP else ()), "count")
    return Classifier(
        Model(init, loss, sums=names),
        (*names, "nonfinite"),
        jax.jit(test_step, donate_argnums=1),
        jax.jit(predict_step),
    )


def correct(logits: Array, labels: Array) -> dict[str, jax.Array]:
    """Whether each image's label is first, and with more than five classes whether it is among the first five.

    Ties are broken by the class, as a stable sort does, so that rounded logits gain nothing.
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)[:, None]
    own = jnp.take_along_axis(logits, labels, axis=-1)
    classes = jnp.arange(logits.shape[-1])
    rank = jnp.sum((logits > own) | ((logits == own) & (classes < labels)), axis=-1)
    tops = {"accuracy": 1, **({"top5_accuracy": _TOP} if logits.shape[-1] > _TOP else {})}
    return {name: (rank < top).astype(jnp.float32) for name, top in tops.items()}


def _normaliser(mean: Sequence[float], std: Sequence[float]) -> Callable[[Array], jax.Array]:
    # Runs on the device: transferring bytes takes a quarter of the bandwidth of float32.
    means, stds = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    return lambda images: (jnp.asarray(images, jnp.float32) / 255 - means) / stds


def _losses(logits: Array, targets: Array) -> jax.Array:
    # Float32 even if the policy's output is half precision: the log-sum-exp needs the mantissa.
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)


def mix_up(key: jax.Array, alpha: float, batch_size: int) -> Callable[[jax.Array], jax.Array]:
    """A function that blends each entry of a batch with another (Zhang et al., 2017, https://arxiv.org/abs/1710.09412).

    Args:
        key: Random key.
        alpha: Parameter of the Beta distribution from which the batch's one weight is drawn; 0 disables blending.
        batch_size: Number of entries.

    Returns:
        A function of arrays [batch_size, ...], to apply to both images and targets.
    """
    if not alpha:
        return lambda x: x
    draw, permute = jax.random.split(key)
    weight = jax.random.beta(draw, alpha, alpha)
    others = jax.random.permutation(permute, batch_size)
    return lambda x: weight * x + (1 - weight) * x[others]
