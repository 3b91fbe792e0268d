"""DeepSpeech (Hannun et al., 2014, https://arxiv.org/abs/1412.5567): dense layers around one recurrent one.

The layers are for sequences of different lengths: padding past a sequence's end does not affect its results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from examples.speech.config import Config
from examples.speech.features import MELS

# A masked or silent frame is exactly zero, and so is its variance: each norm multiplies the frame's gradient by
# 1/sqrt(epsilon), three in a row by 10^9 with Flax's 1e-6.
_EPSILON = 1e-2


class DeepSpeech(nnx.Module):
    """Three dense layers with clipped ReLU, one recurrent layer, one more dense layer, and the output layer.

    Args:
        flags: Those of `Config` that describe the model.
        characters: Number of logits per frame, including the CTC blank.
        rngs: Random streams of the initialisation.
    """

    def __init__(self, flags: Config, characters: int, *, rngs: nnx.Rngs) -> None:
        hidden, kernel = flags.hidden, 2 * flags.context + 1
        self.window = MaskedConv(MELS, hidden, kernel, flags.stride, rngs=rngs)
        self.dense = nnx.List([nnx.Linear(hidden, hidden, rngs=rngs) for _ in range(2)])
        self.recurrent = Recurrent(flags.cell, hidden, hidden, bidirectional=flags.bidirectional, rngs=rngs)
        self.last = nnx.Linear(hidden * self.recurrent.directions, hidden, rngs=rngs)
        self.characters = nnx.Linear(hidden, characters, rngs=rngs)
        norms = 4 if flags.layer_norm else 0
        self.norms = nnx.List([nnx.LayerNorm(hidden, epsilon=_EPSILON, rngs=rngs) for _ in range(norms)])
        self.dropout = nnx.Dropout(flags.dropout)

    def __call__(
        self, x: jax.Array, lengths: jax.Array, *, train: bool = False, rngs: nnx.Rngs | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """x [batch, time, features] with lengths [batch] → logits [batch, time / stride, characters], lengths."""

        def activate(index: int, x: jax.Array) -> jax.Array:
            if self.norms:
                x = self.norms[index](x)
            return self.dropout(clipped_relu(x), deterministic=not train, rngs=rngs)

        x, lengths = self.window(x, lengths)
        x = activate(0, x)
        for index, dense in enumerate(self.dense, start=1):
            x = activate(index, dense(x))
        x = self.recurrent(x, time_mask(lengths, x.shape[1]))
        return self.characters(activate(3, self.last(x))), lengths


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


# Recurrent layers: one matmul for the inputs of all time steps, then one small matmul per step.
#
# Accumulation over time is in float32. This holds for the state, which a policy leaves in its initial dtype, and for
# the gradient of the recurrent kernel. Differentiating a scan would accumulate that gradient step by step in the
# kernel's dtype, which is half under a policy. Here it is one matmul over all steps.

Carry = tuple[jax.Array, ...]  # the output first, each shape=(batch, hidden), dtype=float32


class Cell(NamedTuple):
    """A recurrent cell, defined by the update of its state.

    Args:
        gates: Number of matmul outputs per hidden unit.
        states: Number of arrays in the carry.
        update: Maps (carry, gates from the input, gates from the previous output) to the next carry.
    """

    gates: int
    states: int
    update: Callable[[Carry, jax.Array, jax.Array], Carry]


def _rnn(carry: Carry, inputs: jax.Array, recurrent: jax.Array) -> Carry:
    return (clipped_relu(inputs + recurrent),)


def _gru(carry: Carry, inputs: jax.Array, recurrent: jax.Array) -> Carry:
    reset_in, update_in, new_in = jnp.split(inputs, 3, axis=-1)
    reset_h, update_h, new_h = jnp.split(recurrent, 3, axis=-1)
    update = nnx.sigmoid(update_in + update_h)
    # The reset gate applies after the matmul, as in cuDNN, so that a step needs one matmul instead of two.
    new = jnp.tanh(new_in + nnx.sigmoid(reset_in + reset_h) * new_h)
    return ((1 - update) * new + update * carry[0],)


def _lstm(carry: Carry, inputs: jax.Array, recurrent: jax.Array) -> Carry:
    enter, forget, new, leave = jnp.split(inputs + recurrent, 4, axis=-1)
    # The forget bias of 1 preserves the state until the gate has learned when to drop it.
    state = nnx.sigmoid(forget + 1) * carry[1] + nnx.sigmoid(enter) * jnp.tanh(new)
    return nnx.sigmoid(leave) * jnp.tanh(state), state


CELLS = {"rnn": Cell(1, 1, _rnn), "gru": Cell(3, 1, _gru), "lstm": Cell(4, 2, _lstm)}


class Recurrent(nnx.Module):
    """A recurrent layer, forward or in both directions, over sequences of different lengths.

    Args:
        cell: A name in `CELLS`.
        features: Number of input features.
        hidden: Units of each direction; the output concatenates the directions.
        bidirectional: Whether to add a backward direction, which starts at the last frame of each sequence.
        rngs: Random streams of the initialisation.
    """

    def __init__(self, cell: str, features: int, hidden: int, *, bidirectional: bool, rngs: nnx.Rngs) -> None:
        self.cell, self.directions = CELLS[cell], 2 if bidirectional else 1
        gates = self.cell.gates
        self.inputs = nnx.Linear(features, self.directions * gates * hidden, rngs=rngs)
        orthogonal = nnx.initializers.orthogonal()
        kernels = [orthogonal(rngs.params(), (hidden, hidden)) for _ in range(self.directions * gates)]
        self.kernels = nnx.Param(jnp.concatenate(kernels, axis=-1))

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """x [batch, time, features], mask [batch, time] → [batch, time, directions · hidden], zero where masked."""
        inputs = self.inputs(x)
        time_major = partial(jnp.swapaxes, axis1=0, axis2=1)
        parts = jnp.split(time_major(inputs), self.directions, axis=-1)
        # `recur` has its own derivative, so a policy does not cast what its matmuls read.
        kernels = jnp.split(self.kernels[...].astype(inputs.dtype), self.directions, axis=-1)
        inside, directions = time_major(mask)[..., None], zip((False, True), parts, kernels, strict=False)
        outputs = [recur(self.cell, reverse, part, kernel, inside) for reverse, part, kernel in directions]
        return masked(time_major(jnp.concatenate(outputs, axis=-1)).astype(inputs.dtype), mask)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def recur(cell: Cell, reverse: bool, inputs: jax.Array, kernel: jax.Array, mask: jax.Array) -> jax.Array:
    """One direction: inputs [time, batch, gates · hidden] → outputs [time, batch, hidden] in the kernel's dtype."""
    return recur_by_scan(cell, reverse, kernel, mask, inputs, _no_offset(inputs, kernel))[0]


