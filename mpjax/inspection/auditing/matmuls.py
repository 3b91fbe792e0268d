"""Matmuls and convolutions as table rows, what keeps them from using Tensor Cores well, and what half can gain."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax.inspection.devices import Device
from mpjax.inspection.reports import added_up, amount, by_key, totals
from mpjax.program import compat
from mpjax.program.dtypes import is_float, is_half
from mpjax.program.formats import NAMES, is_narrow
from mpjax.program.graph import Site, sub_jaxprs
from mpjax.program.inlining import Flow
from mpjax.program.primitives import Op, is_weight_gradient, primitive
from mpjax.program.source import FORWARD

# By name: matmuls and convolutions have different parameters.

ALIGNMENT = 8
# "If any GEMM dimension is 128 or smaller, speedup is closer to 2x than 8x" (NVIDIA, mixed precision tutorial).
SMALL = 128
# One tile of 128 x 128 x 128, the least work that occupies one multiprocessor.
TINY = 2 * 128**3
DTYPE, DIMENSION, SMALL_DIMENSION, TINY_WORK = "dtype", "dimension", "small", "tiny"
MEANINGS = {
    DTYPE: "only half runs on Tensor Cores at full speed",
    DIMENSION: f"not a multiple of {ALIGNMENT}, as Tensor Cores require for full speed",
    SMALL_DIMENSION: f"a dimension of {SMALL} or less: the speedup is nearer 2× than 8×",
    TINY_WORK: f"less work than one tile of {SMALL}×{SMALL}×{SMALL}: the launch takes longer",
}
ON_TPU = {DTYPE: "float32 in several bfloat16 passes: one pass at JAX's default precision, 3 at HIGH, 6 at HIGHEST"}


@dataclasses.dataclass(frozen=True)
class Matmul:
    """Matmuls or convolutions on one line of the program that differ in nothing but `count` and `flops`.

    Args:
        module: Module path, from the named scopes.
        source: The line, `file.py:12`.
        op: The primitive.
        phase: `"forward"`, `"backward"`, or `"recomputed"` (forward operations repeated in the backward pass).
        lhs, rhs: Shapes of the operands.
        dtypes: Dtypes of the operands.
        out_dtype: Dtype of the result.
        count: Number of executions, over all devices.
        flops: FLOPs of all executions; a multiply-add is two.
        dimensions: M, N and K of the matrix product; for a convolution, the channels too.
        precision: JAX's `precision` or the dot algorithm, if it is not the default. Includes
            `jax_default_matmul_precision`.
        devices: Number of devices that run it on their own parts; 1 outside `shard_map`, where the shapes are global.
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
    devices: int = 1

    @property
    def dtype(self) -> str:
        """The operands' dtype, or both as `float16/float32` if they differ. Includes the dot algorithm's dtype."""
        operands = "/".join(dict.fromkeys(self.dtypes))
        return f"{operands} as {_multiplied(self.precision)}" if _multiplied(self.precision) else operands

    @property
    def is_half(self) -> bool:
        """Whether the multiplications use 16 bits or fewer."""
        if _multiplied(self.precision):
            return self.precision.startswith(("F16_", "BF16_", "ANY_F8_")) and "_X" not in self.precision
        return all(jnp.dtype(dtype).itemsize <= 2 for dtype in self.dtypes)

    @property
    def eight_bits(self) -> str:
        """The kind of operands of 8 bits, `"float8"` or `"int8"`; empty if they are others, or of two kinds."""
        kinds = {
            ("int8" if jnp.issubdtype(dtype, jnp.integer) else "float8") if jnp.dtype(dtype).itemsize == 1 else ""
            for dtype in self.dtypes
        }
        return kinds.pop() if len(kinds) == 1 else ""

    @property
    def passes(self) -> int:
        """The bfloat16 passes that it takes on a TPU."""
        _, _, times = self.precision.partition("_X")
        if self.is_half or times:
            return int(times or 1)
        return {"HIGHEST": 6, "F32_F32_F32": 6, "HIGH": 3}.get(self.precision, 1)


_KINDS = {"BF": "bfloat", "TF": "tfloat", "F": "float"}


def _multiplied(precision: str) -> str:
    """The dtype in which a dot algorithm multiplies; empty for a `Precision`.

    Example:
        >>> _multiplied("TF32_TF32_F32"), _multiplied("BF16_BF16_F32_X3"), _multiplied("HIGHEST")
        ('tfloat32', 'bfloat16×3', '')
    """
    found = re.match(r"(?:ANY_)?(BF|TF|F)(\d+)_.*?(?:_X(\d))?$", precision)
    return f"{_KINDS[found[1]]}{found[2]}{f'×{found[3]}' if found[3] else ''}" if found else ""


def matmuls_of(sites: Iterable[Site]) -> tuple[Matmul, ...]:
    """The rows of a program's matmuls and convolutions on real floating-point numbers and 8-bit integers."""
    merged = added_up(
        (_row(site), (site.times * site.devices, site.flops * site.devices))
        for site in sites
        if site.flops and all(_is_multiplied(v.aval.dtype) for v in site.eqn.invars[:2])
    )
    return tuple(dataclasses.replace(row, count=n, flops=flops) for row, (n, flops) in merged.items())


