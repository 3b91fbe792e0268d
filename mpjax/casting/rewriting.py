"""Carrying out a plan: the program is re-issued, equation by equation, with the casts that the plan asks for.

It runs under whatever transformation is at work outside (`grad`, `vmap`, `jit`, ...), so derivatives
are JAX's own derivatives of the program that is written here. First-order primitives are bound with
their traced parameters; those with programs inside go through JAX's public functions (`reissuing`,
`custom_rules`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from mpjax._jaxpr import compat
from mpjax.casting.classify import FLOAT32, tracked
from mpjax.casting.islands import Island
from mpjax.casting.planning import ALIAS, BIND, SKIP, Plan, Step
from mpjax.casting.states import FULL, LOW, RAW

# A float32 value of the program is a list of two: the array in float32 and in half, None until it is
# wanted. So a cast is made once per value and dtype. Any other value is the array itself.
Value = Any

# How equations with programs inside are re-issued; `reissuing` and `custom_rules` fill it in.
REISSUE: dict[str, Callable[[Step, Sequence[Any], Plan, dict[Any, Value]], Sequence[Value]]] = {}


def run(plan: Plan, consts: Sequence[Any], values: Sequence[Value]) -> list[Value]:
    """Carries out a plan.

    Args:
        plan: the plan.
        consts: arrays, one for each constvar.
        values: one for each input.

    Returns:
        The values of the outputs; `array_of` takes an array out of one.
    """
    env: dict[Any, Value] = {}
    for v, const in zip(plan.constvars, consts, strict=True):
        env[v] = [const, None] if tracked(v) else const
    env.update(zip(plan.invars, values, strict=True))
    _carry_out(plan.steps, env, plan)
    return [_operand(v, env) for v in plan.outvars]


def _carry_out(steps: Sequence[Step | Island], env: dict[Any, Value], plan: Plan) -> None:
    half = plan.setting.half
    for step in steps:
        if isinstance(step, Island):
            _recomputed(step, env, plan)
            continue
        if step.action == SKIP:
            continue
        eqn = step.eqn
        if step.action == ALIAS:
            ((v,), (out,)) = eqn.invars, eqn.outvars
            value = env[v]
            env[out] = value if step.outs[0] is not None else array_of(value, LOW, half)
            continue
        with compat.EquationContext(eqn):
            if step.action == BIND:
                outs = _bind(step, env, half)
            else:
                operands = [_operand(v, env) for v in eqn.invars]
                outs = REISSUE[step.action](step, operands, plan, env)
        env.update(zip(eqn.outvars, outs, strict=True))


def _recomputed(island: Island, env: dict[Any, Value], plan: Plan) -> None:
    """Issues an island: its inputs are stored for the backward pass, and nothing that is made in it."""
    half = plan.setting.half

    def body(*arrays: Any) -> tuple[Any, ...]:
        inside: dict[Any, Value] = {}
        for (v, slot), array in zip(island.ins, arrays, strict=True):
            inside[v] = value_of(array, slot)
        _carry_out(island.steps, inside, plan)
        return tuple(array_of(inside[v], slot, half) for v, slot in island.outs)

    arrays = [_strong(array_of(env[v], slot, half)) for v, slot in island.ins]
    # The barrier against sharing values with the forward pass is for what is made there. In a scan, whose two passes
    # are two loops, it is only in the way of fusion, and of parameters that are updated in place it makes copies.
    barrier = tuple(not plan.setting.looped and not given for given in island.given)
    outs = jax.checkpoint(body, prevent_cse=barrier, policy=_many_to_one)(*arrays)
    for (v, slot), array in zip(island.outs, outs, strict=True):
        if slot != RAW and v in env:
            env[v][slot] = array
        else:
            env[v] = value_of(array, slot)


def _many_to_one(primitive: Any, *avals: Any, axes: tuple[int, ...] = (), **_: Any) -> bool:
    """What an island stores all the same: sums over so many elements that their size is nothing.

    To compute the statistics of a batch again would read all of it once more. Those of a row or a feature vector come
    with the rest, in the kernel that reads the row anyway.
    """
    return primitive.name.startswith("reduce_") and math.prod(avals[0].shape[axis] for axis in axes) > 1024


def run_closed(plan: Plan, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
    """Carries out the plan of a closed jaxpr with the constants it holds."""
    return run(plan, compat.open_jaxpr(jaxpr).consts, values)


def array_of(value: Value, slot: int, half: np.dtype) -> Any:
    """The array of a value in a slot; the cast is made at the first time of asking."""
    if slot == RAW:
        return value
    array = value[slot]
    if array is None:
        array = value[slot] = lax.convert_element_type(value[1 - slot], half if slot == LOW else FLOAT32)
    return array


def value_of(array: Any, slot: int) -> Value:
    """The value that has an array in a slot."""
    return array if slot == RAW else [array, None] if slot == FULL else [None, array]


def slot_of(state: Any) -> int:
    """The slot in which a value of this state is handed over."""
    return RAW if state is None else state.slot


def _strong(x: Any) -> Any:
    """The array without its weak type: a remat's input loses it in its cotangent, a cast's keeps it."""
    weak = getattr(jax.typeof(x), "weak_type", False)
    return lax.convert_element_type(x, x.dtype) if weak and jax.numpy.issubdtype(x.dtype, np.floating) else x


def _operand(v: Any, env: dict[Any, Value]) -> Value:
    if not isinstance(v, compat.Literal):
        return env[v]
    return [v.val, None] if tracked(v) else v.val


def _read(v: Any, slot: int, env: dict[Any, Value], half: np.dtype) -> Any:
    if not isinstance(v, compat.Literal):
        return array_of(env[v], slot, half)
    return np.asarray(v.val).astype(half)[()] if slot == LOW else v.val


def _broadcast(x: Any, shape: tuple[int, ...], half: np.dtype) -> Any:
    """Broadcasts in float32 and then casts, so that the derivative sums in float32."""
    offset = len(shape) - x.ndim
    wide = lax.broadcast_in_dim(x, shape, tuple(range(offset, len(shape))))
    return lax.convert_element_type(wide, half)


@jax.custom_jvp
def _scaled(x: Any, factor: Any, low: Any) -> Any:
    """`x * low`, where `low` is the half of a smaller `factor` whose gradient is summed in float32.

    Broadcasting the factor before the product would do, but store it at full size for the backward pass.
    """
    return lax.mul(x, low)


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


def _bind(step: Step, env: dict[Any, Value], half: np.dtype) -> Sequence[Value]:
    eqn = step.eqn
    args = [_read(v, slot, env, half) for v, slot in zip(eqn.invars, step.reads, strict=True)]
    params = eqn.primitive.get_bind_params(eqn.params)
    if step.spread:
        shape = eqn.outvars[0].aval.shape
        if eqn.primitive.name == "mul" and len(step.spread) == 1:
            (i,) = step.spread
            low = array_of(env[eqn.invars[i]], LOW, half)
            return [value_of(_scaled(args[1 - i], args[i], lax.stop_gradient(low)), LOW)]
        for i in step.spread:
            args[i] = _broadcast(args[i], shape, half)
    if step.low and params.get("preferred_element_type") is not None:
        params = {**params, "preferred_element_type": half}
    outs = eqn.primitive.bind(*args, **params)
    if not eqn.primitive.multiple_results:
        outs = (outs,)
    return [value_of(out, slot_of(state)) for out, state in zip(outs, step.outs, strict=True)]