def recur_by_scan(
    cell: Cell, reverse: bool, kernel: jax.Array, mask: jax.Array, inputs: jax.Array, offset: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The outputs, and the previous output of each step, both in the kernel's dtype.

    `offset` [time, batch, gates · hidden] is added to the products with the kernel. It is zero; its cotangent is that
    of the products.
    """

    def step(carry: Carry, now: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
        given, extra, present = now
        last = carry[0].astype(kernel.dtype)
        recurrent = last @ kernel + extra
        new = cell.update(carry, given.astype(jnp.float32), recurrent.astype(jnp.float32))
        # Padding frames keep the carry: the backward direction meets those of a short sequence first.
        carry = tuple(jnp.where(present, b, a) for a, b in zip(carry, new, strict=True))
        return carry, (carry[0].astype(kernel.dtype), last)

    start = (jnp.zeros((inputs.shape[1], kernel.shape[0]), jnp.float32),) * cell.states
    return jax.lax.scan(step, start, (inputs, offset, mask), reverse=reverse)[1]


def _run_forward(cell: Cell, reverse: bool, inputs: jax.Array, kernel: jax.Array, mask: jax.Array) -> tuple[Any, Any]:
    scan = partial(recur_by_scan, cell, reverse, kernel, mask)
    outputs, pullback, before = jax.vjp(scan, inputs, _no_offset(inputs, kernel), has_aux=True)
    return outputs, (pullback, before)


def _run_backward(cell: Cell, reverse: bool, residuals: Any, cotangent: jax.Array) -> tuple[Any, Any, None]:
    pullback, before = residuals
    of_inputs, of_products = pullback(cotangent)
    return of_inputs, jnp.einsum("tbh,tbg->hg", before, of_products), None


recur.defvjp(_run_forward, _run_backward)


def _no_offset(inputs: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.zeros(inputs.shape, kernel.dtype)
