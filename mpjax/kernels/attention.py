"""Attention as a primitive: softmax(scale · Q Kᵀ, capped, plus biases, masked) V. No matrix of scores is stored.

    attention           (q, k, v, bias, mask)               → out, logsumexp
    attention_tangent   (all of these, tangents)            → tangent of out
    attention_backward  (all of these, cotangent of out)    → cotangents of q, k, v, bias

They are a `Family`. What runs is chosen when a program is lowered (see `mpjax.kernels.attention_kernels`): a fused
kernel of the platform, or the formulas here, a block of queries at a time.

    scores = scale · q kᵀ       p = exp(scores - logsumexp)     out = p v
    d v = pᵀ d out              d p = d out vᵀ                  d scores = p (d p - Σ p d p)

The scores, their softmax, the bias and its gradient are float32; matmuls read half operands and sum in float32.

Source: Dao, "FlashAttention-2", 2023 (the backward pass from the logsumexp).
"""

from __future__ import annotations

import dataclasses
import functools
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

# A score that no key has. (-inf would give NaN in a row without keys.)
_HIDDEN = np.float32(-0.7 * np.finfo(np.float32).max)
# The scores of a block of queries that the formulas compute at once, for each example and head.
_BLOCK = 2**18


@dataclasses.dataclass(frozen=True)
class Form:
    """What an attention computes.

    Args:
        scale: The factor of the scores.
        cap: If not 0, scores are capped: `cap · tanh(scores / cap)`.
        window: The keys (left, right) of each query's own position that it reads; None on a side without a limit.
        kernel: What runs: "fused" (the kernel of the platform), "cudnn", "pallas", "tokamax", or "xla" (the formulas).
    """

    scale: float
    cap: float = 0.0
    window: tuple[int | None, int | None] = (None, None)
    kernel: str = "xla"

    @property
    def is_causal(self) -> bool:
        """Whether no query reads a later key, and every query all earlier ones."""
        return self.window == (None, 0)


class Operands(NamedTuple):
    """The operands of an attention.

    Args:
        q: Queries [batch, queries, heads, features], half.
        k, v: Keys and values [batch, keys, heads or a divisor of them, features], half.
        bias: None, or an array added to the scores [batch or 1, heads or 1, queries or 1, keys or 1], float32.
        mask: None, or a boolean array of such a shape, False where a key is hidden.
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None
    mask: Any = None


def attention(operands: Operands, form: Form) -> Any:
    """The attention [batch, queries, heads, features], half.

    Example:
        >>> import jax.numpy as jnp
        >>> q = k = v = jnp.ones((1, 3, 2, 8), jnp.bfloat16)
        >>> attention(Operands(q, k, v), Form(1.0, window=(None, 0))).shape
        (1, 3, 2, 8)
    """
    if compat.under_jet():
        return formula(operands, form)[0]
    given = {name: y for name, y in operands._asdict().items() if y is not None}
    return forward_p.bind(*same_axes([*given.values()]), form=form, given=tuple(given))[0]


# The formulas.


def formula(x: Operands, form: Form, first: Any = 0) -> tuple[Any, Any]:
    """The result and the logsumexp [batch, heads, queries] of queries whose first one is at position `first`."""
    scores, _, _ = _scores(x, form, first)
    logsumexp = jax.nn.logsumexp(scores, axis=-1)
    p = _probabilities(scores, logsumexp).astype(x.q.dtype)
    out = _dot("bkgts,bskh->btkgh", p, x.v).astype(x.q.dtype)
    return out.reshape(*x.q.shape[:-1], x.v.shape[-1]), logsumexp.reshape(_rows(x.q))


def gradients(x: Operands, logsumexp: Any, ct: Any, form: Form, first: Any = 0) -> Operands:
    """The cotangents of q, k, v and the bias, in float32."""
    scores, slope, visible = _scores(x, form, first)
    p = _probabilities(scores, logsumexp.reshape(scores.shape[:-1]))
    grouped = (*x.q.shape[:2], x.k.shape[2], -1, x.v.shape[-1])
    of_p = _dot("btkgh,bskh->bkgts", ct.reshape(grouped), x.v)
    # Kernels take out · d out for the sum of p · d p. In half, `out` is rounded, and the difference cancels.
    of_scores = jnp.where(visible, p * (of_p - jnp.sum(p * of_p, -1, keepdims=True)), 0)
    of_bias = None if x.bias is None else summed_as(of_scores.reshape(*_rows(x.q), -1), x.bias)
    low = (of_scores * (slope * np.float32(form.scale))).astype(x.q.dtype)
    q = _dot("bkgts,bskh->btkgh", low, x.k).reshape(x.q.shape)
    k = _dot("bkgts,btkgh->bskh", low, _grouped(x))
    v = _dot("bkgts,btkgh->bskh", p.astype(x.q.dtype), ct.reshape(grouped))
    return Operands(q, k, v, of_bias)


def _probabilities(scores: Any, logsumexp: Any) -> Any:
    # The logsumexp of a row of hidden scores is so large that their number is lost in it: its sum is not one.
    p = jnp.exp(scores - logsumexp[..., None])
    return p / jnp.sum(p, -1, keepdims=True)


def _scores(x: Operands, form: Form, first: Any) -> tuple[Any, Any, Any]:
    """The masked scores [batch, heads of keys, heads of queries, queries, keys], the cap's slope, and what is read."""
    scores = _dot("btkgh,bskh->bkgts", _grouped(x), x.k) * np.float32(form.scale)
    slope: Any = np.float32(1)
    if form.cap:
        tanh = jnp.tanh(scores / np.float32(form.cap))
        scores, slope = np.float32(form.cap) * tanh, 1 - tanh * tanh
    visible = band(form, first, x.q.shape[1], x.k.shape[1])
    if x.mask is not None:
        visible = visible & _split_heads(x.mask, scores)
    if x.bias is not None:
        scores = scores + _split_heads(x.bias, scores)
    return (scores if visible is True else jnp.where(visible, scores, _HIDDEN)), slope, visible


