"""`autocast`: traces a function, plans the dtypes of its values, and runs it with casts inserted."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mpjax.casting import checks
from mpjax.casting.attention import prepare
from mpjax.casting.checkpointed import without_streams
from mpjax.casting.infer import plan_function
from mpjax.casting.lattice import FULL, TRACED
from mpjax.casting.plan import Plan
from mpjax.casting.policies import is_enabled, setting_of
from mpjax.casting.regions import in_region
from mpjax.casting.rewrite import array_for, run_closed, values_of
from mpjax.casting.rules import Rules
from mpjax.casting.setting import Region, Setting
from mpjax.casting.streams import is_deep
from mpjax.casting.updates import repeats_calls
from mpjax.kernels import unscaled
from mpjax.policy import Policy, get_policy
from mpjax.program import compat
from mpjax.program.dataflow import dataflow
from mpjax.program.linearity import passes_of
from mpjax.program.owners import owners_of
from mpjax.program.source import BACKWARD, SCALED
from mpjax.program.tracing import TracedCall, functional, trace

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")


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
    if setting.rules.residual_stream == "auto":
        setting = dataclasses.replace(setting, deep=is_deep(jaxpr) or repeats_calls(jaxpr))
    if setting.wide_stream:
        jaxpr = without_streams(jaxpr)
        prepare.remember(jaxpr, consts)
    plan = plan_function(jaxpr, setting, program.arrays)
    if plan.counts.cast or setting.plans_rules:
        return plan
    # Only a derivative rule may have a matmul.
    return plan_function(jaxpr, dataclasses.replace(setting, plans_rules=True), program.arrays)


def run_program(program: TracedCall, planned: Plan, mark: Callable[[Any], Any] | None = None) -> Any:
    """Runs a planned function on the arrays it was traced with. `mark` is applied to the results that it computes."""
    outs = run_closed(planned, program.jaxpr, values_of(program.arrays, planned.ins, planned.setting.half))
    flow, results = dataflow(program.jaxpr), []
    for out, x, v in zip(outs, planned.outs, planned.outvars, strict=True):
        maker = flow.maker(v)
        array = array_for(out, TRACED if x is None else FULL, iter(() if maker is None else (maker,)))
        results.append(_result(array, v, planned))
        if mark is not None and maker is not None:
            with compat.EquationContext(maker):
                results[-1] = mark(results[-1])
    return program.rebuild(results)


def mark_of(program: TracedCall, plan: Plan) -> Callable[[Any], Any] | None:
    """What makes the results of a float16 program warn where they are differentiated; None within scaled losses."""
    if not plan.counts.cast or plan.setting.half != np.float16 or not unscaled.is_outside_scaled_losses():
        return None
    passes = passes_of(compat.open_jaxpr(program.jaxpr).jaxpr.eqns)
    if SCALED in passes:
        return None
    return functools.partial(unscaled.marked, backward=BACKWARD in passes and unscaled.warn())


def _result(x: Any, v: Any, planned: Plan) -> Any:
    """A result as an array of its weak type. A jaxpr holds constants as NumPy arrays and Python scalars."""
    if not compat.is_shaped(v.aval):
        return x
    if not isinstance(x, jax.Array) and v not in planned.invars:  # An argument is returned as it was given.
        x = jnp.asarray(x, v.aval.dtype)
    return compat.with_weak_type(x, v.aval)


@overload
def autocast(fun: F, policy: Any = "mixed_float16", *, rules: Rules | None = None) -> F: ...
@overload
def autocast(
    fun: None = None, policy: Any = "mixed_float16", *, rules: Rules | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def autocast(fun: Any = None, policy: Any = "mixed_float16", *, rules: Rules | None = None) -> Any:
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
            Without it, autocast is a decorator: `@mpjax.autocast(policy="mixed_bfloat16")`.
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
    if fun is not None and not _can_be_traced(fun):
        raise _not_a_function(fun)
    policy = get_policy(policy)
    if not isinstance(rules, Rules | None):
        raise TypeError(f"autocast(rules={rules!r}): give a mpjax.Rules, such as mpjax.Rules(residuals='int8').")
    if fun is None:
        return functools.partial(autocast, policy=policy, rules=rules)

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
        checks.check_device(setting)
        checks.check_plan(plan, policy, rules)
        checks.check_options(program, plan, rules)
        return finish(run_planned(program, plan))

    vars(wrapped)[_ATTRIBUTE] = Autocast(wrapped, fun, policy, rules)
    return wrapped


def _is_linen(x: Any) -> bool:
    """Whether `x` is a Linen module, which Flax's own transformations alone can lift out of its scope."""
    return any(c.__name__ == "Module" and c.__module__.startswith("flax.linen") for c in type(x).__mro__)


def _can_be_traced(fun: Any) -> bool:
    """Whether a call runs the body of a function, and `fun` is no Linen module."""
    runs_later = inspect.isclass(fun) or inspect.isgeneratorfunction(fun) or inspect.iscoroutinefunction(fun)
    return callable(fun) and not runs_later and not _is_linen(fun)


def _not_a_function(fun: Any) -> TypeError:
    kind = type(fun).__qualname__
    if _is_linen(fun):
        return TypeError(
            f"autocast({kind}(...)): a Flax Linen module is not a function of its parameters. Give autocast "
            "model.apply, or a loss function that calls it; mpjax.with_policy(model, policy) returns a model."
        )
    if isinstance(fun, (str, jmp.Policy)):
        return TypeError(
            f"autocast({fun!r}): the function comes first, autocast(loss_fn, {fun!r}); a decorator is "
            f"@mpjax.autocast(policy={fun!r}). There is no context manager."
        )
    if inspect.isclass(fun):
        return TypeError(
            f"autocast({fun.__qualname__}): a call of a class only makes an object. Put autocast on a method, or on "
            "the function that calls the object."
        )
    if callable(fun):
        return TypeError(f"autocast({fun!r}): a call of a generator or coroutine function runs nothing of it.")
    if isinstance(fun, classmethod):
        return TypeError(f"autocast({fun!r}): put @classmethod above @mpjax.autocast.")
    if hasattr(fun, "apply"):
        return TypeError(f"autocast({kind}(...)): give its apply, autocast(model.apply, policy).")
    return TypeError(f"autocast({fun!r}): a {kind} is not a function; give the loss function itself.")


def run_planned(program: TracedCall, plan: Plan) -> Any:
    """Runs a planned function on the arrays it was traced with. An outer autocast leaves the plan's decisions alone."""
    with in_region(Region.PLANNED), compat.present_primitives():
        return run_program(program, plan, mark_of(program, plan))


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
