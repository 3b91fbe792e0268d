"""A trial of a loss function in half at any loss scale: its gradients as half would compute them.

The trial evaluates the gradient's program operation by operation in float32 and rounds each result that the program
stores in half. Matmuls accumulate in float32, as on Tensor Cores. Most operations are compiled already, because the
float32 program and other trials have the same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from mpjax._jaxpr.interpreter import COMPILER_OPTIONS, Eager, Probe, is_half, widened
from mpjax._jaxpr.primitives import primitive
from mpjax._jaxpr.program import Site, lay_out, owners_of, walk
from mpjax.inspection.gradient import Loss, half_share, relative_error


class Trial:
    """The gradient of a loss function at any loss scale.

    Args:
        caller: The tool, for error messages.
        loss: The loss function, under autocast or in float32.
        args: The arguments of the call.
    """

    def __init__(self, caller: str, loss: Loss, args: Sequence[Any]):
        self._program, self._scale, self.names = loss.traced_at_any_scale(caller, args)
        self._block = lay_out(self._program.jaxpr)
        self._evaluation = Eager(Probe(), wide=True, replace=jax.tree_util.Partial(_rounded))

    @functools.cached_property
    def sites(self) -> list[Site]:
        """The program's equations."""
        return list(walk(self._program.jaxpr, owners=owners_of(self._program.jaxpr, self._program.names)))

    @property
    def half_share(self) -> float:
        """The share of the FLOPs of matmuls and convolutions with half operands."""
        return half_share(self.sites)

    def run(self, scale: float) -> tuple[Any, list[Any]]:
        """The loss and the gradients, in the order of `names`, at a loss scale."""
        arrays = [widened(x) for x in self._program.arrays]
        arrays[self._scale] = np.float32(scale)
        outs, _ = self._evaluation.block(self._block, arrays)
        return outs[len(self.names)], outs[: len(self.names)]

    def error(self, scale: float, exact: Sequence[Any]) -> float:
        """The relative error of the gradients against the exact ones; inf if they are not finite."""
        return relative_error(self.run(scale)[1], exact)


def _rounded(place: Site, iteration: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
    """An equation's results. Those in half are rounded to half and cast back to float32."""
    row, eqn = primitive(place.name), place.eqn
    if (row.moves or row.keeps_values) and all(map(is_half, eqn.invars[:1])):
        return outs  # the operands are rounded already
    return [_round(x, v.aval.dtype) if is_half(v) else x for x, v in zip(outs, eqn.outvars, strict=True)]


# The largest number of elements that NumPy rounds faster than XLA compiles a program for their shape.
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