def _is_multiplied(dtype: Any) -> bool:
    return bool(
        jnp.issubdtype(dtype, jnp.floating) or (jnp.issubdtype(dtype, jnp.integer) and jnp.dtype(dtype).itemsize == 1)
    )


def _row(site: Site) -> Matmul:
    lhs, rhs = (v.aval for v in site.eqn.invars[:2])
    # A loss without logits casts its weights block by block.
    multiplied = lhs if primitive(site.name).heads else rhs
    return Matmul(
        module=site.path,
        source=site.source,
        op=site.name,
        phase=site.phase,
        lhs=lhs.shape,
        rhs=rhs.shape,
        # A block-scaled matmul quantises its operands itself.
        dtypes=tuple(x.name for x in site.eqn.params.get("dtypes", (lhs.dtype, multiplied.dtype))),
        out_dtype=site.eqn.outvars[0].aval.dtype.name,
        count=0,
        flops=0,
        dimensions=tuple(_dimensions(site).items()),
        precision=_precision(site.eqn.params.get("precision")),
        devices=site.devices,
    )


def _precision(precision: Any) -> str:
    names = {str(p).rsplit(".", 1)[-1] for p in (precision if isinstance(precision, tuple) else (precision,))}
    names -= {"DEFAULT", "None"}
    return "HIGHEST" if "HIGHEST" in names else next(iter(names), "")


def _dimensions(site: Site) -> dict[str, int]:
    """M, N and K of the matrix product; for a convolution, those of its im2col product and the channels."""
    eqn = site.eqn
    lhs, rhs, out = (v.aval.shape for v in (*eqn.invars[:2], eqn.outvars[0]))
    if primitive(site.name).attends:  # The product of queries and keys [batch, tokens, heads, features].
        return {"M": lhs[1], "N": rhs[1], "K": lhs[3]}
    if site.name == "dot_general" or primitive(site.name).contracts:
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
    # The gradient of the weights slides the output's gradient over the input, and sums over the batch.
    channels = (lhs[numbers.lhs_spec[0]] if is_weight_gradient(eqn) else inner, features // groups)
    groups *= eqn.params["batch_group_count"]
    return sizes | {"in": channels[0], "out": channels[1]} | ({"groups": groups} if groups > 1 else {})


@dataclasses.dataclass(frozen=True)
class Finding:
    """Why matmuls or convolutions do not run on Tensor Cores, or not at full speed.

    Args:
        kind: `"dtype"`: the operands are not half; `"dimension"`: a dimension is not a multiple of 8;
            `"small"`: a dimension is 128 or less; `"tiny"`: too little work to fill a GPU.
        module, source, op: The module path, the line and the primitive.
        flops: FLOPs of the affected matmuls.
        share: Their share of the program's FLOPs.
        shapes: Operand shapes of the first affected matmul.
        why: The reason and the fix.
    """

    kind: str
    module: str
    source: str
    op: str
    flops: int
    share: float
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    why: str


def widened_at(flow: Flow) -> dict[tuple[str, str, str], str]:
    """The lines that widen half operands of matmuls to float32, by the matmuls' module, line and primitive."""
    found: dict[tuple[str, str, str], str] = {}
    for matmul in (node for node in flow.eqns if node.site.flops and node.site.phase == FORWARD):
        wide = [v for v in matmul.reads[:2] if v.aval.dtype == jnp.float32]
        makers = flow.made_by(wide, lambda node: () if node.site.flops else filter(is_float, node.reads))
        if line := next((node.site.source for node in makers if any(map(is_half, node.reads))), ""):
            found[matmul.site.path, matmul.site.source, matmul.site.name] = line
    return found


def findings_of(rows: Sequence[Matmul], tpu: bool, widened: Mapping[tuple[str, str, str], str]) -> tuple[Finding, ...]:
    """The findings by kind, most FLOPs first. Forward and backward of one matmul are one finding.

    Args:
        rows: The rows.
        tpu: Whether they run on a TPU, where these are matmuls of several passes: the checks of sizes are for GPUs.
        widened: What `widened_at` found.
    """
    total = sum(row.flops for row in rows)
    faults = (
        ((kind, row.module, row.source, row.op, sizes), (row, why))
        for row in rows
        for kind, sizes, why in _faults(row, widened.get((row.module, row.source, row.op), ""))
        if not tpu or (kind == DTYPE and row.passes > 1)
    )
    found = []
    for (kind, module, source, op, _), alike in by_key(faults).items():
        flops, (first, why) = sum(row.flops for row, _ in alike), alike[0]
        found.append(Finding(kind, module, source, op, flops, flops / total, (first.lhs, first.rhs), why))
    return tuple(sorted(found, key=lambda f: (list(MEANINGS).index(f.kind), -f.flops)))


def _faults(row: Matmul, widened: str) -> Iterator[tuple[str, frozenset[int], str]]:
    """The kind, the sizes concerned and the text of each fault."""
    if not row.is_half:
        dtypes = list(dict.fromkeys(row.dtypes))
        text = f"{' and '.join(dtypes)} operands" + (f" at precision {row.precision}" if row.precision else "")
        wide = [dtype for dtype in dtypes if jnp.dtype(dtype).itemsize > 2]
        is_mixed = len(wide) < len(dtypes)
        text += f", widened at {widened}" if widened else ""
        if is_mixed and widened:
            text += ": use half numbers and arrays there, or cast after it"
        elif is_mixed:
            text += f": cast the {wide[0]} one (created in the model? Use jnp.zeros(shape, x.dtype))"
        yield DTYPE, frozenset(), text
    if row.flops / row.count < TINY:
        yield TINY_WORK, frozenset(), f"{amount(row.flops / row.count, 'FLOP')} a run"
        return
    sizes = dict(row.dimensions)
    aligned = {"in": "input channels", "out": "output channels"} if "in" in sizes else {n: n for n in "MNK"}
    ragged = {name: sizes[name] for name in aligned if sizes[name] % ALIGNMENT}
    if ragged:
        padded = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in ragged.items()}
        text = ", ".join(f"{aligned[n]} = {size}: pad to {padded[n]}" for n, size in ragged.items())
        text += f" ({sizes['groups']} groups)" if "groups" in sizes else ""
        yield DIMENSION, frozenset(ragged.values()), text
    small = {name: sizes[name] for name in "MNK" if sizes[name] <= SMALL}
    if small:
        yield SMALL_DIMENSION, frozenset(small.values()), ", ".join(f"{name} = {size}" for name, size in small.items())


