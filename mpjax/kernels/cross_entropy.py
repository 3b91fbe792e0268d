"""What a loss reads of its logits, as a primitive that stores none of them.

    logits      = adjusted(x w)      rows × vocabulary: scaled, with a bias, capped
    statistics  = logsumexp, expected (the mean under the softmax), best (the index of the largest), largest,
                  total (the sum), the logits at given labels

A walk goes over blocks of the vocabulary: each block's logits are computed in half with float32 sums, read, and gone.
The backward pass computes them again from the logsumexp. A block then holds all rows, so it writes its part of the
gradient of `w` once, in float32; only the gradient of `x`, which is small, is added up.

A block has a piece of each of up to 64 parts of the vocabulary. So if devices share the vocabulary, each has its share
of each block, and sends others its statistics only.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024 (logits that are computed again).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from mpjax.kernels.derivatives import mapped_size, same_axes, vary_as
from mpjax.kernels.families import Family, primitives
from mpjax.program import compat

# The logits of a block that exist at once.
_BLOCK = 2**27
# The rows of a program that is exported for any number of them.
_ROWS = 2**13
# The most parts of a vocabulary, and so the most devices that may share it.
_PARTS = 64
# The least piece of a part in a block: TPUs compute with 128 columns at once.
_PIECE = 128


@dataclasses.dataclass(frozen=True)
class Head:
    """How logits follow from rows and weights.

    Args:
        steps: What is done to the product, in order: ("scale", factor), ("bias", 0), ("factors", 0) or ("cap", size).
        labels: How many arrays of labels there are.
    """

    steps: tuple[tuple[str, float], ...] = ()
    labels: int = 1

    @property
    def floats(self) -> tuple[str, ...]:
        """The operands before the labels, which have derivatives: rows, weights, a bias, a factor of each row."""
        kinds = {kind for kind, _ in self.steps}
        return ("x", "w", *(name for name in ("bias", "factors") if name in kinds))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all operands; those of labels are empty."""
        return (*self.floats, *[""] * self.labels)


class Statistics(NamedTuple):
    """What is read of each row of logits, [rows] each, float32; `best` is int32, `at` has one for each array of labels.

    All but `best` have a derivative. `expected` is the mean of the logits under their softmax; logits of -inf add
    nothing to it. The derivative of `largest` is that of the logit at `best`. `at` is 0 where a label is outside of the
    vocabulary.
    """

    logsumexp: Any
    expected: Any
    best: Any
    largest: Any
    total: Any
    at: tuple[Any, ...]

    @classmethod
    def of(cls, found: Sequence[Any]) -> Statistics:
        """The statistics of a list."""
        logsumexp, expected, best, largest, total, *at = found
        return cls(logsumexp, expected, best, largest, total, tuple(at))


def statistics(x: Any, w: Any, bias: Any, labels: Sequence[Any], head: Head, factors: Any = None) -> Statistics:
    """The statistics of logits.

    Args:
        x: Rows [rows, features], half.
        w: Weights [features, vocabulary], float32; read in the dtype of `x`.
        bias: None, or [vocabulary], float32.
        labels: Arrays of labels [rows], int32.
        head: How logits follow from them.
        factors: None, or the factor of each row [rows], float32: the inverse of a learned temperature.

    Example:
        >>> import jax.numpy as jnp
        >>> found = statistics(jnp.ones((2, 4), jnp.bfloat16), jnp.zeros((4, 8)), None, [jnp.zeros(2, int)], Head())
        >>> found.logsumexp.dtype, round(float(found.logsumexp[0]), 4)  # the logarithm of 8
        (dtype('float32'), 2.0794)
    """
    given = (x, w, *(y for y in (bias, factors) if y is not None), *labels)
    return Statistics.of(forward_p.bind(*same_axes(given), head=head))


# The walk.


def _adjusted(product: Any, bias: Any, factors: Any, head: Head) -> Any:
    for kind, number in head.steps:
        if kind == "bias":
            product = product + bias
        elif kind == "factors":
            product = product * factors.reshape(-1, *[1] * (product.ndim - 1))
        elif kind == "scale":
            product = product * np.float32(number)
        else:
            product = np.float32(number) * jnp.tanh(product / np.float32(number))
    return product


