"""Binding primitives whose results are known, which takes a fraction of the time of `primitive.bind`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from mpjax.program import compat
from mpjax.program.evaluator import run


def bind(primitive: Any, arrays: Sequence[Any], params: dict[str, Any], outs: Sequence[Any] | None) -> Any:
    """`primitive.bind`. The abstract values of the results, if given, are not computed again when a program is traced.

    Args:
        primitive: Any primitive; one without effects if `outs` is given.
        arrays, params: Its operands and parameters.
        outs: The abstract values of its results, or None.
    """
    known = outs is not None and type(primitive) is jex.Primitive and compat.is_staging()
    if outs is None or not known or compat.is_high(primitive, arrays, params):
        return primitive.bind(*arrays, **params)
    return compat.add_equation(primitive, arrays, params, outs)


def evaluate_again(jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
    """The results of an open jaxpr in another trace, where equations with operands of the same types keep their own.

    Args:
        jaxpr: The open jaxpr.
        arrays: Its constants and inputs.
    """

    def again(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        known = not eqn.effects and all(jax.typeof(x) == v.aval for x, v in zip(operands, eqn.invars, strict=True))
        params, types = compat.bind_params(eqn.primitive, eqn.params), [v.aval for v in eqn.outvars]
        with compat.EquationContext(eqn):
            outs = bind(eqn.primitive, operands, params, types if known else None)
        return outs if eqn.primitive.multiple_results else [outs]

    return run(jaxpr, arrays, again)


def cast(x: Any, dtype: Any) -> Any:
    """`lax.convert_element_type` on the mesh of the array's own type.

    An equation that enters or leaves `jax.sharding.auto_axes` or `explicit_axes` has operands of another mesh than its
    own, on which JAX can't cast them.
    """
    aval = jax.typeof(x)
    here, own = jax.sharding.get_abstract_mesh(), aval.sharding.mesh
    if here.empty and own.empty and isinstance(x, jax.core.Tracer):
        params = {"new_dtype": np.dtype(dtype), "weak_type": False, "sharding": None}
        return bind(jax.lax.convert_element_type_p, [x], params, [in_dtype(aval, np.dtype(dtype))])
    with compat.on_mesh_of(aval):
        return jax.lax.convert_element_type(x, dtype)


@functools.lru_cache(maxsize=4096)
def in_dtype(aval: Any, dtype: Any) -> Any:
    """The abstract value of an array after a cast."""
    return aval.update(dtype=dtype, weak_type=False)
