"""An attention of a program as a call of the primitive `mpjax.kernels.attention`."""

from __future__ import annotations

import dataclasses
import functools
import os
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
from mpjax.kernels.attention import Form, Operands, attention, band
from mpjax.kernels.attention_kernels import kernel_of, refusal
from mpjax.program import compat, contexts

ATTENTION = jax.extend.core.Primitive("fused_attention")
# Longer rows of scores make the fused kernel faster than XLA's operations (measured on an H200 with 1,024; shorter
# ones are not measured).
_LONG = 512


@dataclasses.dataclass(frozen=True)
class Options:
    """The parameters of a fused attention of q, k, v, biases and masks.

    Args:
        ins: The layout of each operand.
        out: The layout of the result.
        factors: The factor of each bias.
        inverted: For each mask, whether it is False for the keys that are read.
        form: What is computed.
        nan: Whether a row without a key is NaN, as it is in a softmax of -inf.
    """

    ins: tuple[Layout, ...]
    out: Layout
    factors: tuple[float, ...]
    inverted: tuple[bool, ...]
    form: Form
    nan: bool

    @property
    def floats(self) -> tuple[int, ...]:
        """The operands that are read in float32: the biases."""
        return tuple(range(3, 3 + len(self.factors)))

    @property
    def scores(self) -> int:
        """The number of scores."""
        batch, rows, heads, _ = self.ins[0].merged
        return batch * rows * heads * self.ins[1].merged[1]

    @property
    def kind(self) -> str:
        """What it is, in words."""
        left, right = self.form.window
        limited = not self.form.is_causal and self.form.window != (None, None)
        window = f"window ({'all' if left is None else left}, {'all' if right is None else right})"
        parts = {"causal": right == 0, window: limited, "capped": self.form.cap, "mask": self.inverted}
        words = [part for part, used in {**parts, "bias": self.factors}.items() if used]
        return ", ".join((f"{kernel_of(self.form, platform())}: stores no scores", *words))

    def operands(self, *arrays: Any) -> Operands:
        """The operands of the primitive: q, k, v in half; biases in float32 and masks of booleans."""
        count = 3 + len(self.factors)
        q, k, v = (layout(x) for layout, x in zip(self.ins[:3], arrays[:3], strict=True))
        masks = [
            layout(x ^ inverted)
            for layout, x, inverted in zip(self.ins[count:], arrays[count:], self.inverted, strict=True)
        ]
        biases = zip(self.ins[3:count], arrays[3:count], self.factors, strict=True)
        terms = [layout(x.astype(np.float32) * np.float32(factor)) for layout, x, factor in biases]
        bias = functools.reduce(jnp.add, terms) if terms else None
        return Operands(q, k, v, bias, functools.reduce(jnp.logical_and, masks) if masks else None)

    def __call__(self, *arrays: Any) -> Any:
        """The attention of q, k, v in half; biases in float32 and masks of booleans."""
        if contexts.trial.value is not None:
            contexts.trial.value.scores.add(self.scores)
        x = self.operands(*arrays)
        out = attention(x, self.form)
        return self.out(self._with_nan(out, x) if self.nan else out)

    def _with_nan(self, out: Any, x: Operands) -> Any:
        """A result [batch, queries, heads, width] that is NaN in rows of which no key is read."""
        visible = band(self.form, 0, x.q.shape[1], x.k.shape[1])
        visible = visible if x.mask is None else visible & x.mask
        rows = jnp.any(jnp.broadcast_to(visible, (*np.shape(visible)[:-1], x.k.shape[1])), -1)
        rows = rows[None, None] if rows.ndim == 1 else rows
        return jnp.where(rows.swapaxes(1, 2)[..., None], out, jnp.nan)


def platform() -> str:
    """The platform that a program is traced for: "cuda", "tpu", or another, which has no fused kernel."""
    found = compat.platform()
    if found != "gpu":
        return found
    return "rocm" if "rocm" in jax.extend.backend.get_backend().platform_version else "cuda"


def is_sought(choice: str) -> bool:
    """Whether a program's attentions are to be found, for `Rules(attention=...)`."""
    return choice not in ("unfused", "auto") or (choice == "auto" and platform() in ("cuda", "tpu"))