def _parts_and_blocks(rows: Any, vocabulary: int) -> tuple[int, int]:
    """The number of parts, and of blocks: if one near it divides a part, no two blocks overlap."""
    rows = rows if isinstance(rows, int) else _ROWS
    least = max(1, -(-rows * vocabulary // _BLOCK))
    few = min(math.gcd(vocabulary, _PARTS), max(1, vocabulary // (_PIECE * least)))
    choices = [n for n in (64, 32, 16, 8, 4, 2, 1) if n <= few and vocabulary % n == 0]
    for blocks in range(least, 2 * least):
        for parts in choices:
            if vocabulary % (parts * blocks) == 0 and parts >= min(8, choices[0]):
                return parts, blocks
    return choices[0], min(least, vocabulary // choices[0])


class _Walk:
    """The blocks of a vocabulary. The last one may begin before the end of the one before it, which then counts.

    Arrays over the vocabulary have two axes for it: [parts, places in a part].
    """

    def __init__(self, x: Any, w: Any, bias: Any, factors: Any, head: Head):
        self.x, self.factors, self.head = x, factors, head
        self.vocabulary = w.shape[1]
        parts, count = _parts_and_blocks(x.shape[0], self.vocabulary)
        self.shape = (parts, self.vocabulary // parts)
        self.size = -(-self.shape[1] // count)
        self.starts = np.minimum(np.arange(count) * self.size, self.shape[1] - self.size).astype(np.int32)
        self.fresh = (np.arange(count) * self.size).astype(np.int32)
        self.apart = bool((self.starts == self.fresh).all())
        self.w = w.reshape(-1, *self.shape)
        self.bias = None if bias is None else bias.reshape(self.shape)

    def block(self, start: Any) -> tuple[Any, Any]:
        """The weights and the bias of a block."""
        w = lax.dynamic_slice_in_dim(self.w, start, self.size, axis=2).astype(self.x.dtype)
        return w, None if self.bias is None else lax.dynamic_slice_in_dim(self.bias, start, self.size, axis=1)

    def logits(self, w: Any, bias: Any) -> Any:
        """The logits of a block [rows, parts, size], float32."""
        return _adjusted(self.product(w), bias, self.factors, self.head)

    def product(self, w: Any) -> Any:
        """The product of rows and weights, rounded to half as any matmul's result that is stored."""
        return lax.dot_general(self.x, w, (((1,), (0,)), ((), ()))).astype(np.float32)

    def columns(self, start: Any) -> Any:
        """The places in the vocabulary of a block's columns [1, parts, size]."""
        part, place = (lax.broadcasted_iota(np.int32, (1, self.shape[0], self.size), axis) for axis in (1, 2))
        return part * self.shape[1] + place + start

    def new(self, start: Any, fresh: Any) -> Any:
        """Whether a block's columns are in no block before it."""
        return lax.broadcasted_iota(np.int32, (1, 1, self.size), 2) + start >= fresh

    def with_block(self, whole: Any, part: Any, start: Any) -> Any:
        """A gradient with that of a block, which is 0 in columns of the block before it."""
        axis = whole.ndim - 1
        if not self.apart:
            part = part + lax.dynamic_slice_in_dim(whole, start, self.size, axis)
        return lax.dynamic_update_slice_in_dim(whole, part, start, axis)

    def run(self, body: Callable[..., Any], carry: Any) -> Any:
        """The carry after all blocks; `body(carry, start, fresh) → carry`, where columns from `fresh` on are new."""
        arrays = [y for y in (self.x, self.w, self.bias, self.factors) if y is not None]
        carry = jax.tree.map(lambda y: vary_as(y, arrays), carry)
        if len(self.starts) == 1:
            return body(carry, 0, 0)
        steps = (jnp.asarray(self.starts), jnp.asarray(self.fresh))
        return lax.scan(lambda carry, at: (body(carry, *at), None), carry, steps)[0]


_OF_BLOCK = (1, 2)  # the axes of the vocabulary in a block's logits


def _of_rows(x: Any) -> Any:
    return x[:, None, None]


def _joined(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
    """The maximum of two sets of logits, the sum of exponentials relative to it, and sums, from those of each set."""
    (most, summed, *sums), (other, more, *others) = a, b
    ratio = jnp.where(most == other, 1, jnp.exp(-jnp.abs(most - other)))
    summed = jnp.where(most > other, summed + more * ratio, more + summed * ratio)
    return lax.max(most, other), summed, *map(lax.add, sums, others)


def _weighted(exponentials: Any, logits: Any) -> Any:
    """The products of exponentials and logits; 0 for masked logits, which are -inf."""
    return exponentials * jnp.where(exponentials > 0, logits, 0)


def _forward_program(*arrays: Any, head: Head) -> list[Any]:
    x, w, bias, factors, labels = _parts(arrays, head)
    walk = _Walk(x, w, bias, factors, head)
    rows = jnp.zeros(x.shape[:1], np.float32)

    def body(carry: Any, start: Any, fresh: Any) -> Any:
        largest, summed, weighted, total, best, at = carry
        logits, columns = walk.logits(*walk.block(start)), walk.columns(start)
        new = True if walk.apart else walk.new(start, fresh)
        counted = jnp.where(new, logits, -jnp.inf)
        hits = (new & (columns == _of_rows(y)) for y in labels)
        read = counted, jnp.where(counted > -jnp.inf, 1.0, 0.0), *(jnp.where(hit, logits, 0) for hit in hits)
        found = lax.reduce(read, (-np.inf, *[0.0] * (len(read) - 1)), _joined, _OF_BLOCK)  # Logits are read once.
        here, (higher, summed, *at) = found[0], _joined((largest, summed, *at), found)
        safe = jnp.where(jnp.isfinite(higher), higher, 0)
        before, exponentials = jnp.exp(largest - safe), jnp.exp(counted - _of_rows(safe))
        weighted = weighted * before + jnp.sum(_weighted(exponentials, logits), _OF_BLOCK)
        place = jnp.min(jnp.where(counted == _of_rows(here), columns, walk.vocabulary), _OF_BLOCK)
        # As argmax, which takes the first NaN.
        best = jnp.where(here > largest, place, best)
        total = total + jnp.sum(jnp.where(new, logits, 0), _OF_BLOCK)
        return higher, summed, weighted, total, best, at

    start = (rows - jnp.inf, rows, rows, rows, jnp.zeros(x.shape[:1], np.int32), [rows for _ in labels])
    largest, summed, weighted, total, best, at = walk.run(body, start)
    return [largest + jnp.log(summed), weighted / summed, best, largest, total, *at]


def _backward_program(*arrays: Any, head: Head, wrt: tuple[str, ...]) -> list[Any]:
    end = len(arrays) - head.labels
    *given, logsumexp, expected, best, of_logsumexp, of_expected, of_largest, of_total = arrays[:end]
    x, w, bias, factors, labels = _parts(given, head)
    places = [(best, of_largest), *zip(labels, arrays[end:], strict=True)]
    walk = _Walk(x, w, bias, factors, head)
    expected = jnp.where(of_expected == 0, 0, expected)  # A compiler then drops its sum where nothing reads it.

    def body(carry: Any, start: Any, fresh: Any) -> Any:
        w, bias = walk.block(start)
        adjusted = functools.partial(_adjusted, head=head)
        operands = walk.product(w), *(0.0 if y is None else y for y in (bias, factors))
        logits, pullback = jax.vjp(adjusted, *operands)
        columns = walk.columns(start)
        p = jnp.exp(logits - _of_rows(logsumexp))
        ct = p * _of_rows(of_logsumexp + of_expected * (1 - expected)) + _of_rows(of_total)
        ct = ct + _weighted(p, logits) * _of_rows(of_expected)
        for y, c in places:
            ct = ct + jnp.where(columns == _of_rows(y), _of_rows(c), 0)
        of_product, of_bias, of_factors = pullback(ct if walk.apart else jnp.where(walk.new(start, fresh), ct, 0))
        low = of_product.astype(x.dtype)
        found = {
            "x": lambda: carry["x"] + _dot(low, w, _OF_BLOCK, _OF_BLOCK),
            "w": lambda: walk.with_block(carry["w"], _dot(x, low, (0,), (0,)), start),
            "bias": lambda: walk.with_block(carry["bias"], of_bias, start),
            "factors": lambda: carry["factors"] + of_factors,
        }
        return {name: found[name]() for name in wrt}

    shapes = {"x": x.shape, "w": walk.w.shape, "bias": walk.shape, "factors": x.shape[:1]}
    sums = walk.run(body, {name: jnp.zeros(shapes[name], np.float32) for name in wrt})
    types = {"x": x, "w": w, "bias": bias, "factors": factors}
    return [sums[name].reshape(types[name].shape).astype(types[name].dtype) for name in wrt]


def _dot(a: Any, b: Any, i: Sequence[int], j: Sequence[int]) -> Any:
    if compat.contracts_rows(a.dtype):  # XLA for CPUs has no other product of half operands in float32.
        a, b = a.astype(np.float32), b.astype(np.float32)
    return lax.dot_general(a, b, ((i, j), ((), ())), preferred_element_type=np.float32)


def formula(*arrays: Any, head: Head) -> list[Any]:
    """The statistics from logits as a whole, for forward mode and second derivatives."""
    x, w, bias, factors, labels = _parts(arrays, head)
    logits = _adjusted(_dot(x, w.astype(x.dtype), (1,), (0,)), bias, factors, head)
    columns = lax.broadcasted_iota(np.int32, logits.shape, 1)
    best = jnp.argmax(logits, 1).astype(np.int32)
    largest, *at = (jnp.sum(jnp.where(columns == y[:, None], logits, 0), 1) for y in (best, *labels))
    expected = jnp.sum(_weighted(jax.nn.softmax(logits), logits), 1)
    return [jax.nn.logsumexp(logits, 1), expected, best, largest, jnp.sum(logits, 1), *at]


def _parts(arrays: Sequence[Any], head: Head) -> tuple[Any, Any, Any, Any, Sequence[Any]]:
    given = dict(zip(head.floats, arrays, strict=False))
    return given["x"], given["w"], given.get("bias"), given.get("factors"), arrays[len(given) :]


# The primitives: x, w, the bias and the factors if there are any, labels; then what follows.

forward_p, tangent_p, backward_p = primitives("cross_entropy")


@functools.lru_cache(maxsize=1024)
def _row_types(x: Any, labels: int) -> list[Any]:
    def rows(x: Any) -> Any:
        row = x[:, 0].astype(np.float32)
        return row, row, row.astype(np.int32), row, row, *[row] * labels

    return [aval.update(weak_type=False) for aval in compat.trace(rows, x).out_avals]


def _forward_avals(*avals: Any, head: Head) -> list[Any]:
    return _row_types(avals[0], head.labels)


def _batching(primitive: Primitive) -> Callable[..., Any]:
    """The batching rule of a primitive: mapped rows become rows; mapped weights are mapped one after the other."""

    def batch(arrays: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        size = mapped_size(arrays, dims)
        moved = [y if d is None else jnp.moveaxis(y, d, 0) for y, d in zip(arrays, dims, strict=True)]
        of_tangents = params["wrt"] if primitive is tangent_p else ()
        names = (*params["head"].floats, *[""] * len(arrays))[: len(arrays) - len(of_tangents)]
        of_rows = [name not in ("w", "bias") for name in (*names, *of_tangents)]
        sums = primitive is backward_p and not set(params["wrt"]) <= {"x", "factors"}
        if sums or any(d is not None and not rows for d, rows in zip(dims, of_rows, strict=True)):
            mapped = [y for y, d in zip(moved, dims, strict=True) if d is not None]

            def one(mapped: Any) -> Any:
                following = iter(mapped)
                each = (y if d is None else next(following) for y, d in zip(moved, dims, strict=True))
                return primitive.bind(*each, **params)

            outs = lax.map(one, mapped)
            return outs, [0] * len(outs)
        folded = []
        for y, d, rows in zip(moved, dims, of_rows, strict=True):
            y = jnp.broadcast_to(y, (size, *y.shape)) if rows and d is None else y
            folded.append(y.reshape(-1, *y.shape[2:]) if rows else y)
        outs = primitive.bind(*same_axes(folded), **params)
        return [y.reshape(size, -1, *y.shape[1:]) for y in outs], [0] * len(outs)

    return batch


_FAMILY = Family(
    forward_p,
    tangent_p,
    backward_p,
    names=lambda head: head.names,
    formula=formula,
    constant={2},  # where the largest is
    kept=lambda outs, head: outs[:3],
)
PROGRAMS = _FAMILY.define(_forward_program, _forward_avals, _backward_program, _batching)
