"""What one scale for each tensor does to the operands of float8 matmuls."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._jaxpr import compat

QUANTISE = "float8_quantise"
Float8Note = Any  # float32[4]: the largest magnitude, nonzero values, those that become zero, largest / median


@dataclasses.dataclass(frozen=True)
class Float8Range:
    """The operands of one module's float8 matmuls in one pass, over all batches.

    Args:
        name: The module path.
        phase: `"forward"` or `"backward"`.
        dtypes: The float8 dtype: e4m3 holds operands, e5m2 cotangents.
        max: The largest magnitude, which the scale maps to the largest number of the dtype.
        flushed: The share of the nonzero values that become zero.
        outliers: The largest magnitude over the median of the nonzero magnitudes; the largest of all tensors.
        count: The number of nonzero values.
    """

    name: str
    phase: str
    dtypes: tuple[str, ...]
    max: float
    flushed: float
    outliers: float
    count: int

    @classmethod
    def of(cls, name: str, phase: str, dtype: str, found: Float8Note) -> Float8Range:
        """The row of a note."""
        largest, count, flushed, outliers = map(float, found)
        return cls(name, phase, (dtype,), largest, flushed / max(count, 1.0), outliers, int(count))


def together(a: Float8Range, b: Float8Range) -> Float8Range:
    """Merges two rows."""
    count = a.count + b.count
    flushed = (a.count * a.flushed + b.count * b.flushed) / max(count, 1)
    worst = {name: max(getattr(a, name), getattr(b, name)) for name in ("max", "outliers")}
    return dataclasses.replace(a, flushed=flushed, count=count, **worst)


@functools.partial(jax.jit, static_argnames="dtype")
def note(x: Any, scale: Any, dtype: np.dtype) -> Float8Note:
    """The note of one tensor and its scale."""
    size = jnp.abs(compat.replicated(x).astype(jnp.float32))
    nonzero = (size > 0) & jnp.isfinite(size)
    largest = jnp.max(size, initial=0, where=nonzero)
    median = jnp.nanmedian(jnp.where(nonzero, size, jnp.nan))
    flushed = nonzero & (size / compat.replicated(scale) <= float(compat.finfo(dtype).smallest_subnormal) / 2)
    outliers = jnp.where(largest > 0, largest / median, 0.0)
    counts = [jnp.sum(mask, dtype=jnp.float32) for mask in (nonzero, flushed)]
    return jnp.stack([largest, *counts, outliers])


def merged(a: Float8Note, b: Float8Note) -> Float8Note:
    """The note of both tensors."""
    return jnp.concatenate([jnp.maximum(a[:1], b[:1]), a[1:3] + b[1:3], jnp.maximum(a[3:], b[3:])])