def casts_of(sites: Iterable[Site]) -> dict[str, tuple[int, int]]:
    """The number of casts between floating dtypes, as `float32→float16`, and the bytes they read and write."""
    return added_up(row for site in sites if primitive(site.name).op is Op.CONVERT for row in _cast(site))


def _cast(site: Site) -> Iterator[tuple[str, tuple[int, int]]]:
    (given, *_), (made,) = site.eqn.invars, site.eqn.outvars
    source, target = given.aval, made.aval
    if source.dtype != target.dtype and is_float(given) and is_float(made):
        times = site.times * site.devices
        size = source.size * (source.dtype.itemsize + target.dtype.itemsize)
        yield f"{source.dtype.name}→{target.dtype.name}", (times, times * size)


_PRECISIONS = {3: "HIGH", 6: "HIGHEST"}  # by the bfloat16 passes of a TPU


@dataclasses.dataclass(frozen=True)
class SpeedupBound:
    """Bounds on the speedup of half on a device; see `PrecisionReport.speedup_bound`. Times are in seconds.

    Args:
        device: The device's name.
        float32: The least time of the float32 program.
        least: The least time of the program as written: its matmuls and convolutions at the peak rates.
        least_half: The least time with all of them in half.
        speedup: The largest speedup of the program as written over float32.
        limit: The same with all matmuls and convolutions in half.
    """

    device: str
    float32: float
    least: float
    least_half: float
    speedup: float
    limit: float


def traffic_gain(sites: Iterable[Site]) -> float:
    """By how much the results of a program, and so its memory traffic, are smaller than in float32: from 1 to 2."""
    sizes = totals(
        (is_narrow(v.aval.dtype), site.times * compat.numel(v.aval) * v.aval.dtype.itemsize)
        for site in sites
        if not sub_jaxprs(site.eqn)
        for v in site.outvars
        if is_float(v)
    )
    half, total = sizes.get(True, 0), sum(sizes.values())
    return (total + half) / total if total else 1.0


def speedup_bound(matmuls: Sequence[Matmul], devices: int, device: Device, traffic: float) -> SpeedupBound:
    """The speedup bound of a program's matmuls and convolutions, spread evenly over `devices`.

    Args:
        matmuls, devices, device: The rows of the program, and the devices that run it.
        traffic: By how much its memory traffic is smaller than in float32.
    """
    halves = totals((d, row.flops) for row in matmuls for d in row.dtypes if d in ("float16", "bfloat16"))
    half = max(halves, key=lambda dtype: halves[dtype], default="float16")

    def least(narrow: str = "", wide: str = "") -> float:
        """The time at the peak rates, with `narrow` in place of half and less, and `wide` in place of float32."""
        seconds = 0.0
        for row in matmuls:
            dtype = next((d for d in row.dtypes if not d.startswith(NAMES)), row.dtypes[0])
            dtype = (narrow if dtype.startswith(NAMES) else wide if dtype == "float32" else "") or dtype
            seconds += row.flops / devices / device.peak(dtype, _PRECISIONS.get(row.passes, ""))
        return seconds

    float32, now, in_half = least("float32"), least(), least(wide=half)

    def bound(seconds: float, of_memory: float) -> float:
        ratio = float32 / seconds if seconds else 1.0
        return max(ratio, of_memory) if ratio > 1 else 1.0

    return SpeedupBound(device.name, float32, now, in_half, bound(now, traffic), bound(in_half, 2.0))
