"""Finds the fault, and its element, that reaches a result: the program runs again with the others made finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from mpjax._jaxpr.interpreter import Probe, is_inexact
from mpjax._jaxpr.program import Site
from mpjax.inspection.nonfinite.point import at_iteration
from mpjax.inspection.nonfinite.provenance import Provenance

# Runs the program with a probe and replaced results. Returns whether a check failed, and the codes of the results.
Runs = Callable[[Any, Any], tuple[bool, Sequence[int]]]


def made_finite(probe: Probe, faults: Sequence[Provenance], lows: Sequence[Any], highs: Sequence[Any]) -> Partial:
    """The `replace` of an `Instrumented`: sets the faults' elements to 1, except those from `low` to `high`.

    The position of an element is its flat index, counted after the elements of all earlier devices. An array that
    several devices hold counts as that of the first of them.
    """

    def replace(lows: Any, highs: Any, place: Site, iteration: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
        for i, fault in enumerate(faults):
            if fault.number == place.number:
                outs = [
                    _with_finite_elements(probe, x, at_iteration(iteration, fault.iteration), lows[i], highs[i])
                    for x in outs
                ]
        return outs

    return Partial(replace, lows, highs)


def _with_finite_elements(probe: Probe, x: Any, hit: Any, low: Any, high: Any) -> Any:
    if not is_inexact(x):
        return x
    position = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape) + probe.device(x) * x.size
    kept = (position >= low) & (position < high)
    return jnp.where(hit & ~kept & ~jnp.isfinite(x), jnp.ones((), x.dtype), x)


def reaching(count: int, sizes: Sequence[int], run: Runs) -> tuple[int, int] | None:
    """The first fault that reaches a result by itself, and the position of its first element that does.

    Args:
        count: The number of faults.
        sizes: The number of positions of each fault.
        run: Takes, for each fault, the start and end of the range of positions whose elements stay unchanged.

    Returns:
        The fault's index and the position; None if no fault reaches a result by itself.
    """
    none = np.zeros(count, np.int32)
    without = run(none, none)

    def reaches(fault: int, high: int) -> bool:
        highs = none.copy()
        highs[fault] = high
        failed, codes = run(none, highs)
        return (failed and not without[0]) or any(c and not w for c, w in zip(codes, without[1], strict=True))

    for fault, size in enumerate(sizes):
        if not reaches(fault, size):
            continue
        low, high = 0, size
        while high - low > 1:  # reaches(high) holds, reaches(low) does not
            middle = (low + high) // 2
            low, high = (low, middle) if reaches(fault, middle) else (middle, high)
        return fault, high - 1
    return None
