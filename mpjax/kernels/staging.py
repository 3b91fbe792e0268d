"""Binding primitives whose results are known, which takes a fraction of the time of `primitive.bind`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from mpjax.program import compat


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
    with contextlib.nullcontext() if here.empty or own.empty or own == here else compat.use_abstract_mesh(own):
        return jax.lax.convert_element_type(x, dtype)


@functools.lru_cache(maxsize=4096)
def in_dtype(aval: Any, dtype: Any) -> Any:
    """The abstract value of an array after a cast."""
    return aval.update(dtype=dtype, weak_type=False)
