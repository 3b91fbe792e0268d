"""The variables of a model with a policy: stored in half if the policy says so, float32 for the code that reads them.

The code of a module is traced as that of the float32 model. Half parameters, and other half variables such as a
decoding cache, are float32 in that program, and its plan reads the half arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mpjax.casting.autocast import plan_program, run_planned
from mpjax.casting.policies import is_enabled, setting_of
from mpjax.casting.regions import autocast_disabled, in_region
from mpjax.casting.rules import Rules
from mpjax.casting.setting import FLOAT32, Region
from mpjax.policy import Policy, _cast_leaf, is_castable, is_half
from mpjax.program import compat
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
