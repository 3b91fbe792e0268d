"""`explain`: the plan of an autocast function as a table. It reads the plan that runs, no second opinion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import MATMULS, Op
from mpjax._jaxpr.walk import Site, site_of
from mpjax._tables import table
from mpjax.casting.classify import tracked
from mpjax.casting.lattice import HALF, Storage, storage_of
from mpjax.casting.plan import Action, Plan, Step
from mpjax.casting.remat import RematRegion

# Not worth a line: they move elements about, or have their own lines inside.
_SILENT = (Op.MOVE, Op.CONVERT, Op.READ)


@dataclasses.dataclass(frozen=True)
class Row:
    """The equations of one line of the program that were decided alike.

    Args:
        module: module path, from the named scopes.
        source: the line, `file.py:12`.
        op: the primitive.
        count: how many times it runs.
        flops: FLOPs of matmuls and convolutions, all runs together.
        dtypes_in, dtypes_out: the floating dtypes that it reads and gives, as they run.
        list: allow, deny, infer, wide or opaque.
        why: the reason for the dtype.
        recomputed: whether the backward pass computes it again instead of storing what it needs.
    """

    module: str
    source: str
    op: str
    count: int
    flops: int
    dtypes_in: tuple[str, ...]
    dtypes_out: tuple[str, ...]
    list: str
    why: str
    recomputed: bool


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The plan of a function: `rows` for programs, `str()` for people.

    Args:
        rows: in the program's order.
        policy_dtype: the half dtype.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> plan = mpjax.explain(lambda w, x: x @ w, jnp.eye(2), jnp.eye(2))
        >>> print(str(plan).splitlines()[-1])
        matmuls and convolutions: 1.6e-05 MFLOP in float16 (100.0% in half)
        >>> plan.flops
        {'float16': 16}
    """

    rows: tuple[Row, ...]
    policy_dtype: str

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matmuls and convolutions by the dtype of their operands."""
        totals: dict[str, int] = {}
        for row in self.rows:
            if row.flops:
                dtype = "/".join(dict.fromkeys(row.dtypes_in))
                totals[dtype] = totals.get(dtype, 0) + row.flops
        return totals

    @property
    def half_share(self) -> float:
        """The share of those FLOPs that runs in half; 0 if there are none."""
        flops = self.flops
        half = sum(n for dtype, n in flops.items() if dtype in ("float16", "bfloat16"))
        return half / sum(flops.values()) if flops else 0.0

    @property
    def opaque(self) -> tuple[Row, ...]:
        """What autocast could not look into, or was told to leave alone."""
        return tuple(row for row in self.rows if row.list == Op.OPAQUE.value)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, for JSON or a data frame."""
        return [dataclasses.asdict(row) for row in self.rows]

    def __str__(self) -> str:
        header = ("module", "line", "op", "runs", "MFLOP", "in", "out", "why")
        text = table(header, [_cells(row) for row in self.rows], right={3, 4})
        return "\n".join([*text, "", *self._summary()])

    def _summary(self) -> list[str]:
        total = sum(self.flops.values())
        parts = ", ".join(f"{n / 1e6:.3g} MFLOP in {dtype}" for dtype, n in sorted(self.flops.items()))
        lines = [
            f"matmuls and convolutions: {parts or 'none'}" + (f" ({self.half_share:.1%} in half)" if total else "")
        ]
        if any(row.recomputed for row in self.rows):
            lines.append("↻: the backward pass computes it again from half values instead of storing float32 ones")
        lines += [f"left as traced: {row.op} at {row.source or 'an unknown line'}: {row.why}" for row in self.opaque]
        return lines


def _cells(row: Row) -> tuple[str, ...]:
    mega = f"{row.flops / 1e6:.3g}" if row.flops else ""
    why = row.why + (" ↻" if row.recomputed else "")
    return (
        row.module or "-",
        row.source,
        row.op,
        str(row.count),
        mega,
        _short(row.dtypes_in),
        _short(row.dtypes_out),
        why,
    )


def _short(dtypes: Sequence[str]) -> str:
    short = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64"}
    return ",".join(dict.fromkeys(short.get(dtype, dtype) for dtype in dtypes))


def sites(plan: Plan, around: Site | None = None) -> Iterator[tuple[Site, Step, bool, str]]:
    """Each equation of a plan with its step, whether it stands in an island, and the half dtype."""
    half = plan.setting.half.name
    for step in plan.steps:
        in_region = isinstance(step, RematRegion)
        for inner in step.steps if isinstance(step, RematRegion) else (step,):
            site = site_of(inner.eqn, around)
            yield site, inner, in_region, half
            for planned in inner.plans:
                for found in sites(planned, site):
                    yield (*found[:2], found[2] or in_region, half)


def rows_of(plan: Plan) -> tuple[Row, ...]:
    """The rows of a plan: equations of one place that were decided alike are one row."""
    merged: dict[tuple[Any, ...], list[int]] = {}
    for site, step, in_region, half in sites(plan):
        if _silent(step):
            continue
        dtypes_in = tuple(
            _dtype(v, storage, half) for v, storage in zip(site.eqn.invars, step.reads, strict=True) if _float(v)
        )
        storages = map(storage_of, step.outs)
        dtypes_out = tuple(
            _dtype(v, storage, half) for v, storage in zip(site.eqn.outvars, storages, strict=True) if _float(v)
        )
        if step.spread:
            dtypes_in = (half,)
        why = step.listing.op.value if step.why == "" else step.why
        key = (
            site.module,
            site.source,
            site.name,
            dtypes_in,
            dtypes_out,
            step.listing.op.value,
            why,
            in_region,
        )
        total = merged.setdefault(key, [0, 0])
        total[0] += site.times
        total[1] += site.flops
    return tuple(
        Row(module, source, op, count, flops, ins, outs, listed, why, again)
        for (module, source, op, ins, outs, listed, why, again), (count, flops) in merged.items()
    )


def _silent(step: Step) -> bool:
    if step.action is Action.SKIP or step.listing.op in _SILENT or step.listing.op is Op.ENTER:
        return True
    return step.eqn.primitive.name not in MATMULS and not any(map(tracked, (*step.eqn.invars, *step.eqn.outvars)))


def _float(v: Any) -> bool:
    return compat.is_shaped(v.aval) and v.aval.dtype.kind in "fcV"


def _dtype(v: Any, storage: Storage, half: str) -> str:
    return half if storage == HALF else v.aval.dtype.name


def explain(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """The plan that `mpjax.autocast` makes of a function, as a table.

    Args:
        fun: an autocast function; any other function is shown as `mpjax.autocast(fun)` would run it.
        *args, **kwargs: what it is called with; `jax.ShapeDtypeStruct`s will do for arrays.

    Returns:
        An `Explanation`: `print` it, or go through its `rows`. Each row has the module path, the source
        line, the primitive, its FLOPs, the dtypes it reads and gives, and the reason.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> x = jnp.ones((8, 8))
        >>> plan = mpjax.explain(lambda w, x: jnp.sum(jnp.exp(x @ w)), x, x)
        >>> [(row.op, row.dtypes_in[0], row.why) for row in plan.rows]
        [('dot_general', 'float16', 'allow'), ('exp', 'float32', 'deny'), ('reduce_sum', 'float32', 'deny')]
        >>> plan.half_share
        1.0
    """
    from mpjax.casting.autocast import planned_call

    plan = planned_call(fun, args, kwargs)
    return Explanation(rows_of(plan), plan.setting.half.name)
