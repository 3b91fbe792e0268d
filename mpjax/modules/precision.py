"""The precision of a model with a policy, Linen or NNX: that of its variables, and that of the code of its modules.

The code of a module is traced as that of the float32 model, and then cast by autocast. Half parameters, and other half
variables such as a decoding cache, are float32 in that program, and its plan reads the half arrays. So the policy says
nothing to most layers. Those with an explicit dtype, and those with an override by path, are regions of their own in
the traced program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.casting.autocast import plan_program, run_planned
from mpjax.casting.policies import is_enabled, setting_of
from mpjax.casting.regions import autocast_disabled, in_region
from mpjax.casting.rules import Rules
from mpjax.casting.setting import FLOAT32, Region
from mpjax.policy import CASTABLE_DTYPES, HALF_DTYPES, Policy, _cast_leaf, is_castable, is_half, is_norm_class
from mpjax.program import compat, contexts
from mpjax.program.graph import sub_jaxprs, walk
from mpjax.program.objects import is_stateful
from mpjax.program.primitives import MATMULS
from mpjax.program.source import MARK, scopes
from mpjax.program.tracing import is_array, struct_of, trace


def cast(tree: Any, dtype: np.dtype) -> Any:
    """Casts the real floating arrays of a tree. NNX objects in it (an Rngs, a module) are unchanged."""
    return jax.tree.map(lambda x: _cast_leaf(x, dtype), tree, is_leaf=is_stateful)


def cast_parameter(value: Any, dtype: np.dtype) -> Any:
    """Casts a parameter to a policy's param dtype. Only float32 is cast: other dtypes were chosen by the author."""
    return jax.tree.map(lambda x: _cast_leaf(x, dtype) if is_castable(x) and x.dtype == FLOAT32 else x, value)


def stored_in(init_fn: Any, dtype: np.dtype) -> Any:
    """An initialiser that computes as in the float32 model, and whose float32 values are then cast to a dtype."""
    if not callable(init_fn):
        return init_fn

    @functools.wraps(init_fn)
    def initialise(*args: Any, **kwargs: Any) -> Any:
        with autocast_disabled():
            return cast_parameter(init_fn(*args, **kwargs), dtype)

    return initialise


def widened(tree: Any) -> Any:
    """A tree whose half arrays are float32, as in the float32 model. An autocast around it may cast them again."""
    with in_region(Region.PLANNED):
        return jax.tree.map(lambda x: _cast_leaf(x, FLOAT32) if is_half(x) else x, tree, is_leaf=is_stateful)


def run_cast(fun: Callable[..., Any], variables: Any, rest: Any, policy: Policy) -> Any:
    """Calls `fun(variables, rest)`, which returns a result and changed variables, with its operations cast.

    Half variables are float32 for the function. Those that it changes are returned in half.
    """
    setting = setting_of(policy.without_overrides(), Rules()) if is_enabled() else None
    if setting is None:
        with in_region(Region.FLOAT):
            return fun(variables, rest)
    seen = jax.tree.map(lambda x: struct_of(x, FLOAT32) if is_half(x) else x, variables)
    stored = jax.tree.map(lambda x: cast(x, FLOAT32) if is_half(x) and x.dtype != setting.half else x, variables)
    program = trace(fun, (seen, rest), {}, setting.half)
    program.arrays = [x for x in jax.tree.leaves((stored, rest)) if is_array(x)]
    _keep_inputs(program.jaxpr, len(jax.tree.leaves(seen)))
    plan = plan_program(program, dataclasses.replace(setting, keeps_carries=True))
    out, changed = run_planned(program, plan)
    halves = {path: x.dtype for path, x in jax.tree.leaves_with_path(variables) if is_half(x)}
    return out, jax.tree.map_with_path(lambda path, x: _cast_leaf(x, halves[path]) if path in halves else x, changed)


def _keep_inputs(jaxpr: Any, count: int) -> None:
    """Keeps the matmuls of a program that read none of its first inputs, its parameters, in float32.

    They prepare inputs (Fourier features, the angles of rotary embeddings, spectrograms), which may need the mantissa.
    """
    jaxpr = compat.open_jaxpr(jaxpr).jaxpr
    read = set(jaxpr.invars[:count])
    for eqn in jaxpr.eqns:
        if any(v in read for v in eqn.invars if isinstance(v, compat.Var)):
            read.update(eqn.outvars)
        elif MARK not in scopes(eqn) and (
            eqn.primitive.name in MATMULS or any(site.flops for sub in sub_jaxprs(eqn) for site in walk(sub.jaxpr))
        ):
            compat.add_scope(eqn, MARK + Region.FLOAT)


# The code of modules.


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
