"""`autocast`: traces a function, plans the dtypes of its values, and runs it with casts inserted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.casting import checks
from mpjax.casting.attention import prepare
from mpjax.casting.classify import Region, Setting
from mpjax.casting.formats import Float8, Float8Setting
from mpjax.casting.higher_order import HIGHER_ORDER
from mpjax.casting.infer import plan_function
from mpjax.casting.lattice import FULL, TRACED
from mpjax.casting.plan import Plan
from mpjax.casting.regions import scopes_of_modules
from mpjax.casting.rewrite import array_for, run_closed, values_of
from mpjax.casting.rules import Rules, is_pattern
from mpjax.policy import HALF_DTYPES, NORM_PATTERNS, Policy, get_policy
from mpjax.program import compat, contexts, derivative_rules
from mpjax.program import objects as nnx_calls
from mpjax.program.graph import owners_of
from mpjax.program.source import MARK, traceback_line

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass
class TracedCall:
    """A traced function: its jaxpr, the arrays it was called with, and how to rebuild its result."""

    jaxpr: Any
    arrays: Sequence[Any]
    names: Sequence[str]
    rebuild: Callable[[Sequence[Any]], Any]


def is_array(x: Any) -> bool:
    """Whether an argument is traced. Python scalars, strings and other objects are not."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def trace(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], half: np.dtype | None) -> TracedCall:
    """Traces a call. Arguments and results that are not arrays stay outside the program.

    Args:
        fun, args, kwargs: The call.
        half: The half dtype of the plan that will be made of the trace; None if none will be made. That plan leaves the
            operations of autocast functions inside alone.

    Raises:
        TypeError: The function's control flow depends on the value of an array.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    where = [i for i, (_, leaf) in enumerate(leaves) if is_array(leaf)]
    arrays = [leaves[i][1] for i in where]
    out: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        filled = [leaf for _, leaf in leaves]
        for i, array in zip(where, arrays, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        results, out["tree"] = jax.tree.flatten(fun(*args, **kwargs))
        if half is not None:
            out["rules"] = derivative_rules.trace_live()
        # Tracers must not outlive the trace.
        out["leaves"] = [_ARRAY if isinstance(leaf, jax.Array) else leaf for leaf in results]
        return [leaf for leaf in results if isinstance(leaf, jax.Array)]

    try:
        with contexts.planning(half.name) if half is not None else contextlib.nullcontext():
            jaxpr = compat.trace(flat, *arrays)
    except jax.errors.ConcretizationTypeError as error:
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            raise  # Without autocast, the function would fail here too.
        raise TypeError(_needs_a_value(fun, error)) from error
    if half is not None:
        derivative_rules.remember(jaxpr, out["rules"])

    def rebuild(results: Sequence[Any]) -> Any:
        rest = iter(results)
        return jax.tree.unflatten(out["tree"], [next(rest) if leaf is _ARRAY else leaf for leaf in out["leaves"]])

    return TracedCall(jaxpr, arrays, [jax.tree_util.keystr(leaves[i][0]) for i in where], rebuild)


_ARRAY = object()  # in place of an array in a result


def _needs_a_value(fun: Callable[..., Any], error: Exception) -> str:
    name = getattr(fun, "__name__", "the function")
    return (
        f"autocast traces {name}, as jax.jit does, but {traceback_line(error) or 'a line of it'} needs the value of an "
        "array. Put jax.jit's control flow there (jax.lax.cond, jax.lax.while_loop, jnp.where), or apply autocast to "
        f"the part without it. JAX says: {str(error).splitlines()[0]}"
    )


def plan_program(program: TracedCall, setting: Setting, with_owners: bool = False) -> Plan:
    """The plan of a traced function: inputs are castable, outputs are returned in float32.

    Args:
        program: The traced function.
        setting: Half dtype, rules, region.
        with_owners: Whether equations without a named scope belong to the modules whose parameters they read.
    """
    jaxpr, consts = compat.open_jaxpr(program.jaxpr)
    prepare.remember(jaxpr, consts)
    if with_owners:
        setting = dataclasses.replace(setting, owners=owners_of(jaxpr, program.names))
    plan = plan_function(jaxpr, setting)
    if plan.counts.cast or setting.plans_rules:
        return plan
    # Only a derivative rule may have a matmul.
    return plan_function(jaxpr, dataclasses.replace(setting, plans_rules=True))


def run_program(program: TracedCall, planned: Plan) -> Any:
    """Runs a planned function on the arrays it was traced with."""
    outs = run_closed(planned, program.jaxpr, values_of(program.arrays, planned.ins, planned.setting.half))
    storages = [TRACED if x is None else FULL for x in planned.outs]
    eqns = compat.open_jaxpr(program.jaxpr).jaxpr.eqns
    makers = ((eqn for eqn in reversed(eqns) if v in eqn.outvars) for v in planned.outvars)
    arrays = [array_for(*each) for each in zip(outs, storages, makers, strict=True)]
    return program.rebuild([_result(x, v, planned) for x, v in zip(arrays, planned.outvars, strict=True)])


def _result(x: Any, v: Any, planned: Plan) -> Any:
    """A result as an array of its weak type. A jaxpr holds constants as NumPy arrays and Python scalars."""
    if not compat.is_shaped(v.aval):
        return x
    if not isinstance(x, jax.Array) and v not in planned.invars:  # An argument is returned as it was given.
        x = jnp.asarray(x, v.aval.dtype)
    return compat.with_weak_type(x, v.aval)


def is_enabled() -> bool:
    """Whether autocast is on: neither `MPJAX_AUTOCAST` nor `autocast_disabled` turns it off."""
    return not contexts.autocast_disabled.value and os.environ.get("MPJAX_AUTOCAST", "1").strip().lower() not in (
        "0",
        "false",
        "off",
    )


def setting_of(policy: Policy, rules: Rules | None) -> Setting | None:
    """The setting for a policy and rules; None if the policy computes in float32."""
    if policy.compute_dtype not in HALF_DTYPES:
        return None
    if rules is None:
        rules = Rules(level="half") if policy == get_policy("O3") else Rules()
    if policy.reduce_dtype == policy.compute_dtype:  # A sum across devices has the dtype of its operand.
        rules = dataclasses.replace(rules, weight_gradients="half")
    float8 = _float8_setting(rules, policy)
    if contexts.attention_trial.value is not None:
        rules = dataclasses.replace(rules, attention=contexts.attention_trial.value.attention)
    rules = _with_overrides(rules, policy).with_environment()
    recompute, plans_rules = rules.residuals != "full", bool(rules.entries)
    return Setting(
        policy.compute_dtype, rules, HIGHER_ORDER, recompute=recompute, plans_rules=plans_rules, float8=float8
    )


def _float8_setting(rules: Rules, policy: Policy) -> Float8Setting | None:
    """The options and patterns of float8 matmuls; None if neither the policy nor an override has any."""
    everywhere = policy.matmul_dtype is not None
    overrides = [(_pattern(pattern), other) for pattern, other in policy.overrides if pattern not in NORM_PATTERNS]
    if not everywhere and all(other.matmul_dtype is None for _, other in overrides):
        if rules.float8 is not None:
            raise ValueError(
                f"Rules(float8={rules.float8!r}): the policy {str(policy)!r} has no float8 matmuls; use "
                "'mixed_float8', or leave the option out."
            )
        return None
    options = rules.float8 or Float8()
    entries = [(pattern, True) for pattern in options.allow] + [(pattern, False) for pattern in options.deny]
    entries += [(pattern, other.matmul_dtype is not None) for pattern, other in overrides]
    return Float8Setting(options, tuple((_pattern(pattern), on) for pattern, on in entries), everywhere)


def _pattern(pattern: str) -> str:
    """A pattern of a policy's override as one over module paths."""
    return pattern if is_pattern(pattern) else f"*/{pattern}"


