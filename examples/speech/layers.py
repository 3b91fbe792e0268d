"""Layers for sequences of different lengths: padding past a sequence's end does not affect its results."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike


def time_mask(lengths: ArrayLike, frames: int) -> jax.Array:
    """Whether each frame is within its sequence: lengths [batch] → bool [batch, frames]."""
    return jnp.arange(frames) < jnp.asarray(lengths)[:, None]


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x [batch, time, ...] with zeros where mask [batch, time] is false."""
    return jnp.where(_broadcast(mask, x), x, 0)


def clipped_relu(x: jax.Array) -> jax.Array:
    """min(max(x, 0), 20), which keeps a subsequent recurrence from exploding (Hannun et al., 2014, section 2)."""
    return jnp.clip(x, 0, 20)


class MaskedConv(nnx.Module):
    """A convolution over time, or time and frequency, whose results do not depend on the batch's padding.

    The number of zeros that pad the time axis does not depend on the batch's length. XLA's "SAME" would shift a strided
    convolution by a frame as the batch grows.

    Args:
        inputs: Number of input channels.
        outputs: Number of output channels.
        kernel: Kernel sizes over time (odd) and, in two dimensions, frequency.
        strides: Strides over the same dimensions.
        bias: Whether to add a bias.
        rngs: Random streams of the initialisation.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: Sequence[int], strides: Sequence[int], *, bias: bool, rngs: nnx.Rngs
    ) -> None:
        self.stride = strides[0]
        padding = [(size // 2, size // 2) for size in kernel]
        self.conv = nnx.Conv(inputs, outputs, kernel, strides, padding=padding, use_bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [batch, time, (frequency,) channels] and its lengths → output and its lengths."""
        y = self.conv(masked(x, time_mask(lengths, x.shape[1])))
        return y, -(-lengths // self.stride)


class MaskedBatchNorm(nnx.Module):
    """Batch normalisation over batch, time and frequency, with statistics of the unmasked frames."""

    def __init__(self, features: int, *, rngs: nnx.Rngs) -> None:
        # The fast variance, E[x²] - E[x]², suffers from cancellation: with few frames it is noise.
        self.norm = nnx.BatchNorm(features, momentum=0.95, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, *, train: bool) -> jax.Array:
        """x [batch, time, ..., features], mask [batch, time]."""
        return self.norm(x, use_running_average=not train, mask=_broadcast(mask, x))


class Lookahead(nnx.Module):
    """Row convolution: mixes each feature over a frame and the `frames` after it (Deep Speech 2, section 3.7).

    It gives a forward-only model a bounded view of the future.
    """

    def __init__(self, features: int, frames: int, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(
            features,
            features,
            (frames + 1,),
            padding=[(0, frames)],
            feature_group_count=features,
            use_bias=False,
            rngs=rngs,
        )

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """x [batch, time, features] → the same shape."""
        return self.conv(masked(x, mask))


def _broadcast(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
