"""The fused kernel: an attention of a program as a call of `jax.nn.dot_product_attention`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from mpjax._jaxpr import compat
from mpjax.casting.attention.axes import Axis, Dims, flat, joined
from mpjax.casting.attention.find import Flow, Found
from mpjax.casting.attention.pallas import flash_attention

ATTENTION = jax.extend.core.Primitive("fused_attention")
Shape = tuple[int, ...]


class Layout(NamedTuple):
    """Brings an array into another order of axes: reshape, transpose, broadcast, reshape."""

    split: Shape
    order: Shape
    apart: Shape
    spread: Shape
    merged: Shape

    def __call__(self, x: Any) -> Any:
        """The array in the new order."""
        x = x.reshape(self.split).transpose(self.order).reshape(self.apart)
        module = np if isinstance(x, np.ndarray) else jnp
        return module.broadcast_to(x, self.spread).reshape(self.merged)


def _layout(dims: Dims, groups: Sequence[Sequence[Axis]], full: Sequence[int] = ()) -> Layout:
    """The layout for a dimension per group of axes; of size 1 if the array has none of them, unless it is `full`."""
    axes = joined(dims)
    assert set(axes) <= {axis for group in groups for axis in group}
    apart, spread, merged = [], [], []
    for i, group in enumerate(groups):
        whole = i in full or any(axis in axes for axis in group)
        apart += [axis.size if axis in axes else 1 for axis in group]
        spread += [axis.size if whole else 1 for axis in group]
        merged.append(_size(group) if whole else 1)
    order = [axes.index(axis) for group in groups for axis in group if axis in axes]
    return Layout(tuple(axis.size for axis in axes), tuple(order), tuple(apart), tuple(spread), tuple(merged))


def _size(axes: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


@dataclasses.dataclass(frozen=True)
class Options:
    """The parameters of a fused attention of q, k, v, biases and masks.

    Args:
        ins: The layout of each operand.
        out: The layout of the result.
        factors: The factor of each bias.
        inverted: For each mask, whether it is False for the keys that are read.
        scale, is_causal, local_window_size, implementation: As in `jax.nn.dot_product_attention`.
    """

    ins: tuple[Layout, ...]
    out: Layout
    factors: tuple[float, ...]
    inverted: tuple[bool, ...]
    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    implementation: str

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
        """The attention of arrays in half; masks are booleans."""
        arrays = tuple(layout(x) for layout, x in zip(self.ins, arrays, strict=True))
        (q, k, v), rest = arrays[:3], arrays[3:]
        biases, masks = rest[: len(self.factors)], rest[len(self.factors) :]
        bias = mask = None
        if biases:
            terms = [x.astype(np.float32) * factor for x, factor in zip(biases, self.factors, strict=True)]
            least = np.float32(compat.finfo(q.dtype).min)  # A mask of -1e9 or -inf would make rows of NaN.
            bias = jnp.maximum(functools.reduce(jnp.add, terms), least).astype(q.dtype)
        if masks:
            read = [~x if inverted else x for x, inverted in zip(masks, self.inverted, strict=True)]
            mask = functools.reduce(jnp.logical_and, read)
        fused = functools.partial(jax.nn.dot_product_attention, implementation=self.implementation)
        attention: Any = flash_attention if self.implementation == "pallas" else fused
        attention = functools.partial(
            attention, scale=self.scale, is_causal=self.is_causal, local_window_size=self.local_window_size
        )
        # The backward pass of a fused kernel computes the scores again. So does that of XLA's operations here.
        attention = jax.checkpoint(attention) if self.implementation == "xla" else attention
        return self.out(attention(q, k, v, bias, mask))


def implementation_of(choice: str) -> str:
    """The implementation for `Rules(attention=...)`; empty if the platform has no fused kernel."""
    if choice != "fused":
        return choice
    if compat.platform() == "tpu":
        return "pallas"
    return "cudnn" if "cuda" in jax.extend.backend.get_backend().platform_version else ""


def options_of(found: Found, flow: Flow, setting: Any) -> tuple[list[Any], Options] | str:
    """The operands and the options of an attention, or the reason why no kernel computes it."""
    implementation = implementation_of(setting.rules.attention)
    if not implementation:
        return f"{jax.default_backend()} has no fused kernel"
    q, k, v = found.parts
    k, v, shared = _without_repeats(flow, k, v, found.batch)
    batched, queries, keys = flat(found.batch), flat(found.queries), flat(found.keys)
    masks = [(mask, flow.constant(mask.v)) for mask in found.masks]
    touched = [joined(dims) for dims in (*(m.dims for m in found.masks), *(b.dims for b in found.biases))]
    causal = [joined(mask.dims) for mask, value in masks if value is not None] or touched
    rows = tuple(axis for axis in queries if not causal or any(axis in axes for axes in causal))
    kept = tuple(axis for axis in batched if axis not in shared)
    heads = kept[-1:] if len(batched) > 1 or not batched else kept
    batch = tuple(axis for axis in kept if axis not in heads)
    repeats = (*shared, *(axis for axis in queries if axis not in rows))
    scores = batch, (*heads, *repeats), rows, keys
    window, dynamic = _window(masks, scores, implementation)
    biases = found.biases
    # Of an array for each score, only the batch and the heads may be of size 1.
    full = (2, 3)
    layouts = (
        _layout(q[1], (batch, rows, (*heads, *repeats), found.head)),
        _layout(k[1], (batch, keys, heads, found.head)),
        _layout(v[1], (batch, keys, heads, found.width)),
        *(_layout(each.dims, scores, full) for each in (*biases, *dynamic)),
    )
    given = (*batch, *rows, *heads, *repeats, *found.width)
    result = joined(found.out)
    order, shape = tuple(given.index(axis) for axis in result), tuple(axis.size for axis in result)
    out = Layout(tuple(axis.size for axis in given), order, shape, shape, found.values.outvars[0].aval.shape)
    causal_kind = window is not None and window[1] == 0
    left = None if window is None or (causal_kind and window[0] >= _size(rows) - 1) else window
    options = Options(
        layouts, out, tuple(each.factor for each in biases), tuple(mask.inverted for mask in dynamic),
        found.scale, causal_kind, left, implementation,
    )  # fmt: skip
    operands = [q[0], k[0], v[0], *(each.v for each in (*biases, *dynamic))]
    return (operands, options) if not (why := _refusal(options, operands, setting.half)) else why


def _without_repeats(flow: Flow, k: Any, v: Any, batch: Sequence[Axis]) -> tuple[Any, Any, list[Axis]]:
    """Keys and values before their heads were repeated, if both were, and the axes of the repeats."""
    before = [flow.stripped(*each) for each in (k, v)]
    missing = [[axis for axis in batch if axis not in joined(dims)] for _, dims in before]
    if missing[0] and missing[0] == missing[1]:
        return before[0], before[1], missing[0]
    return k, v, []


def _window(masks: Sequence[Any], scores: Any, implementation: str) -> tuple[tuple[int, int] | None, list[Any]]:
    """The window (left, right) of the keys that each query reads by constant masks, and the other masks."""
    constant, dynamic = None, []
    for mask, value in masks:
        if value is None or (set(joined(mask.dims)) & {*scores[0], *scores[1]} and not _same(mask, value, scores)):
            dynamic.append(mask)
            continue
        dims = [d for d, axes in enumerate(mask.dims) if set(axes) & {*scores[2], *scores[3]}]
        array = value[tuple(slice(None) if d in dims else 0 for d in range(value.ndim))] ^ mask.inverted
        array = _layout(tuple(mask.dims[d] for d in dims), scores[2:], (0, 1))(array)
        constant = array if constant is None else constant & array
    if constant is None:
        return None, dynamic
    if constant.all():
        return None, dynamic
    i, j = np.indices(constant.shape, sparse=True)
    reach = [int(np.max(np.where(constant, d, -1))) for d in (i - j, j - i)]
    band = (i - j <= reach[0]) & (j - i <= reach[1])
    fits = reach[1] == 0 or (implementation == "xla" and reach[1] > 0)
    if fits and reach[0] >= 0 and (constant == band).all():
        return (reach[0], reach[1]), dynamic
    return None, [*dynamic, *(mask for mask, _ in masks if mask not in dynamic)]


def _same(mask: Any, value: np.ndarray, scores: Any) -> bool:
    """Whether a constant mask is the same for all of a batch and all heads."""
    others = [d for d, axes in enumerate(mask.dims) if set(axes) & {*scores[0], *scores[1]}]
    mixed = any(set(mask.dims[d]) & {*scores[2], *scores[3]} for d in others)
    return not mixed and bool(
        (value == value[tuple(slice(1) if d in others else slice(None) for d in range(value.ndim))]).all()
    )


def _refusal(options: Options, operands: Sequence[Any], half: np.dtype) -> str:
    """Why JAX can't issue the kernel, with its gradient; empty if it can."""
    count = 3 + len(options.factors)
    examples = [compat.example(v.aval, half if i < count else None) for i, v in enumerate(operands)]

    def gradients(*arrays: Any) -> Any:
        out, pullback = jax.vjp(lambda *floats: options(*floats, *arrays[count:]), *arrays[:count])
        return pullback(out)

    try:
        jax.eval_shape(gradients, *examples)
    except Exception as error:  # cuDNN refuses with several types of errors.
        return f"{options.implementation} refuses it: {str(error).splitlines()[0]}"
    return ""
