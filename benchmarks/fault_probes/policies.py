"""Faults of policies: a setting without effect, or a policy that cannot be printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np

import mpjax
from testing.measures import matmuls

from .fault import Fault

X = jnp.ones((8, 8))


def _matmul_dtype(fun: Callable[..., Any]) -> np.dtype:
    return matmuls(fun, X)[0].in_dtypes[0]


def mpjax_ignores_bfloat16() -> bool:
    return _matmul_dtype(mpjax.autocast(lambda x: x @ x, "mixed_bfloat16")) != jnp.bfloat16


def jmp_ignores_bfloat16() -> bool:
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    return _matmul_dtype(lambda x: (lambda h: h @ h)(policy.cast_to_compute(x))) != jnp.bfloat16


def mpx_ignores_bfloat16() -> bool:
    import mpx

    before = mpx.half_precision_datatype()
    try:
        mpx.set_half_precision_datatype("bfloat16")
        return _matmul_dtype(lambda x: (lambda h: h @ h)(mpx.cast_to_half_precision(x))) != jnp.bfloat16
    finally:
        mpx.set_half_precision_datatype(before)


def mpjax_float_function_gives_float16() -> bool:
    """In a bfloat16 run; between two matmuls, so that the result is cast again."""
    exact = mpjax.float_function(jnp.exp)
    fun = mpjax.autocast(lambda x: exact(x @ x) @ x, "mixed_bfloat16")
    return ":f16[" in str(jax.make_jaxpr(fun)(X))  # "f16" alone is in some addresses


def mpx_full_precision_gives_float16() -> bool:
    import mpx

    return mpx.force_full_precision(jnp.exp)(X.astype(jnp.bfloat16)).dtype == jnp.float16


def str_fails(policy: Any) -> bool:
    try:
        return not str(policy)
    except Exception:
        return True


_DTYPES = np.dtype("float32"), np.dtype("float16"), np.dtype("float32")

FAULTS = [
    Fault(
        "bfloat16 as the half dtype, by name, is ignored without a word",
        {
            "mpjax": mpjax_ignores_bfloat16,
            "jmp": jmp_ignores_bfloat16,
            "mixed-precision-for-JAX": mpx_ignores_bfloat16,
        },
    ),
    Fault(
        "the decorator for full precision gives float16 in a bfloat16 run",
        {"mpjax": mpjax_float_function_gives_float16, "mixed-precision-for-JAX": mpx_full_precision_gives_float16},
    ),
    Fault(
        "str of a policy with numpy dtypes fails",
        {
            "mpjax": lambda: str_fails(mpjax.Policy(*_DTYPES)),
            "jmp": lambda: str_fails(jmp.Policy(*_DTYPES)),
        },
    ),
]