def band(form: Form, first: Any, queries: int, keys: int) -> Any:
    """The keys that each query reads by the window [queries, keys]; True if there is no limit."""
    left, right = form.window
    if left is right is None:
        return True
    distance = lax.broadcasted_iota(np.int32, (queries, keys), 0) + first
    distance = distance - lax.broadcasted_iota(np.int32, (queries, keys), 1)
    low = True if right is None else distance >= -right
    return low if left is None else low & (distance <= left)


def _dot(spec: str, a: Any, b: Any) -> Any:
    if compat.contracts_rows(a.dtype):  # XLA for CPUs has no other product of half operands in float32.
        a, b = a.astype(np.float32), b.astype(np.float32)
    return jnp.einsum(spec, a, b, preferred_element_type=np.float32)


def _grouped(x: Operands) -> Any:
    """The queries, with those that share keys in a dimension of their own."""
    return x.q.reshape(*x.q.shape[:2], x.k.shape[2], -1, x.q.shape[3])


def _split_heads(added: Any, scores: Any) -> Any:
    """A mask or bias with its heads as the scores have them."""
    heads = (1, 1) if added.shape[1] == 1 else scores.shape[1:3]
    return added.reshape(added.shape[0], *heads, *added.shape[2:])


def _rows(q: Any) -> tuple[int, ...]:
    return q.shape[0], q.shape[2], q.shape[1]


def summed_as(x: Any, like: Any) -> Any:
    """The sum of an array over the dimensions in which another one has size 1."""
    axes = tuple(d for d, n in enumerate(like.shape) if n == 1 and x.shape[d] != 1)
    return jnp.sum(x, axes, keepdims=True) if axes else x


# A block of queries at a time.


def in_blocks(x: Operands, form: Form) -> tuple[Any, Any]:
    """As `formula`, with the scores of one block of queries at a time."""
    blocks = _Blocks.of(x)
    if blocks.number == 1:
        return formula(x, form)

    def body(_: Any, block: Any) -> Any:
        part, first = block
        return None, formula(part._replace(k=x.k, v=x.v), form, first)

    _, (out, logsumexp) = lax.scan(body, None, (blocks.split(x), blocks.first))
    return blocks.joined(out, 1), blocks.joined(logsumexp, 2)


def gradients_in_blocks(x: Operands, out: Any, logsumexp: Any, ct: Any, form: Form) -> Operands:
    """As `gradients`, with the scores of one block of queries at a time; `out` is the result, for other kernels."""
    blocks = _Blocks.of(x)
    if blocks.number == 1:
        return gradients(x, logsumexp, ct, form)
    whole = x.bias is not None and x.bias.shape[2] != 1  # Each block then has rows of its own.

    def body(sums: Operands, block: Any) -> Any:
        part, logsumexp, ct, first = block
        found = gradients(part._replace(k=x.k, v=x.v), logsumexp, ct, form, first)
        of_bias = None if found.bias is None or whole else sums.bias + found.bias
        sums = sums._replace(k=sums.k + found.k, v=sums.v + found.v, bias=of_bias)
        return sums, (found.q, found.bias if whole else None)

    zeros = Operands(None, *(jnp.zeros(y.shape, np.float32) for y in (x.k, x.v)))
    if x.bias is not None and not whole:
        zeros = zeros._replace(bias=jnp.zeros(x.bias.shape, np.float32))
    rows = (blocks.split(x), *(blocks.apart(y, d) for y, d in ((logsumexp, 2), (ct, 1))), blocks.first)
    arrays = [y for y in (x.q, x.k, x.v, x.bias, ct) if y is not None]
    zeros = jax.tree.map(lambda zero: vary_as(zero, arrays), zeros)
    sums, (q, bias) = lax.scan(body, zeros, rows)
    return Operands(blocks.joined(q, 1), sums.k, sums.v, blocks.joined(bias, 2) if whole else sums.bias)


