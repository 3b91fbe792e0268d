"""The fused kernel: an attention of a program as a call of `jax.nn.dot_product_attention`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from mpjax.casting.attention.axes import Axis, flat, joined
from mpjax.casting.attention.flat import Inlined
from mpjax.casting.attention.layout import Layout, size_of
from mpjax.casting.attention.masks import resolved
from mpjax.casting.attention.parts import Attention, Bias, Mask
from mpjax.program import compat, contexts

ATTENTION = jax.extend.core.Primitive("fused_attention")
# Of bias and mask together, no row may become -inf in half. JAX adds -2**41 and -2**15 to masked scores in cuDNN's
# kernel, which computes NaN from larger numbers.
_LEAST = {"bfloat16": -(2.0**41), "float16": -(2.0**14)}


@dataclasses.dataclass(eq=False)
class Trial:
    """An inspection's trial of fused attention in every autocast.

    Args:
        attention: The value of `Rules(attention=...)`.
        scores: The numbers of scores of the attentions that are fused.
    """

    attention: str
    scores: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Options:
    """The parameters of a fused attention of q, k, v, biases and masks.

    Args:
        ins: The layout of each operand.
        out: The layout of the result.
        factors: The factor of each bias.
        inverted: For each mask, whether it is False for the keys that are read.
        scale, is_causal, local_window_size, implementation: As in `jax.nn.dot_product_attention`.
        nan: Whether a row without a key is NaN, as it is in a softmax of -inf.
    """

    ins: tuple[Layout, ...]
    out: Layout
    factors: tuple[float, ...]
    inverted: tuple[bool, ...]
    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    implementation: str
    nan: bool

    @property
    def biases(self) -> tuple[int, ...]:
        """The indices of the biases among the operands."""
        return tuple(range(3, 3 + len(self.factors)))

    @property
    def scores(self) -> int:
        """The number of scores."""
        batch, rows, heads, _ = self.ins[0].merged
        return batch * rows * heads * self.ins[1].merged[1]

    @property
    def kind(self) -> str:
        """What it is, in words."""
        window = f"window {self.local_window_size}"
        parts = {"causal": self.is_causal, window: self.local_window_size, "mask": self.inverted, "bias": self.factors}
        return ", ".join((f"{self.implementation}: stores no scores", *(part for part, used in parts.items() if used)))

    def __call__(self, *arrays: Any) -> Any:
        """The attention of q, k, v in half; biases in float32 and masks of booleans."""
        if contexts.attention_trial.value is not None:
            contexts.attention_trial.value.scores.add(self.scores)
        count = 3 + len(self.factors)
        q, k, v = (layout(x) for layout, x in zip(self.ins[:3], arrays[:3], strict=True))
        masks = [
            layout(x ^ inverted)
            for layout, x, inverted in zip(self.ins[count:], arrays[count:], self.inverted, strict=True)
        ]
        # Broadcast in float32, in which their gradients are then summed.
        biases = zip(self.ins[3:count], arrays[3:count], self.factors, strict=True)
        terms = [layout(x.astype(np.float32) * np.float32(factor)) for layout, x, factor in biases]
        mask = functools.reduce(jnp.logical_and, masks) if masks else None
        bias = functools.reduce(jnp.add, terms) if terms else None
        bias = None if bias is None else self._in_half(bias, q.dtype)
        attention: Any = {"pallas": flash_attention, "xla": _attention_of_xla}.get(self.implementation, _CUDNN)
        attention = functools.partial(
            attention, scale=abs(self.scale), is_causal=self.is_causal, local_window_size=self.local_window_size
        )
        # The backward pass of a fused kernel computes the scores again. So does that of XLA's operations here.
        attention = jax.checkpoint(attention) if self.implementation == "xla" else attention
        out = attention(-q if self.scale < 0 else q, k, v, bias, mask)
        return self.out(self._with_nan(out, mask, k.shape[1]) if self.nan else out)

    def _in_half(self, bias: Any, half: np.dtype) -> Any:
        """A bias in half, in which a finite number stays finite."""
        finite = jnp.maximum(bias, np.float32(_LEAST[half.name]))
        return (finite if self.implementation == "cudnn" else jnp.where(jnp.isneginf(bias), bias, finite)).astype(half)

    def _with_nan(self, out: Any, mask: Any, keys: int) -> Any:
        """A result [batch, queries, heads, width] that is NaN in rows of which no key is read."""
        rows, columns = np.arange(out.shape[1])[:, None], np.arange(keys)
        left, right = self.local_window_size or (out.shape[1] + keys, 0 if self.is_causal else keys)
        band = (columns >= rows - left) & (columns <= rows + right)
        visible = jnp.any(band if mask is None else mask & band, axis=-1)
        visible = jnp.broadcast_to(
            visible, (*out.shape[:1], visible.shape[-2] if visible.ndim > 1 else 1, out.shape[1])
        )
        return jnp.where(visible.swapaxes(1, 2)[..., None], out, jnp.nan)


_CUDNN = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


def _attention_of_xla(q: Any, k: Any, v: Any, bias: Any, mask: Any, **options: Any) -> Any:
    """JAX's attention without a kernel."""
    arrays = (q, k, v)
    if q.dtype == np.float16 and compat.platform() not in ("cuda", "rocm", "gpu"):
        arrays = tuple(x.astype(np.float32) for x in arrays)  # Only GPUs have JAX's float16 matmul, F16_F16_F32.
    out = jax.nn.dot_product_attention(*arrays, bias, mask, implementation="xla", **options)
    return out.astype(q.dtype)


