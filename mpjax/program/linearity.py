"""Finds derivative rules that a loss scale would change: those of `custom_vjp` that are not linear in the cotangent.

A gradient clip, a rule that adds noise, or one that returns a stored gradient gives other results for scaled
cotangents. JAX's own rules and those of `custom_jvp` are linear, or JAX could not transpose them.
"""

from __future__ import annotations

import enum
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax.program import compat
from mpjax.program.derivative_rules import rules_of
from mpjax.program.evaluator import run
from mpjax.program.graph import hidden, sub_jaxprs
from mpjax.program.primitives import Op, Saves, primitive
from mpjax.program.source import BACKWARD, DIVIDED, OUTSIDE, SCALED, TRUE, is_library, phase_of, scopes, user_stacklevel
from mpjax.program.tracing import trace


class NonlinearRuleWarning(UserWarning):
    """A derivative rule in a scaled loss gives other gradients for scaled cotangents.

    Example:
        >>> import warnings, jax, jax.numpy as jnp, optax, mpjax
        >>> @jax.custom_vjp
        ... def clip_gradient(x):
        ...     return x
        >>> clip_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1.0, 1.0),))
        >>> opt_state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init({})
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = jax.grad(mpjax.scale_loss(clip_gradient, opt_state))(1.0)
        >>> str(caught[0].message)
        'the backward rule of clip_gradient (...) is not linear in its cotangent, which ... mpjax.true_cotangents...'
    """


FLOAT16 = "float16"


def passes_of(eqns: Iterable[Any]) -> frozenset[str]:
    """The passes of the matmuls among equations, and the marks of loss scaling.

    `SCALED` marks products with a loss scale, `DIVIDED` those of the backward pass, which make gradients true, and
    `OUTSIDE` derivative rules that no scaled loss is around. `FLOAT16` stands for such matmuls of a backward pass.
    """
    found: set[str] = set()
    for eqn in eqns:
        module, row = scopes(eqn), primitive(eqn.primitive.name)
        found |= {SCALED} if SCALED in module else set()
        found |= {DIVIDED} if SCALED in module and phase_of(module) == BACKWARD else set()
        found |= {OUTSIDE} if OUTSIDE in module and phase_of(module) == BACKWARD else set()
        found |= {phase_of(module)} if row.op is Op.ALLOW else set()
        is_float16 = row.op is Op.ALLOW and any(v.aval.dtype == np.float16 for v in eqn.invars)
        found |= {FLOAT16} if is_float16 and phase_of(module) == BACKWARD else set()
        for inner in sub_jaxprs(eqn) if row.op is Op.ENTER else ():
            found |= passes_of(inner.opened.eqns)
    return frozenset(found)


def check_scaled_rule(eqn: Any, rule: Any, residuals: int, results: int) -> None:
    """Warns if the backward rule of a `custom_vjp` in a scaled loss is seen not to be linear in its cotangents.

    Not of a rule that receives true cotangents, or gives them to a part of itself (`true_cotangents`), nor of a layer
    library, whose float8 layers keep the range of their cotangents themselves.

    Args:
        eqn: The equation of the `custom_vjp`.
        rule: The closed jaxpr of its rule.
        residuals, results: The number of its inputs before the cotangents, and of those of its outputs that matter.
    """
    place = (compat.open_jaxpr(eqn.params["call_jaxpr"]).jaxpr.debug_info.func_src_info or "").rpartition(" at ")[2]
    if TRUE in scopes(eqn) or is_library(place) or SCALED in passes_of(compat.open_jaxpr(rule).jaxpr.eqns):
        return
    outs = _dependences(rule, residuals)[:results]
    if _In.UNKNOWN in outs or all(x in (_In.ZERO, _In.LINEAR) for x in outs):
        return
    name = rule_name(eqn)
    function = name.partition(" ")[0]
    warnings.warn(
        f"the backward rule of {name} is not linear in its cotangent, which is multiplied by the loss scale here, so "
        f"its gradients are wrong. Call mpjax.true_cotangents({function}, opt_state) in place of {function}: inside, "
        "the rule sees true cotangents.",
        NonlinearRuleWarning,
        stacklevel=user_stacklevel(),
    )


class _In(enum.IntEnum):
    """How a value depends on the cotangents."""

    ZERO = 0  # it is zero
    CONSTANT = 1
    LINEAR = 2
    OTHER = 3
    UNKNOWN = 4  # through code that JAX does not show, such as a kernel


def _sum(a: _In, b: _In) -> _In:
    return max(a, b) if _In.ZERO in (a, b) or a == b else max(a, b, _In.OTHER)


def nonlinear_rule(jaxpr: Any) -> str:
    """The first `custom_vjp` of a program whose backward rule is not linear, as `clip (train.py:12)`; "" if none.

    A rule that runs code which JAX does not show, such as a kernel, counts as not linear.
    """
    opened = compat.open_jaxpr(jaxpr).jaxpr
    for eqn in opened.eqns:
        if "bwd" in eqn.params:
            rules = rules_of(opened, eqn, traced=True)
            if (
                rules.vjp is None
                or rules.backward is None
                or not is_linear(rules.backward.jaxpr, len(rules.vjp.arrays), rules.backward.zeros.count(False))
            ):
                return rule_name(eqn)
        else:
            found = next(filter(None, (nonlinear_rule(inner.jaxpr) for inner in sub_jaxprs(eqn))), "")
            if found:
                return found
    return ""


