"""The dtype of a value or a variable: what it holds, and casts to and from half."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.program import compat
from mpjax.program.formats import HALF_DTYPES, is_narrow
from mpjax.program.host import in_host_memory


def _aval(x: Any) -> Any:
    return getattr(x, "aval", None) or jax.typeof(x)


def is_inexact(x: Any) -> bool:
    """Whether a value or a variable is an array of floats, real or complex."""
    return compat.is_inexact(_aval(x))


def is_float(x: Any) -> bool:
    """Whether a value or a variable is an array of real floats."""
    return compat.is_shaped(_aval(x)) and bool(jnp.issubdtype(_aval(x).dtype, jnp.floating))


def is_half(x: Any) -> bool:
    """Whether a value or a variable is a float16 or bfloat16 array."""
    return compat.is_shaped(_aval(x)) and _aval(x).dtype in HALF_DTYPES


def is_low(x: Any) -> bool:
    """Whether a value or a variable is an array of floats of at most 16 bits."""
    return compat.is_shaped(_aval(x)) and is_narrow(_aval(x).dtype)


def widened(x: Any) -> Any:
    """A half array cast to float32, zeros for an array that takes no memory; any other value unchanged."""
    if isinstance(getattr(_aval(x), "dtype", None), compat.Empty):
        return jnp.zeros(x.shape, np.float32)
    if not is_half(x):
        return x
    return np.asarray(x, np.float32) if in_host_memory(x) else lax.convert_element_type(x, np.float32)


def narrowed(x: Any, dtype: Any) -> Any:
    """An array cast to half or float8."""
    if not in_host_memory(x):
        return lax.convert_element_type(x, dtype)
    with np.errstate(all="ignore"):
        return np.asarray(x).astype(dtype)