def _with_overrides(rules: Rules, policy: Policy) -> Rules:
    """The rules plus a policy's overrides by path.

    Level O2's are skipped: the lists already cover them. An override that differs in its matmul dtype alone changes
    no list.
    """
    added: dict[str, list[str]] = {"allow": [], "deny": []}
    for pattern, other in policy.overrides:
        if pattern not in NORM_PATTERNS and not any(entry == pattern for entry, _ in rules.entries):
            if other.compute_dtype == policy.compute_dtype and {policy.matmul_dtype, other.matmul_dtype} != {None}:
                continue
            added["allow" if other.compute_dtype in HALF_DTYPES else "deny"].append(_pattern(pattern))
    return rules.add(**added) if any(added.values()) else rules


def autocast(fun: F, policy: Any = "mixed_float16", *, rules: Rules | None = None) -> F:
    """A function like `fun` whose operations run in half precision where that is safe.

    Autocast traces the call, gives each value of the program a dtype, and runs the program with casts
    inserted. It works under any transformation (`grad`, `vmap`, `jit`, `scan`, `shard_map`, ...):

        for each operation
            allow (matmuls, convolutions):          inputs to half
            deny  (exp, log, sums, statistics):     inputs to float32
            infer (all others):                     the widest dtype of its activations; parameters follow
            no path to an allow op:                 float32 (the loss)

    Parameters stay float32 outside the function. They are the master weights, and their gradients are float32.

    Args:
        fun: Any function of JAX arrays and pytrees of them, or of Flax NNX modules, whose state it may
            change. Arguments that are not arrays (Python scalars, strings, `None`) are passed through unchanged.
        policy: `"mixed_float16"`, `"mixed_bfloat16"`, `"mixed_float8"`, or anything that `get_policy` accepts. Autocast
            uses its compute dtype and its matmul dtype: float32 makes autocast the identity, and `"O3"` runs everything
            in half.
        rules: A `Rules` with changes to the lists.

    Returns:
        A function of the same signature, whose results have the same structure and dtypes.

    Raises:
        TypeError: `fun` is not callable.
        ValueError: The policy is invalid, or an environment variable names an unknown primitive.

    Environment: `MPJAX_AUTOCAST=0` makes every autocast the identity. `MPJAX_ALLOWLIST_ADD`,
    `MPJAX_DENYLIST_ADD` and `MPJAX_INFERLIST_ADD` hold entries for the lists, separated by commas.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     return jnp.mean(jax.nn.relu(x @ w) ** 2)
        >>> w, x = jnp.ones((4, 4)), jnp.ones((8, 4))
        >>> mpjax.autocast(loss)(w, x)
        Array(16., dtype=float32)
        >>> jax.grad(mpjax.autocast(loss, "mixed_bfloat16"))(w, x).dtype
        dtype('float32')

    Source: the lists and the propagation of TensorFlow's automatic mixed precision (NVIDIA) and of
    `torch.autocast`; Micikevicius et al., "Mixed Precision Training", ICLR 2018.
    """
    policy = get_policy(policy)
    if not callable(fun):
        raise TypeError(
            f"autocast({fun!r}): a {type(fun).__qualname__} is not a function; give the loss function itself."
        )

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        setting = setting_of(policy, rules) if is_enabled() else None
        if setting is None:
            return fun(*args, **kwargs)
        call, args, kwargs, finish = functional(fun, args, kwargs)
        program = trace(call, args, kwargs, setting.half)
        # NNX modules have named scopes.
        plan = plan_program(program, setting, with_owners=call is fun and setting.reads_scopes)
        checks.check_inputs(program, policy)
        checks.check_backend(setting)
        checks.check_plan(plan)
        # An outer autocast leaves this plan's decisions alone.
        with jax.named_scope(MARK + Region.PLANNED) if contexts.planning.value else contextlib.nullcontext():
            return finish(run_program(program, plan))

    vars(wrapped)[_ATTRIBUTE] = Autocast(wrapped, fun, policy, rules)
    return cast(F, wrapped)


