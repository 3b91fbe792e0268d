"""The rows of a plan, built from the same plan that runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from mpjax.casting.lattice import FULL, HALF, Storage, storage_of
from mpjax.casting.packing import formats_of_packs
from mpjax.casting.plan import Action, Plan, Step, is_left_alone
from mpjax.casting.remat import RematRegion
from mpjax.casting.setting import tracked
from mpjax.program import compat
from mpjax.program.graph import Site, is_unknown, not_entered, site_of, sub_jaxprs, unknown_flops, walk
from mpjax.program.primitives import MATMULS, Op
from mpjax.program.source import BACKWARD, FORWARD

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
        list: Allow, deny, infer, wide or opaque; "kept" if autocast has no choice because no operand is float32;
            "unfused" for an attention that `Rules(attention="fused")` left as it is written, whose operations have rows
            of their own.
        why: Reason for the dtype.
        recomputed: Whether the backward pass recomputes it instead of storing its residuals.
        rule: Whether it belongs to a derivative rule (`custom_jvp`, `custom_vjp`), which runs only if the function is
            differentiated.
        phase: `"forward"`, or, in a program that computes a gradient, `"backward"` or `"recomputed"` (a forward
            operation repeated in the backward pass).
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
    phase: str = FORWARD


@dataclasses.dataclass(frozen=True)
class _Planned:
    """An equation of a plan: its site and step, whether it is recomputed, and the pass of its derivative rule.

    `packed` is the format in which its derivative keeps an operand in fewer bits.
    """

    site: Site
    step: Step
    half: str
    recomputed: bool = False
    rule: str = ""
    packed: str = ""

    @property
    def phase(self) -> str:
        """The pass of the program in which it runs."""
        return BACKWARD if self.rule == BACKWARD else self.site.phase


def _planned(
    plan: Plan,
    around: Site | None = None,
    recomputed: bool = False,
    rule: str = "",
    kept: Mapping[Any, str] = MappingProxyType({}),
) -> Iterator[_Planned]:
    """Each equation of a plan, including those of sub-jaxprs and derivative rules.

    `kept` has the formats of the inputs that a call around the plan keeps in fewer bits.
    """
    kept = dict(kept)
    for part in plan.eqns:
        is_recomputed = recomputed or isinstance(part, RematRegion)
        own = formats_of_packs(part)
        packed = kept | own if own else kept
        for step in part.eqns if isinstance(part, RematRegion) else (part,):
            site = site_of(step.eqn, around, plan.setting.owners)
            format = next((packed[v] for v, _ in step.all_reads if v in packed), "")
            if format and step.listing.op in _SILENT:  # What reads its result has a row.
                packed.update(dict.fromkeys(step.outvars, format))
            yield _Planned(site, step, plan.setting.half.name, is_recomputed, rule, format)
            if is_left_alone(step):
                yield from _left_alone(site, step, plan.setting.half.name, is_recomputed, rule)
            inside = _inside(step, packed)
            for inner in step.plans:
                yield from _planned(inner, site, is_recomputed, rule, inside)
            for inner in step.rules:
                yield from _planned(inner, site, False, BACKWARD if inner is step.backward else rule or FORWARD)


def _inside(step: Step, packed: Mapping[Any, str]) -> dict[Any, str]:
    """The formats of the inputs of a call's program."""
    if not packed or [len(inner.invars) for inner in step.plans] != [len(step.eqn.invars)]:
        return {}
    pairs = zip(step.eqn.invars, step.plans[0].invars, strict=True)
    return {w: packed[v] for v, w in pairs if not isinstance(v, compat.Literal) and v in packed}


def _left_alone(site: Site, step: Step, *rest: Any) -> Iterator[_Planned]:
    """The equations inside an equation that runs as traced."""
    for inner in sub_jaxprs(step.eqn):
        for inner_site in walk(inner.jaxpr, site):
            eqn = inner_site.eqn
            reads, outs = (FULL,) * len(eqn.invars), (None,) * len(eqn.outvars)
            yield _Planned(inner_site, Step(eqn, Action.BIND, reads, outs, step.why, step.listing), *rest)


