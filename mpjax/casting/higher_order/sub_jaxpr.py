"""Shared by all higher-order primitives: the form of their rules, and passing values to and from a sub-jaxpr."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.casting.classify import Listing
from mpjax.casting.infer import plan_jaxpr
from mpjax.casting.inference import Inference
from mpjax.casting.lattice import FULL, HALF, TRACED, Inferred, Storage, storage_of
from mpjax.casting.plan import Action, Plan, Step
from mpjax.casting.rewrite import array_of, arrays_of, run_closed, value_of
from mpjax.casting.setting import Setting, tracked
from mpjax.casting.uses import Use
from mpjax.kernels.scaled_matmul import Operand
from mpjax.program.formats import Format

Convention = tuple[tuple[int, Storage], ...]
"""The operand and the storage dtype of each array that goes into a sub-jaxpr: an operand may go in in both."""

Copies = tuple[tuple[int, Format], ...]
"""The operands of which copies with scales go in, each with the format."""


class HigherOrder(NamedTuple):
    """The rules of a higher-order primitive.

    Args:
        uses: Backward analysis, `(eqn, uses of the outputs, setting inside) → uses of the operands`.
        infer: Forward inference, `(inference, eqn, listing) → step`.
        issue: Issues the equation again, `(step, operands, plan) → values`.
        regions_inside: Whether to form rematerialisation regions in its sub-jaxprs. A remat already recomputes
            everything, and the author of a derivative rule chooses what it stores.
        is_scan: Whether its sub-jaxpr is the body of a scan.
    """

    uses: Callable[[Any, tuple[Use, ...], Setting], Sequence[Use]]
    infer: Callable[[Inference, Any, Listing], Step]
    issue: Callable[[Step, Sequence[Any], Plan], Sequence[Any]]
    regions_inside: bool = True
    is_scan: bool = False


@dataclasses.dataclass(slots=True)
class Inner:
    """The plans of sub-jaxprs that take the same operands, and the storage dtypes of these.

    Args:
        plans: The plans.
        convention: The arrays that go in.
        copies: The operands whose copies with scales go in after these arrays, each with the format.
    """

    plans: tuple[Plan, ...]
    convention: Convention
    copies: Copies = ()


# Inference.


def operand_dtypes(inference: Inference, variables: Sequence[Any]) -> tuple[Inferred | None, ...]:
    """The inferred dtypes of operands that are passed to a sub-jaxpr."""
    return tuple(inference.operand(v) for v in variables)


def outs_of(eqn: Any, inferred: Sequence[Inferred | None]) -> tuple[Inferred | None, ...]:
    """The inferred dtypes of an equation's outputs, given those of its sub-jaxpr."""
    return tuple(x if tracked(v) else None for v, x in zip(eqn.outvars, inferred, strict=True))


def plan_call(inference: Inference, eqn: Any, listing: Listing, jaxpr: Any, setting: Setting | None = None) -> Plan:
    """The plan of a sub-jaxpr with the operands and results of its equation."""
    setting = setting or inference.setting.inside(eqn, listing.region)
    return plan_jaxpr(jaxpr, operand_dtypes(inference, eqn.invars), inference.wanted_of(eqn), setting)


def enter(eqn: Any, listing: Listing, outs: Sequence[Inferred | None], inner: Any, why: str = "entered") -> Step:
    """The step of a higher-order equation that is issued again by its rule."""
    return Step(eqn, Action.ENTER, (), outs_of(eqn, outs), why, listing, inner=inner)


def as_traced(inference: Inference, eqn: Any, listing: Listing, outs: Sequence[Inferred | None], *plans: Plan) -> Step:
    """The step of a higher-order equation in which nothing is cast."""
    reads = tuple(inference.read(v, FULL) for v in eqn.invars)
    inner = Inner(plans, ())
    return Step(eqn, Action.BIND, reads, outs_of(eqn, outs), "nothing inside to cast", listing, inner=inner)


def all_full(inferred: Sequence[Inferred | None]) -> bool:
    """Whether no value is stored in half."""
    return all(x is None or x.storage == FULL for x in inferred)


def convention_of(inference: Inference, eqn: Any, storages: Sequence[Sequence[Storage]]) -> Convention:
    """Records that operands are read, each in the given storage dtypes."""
    return tuple((i, inference.read(eqn.invars[i], storage)) for i, wanted in enumerate(storages) for storage in wanted)


def passed_in(value: Inferred | None, mask: int) -> Storage:
    """The storage dtype in which an operand is passed: half if it is read in half only."""
    return HALF if value is not None and mask == HALF.bit else storage_of(value)


def storages_in(mask: int) -> list[Storage]:
    """The storage dtypes of a bit mask."""
    return [storage for storage in (FULL, HALF) if mask & storage.bit]


# Issuing again.


def flatten_operands(convention: Convention, operands: Sequence[Any]) -> list[Any]:
    """The arrays that are passed to a sub-jaxpr."""
    return [array_of(operands[i], storage) for i, storage in convention]


def unflatten_operands(
    convention: Convention, arrays: Sequence[Any], first: int, count: int, half: np.dtype
) -> list[Any]:
    """The values of the arrays inside the sub-jaxpr. An operand may arrive in both dtypes."""
    values: list[Any] = [None] * count
    for (i, storage), array in zip(convention, arrays, strict=True):
        if storage == TRACED:
            values[i - first] = array
        elif values[i - first] is None:
            values[i - first] = value_of(array, storage, half)
        else:
            values[i - first].add(storage, array)
    return values


def function_of(
    planned: Plan,
    convention: Convention,
    jaxpr: Any,
    outs: Sequence[Inferred | None] | None = None,
    first: int = 0,
    copies: Copies = (),
) -> Callable[..., tuple[Any, ...]]:
    """A sub-jaxpr as a function of the arrays that are passed to it.

    Args:
        planned: Its plan.
        convention: The operands that it takes.
        jaxpr: The sub-jaxpr.
        outs: The inferred dtypes of its results; by default those of the plan.
        first: The index of the first operand that it takes.
        copies: The inputs whose copies and scales follow the operands, each with the format.
    """
    returned = planned.outs if outs is None else outs

    def body(*arrays: Any) -> tuple[Any, ...]:
        arrays, scaled = arrays[: len(convention)], arrays[len(convention) :]
        values = unflatten_operands(convention, arrays, first, len(planned.invars), planned.setting.half)
        for (i, format), q, scale in zip(copies, scaled[::2], scaled[1::2], strict=True):
            values[i].share(FULL, format, Operand(values[i][FULL], q, scale, stored=True))
        return tuple(arrays_of(run_closed(planned, jaxpr, values), returned))

    return body


def cached_function(planned: Plan, key: Any, make: Callable[[], Any]) -> Any:
    """A function that is created once per plan, because JAX's caches compare functions by identity."""
    try:
        if key not in planned.runners:
            planned.runners[key] = make()
        return planned.runners[key]
    except TypeError:  # an unhashable parameter
        return make()
