"""Matmuls and convolutions as rows, and what keeps each of them from Tensor Cores or from using them well."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from mpjax._jaxpr.flops import is_weight_gradient
from mpjax._jaxpr.walk import Site
from mpjax.inspection.reports import amount

ALIGNMENT = 8
# "If any GEMM dimension is 128 or smaller, speedup is closer to 2x than 8x" (NVIDIA, mixed precision tutorial).
SMALL = 128
# One tile of 128 x 128 x 128, the least that one multiprocessor is busy with.
TINY = 2 * 128**3
DTYPE, DIMENSION, SMALL_DIMENSION, TINY_WORK = "dtype", "dimension", "small", "tiny"
MEANINGS = {
    DTYPE: "only half runs on Tensor Cores at full speed",
    DIMENSION: f"no multiple of {ALIGNMENT}, which Tensor Cores want",
    SMALL_DIMENSION: f"a dimension of {SMALL} or less: the speedup is nearer 2× than 8×",
    TINY_WORK: f"less work than one tile of {SMALL}×{SMALL}×{SMALL}: the launch takes longer",
}


@dataclasses.dataclass(frozen=True)
class Matmul:
    """The matmuls or convolutions of one line of the program that are alike.

    Args:
        module: module path, from the named scopes.
        source: the line, `file.py:12`.
        op: the primitive.
        phase: `"forward"`, `"backward"`, or `"recomputed"` (forward work that the backward pass does again).
        lhs, rhs: shapes of the operands.
        dtypes: dtypes of the operands.
        out_dtype: dtype of the result.
        count: how many times it runs.
        flops: of all runs together, a multiply and an add counting two.
        dimensions: of the matrix product that it is: M, N and K; of a convolution, the channels too.
        precision: JAX's `precision`, if it is higher than the default.
    """

    module: str
    source: str
    op: str
    phase: str
    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    dtypes: tuple[str, str]
    out_dtype: str
    count: int
    flops: int
    dimensions: tuple[tuple[str, int], ...]
    precision: str = ""

    @property
    def dtype(self) -> str:
        """The operands' dtype; both, as `float16/float32`, if they differ."""
        return "/".join(dict.fromkeys(self.dtypes))

    @property
    def is_half(self) -> bool:
        """Whether all operands have 16 bits or fewer."""
        return all(jnp.dtype(dtype).itemsize <= 2 for dtype in self.dtypes)


def matmuls_of(sites: Iterable[Site]) -> tuple[Matmul, ...]:
    """The rows of a program's matmuls and convolutions on real floating numbers."""
    merged: dict[Matmul, list[int]] = {}
    for site in sites:
        if not site.flops or not all(_is_real(v.aval.dtype) for v in site.eqn.invars[:2]):
            continue
        total = merged.setdefault(_row(site), [0, 0])
        total[0] += site.times
        total[1] += site.flops
    return tuple(dataclasses.replace(row, count=n, flops=flops) for row, (n, flops) in merged.items())


def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _row(site: Site) -> Matmul:
    lhs, rhs = (v.aval for v in site.eqn.invars[:2])
    return Matmul(
        module=site.path,
        source=site.source,
        op=site.name,
        phase=site.phase,
        lhs=lhs.shape,
        rhs=rhs.shape,
        dtypes=(lhs.dtype.name, rhs.dtype.name),
        out_dtype=site.eqn.outvars[0].aval.dtype.name,
        count=0,
        flops=0,
        dimensions=tuple(_dimensions(site).items()),
        precision=_precision(site.eqn.params.get("precision")),
    )


def _precision(precision: Any) -> str:
    names = {str(p).rsplit(".", 1)[-1] for p in (precision if isinstance(precision, tuple) else (precision,))}
    return "HIGHEST" if "HIGHEST" in names else "HIGH" if "HIGH" in names else ""


