"""`custom_linear_solve`: runs the matmuls of an implicit solve in half. Its vectors and tolerances stay float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from mpjax.casting.classify import Listing, Setting, tracked
from mpjax.casting.higher_order.loops import invariant
from mpjax.casting.higher_order.sub_jaxpr import HigherOrder, as_traced, enter, operand_dtypes, storages_in
from mpjax.casting.infer import Inference, plan_jaxpr
from mpjax.casting.lattice import FULL, Inferred, Level, storage_of
from mpjax.casting.plan import Plan, Step
from mpjax.casting.rewrite import MixedValue, arrays_of, run_closed, values_of
from mpjax.casting.uses import RESULT, Use, uses

_VECTOR = Inferred(Level.PINNED, FULL)
_FUNCTIONS = ("matvec", "vecmat", "solve", "transpose_solve")


@dataclasses.dataclass(slots=True)
class Solve:
    """The plans of the solve's functions by name. A solve without a transpose has no `transpose_solve`."""

    functions: dict[str, Plan]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the sub-jaxprs."""
        return tuple(self.functions.values())


def _split(params: dict[str, Any], operands: Sequence[Any]) -> tuple[dict[str, Sequence[Any]], Sequence[Any]]:
    """The loop-invariant operands of each function, and the right-hand side."""
    consts, first = {}, 0
    for name, length in zip(_FUNCTIONS, params["const_lengths"], strict=True):
        consts[name] = operands[first : first + length]
        first += length
    return consts, operands[first:]


def _jaxprs(params: dict[str, Any]) -> dict[str, Any]:
    """The functions to plan. `vecmat` is not planned, because JAX derives it again from the issued `matvec`."""
    found = zip(_FUNCTIONS, params["jaxprs"], strict=True)
    return {name: jaxpr for name, jaxpr in found if jaxpr is not None and name != "vecmat"}


def _uses(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    consts, b = _split(eqn.params, eqn.invars)
    found: list[Use] = []
    jaxprs = _jaxprs(eqn.params)
    for name in _FUNCTIONS:
        if name in jaxprs:
            wanted = (RESULT,) * len(jaxprs[name].out_avals)
            found += uses(jaxprs[name], wanted, setting).inputs[: len(consts[name])]
        else:
            found += [Use.READ] * len(consts[name])
    return [*found, *([Use.READ | Use.FLOAT] * len(b))]


def _infer(inference: Inference, eqn: Any, listing: Listing) -> Step:
    consts, b = _split(eqn.params, eqn.invars)
    setting = inference.setting.inside(eqn, listing.region)
    plans = {}
    for name, jaxpr in _jaxprs(eqn.params).items():
        vectors = (_VECTOR if tracked(v) else None for v in b)
        ins = (*operand_dtypes(inference, consts[name]), *vectors)
        plans[name] = plan_jaxpr(jaxpr, ins, (RESULT,) * len(jaxpr.out_avals), setting)
    outs = tuple(Inferred(Level.FLOAT, FULL) if tracked(v) else None for v in eqn.outvars)
    if all(p.unchanged for p in plans.values()):
        return as_traced(inference, eqn, listing, outs, *plans.values())
    for name, planned in plans.items():
        for v, mask in zip(consts[name], planned.in_reads, strict=False):
            for storage in storages_in(mask) or [storage_of(inference.value(v))]:
                inference.read(v, storage)
    for v in b:
        inference.read(v, FULL)
    return enter(eqn, listing, outs, Solve(plans))


def _issue(step: Step, operands: Sequence[Any], plan: Plan) -> Sequence[Any]:
    inner: Solve = step.inner
    half, jaxprs = plan.setting.half, _jaxprs(step.eqn.params)
    consts, b = _split(step.eqn.params, operands)
    vectors = [_VECTOR if tracked(v) else None for v in _split(step.eqn.params, step.eqn.invars)[1]]

    def function(name: str) -> Callable[[Sequence[Any]], Any]:
        planned = inner.functions[name]
        invariants = [invariant(x, mask, half) for x, mask in zip(consts[name], planned.in_reads, strict=False)]

        def call(arrays: Sequence[Any]) -> Any:
            values = [make() for make in invariants] + values_of(arrays, vectors, half)
            # Vectors are returned in float32, whatever their storage dtype in the plan.
            results = run_closed(planned, jaxprs[name], values)
            found = [x[FULL] if isinstance(x, MixedValue) else x for x in results]
            return (found[: len(b)], found[len(b) :]) if has_aux and "solve" in name else found

        return call

    has_aux = len(step.eqn.outvars) > len(b)
    transposed = function("transpose_solve") if "transpose_solve" in inner.functions else None
    solve = function("solve")
    solution = lax.custom_linear_solve(
        function("matvec"),
        arrays_of(b, vectors),
        lambda _, x: solve(x),
        None if transposed is None else lambda _, x: transposed(x),
        symmetric=step.eqn.params["jaxprs"].vecmat is jaxprs["matvec"],
        has_aux=has_aux,
    )
    found = [*solution[0], *solution[1]] if has_aux else solution
    return values_of(found, step.outs, half)


LINEAR_SOLVE = HigherOrder(_uses, _infer, _issue, regions_inside=False)
