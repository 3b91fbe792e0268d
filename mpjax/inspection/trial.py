"""A trial of a loss function in half at any loss scale: its gradients as half would compute them.

The trial evaluates the gradient's program operation by operation in float32 and rounds each result that the program
stores in half. Matmuls accumulate in float32, as on Tensor Cores. Most operations are compiled already, because the
float32 program and other trials have the same ones. Which modules stay in float32 is
data, so that no run compiles again.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.tree_util import Partial

from mpjax._jaxpr.interpreter import COMPILER_OPTIONS, Eager, Instrumented, Probe, is_half, widened
from mpjax._jaxpr.primitives import MATMULS, primitive
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
        self._block = lay_out(self._program.jaxpr, owners=owners_of(self._program.jaxpr, self._program.names))
        self._evaluation = _EagerRounding(Probe(), wide=True)

    @functools.cached_property
    def sites(self) -> list[Site]:
        """The program's equations."""
        return list(walk(self._program.jaxpr, owners=owners_of(self._program.jaxpr, self._program.names)))

    @functools.cached_property
    def _paths(self) -> list[tuple[int, str]]:
        return [(place.number, place.path) for place in self._block.places()]

    @property
    def half_share(self) -> float:
        """The share of the FLOPs of matmuls and convolutions with half operands."""
        return half_share(self.sites)

    def run(self, scale: float, wide: Collection[str] = ()) -> tuple[Any, list[Any]]:
        """The loss and the gradients, in the order of `names`, at a loss scale, with some modules in float32."""
        arrays = [widened(x) for x in self._program.arrays]
        arrays[self._scale] = np.float32(scale)
        exact = np.zeros(self._block.end, bool)
        exact[[number for number, path in self._paths if is_covered(path, wide)]] = True
        self._evaluation.replace = Partial(_rounded, exact)
        outs, _ = self._evaluation.block(self._block, arrays)
        return outs[len(self.names)], outs[: len(self.names)]

    def error(self, scale: float, exact: Sequence[Any]) -> float:
        """The relative error of the gradients against the exact ones; inf if they are not finite."""
        return relative_error(self.run(scale)[1], exact)


def is_covered(module: str, kept: Iterable[str]) -> bool:
    """Whether a module is one of those that are kept, or inside of one."""
    return any(f"{module}/".startswith(f"{path}/") for path in kept)


class _Rounding(Instrumented):
    """Rounds the operands of matmuls that are in half, which may come from a module in float32."""

    def _with(self, probe: Probe) -> Instrumented:
        return _Rounding(probe, self.wide, self.replace)

    def _bound(self, place: Site, ins: Sequence[Any]) -> list[Any]:
        if place.name in MATMULS and self.replace is not None:
            ins = _rounded_unless(self.replace.args[0][place.number], ins, place.eqn.invars)
        return super()._bound(place, ins)


class _EagerRounding(Eager, _Rounding):
    """Outside of `jit`, operation by operation."""


def _rounded(exact: Any, place: Site, iteration: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
    """An equation's results. Those in half are rounded to half and cast back to float32."""
    row, eqn = primitive(place.name), place.eqn
    if (row.moves or row.keeps_values) and all(map(is_half, eqn.invars[:1])):
        return outs  # the operands are rounded already
    return _rounded_unless(exact[place.number], outs, eqn.outvars)


def _rounded_unless(exact: Any, arrays: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The arrays, with those of half variables rounded unless `exact`."""
    if not isinstance(exact, jax.core.Tracer) and exact:
        return list(arrays)
    found = [_round(x, v.aval.dtype) if is_half(v) else x for x, v in zip(arrays, variables, strict=True)]
    if not isinstance(exact, jax.core.Tracer):
        return found
    return [lax.select(exact, x, y) if x is not y else x for x, y in zip(arrays, found, strict=True)]


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
