"""Brings an array into another order of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax.casting.attention.axes import Axis, Dims, joined

Shape = tuple[int, ...]


class Layout(NamedTuple):
    """Brings an array into another order of axes: reshape, transpose, broadcast, reshape."""

    split: Shape
    order: Shape
    apart: Shape
    broadcast: Shape
    merged: Shape

    @classmethod
    def of(cls, dims: Dims, groups: Sequence[Sequence[Axis]], full: Sequence[int] = ()) -> Layout:
        """A dimension per group of axes; of size 1 if the array has none of them, unless it is `full`."""
        axes = joined(dims)
        assert set(axes) <= {axis for group in groups for axis in group}
        apart, broadcast, merged = [], [], []
        for i, group in enumerate(groups):
            whole = i in full or any(axis in axes for axis in group)
            apart += [axis.size if axis in axes else 1 for axis in group]
            broadcast += [axis.size if whole else 1 for axis in group]
            merged.append(size_of(group) if whole else 1)
        order = [axes.index(axis) for group in groups for axis in group if axis in axes]
        return cls(tuple(axis.size for axis in axes), tuple(order), tuple(apart), tuple(broadcast), tuple(merged))

    def __call__(self, x: Any) -> Any:
        """The array in the new order."""
        x = x.reshape(self.split).transpose(self.order).reshape(self.apart)
        module = np if isinstance(x, np.ndarray) else jnp
        return module.broadcast_to(x, self.broadcast).reshape(self.merged)


def size_of(axes: Sequence[Axis]) -> int:
    """The product of the sizes of axes."""
    return math.prod(axis.size for axis in axes)