def _dimensions(site: Site) -> dict[str, int]:
    """M, N and K of the matrix product; of a convolution, that of its im2col, and the channels."""
    eqn = site.eqn
    lhs, rhs, out = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    if site.name == "dot_general":
        (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
        k, b = math.prod(lhs[d] for d in contracted), math.prod(lhs[d] for d in batch)
        return {"M": math.prod(lhs) // max(b * k, 1), "N": math.prod(rhs) // max(b * k, 1), "K": k}
    if site.name != "conv_general_dilated":
        return {"M": lhs[-2], "N": rhs[-1], "K": lhs[-1]}
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    features = rhs[numbers.rhs_spec[0]]
    inner = rhs[numbers.rhs_spec[1]]
    window = math.prod(rhs) // max(features * inner, 1)
    sizes = {"M": math.prod(out) // max(features, 1), "N": features // groups, "K": inner * window}
    # The gradient of the weights slides the output's gradient over the input: there the batch is summed over.
    channels = (lhs[numbers.lhs_spec[0]] if is_weight_gradient(eqn) else inner, features // groups)
    groups *= eqn.params["batch_group_count"]
    return sizes | {"in": channels[0], "out": channels[1]} | ({"groups": groups} if groups > 1 else {})


@dataclasses.dataclass(frozen=True)
class Finding:
    """Why matmuls or convolutions do not run on Tensor Cores, or not at their speed.

    Args:
        kind: `"dtype"`: the operands are not half; `"dimension"`: a dimension is no multiple of 8;
            `"small"`: a dimension is 128 or less; `"tiny"`: too little work to fill a GPU.
        module, source, op: where and what.
        flops: FLOPs of the matmuls that it concerns.
        share: their share of the program's.
        shapes: of the operands, in the first of them.
        why: the reason, and what would do.
    """

    kind: str
    module: str
    source: str
    op: str
    flops: int
    share: float
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    why: str


def findings_of(matmuls: Iterable[Matmul]) -> tuple[Finding, ...]:
    """The findings, those that concern most FLOPs first. Forward and backward of one matmul are one finding."""
    rows = tuple(matmuls)
    total = sum(row.flops for row in rows)
    merged: dict[Any, Finding] = {}
    for row in rows:
        for kind, sizes, why in _faults(row):
            key = (kind, row.module, row.source, row.op, sizes)
            new = Finding(kind, row.module, row.source, row.op, 0, 0.0, (row.lhs, row.rhs), why)
            found = merged.setdefault(key, new)
            flops = found.flops + row.flops
            merged[key] = dataclasses.replace(found, flops=flops, share=flops / total)
    order = (DTYPE, DIMENSION, SMALL_DIMENSION, TINY_WORK)
    return tuple(sorted(merged.values(), key=lambda f: (order.index(f.kind), -f.flops)))


def _faults(row: Matmul) -> Iterator[tuple[str, frozenset[int], str]]:
    """Each fault's kind, the sizes that are at fault, and the text."""
    if not row.is_half:
        dtypes = list(dict.fromkeys(row.dtypes))
        text = f"{' and '.join(dtypes)} operands"
        wide = [dtype for dtype in dtypes if jnp.dtype(dtype).itemsize > 2]
        if len(wide) < len(dtypes):
            text += f": cast the {wide[0]} one (made in the model's code? jnp.zeros(shape, x.dtype))"
        yield DTYPE, frozenset(), text
    if row.flops / row.count < TINY:
        yield TINY_WORK, frozenset(), f"{amount(row.flops / row.count, 'FLOP')} a run"
        return
    sizes = dict(row.dimensions)
    aligned = {"in": "input channels", "out": "output channels"} if "in" in sizes else {n: n for n in "MNK"}
    ragged = {name: sizes[name] for name in aligned if sizes[name] % ALIGNMENT}
    if ragged:
        text = ", ".join(f"{aligned[n]} = {size}: pad to {_padded(size)}" for n, size in ragged.items())
        yield (
            DIMENSION,
            frozenset(ragged.values()),
            text + (f" ({sizes['groups']} groups)" if "groups" in sizes else ""),
        )
    small = {name: sizes[name] for name in "MNK" if sizes[name] <= SMALL}
    if small:
        yield SMALL_DIMENSION, frozenset(small.values()), ", ".join(f"{name} = {size}" for name, size in small.items())


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def casts_of(sites: Iterable[Site]) -> dict[str, tuple[int, int]]:
    """Casts between floating dtypes, as `float32→float16`: how many run, and the bytes that they read and write."""
    found: dict[str, tuple[int, int]] = {}
    for site in sites:
        if site.name != "convert_element_type":
            continue
        source, target = (v.aval for v in (site.eqn.invars[0], site.eqn.outvars[0]))
        if source.dtype == target.dtype or not (_is_real(source.dtype) and _is_real(target.dtype)):
            continue
        name = f"{source.dtype.name}→{target.dtype.name}"
        size = source.size * (source.dtype.itemsize + target.dtype.itemsize)
        count, moved = found.get(name, (0, 0))
        found[name] = (count + site.times, moved + site.times * size)
    return found
