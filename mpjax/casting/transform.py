"""`autocast`: traces a function, plans the dtypes of its values, and runs it with the casts put in."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from mpjax.casting import versions
from mpjax.casting.classify import Setting, tracked
from mpjax.casting.demand import LIVE, OUTPUT
from mpjax.casting.planning import Plan, plan
from mpjax.casting.rewriting import array_of, run_closed, value_of
from mpjax.casting.rules import Rules
from mpjax.casting.states import FULL, INPUT, RAW, State
from mpjax.policy import HALF_DTYPES, Policy, get_policy

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass
class Program:
    """A traced function: its jaxpr, the arrays it was called with, and how to rebuild its result."""

    jaxpr: Any
    arrays: Sequence[Any]
    names: Sequence[str]
    rebuild: Callable[[Sequence[Any]], Any]


def is_array(x: Any) -> bool:
    """Whether an argument is traced. Python scalars, strings and the like stay what they are."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def trace(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
    """Traces a call; whatever is no array is left out of the program, on the way in and on the way out."""
    leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    where = [i for i, (_, leaf) in enumerate(leaves) if is_array(leaf)]
    out: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        filled = [leaf for _, leaf in leaves]
        for i, array in zip(where, arrays, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        out["leaves"], out["tree"] = jax.tree.flatten(fun(*args, **kwargs))
        return [leaf for leaf in out["leaves"] if isinstance(leaf, jax.Array)]

    arrays = [leaves[i][1] for i in where]
    jaxpr = versions.trace(flat, *arrays)

    def rebuild(results: Sequence[Any]) -> Any:
        rest = iter(results)
        return jax.tree.unflatten(
            out["tree"], [next(rest) if isinstance(leaf, jax.Array) else leaf for leaf in out["leaves"]]
        )

    return Program(jaxpr, arrays, [jax.tree_util.keystr(leaves[i][0]) for i in where], rebuild)


def plan_program(program: Program, setting: Setting) -> Plan:
    """The plan of a traced function: inputs are castable, outputs are handed out in float32."""
    jaxpr = versions.open_jaxpr(program.jaxpr).jaxpr
    states = tuple(State(INPUT, FULL) if tracked(v) else None for v in jaxpr.invars)
    wanted = tuple(OUTPUT if tracked(v) else LIVE for v in jaxpr.outvars)
    return plan(jaxpr, states, wanted, setting)


def run_program(program: Program, planned: Plan) -> Any:
    """Runs a planned function on the arrays it was traced with."""
    half = planned.setting.half
    slots = [RAW if state is None else FULL for state in planned.in_states]
    values = [value_of(a, slot) for a, slot in zip(program.arrays, slots, strict=True)]
    outs = run_closed(planned, program.jaxpr, values)
    slots = [RAW if state is None else FULL for state in planned.out_states]
    return program.rebuild([array_of(v, slot, half) for v, slot in zip(outs, slots, strict=True)])


def is_enabled() -> bool:
    """Whether `MPJAX_AUTOCAST` lets autocast do anything."""
    return os.environ.get("MPJAX_AUTOCAST", "1").strip().lower() not in ("0", "false", "off")


def setting_of(policy: Policy, rules: Rules | None) -> Setting | None:
    """The setting for a policy and rules; None if the policy computes in float32."""
    if policy.compute_dtype not in HALF_DTYPES:
        return None
    rules = (rules or Rules()).with_environment()
    return Setting(policy.compute_dtype, rules, recompute=rules.residuals == "half")


def autocast(fun: F, policy: Any = "mixed_float16", *, rules: Rules | None = None) -> F:
    """A function like `fun` whose operations run in half precision where that is safe."""
    policy = get_policy(policy)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        setting = setting_of(policy, rules)
        if setting is None or not is_enabled():
            return fun(*args, **kwargs)
        program = trace(fun, args, kwargs)
        return run_program(program, plan_program(program, setting))

    return wrapped  # type: ignore[return-value]
