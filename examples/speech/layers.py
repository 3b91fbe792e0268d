"""Layers for sequences of different lengths: padding past a sequence's end does not affect its results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike


def time_mask(lengths: ArrayLike, frames: int) -> jax.Array:
    """Whether each frame is within its sequence: lengths [batch] → bool [batch, frames]."""
    return jnp.arange(frames) < jnp.asarray(lengths)[:, None]


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """x [batch, time, features] with zeros where mask [batch, time] is false."""
    return jnp.where(mask[..., None], x, 0)


def clipped_relu(x: jax.Array) -> jax.Array:
    """min(max(x, 0), 20), which keeps a subsequent recurrence from exploding (Hannun et al., 2014, section 2)."""
    return jnp.clip(x, 0, 20)


class MaskedConv(nnx.Module):
    """A convolution over time whose results do not depend on the batch's padding.

    The number of zeros that pad the time axis does not depend on the batch's length. XLA's "SAME" would shift a strided
    convolution by a frame as the batch grows. `kernel` is odd.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.stride, padding = stride, [(kernel // 2, kernel // 2)]
        self.conv = nnx.Conv(inputs, outputs, (kernel,), (stride,), padding=padding, rngs=rngs)

    def __call__(self, x: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [batch, time, channels] and its lengths → output and its lengths."""
        return self.conv(masked(x, time_mask(lengths, x.shape[1]))), -(-lengths // self.stride)
