"""Carries out a plan: issues the program again, equation by equation, with the casts of the plan.

It runs under any outer transformation (`grad`, `vmap`, `jit`, ...), so JAX differentiates the rewritten program.
First-order primitives are bound with their traced parameters;
higher-order primitives go through JAX's public functions (`higher_order`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from mpjax._jaxpr import compat, weight_gradients
from mpjax._jaxpr.primitives import MATMULS, Op, primitive
from mpjax.casting.classify import FLOAT32, tracked
from mpjax.casting.lattice import FULL, HALF, TRACED, Inferred, Storage, storage_of
from mpjax.casting.plan import Action, Plan, Step
from mpjax.casting.remat import RematRegion

Environment = dict[Any, Any]
"""The value of each variable: a `MixedValue` where it is float32, else the array itself."""


class MixedValue:
    """A float32 value of the traced program: the array in float32 and in half, each computed when first read."""

    __slots__ = ("_arrays", "_half")

    def __init__(self, half: np.dtype, full: Any = None, low: Any = None):
        self._half = half
        self._arrays = [full, low]

    def __getitem__(self, storage: Storage) -> Any:
        array = self._arrays[storage]
        if array is None:
            dtype = self._half if storage == HALF else FLOAT32
            array = self._arrays[storage] = compat.cast(self._arrays[1 - storage], dtype)
        return array

    def has(self, storage: Storage) -> bool:
        """Whether the array of a storage dtype is computed."""
        return self._arrays[storage] is not None

    def add(self, storage: Storage, array: Any) -> None:
        """Sets the array of a storage dtype."""
        self._arrays[storage] = array


def array_of(value: Any, storage: Storage) -> Any:
    """The array of a value in a storage dtype."""
    return value if storage == TRACED else value[storage]


def array_for(value: Any, storage: Storage, eqns: Iterator[Any], scopes: int = 0) -> Any:
    """`array_of`; a cast has the line and the module of the first of these equations.

    Args:
        value: The value.
        storage: The storage dtype.
        eqns: The equations that read the value; for a result, the equation that computes it.
        scopes: The number of their outermost named scopes that are already open.
    """
    if storage == TRACED or value.has(storage) or (eqn := next(eqns, None)) is None:
        return array_of(value, storage)
    with compat.EquationContext(eqn, scopes):
        return value[storage]


def value_of(array: Any, storage: Storage, half: np.dtype) -> Any:
    """The value of an array in a storage dtype."""
    if storage == TRACED:
        return array
    return MixedValue(half, full=array) if storage == FULL else MixedValue(half, low=array)


def values_of(arrays: Sequence[Any], inferred: Sequence[Inferred | None], half: np.dtype) -> list[Any]:
    """The values of the arrays of a sub-jaxpr, given its inferred dtypes."""
    return [value_of(array, storage_of(x), half) for array, x in zip(arrays, inferred, strict=True)]


def arrays_of(values: Sequence[Any], inferred: Sequence[Inferred | None]) -> list[Any]:
    """The arrays of the values that a sub-jaxpr takes or returns, given their inferred dtypes."""
    return [array_of(value, storage_of(x)) for value, x in zip(values, inferred, strict=True)]


def run_closed(plan: Plan, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Carries out the plan of a closed jaxpr, with the jaxpr's constants."""
    return run(plan, compat.open_jaxpr(jaxpr).consts, values)