def options_of(attention: Attention, flow: Inlined, setting: Any) -> tuple[list[Any], Options] | str:
    """The operands and the options of an attention, or the reason why no kernel computes it."""
    choice = setting.rules.attention
    q, k, v = attention.parts
    k, v, shared = _without_repeats(flow, k, v, attention.batch)
    batched, queries, keys = flat(attention.batch), flat(attention.queries), flat(attention.keys)
    # Axes of queries that share a row of the masks are heads, which share their keys, unless all of them do.
    constant = [each for each in attention.added if flow.is_constant(each.v)]
    of_added = {axis for each in constant or attention.added for axis in joined(each.dims)}
    rows = tuple(axis for axis in queries if axis in of_added) or queries
    unshared = tuple(axis for axis in batched if axis not in shared)
    heads = unshared[-1:] if len(batched) > 1 or not batched else unshared
    batch = tuple(axis for axis in unshared if axis not in heads)
    repeats = (*shared, *(axis for axis in queries if axis not in rows))
    scores = batch, (*heads, *repeats), rows, keys
    window, masks, biases, nan = resolved(attention, flow, rows)
    added: tuple[Mask | Bias, ...] = (*biases, *masks)
    layouts = (
        Layout.of(q[1], (batch, rows, (*heads, *repeats), attention.head)),
        Layout.of(k[1], (batch, keys, heads, attention.head)),
        Layout.of(v[1], (batch, keys, heads, attention.width)),
        *(Layout.of(each.dims, scores) for each in added),
    )
    axes = (*batch, *rows, *heads, *repeats, *attention.width)
    result = joined(attention.out)
    order, shape = tuple(axes.index(axis) for axis in result), tuple(axis.size for axis in result)
    out = Layout(tuple(axis.size for axis in axes), order, shape, shape, attention.values.outvars[0].aval.shape)
    form = Form(attention.scale, attention.cap, window, "fused" if choice == "auto" else choice)
    factors, inverted = tuple(each.factor for each in biases), tuple(mask.inverted for mask in masks)
    options = Options(layouts, out, factors, inverted, form, nan)
    operands = [q[0], k[0], v[0], *(each.v for each in added)]
    why = _not_now(size_of(keys)) if choice == "auto" else ""
    return why or _refusal(options, operands, setting.half) or (operands, options)


def _not_now(keys: int) -> str:
    """Why `attention="auto"` leaves an attention as it is written, on a device with a kernel; empty if it does not."""
    if keys <= _LONG:
        return f"auto: its rows have {keys} scores, and only above {_LONG} was the kernel measured to be faster"
    if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return "auto: jax_debug_nans and jax_debug_infs check each operation"
    flags = ("xla_gpu_deterministic_ops=true", "xla_gpu_exclude_nondeterministic_ops=true")
    if any(flag in os.environ.get("XLA_FLAGS", "").lower() for flag in flags):
        return "auto: the kernel's backward pass is not deterministic, which XLA_FLAGS asks for"
    return ""


def _without_repeats(flow: Inlined, k: Any, v: Any, batch: Sequence[Axis]) -> tuple[Any, Any, list[Axis]]:
    """Keys and values before their heads were repeated, if both were, and the axes of the repeats."""
    before = [flow.stripped(*each) for each in (k, v)]
    missing = [[axis for axis in flat(batch) if axis not in joined(dims)] for _, dims in before]
    if missing[0] and missing[0] == missing[1]:
        return before[0], before[1], missing[0]
    return k, v, []


def _refusal(options: Options, operands: Sequence[Any], half: np.dtype) -> str:
    """Why no kernel computes an attention, with its gradient; empty if one does."""
    examples = [compat.example(v.aval, half if i < 3 else None) for i, v in enumerate(operands)]
    try:
        operands = jax.eval_shape(options.operands, *examples)
    except Exception as error:
        return f"it can't be written as one call: {str(error).splitlines()[0]}"
    return refusal(Operands(*operands), options.form, kernel_of(options.form, platform()))
