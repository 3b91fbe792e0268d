"""`explain`: the plan of an autocast function as a table, built from the same plan that runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import MATMULS, Op
from mpjax._jaxpr.program import Site, not_entered, site_of, sub_jaxprs, walk
from mpjax._tables import table
from mpjax.casting.classify import tracked
from mpjax.casting.lattice import FULL, HALF, Storage, storage_of
from mpjax.casting.plan import Action, Plan, Step, is_left_alone
from mpjax.casting.remat import RematRegion

# These get no row: they only move, convert or inspect elements.
_SILENT = (Op.MOVE, Op.CONVERT, Op.READ)


@dataclasses.dataclass(frozen=True)
class Row:
    """Equations of one source line that were planned the same way.

    Args:
        module: Module path, from the named scopes.
        source: Source line, `file.py:12`.
        op: Primitive name.
        count: Number of runs.
        flops: Total FLOPs over all runs, for matmuls and convolutions.
        dtypes_in, dtypes_out: Floating dtypes of the inputs and outputs, at run time.
        list: Allow, deny, infer, wide or opaque; "kept" if autocast has no choice because no operand is float32.
        why: Reason for the dtype.
        recomputed: Whether the backward pass recomputes it instead of storing its residuals.
        rule: Whether it belongs to a derivative rule (`custom_jvp`, `custom_vjp`), which runs only if the function is
            differentiated.
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
    rule: bool = False


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The plan of a function: `rows` for programs, `str()` for users (long plans by module), `table()` for all rows.

    Args:
        rows: Rows in program order.
        policy_dtype: Name of the half dtype.
        unseen: Operations whose work the program does not show (callbacks, kernels of other libraries), and why.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> plan = mpjax.explain(lambda w, x: x @ w, jnp.eye(2), jnp.eye(2))
        >>> print(str(plan).splitlines()[0])
        matmuls and convolutions: 1.6e-05 MFLOP in float16 (100.0% in half)
        >>> plan.flops
        {'float16': 16}
    """

    rows: tuple[Row, ...]
    policy_dtype: str
    unseen: tuple[str, ...] = ()

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matmuls and convolutions by the dtype of their operands, without derivative rules."""
        totals: dict[str, int] = {}
        for row in self.rows:
            if row.flops and not row.rule:
                dtype = "/".join(dict.fromkeys(row.dtypes_in))
                totals[dtype] = totals.get(dtype, 0) + row.flops
        return totals

    @property
    def half_share(self) -> float:
        """The fraction of `flops` that runs in half; 0 if there are none."""
        flops = self.flops
        half = sum(n for dtype, n in flops.items() if dtype in ("float16", "bfloat16"))
        return half / sum(flops.values()) if flops else 0.0

    @property
    def opaque(self) -> tuple[Row, ...]:
        """Rows of operations that autocast cannot analyse or was told to leave alone."""
        return tuple(row for row in self.rows if row.list == Op.OPAQUE.value)

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as dictionaries, for JSON or a data frame."""
        return [dataclasses.asdict(row) for row in self.rows]

    def __str__(self) -> str:
        by_module = len(self.rows) > _LONG
        found = self._modules() if by_module else self.table()
        return "\n".join([*self._summary(by_module), "", *found])

    def table(self, width: int | None = 100) -> list[str]:
        """All rows, as lines of at most `width` characters."""
        header = ("module", "line", "op", "runs", "MFLOP", "in", "out", "why")
        return table(header, [_cells(row) for row in self.rows], right={3, 4}, width=width)

    def _modules(self) -> list[str]:
        """One line per module, with repeated modules folded."""
        modules: dict[str, list[Row]] = {}
        for row in self.rows:
            modules.setdefault(_NUMBER.sub("#", row.module), []).append(row)
        header = ("module", "in half", "in float32", "MFLOP", "matmuls not in half, or left as traced")
        return table(header, [_module_cells(rows, self.policy_dtype) for rows in modules.values()], {1, 2, 3}, 100)

    def _summary(self, by_module: bool) -> list[str]:
        total = sum(self.flops.values())
        parts = ", ".join(f"{n / 1e6:.3g} MFLOP in {dtype}" for dtype, n in sorted(self.flops.items()))
        share = f" ({self.half_share:.1%} in half)" if total else ""
        lines = [f"matmuls and convolutions: {parts or 'none'}{share}"]
        left: dict[tuple[str, str], dict[str, None]] = {}
        for row in self.opaque:
            left.setdefault((row.source or "an unknown line", row.why), {})[row.op] = None
        lines += [f"left as traced: {', '.join(ops)} at {source}: {why}" for (source, why), ops in left.items()]
        lines += [f"not inspected: {place}" for place in self.unseen]
        if any(row.recomputed for row in self.rows) and not by_module:
            lines.append("↻: the backward pass recomputes it from half values instead of storing float32 ones")
        if any(row.rule for row in self.rows) and not by_module:
            lines.append("∂: belongs to a custom derivative rule")
        if by_module:
            lines.append(f"{len(self.rows)} rows, by module; each of them: print(*explanation.table(), sep='\\n')")
        return lines


# Plans with more rows than this are shown by module.
_LONG = 60
_NUMBER = re.compile(r"\d+")


def _module_cells(rows: Sequence[Row], half: str) -> tuple[str, ...]:
    numbers = [_NUMBER.findall(row.module) for row in rows]
    ranges = map(_range, zip(*numbers, strict=True))
    name = _NUMBER.sub(lambda _: next(ranges), rows[0].module) or "-"
    counts = [sum(row.count for row in rows if (half in row.dtypes_in) is in_half) for in_half in (True, False)]
    flops = sum(row.flops for row in rows)
    left = [f"{row.op}: {row.why}" for row in rows if (row.flops and half not in row.dtypes_in) or row.list == "opaque"]
    return name, *map(str, counts), f"{flops / 1e6:.3g}" if flops else "", "; ".join(dict.fromkeys(left))


def _range(texts: Iterable[str]) -> str:
    numbers = sorted(map(int, texts))
    return f"[{numbers[0]}-{numbers[-1]}]" if numbers[0] < numbers[-1] else str(numbers[0])


def _cells(row: Row) -> tuple[str, ...]:
    mega = f"{row.flops / 1e6:.3g}" if row.flops else ""
    why = row.why + (" ↻" if row.recomputed else "") + (" ∂" if row.rule else "")
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


@dataclasses.dataclass(frozen=True)
class _Planned:
    """An equation of a plan: its site and step, and whether it is recomputed or belongs to a derivative rule."""

    site: Site
    step: Step
    half: str
    recomputed: bool = False
    rule: bool = False


def _planned(
    plan: Plan, around: Site | None = None, recomputed: bool = False, rule: bool = False
) -> Iterator[_Planned]:
    """Each equation of a plan, including those of sub-jaxprs and derivative rules."""
    for part in plan.steps:
        is_recomputed = recomputed or isinstance(part, RematRegion)
        for step in part.steps if isinstance(part, RematRegion) else (part,):
            site = site_of(step.eqn, around, plan.setting.owners)
            yield _Planned(site, step, plan.setting.half.name, is_recomputed, rule)
            if is_left_alone(step):
                yield from _left_alone(site, step, plan.setting.half.name, is_recomputed, rule)
            for inner in step.plans:
                yield from _planned(inner, site, is_recomputed, rule)
            for inner in step.rules:
                yield from _planned(inner, site, False, True)


def _left_alone(site: Site, step: Step, *rest: Any) -> Iterator[_Planned]:
    """The equations inside an equation that runs as traced."""
    for inner in sub_jaxprs(step.eqn):
        for found in walk(inner.jaxpr, site):
            eqn = found.eqn
            reads, outs = (FULL,) * len(eqn.invars), (None,) * len(eqn.outvars)
            yield _Planned(found, Step(eqn, Action.BIND, reads, outs, step.why, step.listing), *rest)


def rows_of(plan: Plan) -> tuple[Row, ...]:
    """The rows of a plan. Equations of one source line that were planned the same way share a row."""
    merged: dict[Row, list[int]] = {}
    for found in _planned(plan):
        if _silent(found.step):
            continue
        total = merged.setdefault(_row(found), [0, 0])
        total[0] += found.site.times
        total[1] += found.site.flops
    return tuple(dataclasses.replace(row, count=count, flops=flops) for row, (count, flops) in merged.items())


def _row(found: _Planned) -> Row:
    """The row of an equation, without its counts."""
    site, step = found.site, found.step
    ins = zip(site.eqn.invars, step.reads, strict=True)
    outs = zip(site.eqn.outvars, map(storage_of, step.outs), strict=True)
    dtypes_in, dtypes_out = (
        tuple(_dtype(v, storage, found.half) for v, storage in pairs if _float(v)) for pairs in (ins, outs)
    )
    listed, why = step.listing.op.value, step.why or step.listing.op.value
    if _kept(step) and site.name not in MATMULS:
        listed, why = "kept", "no operand is float32"
    return Row(
        site.path, site.source, site.name, 0, 0, (found.half,) if step.spread else dtypes_in, dtypes_out, listed,
        why, found.recomputed, found.rule,
    )  # fmt: skip


def _silent(step: Step) -> bool:
    if step.action is Action.SKIP or step.listing.op in _SILENT or step.listing.op is Op.ENTER:
        return True
    return not any(map(_float, (*step.eqn.invars, *step.eqn.outvars))) and step.eqn.primitive.name not in MATMULS


def _kept(step: Step) -> bool:
    """Whether a step keeps the dtypes of the program, because none of its values is float32."""
    return not any(map(tracked, (*step.eqn.invars, *step.eqn.outvars)))


def _float(v: Any) -> bool:
    return compat.is_inexact(v.aval)


def _dtype(v: Any, storage: Storage, half: str) -> str:
    return half if storage == HALF else v.aval.dtype.name


def explain(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """The plan that `mpjax.autocast` makes of a function, as a table.

    Args:
        fun: An autocast function. Any other function is shown as `mpjax.autocast(fun)` would run it.
        *args, **kwargs: Arguments of the call. Arrays may be given as `jax.ShapeDtypeStruct`s.

    Returns:
        An `Explanation`: `print` it, or iterate over its `rows`. Each row has the module path, the source
        line, the primitive, its FLOPs, its input and output dtypes, and the reason.

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

    return explanation(planned_call(fun, args, kwargs))


def explanation(plan: Plan) -> Explanation:
    """The `Explanation` of a plan."""
    unseen = not_entered(found.site for found in _planned(plan) if found.step.action is not Action.SKIP)
    return Explanation(rows_of(plan), plan.setting.half.name, unseen)
