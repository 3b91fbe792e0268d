"""A call of the script's function, traced once: it runs in half, and in float32 again if half overflows.

A forward pass in half may give inf or NaN where float32 is finite, for example in a printed loss or in batch
statistics. No loss scale helps there. The function then runs again as the script wrote it, and its results replace
those in half.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.casting.autocast import plan_program, run_program
from mpjax.launcher.retrying import all_finite, behind, is_inexact, strong
from mpjax.launcher.session import Scale, Session, differentiating, function_name
from mpjax.program import compat
from mpjax.program.derivative_rules import rules_of
from mpjax.program.graph import Site, sub_jaxprs, walk
from mpjax.program.primitives import Op, Saves, primitive
from mpjax.program.tracing import is_array, trace

# The named scope of a rerun. Operations in it run only after an overflow.
SCOPE = "mpjax_in_float32"


class Call:
    """A traced call under the policy of the session.

    Args:
        session: The session of this process.
        fun, args, kwargs: The call.
    """

    def __init__(self, session: Session, fun: Callable[..., Any], args: Any, kwargs: Any):
        def scaled(scale: Any, args: Any, kwargs: Any) -> Any:
            with differentiating(scale) as scope:
                out = fun(*args, **kwargs)
            self.scope = scope
            return out

        self.scope = Scale(None)
        session.differentiated = True
        self._reruns = session.reruns
        setting = session.setting
        program = trace(scaled, (jnp.ones((), jnp.float32), args, kwargs), {}, setting and setting.half)
        # Modules are known by the paths of the arguments, without the scale.
        self._program = dataclasses.replace(program, names=["[0]" + name[len("[0][1]") :] for name in program.names])
        self.rebuild = self._program.rebuild
        named = setting is not None and setting.reads_scopes
        self._plan = setting and plan_program(self._program, setting, with_owners=named)

    @property
    def nonlinear_rule(self) -> str:
        """The name of a derivative rule that a loss scale would change; "" if there is none."""
        return self.scope.rule or nonlinear_rule(self._program.jaxpr)

    @property
    def has_matmul(self) -> bool:
        """Whether it has a matmul or a convolution: something to cast."""
        return any(site.flops for site in running_sites(self._program.jaxpr))

    def in_half(self, scale: Any, args: Any, kwargs: Any) -> list[Any]:
        """The arrays among the results for other arguments, with nested gradients scaled by `scale`."""
        arrays = [scale, *(x for x in jax.tree.leaves((args, kwargs)) if is_array(x))]
        if self._plan is None:
            return self._run(arrays)
        return run_program(dataclasses.replace(self._program, arrays=arrays, rebuild=list), self._plan)

    def _run(self, arrays: Sequence[Any]) -> list[Any]:
        return jax.extend.core.jaxpr_as_fun(self._program.jaxpr)(*arrays)

    def finite(self, outs: Sequence[Any]) -> tuple[list[Any], Any]:
        """Results of `in_half` for the call's own arguments if all are finite, otherwise those in float32.

        Returns:
            The arrays, and whether the function ran again, a bool of shape ().
        """
        outs = list(outs)
        places = [i for i, x in enumerate(outs) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)]
        halves = [outs[i] for i in places]
        if not self._reruns or not any(map(is_inexact, halves)):
            return outs, jnp.zeros((), jnp.bool_)
        axes = tuple({axis for x in halves for axis in compat.varying_axes(x)})

        def rerun(arrays: Sequence[Any]) -> list[Any]:
            results = self._run(arrays)
            return [compat.vary(strong(jnp.asarray(results[i]).astype(outs[i].dtype)), axes) for i in places]

        finite = all_finite(halves)
        kept = [compat.vary(strong(x), axes) for x in halves]
        run = _in_a_loop if jax.extend.core.unsafe_am_i_under_a_vmap_DO_NOT_USE() else _in_a_branch
        with jax.named_scope(SCOPE):
            values = run(finite, rerun, self._program.arrays, kept)
        for i, value in zip(places, values, strict=True):
            outs[i] = compat.with_weak_type(value, jax.typeof(outs[i]))
        return outs, ~finite

    def explain(self, session: Session, fun: Any, line: str) -> None:
        """Writes the plan to the `--explain` file, once per line of the script."""
        path = session.options.explain
        if path and line not in session.explained:
            run = mpjax.autocast(self._run, session.policy, rules=session.rules)
            plan = mpjax.explain(run, self._program.arrays)
            with open(path, "a" if session.explained else "w") as file:
                file.write(f"{function_name(fun)}, differentiated at {line}\n\n{plan}\n\n")
            session.explained.add(line)


def _in_a_branch(finite: Any, rerun: Callable[..., Any], arrays: Sequence[Any], kept: list[Any]) -> list[Any]:
    return jax.lax.cond(finite, lambda: kept, lambda: rerun(arrays))


def _in_a_loop(finite: Any, rerun: Callable[..., Any], arrays: Sequence[Any], kept: list[Any]) -> list[Any]:
    """Reruns in a loop of at most one iteration: `vmap` turns a branch into a `select`, which runs both sides."""

    def body(carry: Any) -> Any:
        return jnp.ones((), jnp.bool_), rerun(behind(carry[0].astype(jnp.float32), arrays))

    return jax.lax.while_loop(lambda carry: ~carry[0], body, (finite, kept))[1]


def running_sites(jaxpr: Any) -> Iterator[Site]:
    """The equations of a program and its sub-jaxprs, except those that run only after an overflow."""
    return (site for site in walk(jaxpr) if SCOPE not in site.module)


# Finds derivative rules that a loss scale would change: those of `custom_vjp` that are not linear in the cotangent.
#
# A gradient clip or a rule that adds noise gives other results for scaled cotangents. JAX's own rules and those of
# `custom_jvp` are linear, or JAX could not transpose them.


class _In(enum.IntEnum):
    """How a value depends on the cotangents."""

    ZERO = 0  # it is zero
    CONSTANT = 1
    LINEAR = 2
    OTHER = 3


_SUM = [[max(a, b) if _In.ZERO in (a, b) or a == b else _In.OTHER for b in _In] for a in _In]


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
                return _name(eqn)
        else:
            found = next(filter(None, (nonlinear_rule(inner.jaxpr) for inner in sub_jaxprs(eqn))), "")
            if found:
                return found
    return ""


def _name(eqn: Any) -> str:
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
    count = len(compat.open_jaxpr(jaxpr).jaxpr.invars) - residuals
    outs = _results(jaxpr, [_In.CONSTANT] * residuals + [_In.LINEAR] * count)
    return all(x in (_In.ZERO, _In.LINEAR) for x in outs[:results])


def _results(jaxpr: Any, ins: Sequence[_In]) -> list[_In]:
    opened, consts = compat.open_jaxpr(jaxpr)
    found = dict(zip((*opened.constvars, *opened.invars), (*map(_constant, consts), *ins), strict=True))

    def read(v: Any) -> _In:
        return _constant(v.val) if isinstance(v, compat.Literal) else found[v]

    for eqn in opened.eqns:
        found.update(zip(eqn.outvars, _of_equation(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, opened.outvars))


def _constant(x: Any) -> _In:
    is_known = not isinstance(x, jax.core.Tracer) and compat.is_inexact(jax.typeof(x))
    return _In.ZERO if is_known and not np.any(np.asarray(x, np.complex64)) else _In.CONSTANT


def _joined(a: Sequence[_In], b: Sequence[_In]) -> list[_In]:
    return [_SUM[x][y] for x, y in zip(a, b, strict=True)]


def _of_equation(eqn: Any, ins: list[_In]) -> Sequence[_In]:
    row, inner = primitive(eqn.primitive.name), sub_jaxprs(eqn)
    other = [_In.OTHER] * len(eqn.outvars)
    if row.loop:
        return _of_loop(inner, ins, len(eqn.outvars))
    if inner and (row.op is Op.ENTER or row.call):
        outs = [_results(sub.jaxpr, [ins[i] for i in sub.operands if i is not None]) for sub in inner]
        chosen = len(inner) > 1 and ins[0] > _In.CONSTANT  # which branch runs
        return other if chosen else functools.reduce(_joined, outs)
    if solved := eqn.params.get("const_lengths"):  # a linear solve: linear in its right-hand sides
        consts = sum(solved)
        is_constant = max(ins[:consts], default=_In.ZERO) <= _In.CONSTANT
        return [functools.reduce(lambda a, b: _SUM[a][b], ins[consts:])] * len(other) if is_constant else other
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
        return [functools.reduce(lambda a, b: _SUM[a][b], floats)] * len(eqn.outvars)
    is_one = floats.count(_In.LINEAR) == 1 and _In.OTHER not in floats
    if is_one and (row.linear == "each" or (row.linear == "first" and ins[0] == _In.LINEAR)):
        return [_In.ZERO if _In.ZERO in floats and row.linear == "each" else _In.LINEAR] * len(eqn.outvars)
    return other


def _is_sum(row: Any) -> bool:
    """Whether a primitive is linear in all its floating operands together: its derivative saves nothing of them."""
    return bool(row.linear == "all" or (row.saves is Saves.NOTHING and not row.exact))


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
