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
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mpjax.kernels.derivatives import mapped_size, same_axes, vary_as
from mpjax.kernels.families import Family, primitives
from mpjax.program import compat

# The logits of a block that exist at once. On a TPU, more of them take more memory than they save in bytes moved.
_BLOCK, _BLOCK_OF_TPUS = 2**27, 2**26
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
    """

    steps: tuple[tuple[str, float], ...] = ()

    @property
    def floats(self) -> tuple[str, ...]:
        """The operands, which have derivatives: rows, weights, a bias, a factor of each row."""
        kinds = {kind for kind, _ in self.steps}
        return ("x", "w", *(name for name in ("bias", "factors") if name in kinds))


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of a loss: one, or a student's and a teacher's, with as many rows and one vocabulary.

    Args:
        heads: How the logits of each follow.
        labels: How many arrays of labels there are, which are the same for all heads.
    """

    heads: tuple[Head, ...] = (Head(),)
    labels: int = 1

    @property
    def floats(self) -> tuple[str, ...]:
        """The operands before the labels, head by head, each with the number of its head."""
        return tuple(f"{name}{i}" for i, head in enumerate(self.heads) for name in head.floats)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all operands; those of labels are empty."""
        return (*self.floats, *[""] * self.labels)

    def places(self, kinds: str) -> tuple[int, ...]:
        """The places of the operands whose names begin with one of some letters."""
        return tuple(i for i, name in enumerate(self.floats) if name[0] in kinds)

    def at(self, head: int) -> range:
        """The places among the results of the logits of a head at labels."""
        end = 1 + (head + 1) * (3 + len(self.heads) + self.labels)
        return range(end - self.labels, end)

    def of_results(self, found: Sequence[Any]) -> list[Statistics]:
        """The statistics of each head, from the results of the primitive."""
        best, rest, n = found[0], iter(found[1:]), len(self.heads)
        return [
            Statistics(best[..., i], next(rest), next(rest), next(rest), _next(rest, n), _next(rest, self.labels))
            for i in range(n)
        ]


def _next(arrays: Iterator[Any], count: int) -> tuple[Any, ...]:
    return tuple(itertools.islice(arrays, count))


class Statistics(NamedTuple):
    """What is read of each row of logits, [rows] each, float32; `best` is int32, `at` has one for each array of labels.

    All but `best` have a derivative. `expected` has the mean under the softmax of the logits for each head's logits;
    logits of -inf that have no probability add nothing to it. The derivative of `largest` is that of the logit at
    `best`. `at` is 0 where a label is outside of the vocabulary.
    """

    best: Any
    logsumexp: Any
    largest: Any
    total: Any
    expected: tuple[Any, ...]
    at: tuple[Any, ...]


def statistics(operands: Sequence[Any], heads: Heads) -> list[Any]:
    """The statistics of logits, as `Heads.of_results` reads them.

    Args:
        operands: For each head rows [rows, features], half; weights [features, vocabulary], float32, which are read in
            the dtype of the rows; [vocabulary], float32, with a bias; [rows], float32, with factors (the inverse of a
            learned temperature). Then arrays of labels [rows], int32.
        heads: How logits follow from them.

    Example:
        >>> import jax.numpy as jnp
        >>> operands = jnp.ones((2, 4), jnp.bfloat16), jnp.zeros((4, 8)), jnp.zeros(2, int)
        >>> (found,) = Heads().of_results(statistics(operands, Heads()))
        >>> found.logsumexp.dtype, round(float(found.logsumexp[0]), 4)  # the logarithm of 8
        (dtype('float32'), 2.0794)
    """
    return list(forward_p.bind(*same_axes(operands), head=heads))


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


def _parts_and_blocks(rows: Any, vocabulary: int, heads: int, size: int) -> tuple[int, int]:
    """The number of parts, and of blocks: if one near it divides a part, no two blocks overlap."""
    rows = heads * (rows if isinstance(rows, int) else _ROWS)
    least = max(1, -(-rows * vocabulary // size))
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

    def __init__(self, operands: Sequence[Mapping[str, Any]], heads: Heads, size: int | None):
        self.operands, self.heads = operands, heads.heads
        self.rows, self.vocabulary = operands[0]["x"].shape[0], operands[0]["w"].shape[1]
        parts, count = _parts_and_blocks(self.rows, self.vocabulary, len(operands), size or _BLOCK)
        self.shape = (parts, self.vocabulary // parts)
        self.size = -(-self.shape[1] // count)
        self.starts = np.minimum(np.arange(count) * self.size, self.shape[1] - self.size).astype(np.int32)
        self.fresh = (np.arange(count) * self.size).astype(np.int32)
        self.apart = bool((self.starts == self.fresh).all())

    def block(self, of: Mapping[str, Any], start: Any) -> tuple[Any, Any]:
        """The weights and the bias of a block of a head."""
        arrays = [y.reshape(*y.shape[:-1], *self.shape) for y in (of["w"], of.get("bias")) if y is not None]
        w, *bias = (lax.dynamic_slice_in_dim(y, start, self.size, y.ndim - 1) for y in arrays)
        return w.astype(of["x"].dtype), bias[0] if bias else None

    def logits(self, start: Any) -> list[tuple[Any, Callable[..., Any], Any]]:
        """For each head, the logits of a block [rows, parts, size], float32, their pullback, and the weights.

        The product of rows and weights is rounded to half, as any matmul's result that is stored.
        """
        found = []
        for of, head in zip(self.operands, self.heads, strict=True):
            w, bias = self.block(of, start)
            product = lax.dot_general(of["x"], w, (((1,), (0,)), ((), ()))).astype(np.float32)
            operands = product, *(0.0 if y is None else y for y in (bias, of.get("factors")))
            logits, pullback = jax.vjp(functools.partial(_adjusted, head=head), *operands)
            found.append((logits, pullback, w))
        return found

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
        arrays = [y for of in self.operands for y in of.values()]
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


def _forward_program(*arrays: Any, head: Heads, block: int | None = None) -> list[Any]:
    operands, labels, _ = _parts(arrays, head)
    walk = _Walk(operands, head, block)

    def read(carry: Any, logits: Any, blocks: Sequence[Any], columns: Any, new: Any) -> Any:
        best, largest, summed, total, weighted, at = carry
        counted = jnp.where(new, logits, -jnp.inf)
        hits = (new & (columns == _of_rows(y)) for y in labels)
        operands = counted, jnp.where(counted > -jnp.inf, 1.0, 0.0), *(jnp.where(hit, logits, 0) for hit in hits)
        # Logits are read once.
        found = lax.reduce(operands, (-np.inf, *[0.0] * (len(operands) - 1)), _joined, _OF_BLOCK)
        here, (higher, summed, *at) = found[0], _joined((largest, summed, *at), found)
        safe = jnp.where(jnp.isfinite(higher), higher, 0)
        before, exponentials = jnp.exp(largest - safe), jnp.exp(counted - _of_rows(safe))
        sums = (jnp.sum(_weighted(exponentials, each), _OF_BLOCK) for each in blocks)
        weighted = [old * before + more for old, more in zip(weighted, sums, strict=True)]
        place = jnp.min(jnp.where(counted == _of_rows(here), columns, walk.vocabulary), _OF_BLOCK)
        # As argmax, which takes the first NaN.
        best = jnp.where(here > largest, place, best)
        return best, higher, summed, total + jnp.sum(jnp.where(new, logits, 0), _OF_BLOCK), weighted, at

    def body(carry: Any, start: Any, fresh: Any) -> Any:
        blocks, columns = [logits for logits, *_ in walk.logits(start)], walk.columns(start)
        new = True if walk.apart else walk.new(start, fresh)
        return [read(each, logits, blocks, columns, new) for each, logits in zip(carry, blocks, strict=True)]

    rows = jnp.zeros((walk.rows,), np.float32)
    start = (rows.astype(np.int32), rows - jnp.inf, rows, rows, [rows for _ in operands], [rows for _ in labels])
    found = walk.run(body, [start for _ in operands])
    outs = []
    for _, largest, summed, total, weighted, at in found:
        outs += [largest + jnp.log(summed), largest, total, *(y / summed for y in weighted), *at]
    return [jnp.stack([best for best, *_ in found], -1), *outs]


def _backward_program(*arrays: Any, head: Heads, wrt: tuple[str, ...], block: int | None = None) -> list[Any]:
    operands, labels, (best, *rest) = _parts(arrays, head)
    walk, kept, n = _Walk(operands, head, block), iter(rest), len(operands)
    logsumexps, expected = zip(*((next(kept), _next(kept, n)) for _ in operands), strict=True)
    cts = head.of_results([best, *kept])
    # Where nothing reads a mean, a compiler then drops its sum.
    means = [sum(map(_times, ct.expected, each)) for ct, each in zip(cts, expected, strict=True)]

    def body(carry: Any, start: Any, fresh: Any) -> Any:
        blocks, columns = walk.logits(start), walk.columns(start)
        found: dict[str, Any] = {}
        p = [jnp.exp(each[0] - _of_rows(y)) for each, y in zip(blocks, logsumexps, strict=True)]
        for i in sorted({int(name[-1]) for name in wrt}):
            (_, pullback, w), x, of = blocks[i], operands[i]["x"], cts[i]
            ct = p[i] * _of_rows(of.logsumexp - means[i]) + _of_rows(of.total)
            for j in range(n):
                ct = ct + _times(_of_rows(of.expected[j]), _weighted(p[i], blocks[j][0]))
                ct = ct + _times(_of_rows(cts[j].expected[i]), p[j])
            for y, c in ((best[:, i], of.largest), *zip(labels, of.at, strict=True)):
                ct = ct + jnp.where(columns == _of_rows(y), _of_rows(c), 0)
            of_product, *others = pullback(ct if walk.apart else jnp.where(walk.new(start, fresh), ct, 0))
            low = of_product.astype(x.dtype)
            made = _dot(low, w, _OF_BLOCK, _OF_BLOCK), _dot(x, low, (0,), (0,)), *others
            found |= {f"{name}{i}": y for name, y in zip(("x", "w", "bias", "factors"), made, strict=True)}
        return {
            name: walk.with_block(y, found[name], start) if name[0] in "wb" else y + found[name]
            for name, y in carry.items()
        }

    types = dict(zip(head.floats, arrays, strict=False))
    shapes = {name: (*types[name].shape[:-1], *walk.shape) if name[0] in "wb" else types[name].shape for name in wrt}
    sums = walk.run(body, {name: jnp.zeros(shapes[name], np.float32) for name in wrt})
    return [sums[name].reshape(types[name].shape).astype(types[name].dtype) for name in wrt]


def _times(ct: Any, y: Any) -> Any:
    """The product of a cotangent and something, which is 0 where the cotangent is."""
    return jnp.where(ct == 0, 0, ct * y)


def _dot(a: Any, b: Any, i: Sequence[int], j: Sequence[int]) -> Any:
    if compat.contracts_rows(a.dtype):  # XLA for CPUs has no other product of half operands in float32.
        a, b = a.astype(np.float32), b.astype(np.float32)
    return lax.dot_general(a, b, ((i, j), ((), ())), preferred_element_type=np.float32)


def formula(*arrays: Any, head: Heads) -> list[Any]:
    """The statistics from logits as a whole, for forward mode and second derivatives."""
    operands, labels, _ = _parts(arrays, head)
    products = (_dot(of["x"], of["w"].astype(of["x"].dtype), (1,), (0,)) for of in operands)
    logits = [
        _adjusted(product, of.get("bias"), of.get("factors"), each)
        for product, of, each in zip(products, operands, head.heads, strict=True)
    ]
    bests, outs = [jnp.argmax(each, 1).astype(np.int32) for each in logits], []
    for best, each in zip(bests, logits, strict=True):
        columns = lax.broadcasted_iota(np.int32, each.shape, 1)
        largest, *at = (jnp.sum(jnp.where(columns == y[:, None], each, 0), 1) for y in (best, *labels))
        expected = (jnp.sum(_weighted(jax.nn.softmax(each), other), 1) for other in logits)
        outs += [jax.nn.logsumexp(each, 1), largest, jnp.sum(each, 1), *expected, *at]
    return [jnp.stack(bests, -1), *outs]


def _parts(arrays: Sequence[Any], head: Heads) -> tuple[list[dict[str, Any]], Sequence[Any], Sequence[Any]]:
    """The operands of each head by name, the labels, and what follows."""
    rest = iter(arrays)
    operands = [{name: next(rest) for name in each.floats} for each in head.heads]
    return operands, _next(rest, head.labels), tuple(rest)


# The primitives: for each head x, w, the bias and the factors if there are any; labels; then what follows.

forward_p, tangent_p, backward_p = primitives("cross_entropy")


@functools.lru_cache(maxsize=1024)
def _row_types(x: Any, head: Heads) -> list[Any]:
    def rows(x: Any) -> Any:
        row, n = x[:, 0].astype(np.float32), len(head.heads)
        return jnp.stack([row.astype(np.int32)] * n, -1), *[row] * (n * (3 + n + head.labels))

    return [aval.update(weak_type=False) for aval in compat.trace(rows, x).out_avals]


def _forward_avals(*avals: Any, head: Heads) -> list[Any]:
    return _row_types(avals[0], head)


def _kept(outs: Sequence[Any], head: Heads) -> list[Any]:
    return [outs[0], *(y for each in head.of_results(outs) for y in (each.logsumexp, *each.expected))]


def _batching(primitive: Primitive) -> Callable[..., Any]:
    """The batching rule of a primitive: mapped rows become rows; mapped weights are mapped one after the other."""

    def batch(arrays: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        size = mapped_size(arrays, dims)
        moved = [y if d is None else jnp.moveaxis(y, d, 0) for y, d in zip(arrays, dims, strict=True)]
        of_tangents = params["wrt"] if primitive is tangent_p else ()
        names = (*params["head"].floats, *[""] * len(arrays))[: len(arrays) - len(of_tangents)]
        of_rows = [name[:1] not in ("w", "b") for name in (*names, *of_tangents)]
        sums = primitive is backward_p and any(name[0] in "wb" for name in params["wrt"])
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
    constant={0},  # where the largest is
    kept=_kept,
)
PROGRAMS = _FAMILY.define(_forward_program, _forward_avals, _backward_program, _batching)
for _primitive in (forward_p, backward_p):
    _program = functools.partial(PROGRAMS[_primitive], block=_BLOCK_OF_TPUS)
    mlir.register_lowering(_primitive, mlir.lower_fun(_program, multiple_results=True), platform="tpu")
