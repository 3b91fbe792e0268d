"""Operations of the evaluator that NumPy has no function for: convolutions, casts of bits, random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from testing import cheap_keys

Array = np.ndarray[Any, Any]


def convolution(eqn: Any, x: Array, kernel: Array) -> Array:
    """`conv_general_dilated` of float64 arrays."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    x = _padded(_dilated(x.transpose(numbers.lhs_spec), params["lhs_dilation"]), params["padding"])
    kernel = _dilated(kernel.transpose(numbers.rhs_spec), params["rhs_dilation"])
    of_features, of_batch = params["feature_group_count"], params["batch_group_count"]
    inputs = np.split(x, of_batch, 0) if of_batch > 1 else np.split(x, of_features, 1)
    kernels = np.split(kernel, max(of_features, of_batch), 0)
    groups = [_correlated(a, b, params["window_strides"]) for a, b in zip(inputs, kernels, strict=True)]
    return np.concatenate(groups, 1).transpose(np.argsort(numbers.out_spec))


def _correlated(x: Array, kernel: Array, strides: Sequence[int]) -> Array:
    """The sums over windows of `x` (batch, feature, ...) with the kernel (output, input, ...)."""
    axes = tuple(range(2, x.ndim))
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], axes)
    windows = windows[(slice(None), slice(None), *(slice(None, None, step) for step in strides))]
    out = np.tensordot(windows, kernel, ((1, *(axis + len(axes) for axis in axes)), (1, *axes)))
    return np.moveaxis(out, -1, 1)


def _dilated(x: Array, steps: Sequence[int]) -> Array:
    """Zeros between the elements of the axes after the first two."""
    if all(step == 1 for step in steps):
        return x
    sizes = [(n - 1) * step + 1 for n, step in zip(x.shape[2:], steps, strict=True)]
    out = np.zeros((*x.shape[:2], *sizes), x.dtype)
    out[(slice(None), slice(None), *(slice(None, None, step) for step in steps))] = x
    return out


def _padded(x: Array, padding: Sequence[tuple[int, int]]) -> Array:
    """Zeros around the axes after the first two; a negative number crops."""
    x = np.pad(x, [(0, 0), (0, 0), *((max(low, 0), max(high, 0)) for low, high in padding)])
    cropped = (slice(max(-low, 0), n - max(-high, 0)) for n, (low, high) in zip(x.shape[2:], padding, strict=True))
    return x[(slice(None), slice(None), *cropped)]


def bits(eqn: Any, x: Array) -> Array | None:
    """`bitcast_convert_type` between dtypes of one size; None for others."""
    old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    return np.ascontiguousarray(x.astype(old)).view(new) if old.itemsize == new.itemsize else None


# Numbers of cheap keys: a key is one uint32, so an array of keys has their shape.


def random_split(eqn: Any, keys: Array) -> Array:
    """`random_split` of cheap keys."""
    return _of_each(keys, lambda key: cheap_keys.split(key, eqn.params["shape"]))


def random_bits(eqn: Any, keys: Array) -> Array:
    """`random_bits` of cheap keys."""
    return _of_each(keys, lambda key: cheap_keys.random_bits(key, eqn.params["bit_width"], eqn.params["shape"]))


def random_fold_in(eqn: Any, keys: Array, data: Array) -> Array:
    """`random_fold_in` of cheap keys."""
    return cheap_keys.fold_in(keys, data.astype(np.uint32))


def _of_each(keys: Array, fun: Any) -> Array:
    found = {index: fun(keys[index].reshape(1)) for index in itertools.product(*map(range, keys.shape))}
    return np.stack([*found.values()]).reshape((*keys.shape, *next(iter(found.values())).shape))
