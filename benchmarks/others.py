"""Function casts of other libraries, as each documents them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jmp

from testing.models.zoo import harness


def with_jmp(fun: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """As in jmp's README: cast the arguments to the compute dtype and the result to the output dtype."""
    jmp_policy = jmp.get_policy(f"params=float32,compute={harness.half_of(policy)},output=float32")
    return lambda *args: jmp_policy.cast_to_output(fun(*jmp_policy.cast_to_compute(args)))


def with_mpx(fun: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """mixed-precision-for-JAX's function cast, which its gradient transformation also applies."""
    import mpx

    return mpx.cast_function(fun, harness.half_of(policy), "float32")