def rows_of(plan: Plan) -> tuple[Row, ...]:
    """The rows of a plan. Equations of one source line that were planned the same way share a row."""
    merged: dict[Row, list[int]] = {}
    planned = [*_planned(plan)]
    takes_gradient = any(each.site.phase == BACKWARD and not each.rule for each in planned)
    for each in planned:
        if _silent(each.step):
            continue
        total = merged.setdefault(_row(each, takes_gradient), [0, 0])
        total[0] += each.site.times
        total[1] += each.site.flops
        if is_unknown(each.site.eqn):
            total[1] += each.site.times * (unknown_flops(each.site.eqn) or 0)
    for kind, site, why in _unfused(plan):
        dtypes = (site.eqn.invars[0].aval.dtype.name,)
        row = Row(
            site.path, site.source, kind, 0, 0, dtypes, dtypes, "unfused", why, False, phase=site.phase
        )  # fmt: skip
        merged.setdefault(row, [0, 0])[0] += site.times
    return tuple(dataclasses.replace(row, count=count, flops=flops) for row, (count, flops) in merged.items())


def _unfused(plan: Plan, around: Site | None = None) -> Iterator[tuple[str, Site, str]]:
    """The attentions and losses of a plan that are not fused, and why."""
    for kind, eqn, why in plan.unfused:
        yield kind, site_of(eqn, around, plan.setting.owners), why
    for part in plan.eqns:
        for step in part.eqns if isinstance(part, RematRegion) else (part,):
            for inner in (*step.plans, *step.rules):
                yield from _unfused(inner, site_of(step.eqn, around, plan.setting.owners))


def _row(planned: _Planned, takes_gradient: bool) -> Row:
    """The row of an equation, without its counts; of a program that takes a gradient itself, or not."""
    site, step = planned.site, planned.step
    ins = zip(site.eqn.invars, step.reads, strict=True)
    outs = zip(site.eqn.outvars, map(storage_of, step.outs), strict=True)
    dtypes_in, dtypes_out = (
        tuple(_dtype(v, storage, planned.half) for v, storage in pairs if _float(v)) for pairs in (ins, outs)
    )
    listed, why = step.listing.op.value, step.why or step.listing.op.value
    if step.rounded_once:
        why = f"{why}, rounded once"
    if planned.packed:
        why = f"{why}; {planned.packed} for {'a further derivative' if takes_gradient else 'the backward pass'}"
    if _kept(step) and site.name not in MATMULS:
        listed, why = "kept", "no operand is float32"
    if step.scaled is not None and step.scaled.dtypes:
        dtypes_in = tuple(dtype.name for dtype in step.scaled.dtypes)
    elif step.rounded_once:
        dtypes_in = ("float32",)
    elif step.broadcast:
        dtypes_in = (planned.half,)
    return Row(
        site.path, site.source, site.name, 0, 0, dtypes_in, dtypes_out, listed,
        why, planned.recomputed, bool(planned.rule), planned.phase,
    )  # fmt: skip


def _silent(step: Step) -> bool:
    if step.listing.op in _SILENT or step.listing.op is Op.ENTER:
        return True
    return not any(map(_float, (*step.eqn.invars, *step.eqn.outvars))) and step.eqn.primitive.name not in MATMULS


def _kept(step: Step) -> bool:
    """Whether a step keeps the dtypes of the program, because none of its values is float32."""
    return not any(map(tracked, (*step.eqn.invars, *step.eqn.outvars)))


def _float(v: Any) -> bool:
    return compat.is_inexact(v.aval)


def _dtype(v: Any, storage: Storage, half: str) -> str:
    return half if storage == HALF else v.aval.dtype.name


def unseen_of(plan: Plan) -> tuple[str, ...]:
    """Operations of a plan whose work the program does not show (callbacks, kernels of other libraries), and why."""
    return not_entered(each.site for each in _planned(plan))
