"""`explain`: the plan of an autocast function, built from the same plan that runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpjax.casting.autocast import planned_call
from mpjax.casting.plan import Plan
from mpjax.casting.rows import Row, rows_of, unseen_of
from mpjax.inspection.reports import Report, Section, amount, by_key, folded, short_dtypes, totals
from mpjax.program.formats import NAMES
from mpjax.program.source import FORWARD

_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class Explanation(Report):
    """The plan of a function. `print` it, or read its `rows`.

    The table folds the rows of repeated modules, and those of a line that only follow the dtypes of their operands;
    `rows`, JSON and CSV have each.

    Args:
        rows: Rows in program order.
        policy_dtype: Name of the half dtype.
        name: The function's name.
        unseen: Operations whose work the program does not show (callbacks, kernels of other libraries), and why.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> plan = mpjax.explain(lambda w, x: x @ w, jnp.eye(2), jnp.eye(2))
        >>> print(str(plan).splitlines()[0])
        matmuls and convolutions: 16 FLOP in float16 (100.0% in half)
        >>> plan.flops
        {'float16': 16}
    """

    rows: tuple[Row, ...]
    policy_dtype: str
    name: str = ""
    unseen: tuple[str, ...] = ()

    heading = "Plan of {0.name}"
    main = "rows"
    derived = "flops half_share"

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matmuls and convolutions by the dtype of their operands, without derivative rules."""
        return totals(
            ("/".join(dict.fromkeys(row.dtypes_in)), row.flops) for row in self.rows if row.flops and not row.rule
        )

    @property
    def half_share(self) -> float:
        """The fraction of `flops` that runs in half or less; 0 if there are none."""
        flops = self.flops
        half = (n for dtypes, n in flops.items() if dtypes.startswith(NAMES))
        return sum(half) / sum(flops.values()) if flops else 0.0

    @property
    def opaque(self) -> tuple[Row, ...]:
        """Rows of operations that autocast cannot analyse or was told to leave alone."""
        return tuple(row for row in self.rows if row.list == "opaque")

    def sections(self) -> list[Section]:
        """The sections of the report."""
        return [self._finding(), self._rows()]

    def _rows(self) -> Section:
        """One line for the rows that differ only in what they compute, with the pass if there is a gradient."""
        names = folded(row.module for row in self.rows)

        def key(row: Row) -> tuple[Any, ...]:
            follows = row.list in ("infer", "wide") and not row.flops
            planned = "" if follows else (row.op, row.why)
            marks = row.phase, row.recomputed, row.rule
            return names[row.module], row.source, _short(row.dtypes_in), _short(row.dtypes_out), marks, planned

        rows = [_cells(module, found) for (module, *_), found in by_key((key(row), row) for row in self.rows).items()]
        columns = "module|line|pass|op|>runs|>FLOPs|in|out|why"
        if all(row.phase == FORWARD or row.rule for row in self.rows):
            columns, rows = columns.replace("|pass", ""), [(*cells[:2], *cells[3:]) for cells in rows]
        return Section("", "", columns, rows, shown=_SHOWN)

    def _finding(self) -> Section:
        parts = ", ".join(f"{amount(n, 'FLOP')} in {dtype}" for dtype, n in sorted(self.flops.items()))
        share = f" ({self.half_share:.1%} in half)" if sum(self.flops.values()) else ""
        lines = [f"matmuls and convolutions: {parts or 'none'}{share}"]
        left = by_key(((row.source or "an unknown line", row.why), row.op) for row in self.opaque)
        operations = {place: ", ".join(dict.fromkeys(ops)) for place, ops in left.items()}
        lines += [f"left as traced: {ops} at {source}: {why}" for (source, why), ops in operations.items()]
        lines += [f"not inspected: {place}" for place in self.unseen]
        if any(row.recomputed for row in self.rows):
            lines.append("↻: the backward pass recomputes it from half values instead of storing float32 ones")
        if any(row.rule for row in self.rows):
            lines.append("∂: belongs to a custom derivative rule")
        return Section("", "\n".join(lines))


def _cells(module: str, alike: Sequence[Row]) -> tuple[str, ...]:
    """One line of the table. Operations that follow the dtypes of their operands may be several."""
    first, reasons = alike[0], dict.fromkeys(row.why for row in alike)
    kept = dict.fromkeys(filter(None, (why.partition("; ")[2] for why in reasons)))  # for the backward pass
    why = next(iter(reasons)) if len(reasons) == 1 else "; ".join(("infer: follows its operands", *kept))
    return (
        module or "-",
        first.source,
        first.phase,
        ", ".join(dict.fromkeys(row.op for row in alike)),
        str(sum(row.count for row in alike)),
        amount(flops, "FLOP") if (flops := sum(row.flops for row in alike)) else "",
        _short(first.dtypes_in),
        _short(first.dtypes_out),
        why + (" ↻" if first.recomputed else "") + (" ∂" if first.rule else ""),
    )


def _short(dtypes: Iterable[str]) -> str:
    return short_dtypes(dict.fromkeys(dtypes)).replace("/", ",")


def explain(fun: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None) -> Explanation:
    """The plan that `mpjax.autocast` makes of a function, as a table.

    Args:
        fun: An autocast function, or `jax.jit`, `jax.grad`, `jax.value_and_grad` or `jax.checkpoint` of one, which show
            its plan. Any other function is shown as `mpjax.autocast(fun)` would run it; autocast functions that it
            calls keep their plan.
        *args: Arguments of the call. Arrays may be given as `jax.ShapeDtypeStruct`s.
        kwargs: Keyword arguments of the call.

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
    name = getattr(fun, "__name__", type(fun).__name__)
    return explanation(planned_call(fun, args, dict(kwargs or {})), name)


def explanation(plan: Plan, name: str = "") -> Explanation:
    """The `Explanation` of a plan."""
    return Explanation(rows_of(plan), plan.setting.half.name, name, unseen_of(plan))