class _Blocks(NamedTuple):
    """The blocks of queries of an attention. The last one is filled up with zeros.

    Args:
        number, size: How many, and the queries in each.
        queries: The queries in all.
    """

    number: int
    size: int
    queries: int

    @classmethod
    def of(cls, x: Operands) -> _Blocks:
        queries, keys = x.q.shape[1], x.k.shape[1]
        if not isinstance(queries, int) or not isinstance(keys, int):  # A symbolic length, of `jax.export`.
            return cls(1, queries, queries)
        size = min(queries, max(16, _BLOCK // keys))
        return cls(-(-queries // size), size, queries)

    @property
    def first(self) -> Any:
        return jnp.arange(self.number, dtype=np.int32) * self.size

    def split(self, x: Operands) -> Operands:
        added = (None if y is None else self.apart(y, 2) for y in (x.bias, x.mask))
        return Operands(self.apart(x.q, 1), None, None, *added)

    def apart(self, y: Any, axis: int) -> Any:
        """The blocks of an array, stacked; of a dimension of size 1, copies."""
        if y.shape[axis] == 1:
            return jnp.broadcast_to(y, (self.number, *y.shape))
        widths = [(0, self.number * self.size - self.queries if d == axis else 0) for d in range(y.ndim)]
        y = jnp.pad(y, widths)
        y = y.reshape(*y.shape[:axis], self.number, self.size, *y.shape[axis + 1 :])
        return jnp.moveaxis(y, axis, 0)

    def joined(self, y: Any, axis: int) -> Any:
        y = jnp.moveaxis(y, 0, axis)
        y = y.reshape(*y.shape[:axis], -1, *y.shape[axis + 2 :])
        return lax.slice_in_dim(y, 0, self.queries, axis=axis)


# The primitives. Their operands are those arrays of `Operands` that are given, in order, and what follows them.

forward_p, tangent_p, backward_p = primitives("attention")


def operands_of(names: Sequence[str], arrays: Sequence[Any]) -> Operands:
    """The operands of the given names."""
    return Operands(**{**dict.fromkeys(("q", "k", "v")), **dict(zip(names, arrays, strict=True))})


def _forward_program(*arrays: Any, form: Form, given: tuple[str, ...]) -> list[Any]:
    return list(in_blocks(operands_of(given, arrays), form))


def _backward_program(*arrays: Any, form: Form, given: tuple[str, ...], wrt: tuple[str, ...]) -> list[Any]:
    x, (*_, logsumexp, ct) = operands_of(given, arrays[: len(given)]), arrays[len(given) :]
    found = gradients_in_blocks(x, None, logsumexp, ct, form)
    return [getattr(found, name).astype(getattr(x, name).dtype) for name in wrt]


def _forward_avals(*avals: Any, form: Form, given: tuple[str, ...]) -> list[Any]:
    return list(_result_types(avals[0], avals[2].shape[-1]))


@functools.lru_cache(maxsize=4096)
def _result_types(q: Any, width: int) -> Sequence[Any]:
    def results(q: Any) -> Any:
        first = lax.slice_in_dim(q, 0, 1, axis=3)
        out = q if q.shape[3] == width else jnp.broadcast_to(first, (*q.shape[:3], width))
        return out, jnp.squeeze(first, 3).swapaxes(1, 2).astype(np.float32)

    return [aval.update(weak_type=False) for aval in compat.trace(results, q).out_avals]


def _batching(primitive: Primitive) -> Callable[..., Any]:
    """The batching rule of a primitive: the mapped axis becomes a part of the batch."""

    def batch(arrays: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        names = (*params["given"], *[""] * (len(arrays) - len(params["given"])))
        size = mapped_size(arrays, dims)
        of_bias = "bias" in params.get("wrt", ())
        examples = arrays[0].shape[1 if dims[0] == 0 else 0]
        folded = []
        for name, y, d in zip(names, arrays, dims, strict=True):
            if name in ("bias", "mask") and d is None and y.shape[0] == 1 and not (of_bias and name == "bias"):
                folded.append(y)
                continue
            y = jnp.moveaxis(y, d, 0) if d is not None else jnp.broadcast_to(y, (size, *y.shape))
            y = jnp.broadcast_to(y, (size, examples, *y.shape[2:])) if y.shape[1] != examples else y
            folded.append(y.reshape(size * examples, *y.shape[2:]))
        outs = [y.reshape(size, examples, *y.shape[1:]) for y in primitive.bind(*same_axes(folded), **params)]
        if primitive is backward_p and of_bias and examples != 1:
            bias, at = names.index("bias"), params["wrt"].index("bias")
            if arrays[bias].shape[1 if dims[bias] == 0 else 0] == 1:  # It was copied for each example.
                outs[at] = jnp.sum(outs[at], 1, keepdims=True)
        return outs, [0] * len(outs)

    return batch


_FAMILY = Family(
    forward_p,
    tangent_p,
    backward_p,
    names=lambda form, given: given,
    formula=lambda *arrays, form, given: formula(operands_of(given, arrays), form),
    constant={1},  # The logsumexp is there for the backward pass.
    # The formulas don't read the result, which a kernel's backward pass does.
    kept=lambda outs, form, given: outs if form.kernel != "xla" else outs[1:],
)
# Each primitive as a function of its operands, by its formulas.
PROGRAMS = _FAMILY.define(_forward_program, _forward_avals, _backward_program, _batching)
