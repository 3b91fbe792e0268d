"""Evaluator operations without a NumPy function: convolutions, gathers, bit casts, random numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
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
    """Inserts zeros between the elements of the axes after the first two."""
    if all(step == 1 for step in steps):
        return x
    sizes = [(n - 1) * step + 1 for n, step in zip(x.shape[2:], steps, strict=True)]
    out = np.zeros((*x.shape[:2], *sizes), x.dtype)
    out[(slice(None), slice(None), *(slice(None, None, step) for step in steps))] = x
    return out


def _padded(x: Array, padding: Sequence[tuple[int, int]]) -> Array:
    """Pads the axes after the first two with zeros; negative padding crops."""
    x = np.pad(x, [(0, 0), (0, 0), *((max(low, 0), max(high, 0)) for low, high in padding)])
    cropped = (slice(max(-low, 0), n - max(-high, 0)) for n, (low, high) in zip(x.shape[2:], padding, strict=True))
    return x[(slice(None), slice(None), *cropped)]


def gather(eqn: Any, x: Array, indices: Array) -> Array:
    """`gather`."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    places, inside = _places(
        x.shape,
        indices,
        params["slice_sizes"],
        numbers.start_index_map,
        (numbers.collapsed_slice_dims, numbers.operand_batching_dims, numbers.start_indices_batching_dims),
        numbers.offset_dims,
    )
    found = x[places]
    if inside.all() or params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
        return found
    fill = _missing(eqn.invars[0].aval.dtype) if params["fill_value"] is None else params["fill_value"]
    return np.where(inside, found, fill)


def _missing(dtype: Any) -> Any:
    """JAX's fill value: NaN (True for bool), the largest unsigned or the smallest signed integer."""
    if dtype.kind not in "iu":
        return np.nan
    return np.iinfo(dtype).max if dtype.kind == "u" else np.iinfo(dtype).min


def scattered(combine: np.ufunc, eqn: Any, x: Array, indices: Array, updates: Array) -> Array:
    """A scatter of float64 arrays that combines elements, as `scatter_add` and `scatter-max` do."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    left_out = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = iter(updates.shape[d] for d in numbers.update_window_dims)
    places, inside = _places(
        x.shape,
        indices,
        [1 if d in left_out else next(window) for d in range(x.ndim)],
        numbers.scatter_dims_to_operand_dims,
        (numbers.inserted_window_dims, numbers.operand_batching_dims, numbers.scatter_indices_batching_dims),
        numbers.update_window_dims,
    )
    out = np.array(x)
    kept = np.broadcast_to(inside | (params["mode"] == jax.lax.GatherScatterMode.CLIP), updates.shape)
    combine.at(out, tuple(np.broadcast_to(place, kept.shape)[kept] for place in places), updates[kept])
    return out


def _places(
    shape: Sequence[int],
    indices: Array,
    sizes: Sequence[int],
    indexed: Sequence[int],
    without_window: tuple[Sequence[int], Sequence[int], Sequence[int]],
    window_dims: Sequence[int],
) -> tuple[tuple[Array, ...], Array]:
    """For each element of the windows, its index in each dimension of the operand, and whether its window is inside.

    A window that crosses the edge is moved inside. A gather reads it there unless its mode is fill, and a scatter drops
    it unless its mode is clip.
    """
    collapsed, batching, of_indices = without_window
    batch = indices.shape[:-1]
    rank = len(batch) + len(window_dims)
    batch_dims = [d for d in range(rank) if d not in window_dims]

    def along(values: Array, dims: Sequence[int]) -> Array:
        wide = [1] * rank
        for d, n in zip(dims, values.shape, strict=True):
            wide[d] = n
        return values.reshape(wide)

    offsets = iter(window_dims)
    places, inside = [], np.ones([1] * rank, bool)
    for d, (length, size) in enumerate(zip(shape, sizes, strict=True)):
        place = np.zeros([1] * rank, np.int64)
        if d in indexed:
            start = along(indices[..., indexed.index(d)].astype(np.int64), batch_dims)
            place = np.clip(start, 0, length - size)
            inside = inside & (place == start)
        elif d in batching:
            of = of_indices[batching.index(d)]
            place = along(np.arange(length), [batch_dims[of]])
        if d not in collapsed and d not in batching:
            place = place + along(np.arange(size), [next(offsets)])
        places.append(place)
    return tuple(places), inside


def bits(eqn: Any, x: Array) -> Array | None:
    """`bitcast_convert_type` between dtypes of the same size; None for others."""
    old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    return x.astype(old, order="C").view(new) if old.itemsize == new.itemsize else None


# Cheap keys as numbers: a key is one uint32, so an array of keys keeps its shape.


def random_split(eqn: Any, keys: Array) -> Array:
    """`random_split` of cheap keys."""
    return _of_each(keys, lambda key: cheap_keys.split(key, eqn.params["shape"]))


def random_bits(eqn: Any, keys: Array) -> Array:
    """`random_bits` of cheap keys."""
    return _of_each(keys, lambda key: cheap_keys.random_bits(key, eqn.params["bit_width"], eqn.params["shape"]))


def threefry_bits(eqn: Any, keys: Any) -> Array | None:
    """`random_bits` of 32 bits from one threefry key, a JAX array; None for others.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (https://doi.org/10.1145/2063384.2063405).
    """
    shape, is_threefry = eqn.params["shape"], str(jax.random.key_impl(keys)) == "threefry2x32"
    if keys.shape or not is_threefry or eqn.params["bit_width"] != 32 or not jax.config.jax_threefry_partitionable:
        return None
    key = np.asarray(jax.random.key_data(keys))
    schedule = *key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    y = np.arange(math.prod(shape), dtype=np.uint32) + schedule[1]
    x = np.zeros_like(y) + schedule[0]
    for i in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x = x + y
            y = (y << np.uint32(turn) | y >> np.uint32(32 - turn)) ^ x
        x, y = x + schedule[(i + 1) % 3], y + schedule[(i + 2) % 3] + np.uint32(i + 1)
    return (x ^ y).reshape(shape)


def random_fold_in(eqn: Any, keys: Array, data: Array) -> Array:
    """`random_fold_in` of cheap keys."""
    return cheap_keys.fold_in(keys, data.astype(np.uint32))


def _of_each(keys: Array, fun: Any) -> Array:
    found = {index: fun(keys[index].reshape(1)) for index in itertools.product(*map(range, keys.shape))}
    return np.stack([*found.values()]).reshape((*keys.shape, *next(iter(found.values())).shape))
