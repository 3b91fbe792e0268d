"""A trial of a policy and a loss scale: how far the gradients in half are from those in float32.

The program that `autocast` makes is evaluated operation by operation in float32, and each result that it stores in half
is rounded to half. Matmuls accumulate in float32, as Tensor Cores do, and most operations are compiled already: they
are the same as those of the float32 program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from mpjax._jaxpr.interpreter import COMPILER_OPTIONS, Eager, Probe, is_half, widened
from mpjax._jaxpr.layout import Place, lay_out
from mpjax._jaxpr.primitives import primitive
from mpjax.inspection.gradient import Loss, relative_error
from mpjax.policy import Policy


class Trial:
    """The gradient of a loss function under a policy, at any loss scale.

    Args:
        loss: the loss function.
        policy: what it runs under.
        args: the arguments of the call.
    """

    def __init__(self, loss: Loss, policy: Policy, args: Sequence[Any]):
        self._program, self._scale, _ = loss.under(policy).traced_at_any_scale("numerics", args)
        self._block = lay_out(self._program.jaxpr)
        self._evaluation = Eager(Probe(), wide=True, replace=_rounded)

    def error(self, scale: float, exact: Sequence[Any]) -> float:
        """The error of the gradients, relative to the exact ones; inf if they are not finite."""
        arrays = [widened(x) for x in self._program.arrays]
        arrays[self._scale] = np.float32(scale)
        outs, _ = self._evaluation.block(self._block, arrays)
        return relative_error(outs[: len(exact)], exact)


def _rounded(place: Place, turn: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
    """An equation's results, those in half rounded to it and back."""
    row, eqn = primitive(place.site.name), place.site.eqn
    if (row.moves or row.keeps_values) and all(map(is_half, eqn.invars[:1])):
        return outs  # of values that are rounded already
    return [_round(x, v.aval.dtype) if is_half(v) else x for x, v in zip(outs, eqn.outvars, strict=True)]


# Elements that NumPy rounds before XLA has compiled a program for their shape.
_SMALL = 2**20


def _round(x: Any, dtype: Any) -> Any:
    if isinstance(x, jax.core.Tracer):
        return _to_half_and_back(x, dtype)
    if x.size > _SMALL or not x.is_fully_addressable:
        return _compiled_rounding(x, dtype)
    with np.errstate(all="ignore"):
        return jax.device_put(np.asarray(x).astype(dtype).astype(np.float32), x.sharding)


def _to_half_and_back(x: Any, dtype: Any) -> Any:
    return lax.convert_element_type(lax.convert_element_type(x, dtype), np.float32)


_compiled_rounding = functools.partial(jax.jit, static_argnums=1, compiler_options=COMPILER_OPTIONS)(_to_half_and_back)