_ATTRIBUTE = "__mpjax_autocast__"


class Autocast(NamedTuple):
    """An autocast function, and what it was made from."""

    wrapped: Callable[..., Any]
    fun: Callable[..., Any]
    policy: Policy
    rules: Rules | None


def autocast_of(fun: Callable[..., Any]) -> Autocast | None:
    """What an autocast function was made from; None for any other function, which may have code around it.

    Sees through methods and through JAX's wrappers that pass their arguments on: `jit`, `grad`, `checkpoint`.
    """
    if isinstance(fun, types.MethodType):
        record = autocast_of(fun.__func__)
        return record and record._replace(fun=types.MethodType(record.fun, fun.__self__))
    record = getattr(fun, _ATTRIBUTE, None)
    if record is not None and record.wrapped is fun:  # `functools.wraps` copies attributes.
        return record
    is_jax = isinstance(fun, jax.stages.Wrapped) or getattr(fun, "__code__", None) in _JAX_WRAPPERS
    return autocast_of(fun.__wrapped__) if is_jax and hasattr(fun, "__wrapped__") else None


_WRAPPERS = (jax.grad, functools.partial(jax.grad, has_aux=True), jax.value_and_grad, jax.checkpoint)
_JAX_WRAPPERS = frozenset(wrapper(abs).__code__ for wrapper in _WRAPPERS)


def functional(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """The call as a call of a pure function, with the scopes of the NNX modules among its arguments."""
    if not nnx_calls.contains_state((args, kwargs)):
        return fun, args, kwargs, lambda out: out

    def scoped(*args: Any, **kwargs: Any) -> Any:
        with scopes_of_modules((args, kwargs)):
            return fun(*args, **kwargs)

    return nnx_calls.functional(scoped, args, kwargs)


def planned_call(fun: Callable[..., Any], args: Any, kwargs: Any) -> Plan:
    """The plan of a call of an autocast function; for any other function, the plan that autocast would make."""
    record = autocast_of(fun) or Autocast(fun, fun, get_policy("mixed_float16"), None)
    setting = setting_of(record.policy, record.rules)
    if setting is None:
        dtype = record.policy.compute_dtype
        raise ValueError(f"explain: the policy {record.policy} computes in {dtype}, so autocast has no plan.")
    call, args, kwargs, _ = functional(record.fun, args, kwargs)
    setting = dataclasses.replace(setting, plans_rules=True)
    return plan_program(trace(call, args, kwargs, setting.half), setting, with_owners=call is record.fun)


def traced_call(fun: Callable[..., Any], args: Any, kwargs: Any) -> TracedCall:
    """The traced program of a call as it runs, with the casts of any autocast inside."""
    call, args, kwargs, _ = functional(fun, args, kwargs)
    return trace(call, args, kwargs, None)