def implementation_of(choice: str) -> str:
    """The implementation for `Rules(attention=...)`; empty if the platform has no fused kernel."""
    if choice != "fused":
        return choice
    if compat.platform() == "tpu":
        return "pallas"
    return "cudnn" if "cuda" in jax.extend.backend.get_backend().platform_version else ""


def options_of(attention: Attention, flow: Inlined, setting: Any) -> tuple[list[Any], Options] | str:
    """The operands and the options of an attention, or the reason why no kernel computes it."""
    implementation = implementation_of(setting.rules.attention)
    if not implementation:
        return f"{jax.default_backend()} has no fused kernel"
    q, k, v = attention.parts
    k, v, shared = _without_repeats(flow, k, v, attention.batch)
    batched, queries, keys = flat(attention.batch), flat(attention.queries), flat(attention.keys)
    # Axes of queries that share a row of the masks are heads, which share their keys, unless all of them do.
    constant = [each for each in attention.added if flow.constant(each.v) is not None]
    of_added = {axis for each in constant or attention.added for axis in joined(each.dims)}
    rows = tuple(axis for axis in queries if axis in of_added) or queries
    unshared = tuple(axis for axis in batched if axis not in shared)
    heads = unshared[-1:] if len(batched) > 1 or not batched else unshared
    batch = tuple(axis for axis in unshared if axis not in heads)
    repeats = (*shared, *(axis for axis in queries if axis not in rows))
    scores = batch, (*heads, *repeats), rows, keys
    window, masks, biases, nan = resolved(attention, flow, scores, implementation == "xla")
    added: tuple[Mask | Bias, ...] = (*biases, *masks)
    # Of an array for each score, only the batch and the heads may be of size 1.
    full = (2, 3)
    layouts = (
        Layout.of(q[1], (batch, rows, (*heads, *repeats), attention.head)),
        Layout.of(k[1], (batch, keys, heads, attention.head)),
        Layout.of(v[1], (batch, keys, heads, attention.width)),
        *(Layout.of(each.dims, scores, full) for each in added),
    )
    axes = (*batch, *rows, *heads, *repeats, *attention.width)
    result = joined(attention.out)
    order, shape = tuple(axes.index(axis) for axis in result), tuple(axis.size for axis in result)
    out = Layout(tuple(axis.size for axis in axes), order, shape, shape, attention.values.outvars[0].aval.shape)
    causal_kind = window is not None and window[1] == 0
    left = None if window is None or (causal_kind and window[0] >= size_of(rows) - 1) else window
    options = Options(
        layouts, out, tuple(each.factor for each in biases), tuple(mask.inverted for mask in masks),
        attention.scale, causal_kind, left, implementation, nan,
    )  # fmt: skip
    operands = [q[0], k[0], v[0], *(each.v for each in added)]
    return (operands, options) if not (why := _refusal(options, operands, setting.half)) else why


def _without_repeats(flow: Inlined, k: Any, v: Any, batch: Sequence[Axis]) -> tuple[Any, Any, list[Axis]]:
    """Keys and values before their heads were repeated, if both were, and the axes of the repeats."""
    before = [flow.stripped(*each) for each in (k, v)]
    missing = [[axis for axis in flat(batch) if axis not in joined(dims)] for _, dims in before]
    if missing[0] and missing[0] == missing[1]:
        return before[0], before[1], missing[0]
    return k, v, []


def _refusal(options: Options, operands: Sequence[Any], half: np.dtype) -> str:
    """Why JAX can't issue the kernel, with its gradient; empty if it can."""
    count = 3 + len(options.factors)
    examples = [compat.example(v.aval, half if i < 3 else None) for i, v in enumerate(operands)]

    def gradients(*arrays: Any) -> Any:
        out, pullback = jax.vjp(lambda *floats: options(*floats, *arrays[count:]), *arrays[:count])
        return pullback(out)

    try:
        jax.eval_shape(gradients, *examples)
    except Exception as error:  # cuDNN refuses with several types of errors.
        return f"{options.implementation} refuses it: {str(error).splitlines()[0]}"
    return ""


# Pallas's flash attention for TPUs, with the arguments of `jax.nn.dot_product_attention`.


_BLOCK = 128


def flash_attention(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, *, scale: float, is_causal: bool, local_window_size: Any
) -> Any:
    """Attention of q, k, v [batch, tokens, heads, features] in one TPU kernel.

    Raises:
        NotImplementedError: The kernel does not compute it, or not without an element for each score.
    """
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    if bias is not None or mask is not None or local_window_size is not None:
        raise NotImplementedError("it would store a mask, a bias or a window for each score")
    if compat.is_partitioned():
        raise NotImplementedError(
            "XLA can't split it over devices: call the function in a shard_map, or in jax.set_mesh of one device"
        )
    if q.shape[1] % _BLOCK or k.shape[1] % _BLOCK:
        raise NotImplementedError(f"{q.shape[1]} × {k.shape[1]} tokens are not multiples of {_BLOCK}")
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return pallas.flash_attention(q, k, v, causal=is_causal, sm_scale=scale).swapaxes(1, 2)
