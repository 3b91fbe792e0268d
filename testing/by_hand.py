"""The measure of accuracy: the error of a program under autocast, against that of the same casts done by hand.

Both errors are against float64, and NumPy evaluates all programs (`testing.random_programs.evaluate`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from testing.random_programs.evaluate import as_typed, casts_by_hand, evaluate, is_float, rounded

# How often casts by hand round: to the nearest number, and up or down at random, since a few numbers are exact by luck.
DRAWS = 4


def differ(plain: Any, other: Any, args: Sequence[Any]) -> bool:
    """Whether two traces of one function compute other numbers, so that it isn't pure."""
    return not all(map(np.array_equal, evaluate(plain, args), evaluate(other, args)))


def ratio(plain: Any, found: Any, args: Sequence[Any], half: Any, draws: int = DRAWS) -> float | None:
    """The relative error of a program's results, divided by that of careful casts by hand.

    An error that float32 itself makes counts as resolved: the divisor is at least the error of the float32 program.

    Args:
        plain: The closed jaxpr of the float32 program.
        found: The closed jaxpr of the program under test, with the same arguments and results.
        args: The arguments.
        half: The dtype of the casts.
        draws: How often casts by hand round; the largest of their errors counts.

    Returns:
        The ratio; infinity if only the program under test is not finite. None if casts by hand have no meaningful
        error: float32 or they are not finite, all results are zero, or a quarter of the result is lost.

    Raises:
        Unsupported: NumPy can't evaluate the program.
    """
    return measured(plain, args, half, draws)(found)


def measured(plain: Any, args: Sequence[Any], half: Any, draws: int = DRAWS) -> Callable[[Any], float | None]:
    """The same as a function of the program under test, for several of these: casts by hand are measured once."""
    exact = evaluate(plain, args)
    judged = [i for i, v in enumerate(plain.jaxpr.outvars) if is_float(v.aval.dtype)]

    def norm(outs: Sequence[Any]) -> float:
        return math.sqrt(sum(float(np.sum(np.square(outs[i]))) for i in judged))

    def error(outs: Sequence[Any]) -> float:
        return norm([out - right for out, right in zip(outs, exact, strict=True)])

    stores = [as_typed, *(rounded(half, np.random.default_rng(seed)) for seed in range(1, draws))]
    by_hand = max(error(evaluate(plain, args, as_typed, casts=casts_by_hand(half, store))) for store in stores)
    size, in_float32 = norm(exact), error(evaluate(plain, args, as_typed))
    resolution = max(in_float32, float(np.finfo(np.float32).eps) * size)
    meaningful = 0 < size < math.inf and by_hand + in_float32 < 0.25 * size

    def of(found: Any) -> float | None:
        own = error(evaluate(found, args, as_typed)) if meaningful else math.nan
        return None if not meaningful else own / max(by_hand, resolution) if math.isfinite(own) else math.inf

    return of
