"""Layers over sequences of different lengths: what is past a sequence's end changes no result before it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike


def time_mask(lengths: ArrayLike, frames: int) -> jax.Array:
    """Which of `frames` are there: lengths [batch] → bool [batch, frames]."""
    return jnp.arange(frames) < jnp.asarray(lengths)[:, None]


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x [batch, time, ...] with zeros where mask [batch, time] is false."""
    return jnp.where(_broadcast(mask, x), x, 0)


def clipped_relu(x: jax.Array) -> jax.Array:
    """min(max(x, 0), 20), which keeps the recurrence that follows from exploding (Hannun et al., 2014, section 2)."""
    return jnp.clip(x, 0, 20)


class MaskedConv(nnx.Module):
    """A convolution over time, or time and frequency, of which the padding is as good as absent.

    The time axis is padded by the same number of zeros whatever the batch's length: XLA's "SAME" would shift a strided
    convolution by a frame as the batch grows.

    Args:
        inputs: channels in.
        outputs: channels out.
        kernel: sizes over time (odd) and, in two dimensions, frequency.
        strides: as many.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: Sequence[int], strides: Sequence[int], *, bias: bool, rngs: nnx.Rngs
    ) -> None:
        self.stride = strides[0]
        padding = [(size // 2, size // 2) for size in kernel]
        self.conv = nnx.Conv(inputs, outputs, kernel, strides, padding=padding, use_bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [batch, time, (frequency,) channels] and its lengths → the same of the output."""
        y = self.conv(masked(x, time_mask(lengths, x.shape[1])))
        return y, -(-lengths // self.stride)


class MaskedBatchNorm(nnx.Module):
    """Batch normalisation with the statistics of the frames that are there, over batch, time and frequency."""

    def __init__(self, features: int, *, rngs: nnx.Rngs) -> None:
        # Squares less squares of the mean cancel: the fast variance of few frames is noise.
        self.norm = nnx.BatchNorm(features, momentum=0.95, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array, *, train: bool) -> jax.Array:
        """x [batch, time, ..., features], mask [batch, time]."""
        return self.norm(x, use_running_average=not train, mask=_broadcast(mask, x))


class Lookahead(nnx.Module):
    """Row convolution: each feature of a frame and of those ahead, mixed (Deep Speech 2, section 3.7).

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