def rule_name(eqn: Any) -> str:
    """The function of a `custom_vjp`, as `clip (train.py:12)`."""
    info = compat.open_jaxpr(eqn.params["call_jaxpr"]).jaxpr.debug_info
    name, _, place = (info.func_src_info or "a custom_vjp").partition(" at ")
    return f"{name} ({os.path.basename(place)})" if place else name


def check_rule(bwd: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a backward rule is linear in its cotangents, which are the last of its arguments."""
    try:
        program = trace(lambda cotangents: bwd(*args[:-1], cotangents), args[-1:], {}, None)
    except Exception:  # The rule raises it when JAX calls it.
        return False
    return is_linear(program.jaxpr, 0, len(compat.open_jaxpr(program.jaxpr).jaxpr.outvars))


def is_linear(jaxpr: Any, residuals: int, results: int) -> bool:
    """Whether the first results of a closed jaxpr are linear in its inputs after the residuals."""
    return all(x in (_In.ZERO, _In.LINEAR) for x in _dependences(jaxpr, residuals)[:results])


def _dependences(jaxpr: Any, residuals: int) -> list[_In]:
    count = len(compat.open_jaxpr(jaxpr).jaxpr.invars) - residuals
    return _results(jaxpr, [_In.CONSTANT] * residuals + [_In.LINEAR] * count)


def _results(jaxpr: Any, ins: Sequence[_In]) -> list[_In]:
    opened, consts = compat.open_jaxpr(jaxpr)
    return run(opened, (*map(_constant, consts), *ins), _of_equation, lambda literal, eqn: _constant(literal.val))


def _constant(x: Any) -> _In:
    is_known = not isinstance(x, jax.core.Tracer) and compat.is_inexact(jax.typeof(x))
    return _In.ZERO if is_known and not np.any(np.asarray(x, np.complex64)) else _In.CONSTANT


def _joined(a: Sequence[_In], b: Sequence[_In]) -> list[_In]:
    return list(map(_sum, a, b))


def _of_equation(eqn: Any, ins: list[_In]) -> Sequence[_In]:
    row, inner = primitive(eqn.primitive.name), sub_jaxprs(eqn)
    is_hidden = row.op is Op.OPAQUE and (hidden(eqn) or inner)
    other = [_In.UNKNOWN if is_hidden or _In.UNKNOWN in ins else _In.OTHER] * len(eqn.outvars)
    if row.loop:
        return _of_loop(inner, ins, len(eqn.outvars))
    if inner and (row.op is Op.ENTER or row.call):
        outs = [_results(sub.jaxpr, [ins[i] for i in sub.operands if i is not None]) for sub in inner]
        chosen = len(inner) > 1 and ins[0] > _In.CONSTANT  # which branch runs
        return other if chosen else functools.reduce(_joined, outs)
    if solved := eqn.params.get("const_lengths"):  # a linear solve: linear in its right-hand sides
        consts = sum(solved)
        is_constant = max(ins[:consts], default=_In.ZERO) <= _In.CONSTANT
        return [functools.reduce(_sum, ins[consts:])] * len(other) if is_constant else other
    is_float = [compat.is_inexact(v.aval) for v in eqn.invars]
    floats = [x for x, inexact in zip(ins, is_float, strict=True) if inexact]
    if max(ins, default=_In.CONSTANT) <= _In.CONSTANT:
        zero = _In.ZERO in floats and (row.linear == "each" or (_is_sum(row) and set(floats) == {_In.ZERO}))
        return [_In.ZERO if zero else _In.CONSTANT] * len(eqn.outvars)
    if not all(compat.is_inexact(v.aval) for v in eqn.outvars) or any(
        x > _In.CONSTANT for x, inexact in zip(ins, is_float, strict=True) if not inexact
    ):
        return other
    if _is_sum(row):
        return [functools.reduce(_sum, floats)] * len(eqn.outvars)
    is_one = floats.count(_In.LINEAR) == 1 and max(floats) == _In.LINEAR
    if is_one and (row.linear == "each" or (row.linear == "first" and ins[0] == _In.LINEAR)):
        return [_In.ZERO if _In.ZERO in floats and row.linear == "each" else _In.LINEAR] * len(eqn.outvars)
    return other


def _is_sum(row: Any) -> bool:
    """Whether a primitive is linear in all its floating operands together: its derivative saves nothing of them."""
    return bool(row.linear == "all" or (row.backward.saves is Saves.NOTHING and not row.exact))


def _of_loop(inner: Sequence[Any], ins: list[_In], count: int) -> Sequence[_In]:
    *condition, body = inner
    consts, carry, xs = body.split(ins)
    while True:
        if condition:
            shared, _, _ = condition[0].split(ins)
            if _results(condition[0].jaxpr, [*shared, *carry])[0] > _In.CONSTANT:
                return [_In.OTHER] * count
        outs = _results(body.jaxpr, [*consts, *carry, *xs])
        following = _joined(carry, outs[: len(carry)])
        if following == carry:
            return [*carry, *outs[len(carry) :]]
        carry = following
