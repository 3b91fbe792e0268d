"""The precision in which the code of a module runs, for Linen and NNX.

A model is traced as a float32 model and then cast by autocast. So the policy says nothing to most layers. Those with an
explicit dtype, and those with an override by path, are regions of their own in the traced program.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax.casting.regions import in_region
from mpjax.casting.setting import FLOAT32, Region
from mpjax.modules.params import widened
from mpjax.policy import CASTABLE_DTYPES, HALF_DTYPES, Policy, is_norm_class
from mpjax.program import contexts


@dataclasses.dataclass(frozen=True)
class Running:
    """The policy of the running model, and the dtype in which its running code computes."""

    policy: Policy
    dtype: np.dtype


def is_running(policy: Policy) -> bool:
    """Whether the code is part of a running model with this policy, and not of another model in it."""
    running = contexts.precision.value
    return running is not None and running.policy == policy


# The dtype of the modules whose policy decides: float32, as in the float32 model. Modules pass it on to their
# submodules, where it differs from an explicit float32 by its identity.
_scalar_type: Any = type(jnp.float32)
FROM_POLICY: Any = _scalar_type("float32", (object,), {"dtype": FLOAT32})


def is_real_float(dtype: Any) -> bool:
    """Whether a layer's `dtype` is None or one that policies cover: not complex or float8."""
    try:
        return dtype is None or np.dtype(dtype) in CASTABLE_DTYPES
    except TypeError:
        return False


def own_dtype(given: Any, policies: tuple[Policy, ...], *unset: Any) -> np.dtype | None:
    """The explicit dtype that a layer keeps, or None.

    It is None if the layer has no dtype, if its dtype is one of the `unset` values (defaults), or if one of the
    `policies` (the model's and the layer's) overrides explicit dtypes.
    """
    if given is None or given is FROM_POLICY or any(p.override_dtypes for p in policies):
        return None
    return None if any(np.dtype(given) == other for other in unset) else np.dtype(given)


def stays_wide(cls: type, own: np.dtype, placed: Policy) -> bool:
    """Whether a layer's explicit dtype keeps its matmuls wider than its policy's compute dtype."""
    norm_or_lookup = is_norm_class(cls) or any(base.__name__ == "Embed" for base in cls.__mro__)
    return own.itemsize > placed.compute_dtype.itemsize and not norm_or_lookup


def in_precision(fun: Callable[..., Any], target: np.dtype, is_own: bool) -> Callable[..., Any]:
    """The code of a module that computes in another dtype than the code around it.

    Args:
        fun: The code.
        target: The dtype.
        is_own: Whether it is the module's explicit dtype, to which the module itself casts.
    """
    running = contexts.precision.value

    def as_region(*args: Any, **kwargs: Any) -> Any:
        casts_itself = is_own and target in HALF_DTYPES
        region = contextlib.nullcontext() if casts_itself else in_region(Region.FLOAT)
        with region, contexts.precision(dataclasses.replace(running, dtype=target)):
            out = fun(*args, **kwargs)
        return widened(out) if casts_itself else out

    return fun if running is None or target == running.dtype or running.dtype not in HALF_DTYPES else as_region
