"""Finds the fault, and its element, that reaches a result: the program runs again with the others made finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._jaxpr.interpreter import Probe, is_inexact
from mpjax._jaxpr.program import Site
from mpjax.inspection.nonfinite.point import at_iteration
from mpjax.inspection.nonfinite.provenance import Provenance

Spans = tuple[tuple[int, int], ...]  # for each fault, the range of positions whose elements stay unchanged
# Runs the program with the other elements made finite. Returns whether a check failed, and the codes of the results.
Runs = Callable[[Spans], tuple[bool, Sequence[int]]]


def finite_but(probe: Probe, faults: Sequence[Provenance]) -> Callable[..., Sequence[Any]]:
    """The `replace` of an `Instrumented`, after the spans: sets the faults' elements outside of them to 1.

    The position of an element is its flat index, counted after the elements of all earlier devices. An array that
    several devices hold counts as that of the first of them.
    """

    def replace(spans: Any, place: Site, iteration: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
        for fault, span in zip(faults, spans, strict=True):
            if fault.number == place.number:
                hit = at_iteration(iteration, fault.iteration)
                outs = [_with_finite_elements(probe, x, hit, *span) for x in outs]
        return outs

    return replace


def _with_finite_elements(probe: Probe, x: Any, hit: Any, low: Any, high: Any) -> Any:
    if not is_inexact(x):
        return x
    position = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape) + probe.device(x) * x.size
    kept = (position >= low) & (position < high)
    return jnp.where(hit & ~kept & ~jnp.isfinite(x), jnp.ones((), x.dtype), x)


def reaching(sizes: Sequence[int], first: Callable[[int], int], run: Runs) -> tuple[int, int] | None:
    """The first fault that reaches a result by itself, and the position of its first element that does.

    Args:
        sizes: The number of positions of each fault.
        first: Returns the position of a fault's first element that is not finite.
        run: Runs the program with all other elements of the faults made finite.

    Returns:
        The fault's index and the position; None if no fault reaches a result by itself.
    """
    nothing: Spans = ((0, 0),) * len(sizes)
    failed_without, codes_without = run(nothing)

    def reaches(fault: int, low: int, high: int) -> bool:
        failed, codes = run((*nothing[:fault], (low, high), *nothing[fault + 1 :]))
        return (failed and not failed_without) or any(c and not w for c, w in zip(codes, codes_without, strict=True))

    for fault, high in enumerate(sizes):
        low = first(fault)
        if reaches(fault, low, low + 1):
            return fault, low
        if not reaches(fault, 0, high):
            continue
        while high - low > 1:  # those before `high` reach it, those before `low` do not
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(fault, 0, middle) else (middle, high)
        return fault, high - 1
    return None