def run(plan: Plan, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Carries out a plan.

    Args:
        plan: The plan.
        consts: An array for each constvar.
        values: A value for each input.

    Returns:
        The values of the outputs.
    """
    half = plan.setting.half
    env: Environment = {}
    for v, const in zip(plan.constvars, consts, strict=True):
        env[v] = value_of(const, FULL if tracked(v) else TRACED, half)
    env.update(zip(plan.invars, values, strict=True))
    _run_steps(plan.steps, env, plan)
    return [_operand(v, env, half) for v in plan.outvars]


def _run_steps(steps: Sequence[Step | RematRegion], env: Environment, plan: Plan, scopes: int = 0) -> None:
    """Carries out steps. Their `scopes` outermost named scopes are already open."""
    half, higher_order = plan.setting.half, plan.setting.higher_order
    for step in steps:
        if isinstance(step, RematRegion):
            _run_region(step, env, plan)
            continue
        if step.action is Action.SKIP:
            continue
        eqn = step.eqn
        outs: Sequence[Any]
        with compat.EquationContext(eqn, scopes):
            if step.action is Action.ALIAS:
                outs = [env[eqn.invars[0]] if step.outs[0] is not None else env[eqn.invars[0]][HALF]]
            elif step.action is Action.BIND:
                outs = _bind(step, env, half)
            else:
                operands = [_operand(v, env, half) for v in eqn.invars]
                outs = higher_order[eqn.primitive.name].issue(step, operands, plan, env)
        env.update(zip(eqn.outvars, outs, strict=True))


def _run_region(region: RematRegion, env: Environment, plan: Plan) -> None:
    """Issues a rematerialisation region. Only its inputs are stored for the backward pass."""
    half, model = plan.setting.half, region.model or region
    if model.body is None:
        model.body = _body(model, plan)
    arrays = [_without_weak_type(array_for(env[v], storage, _readers(region, v))) for v, storage in region.ins]
    with compat.in_scopes(region.scopes):
        outs = compat.checkpoint(model.body, arrays, _barriers(region, plan), _large_reductions)
    for (v, storage), array in zip(region.outs, outs, strict=True):
        if storage != TRACED and v in env:
            env[v].add(storage, array)
        else:
            env[v] = value_of(array, storage, half)


def _body(region: RematRegion, plan: Plan) -> Callable[..., tuple[Any, ...]]:
    """A region as a function of its input arrays."""
    half = plan.setting.half

    def body(*arrays: Any) -> tuple[Any, ...]:
        inside = {v: value_of(array, storage, half) for (v, storage), array in zip(region.ins, arrays, strict=True)}
        scopes = len(region.scopes.stack)
        _run_steps(region.steps, inside, plan, scopes)
        made = {v: step.eqn for step in region.steps for v in step.eqn.outvars}
        return tuple(array_for(inside[v], storage, iter([made[v]]), scopes) for v, storage in region.outs)

    return body


def _readers(region: RematRegion, v: Any) -> Iterator[Any]:
    """The equations of a region that read a variable."""
    steps = (step for step in region.steps if step.action is not Action.SKIP)
    return (step.eqn for step in steps if any(read is v for read in step.eqn.invars))


def _barriers(region: RematRegion, plan: Plan) -> bool | tuple[bool, ...]:
    """Whether each input gets a barrier, which keeps the backward pass from sharing values with the forward pass.

    Only computed inputs need one. For parameters that are updated in place it would make copies. In a scan, the two
    passes are two loops, so a barrier would only prevent fusion.
    """
    if plan.setting.looped:
        return False
    if any(primitive(step.eqn.primitive.name).op is Op.ENTER for step in region.steps):
        # A derivative rule that closes over an array adds inputs, and JAX's remat has no flags for these.
        return True
    return tuple(not is_input for is_input in region.is_input)


def _large_reductions(prim: Any, *avals: Any, axes: tuple[int, ...] = (), **_: Any) -> bool:
    """A checkpoint policy that stores the outputs of large reductions, which are negligible in size.

    Recomputing the statistics of a batch would read the whole batch again. The statistics of a row or a feature vector
    are recomputed in the kernel that reads the row anyway.
    """
    if not prim.name.startswith("reduce_"):
        return False
    shape = avals[0].shape
    return all(isinstance(n, int) for n in shape) and math.prod(shape[axis] for axis in axes) > 1024


def _without_weak_type(x: Any) -> Any:
    """The array without its weak type, which a remat's input loses in its cotangent, and a cast's input keeps."""
    weak = getattr(jax.typeof(x), "weak_type", False)
    return compat.cast(x, x.dtype) if weak and jax.numpy.issubdtype(x.dtype, np.floating) else x


def _operand(v: Any, env: Mapping[Any, Any], half: np.dtype) -> Any:
    if not isinstance(v, compat.Literal):
        return env[v]
    return MixedValue(half, full=v.val) if tracked(v) else v.val


def _read(v: Any, storage: Storage, env: Mapping[Any, Any], half: np.dtype) -> Any:
    if not isinstance(v, compat.Literal):
        return array_of(env[v], storage)
    if storage != HALF:
        return v.val
    with np.errstate(over="ignore"):  # A mask of -1e38 becomes -inf, as in a cast on the device.
        return np.asarray(v.val).astype(half)[()]


def _bind(step: Step, env: Mapping[Any, Any], half: np.dtype) -> Sequence[Any]:
    eqn = step.eqn
    args = [_read(v, storage, env, half) for v, storage in zip(eqn.invars, step.reads, strict=True)]
    params = eqn.primitive.get_bind_params(eqn.params)
    if step.half_collective:
        low, full = weight_gradients.half_collective(eqn.primitive, params, args[0], half)
        return [MixedValue(half, full, low)]
    if step.broadcast:
        shape = eqn.outvars[0].aval.shape
        if eqn.primitive.name == "mul" and len(step.broadcast) == 1:
            (i,) = step.broadcast
            low = env[eqn.invars[i]][HALF]
            return [value_of(_scaled(args[1 - i], args[i], weight_gradients.detached.bind(low)), HALF, half)]
        for i in step.broadcast:
            args[i] = _broadcast(args[i], shape, half)
    if step.half:
        params = _half_params(eqn.primitive.name, params, half)
    avals = _results(step, args, half)
    if step.parameters:
        full = [env[v][FULL] if i in step.parameters else args[i] for i, v in enumerate(eqn.invars[:2])]
        outs = weight_gradients.matmul(eqn.primitive, params, args, full, step.wide_gradients, avals)
    else:
        outs = compat.bind(eqn.primitive, args, params, avals)
    if not eqn.primitive.multiple_results:
        outs = (outs,)
    return values_of(outs, step.outs, half)


def _results(step: Step, args: Sequence[Any], half: np.dtype) -> Sequence[Any] | None:
    """The abstract results of an equation that runs as traced, in float32 or in half; None if they must be computed."""
    eqn = step.eqn
    stored = {s for s in (*step.reads, *(x.storage for x in step.outs if x is not None)) if s != TRACED}
    if eqn.effects or len(stored) > 1 or not compat.is_staging():
        return None

    def aval(v: Any) -> Any:
        return compat.in_dtype(v.aval, half) if HALF in stored and tracked(v) else v.aval

    if any(jax.typeof(x) != aval(v) for x, v in zip(args, eqn.invars, strict=True)):
        return None
    return [aval(v) for v in eqn.outvars]


_scalar_functions: weakref.WeakKeyDictionary[Any, dict[np.dtype, Any]] = weakref.WeakKeyDictionary()


def _of_scalars(jaxpr: Any, dtype: np.dtype) -> Any:
    """The open jaxpr of a function of scalars for another dtype. Cached, so that JAX's caches hit."""
    known = _scalar_functions.setdefault(jaxpr, {})
    if dtype not in known:
        scalars = [jax.ShapeDtypeStruct((), dtype)] * len(jaxpr.invars)
        traced = compat.trace(lambda *args: jax.core.eval_jaxpr(jaxpr, (), *args), *scalars)
        known[dtype] = compat.open_jaxpr(traced).jaxpr
    return known[dtype]


def _half_params(name: str, params: dict[str, Any], half: np.dtype) -> dict[str, Any]:
    """The parameters of an operation that runs in half."""
    if params.get("update_jaxpr") is not None:  # The function with which a scatter combines two elements.
        return {**params, "update_jaxpr": _of_scalars(params["update_jaxpr"], half)}
    if name not in MATMULS:
        return params
    changed: dict[str, Any] = {}
    if params.get("preferred_element_type") is not None:
        changed["preferred_element_type"] = half
    if compat.is_algorithm(params.get("precision")):
        changed["precision"] = None  # An algorithm for float32, which the user's rule overrides.
    return {**params, **changed} if changed else params


def _broadcast(x: Any, shape: tuple[int, ...], half: np.dtype) -> Any:
    """Broadcasts in float32, then casts, so that the derivative sums in float32."""
    offset = len(shape) - x.ndim
    wide = lax.broadcast_in_dim(x, shape, tuple(range(offset, len(shape))))
    return lax.convert_element_type(wide, half)


@jax.custom_jvp
def _scaled(x: Any, factor: Any, low: Any) -> Any:
    """`x * low`, where `low` is `factor` in half. `factor` is smaller than `x`; its gradient is summed in float32.

    Broadcasting the factor before the product would also work, but would store it at full size for the backward pass.
    If the program itself is linear, JAX transposes this function, not its JVP rule.
    """
    return lax.mul(x, _broadcast(factor, x.shape, x.dtype))


def _scaled_jvp(primals: Any, tangents: Any) -> Any:
    (x, _, low), (dx, dfactor, _) = primals, tangents
    parts = []
    if type(dx) is not SymbolicZero:
        parts.append(lax.mul(dx, low))
    if type(dfactor) is not SymbolicZero:
        parts.append(lax.mul(x, _broadcast(dfactor, x.shape, x.dtype)))
    out = lax.mul(x, low)
    if not parts:
        return out, jax.custom_derivatives.zero_from_primal(out, symbolic_zeros=True)
    return out, parts[0] if len(parts) == 1 else lax.add(*parts)


_scaled.defjvp(_scaled_jvp, symbolic_zeros=True)
