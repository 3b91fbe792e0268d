"""The derivative rules of `custom_jvp` and `custom_vjp` as jaxprs.

JAX keeps a rule as a function, which may close over values of the enclosing program. So the rules of a program's own
equations are traced during the trace of the program (`trace_live`), and those of sub-jaxprs during planning. A rule
that holds no such value waits until JAX differentiates the equation: a solver's rule may cost several times what the
function costs.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from mpjax.program import compat, contexts
from mpjax.program.dataflow import dataflow, once_per_jaxpr
from mpjax.program.graph import present, present_open


@dataclasses.dataclass(frozen=True)
class JvpRule:
    """A custom_jvp rule, which takes the primals and the nonzero tangents.

    Args:
        jaxpr: Its jaxpr, which takes its constants as constvars or as leading inputs.
        consts: The constants: arrays, or tracers of the enclosing program.
        has_tangent: For each operand, whether the rule takes its tangent; other tangents are zero.
        zeros: For each output, whether its tangent is zero.
    """

    jaxpr: Any
    consts: Sequence[Any]
    has_tangent: Sequence[bool]
    zeros: Sequence[bool]


@dataclasses.dataclass(frozen=True)
class Residual:
    """A residual of a custom_vjp: an output of its forward rule, an operand, or a Python scalar.

    Args:
        aval: Its abstract value.
        operand: Index of the operand that it is; None if the forward rule computes it.
        scalar: Its value if it is a Python scalar, which the backward rule may branch on.
    """

    aval: Any
    operand: int | None = None
    scalar: Any = None


@dataclasses.dataclass(frozen=True)
class VjpRule:
    """A custom_vjp's forward rule, and the residuals that its backward rule takes.

    Args:
        jaxpr, consts: The forward rule. Its outputs are the residuals that it computes, then the results.
        residuals: The inputs of the backward rule before the cotangents.
        trees: Tree structures of the forward rule that JAX needs to call the backward rule.
    """

    jaxpr: Any
    consts: Sequence[Any]
    residuals: Sequence[Residual]
    trees: Sequence[Any]

    @property
    def num_computed(self) -> int:
        """Number of residuals that the forward rule computes, Python scalars included."""
        return sum(r.operand is None for r in self.residuals)

    @property
    def arrays(self) -> list[Residual]:
        """The residuals that are not Python scalars."""
        return [r for r in self.residuals if r.scalar is None]


@dataclasses.dataclass(frozen=True)
class BackwardRule:
    """A custom_vjp's backward rule, for a given set of zero cotangents.

    Args:
        jaxpr: A closed jaxpr. Takes the residuals that are arrays, then the nonzero cotangents of the outputs. Returns
            the nonzero cotangents of the operands, then the values that the rule logs.
        zeros: For each operand, whether its cotangent is zero.
        logs: The tree structure of the logged values.
    """

    jaxpr: Any
    zeros: Sequence[bool]
    logs: Any


@dataclasses.dataclass
class DerivativeRules:
    """The rules of an equation all of whose operands are perturbed; None for a rule that it does not have.

    If `deferred`, they are not traced yet, and close over no tracers.
    """

    jvp: JvpRule | None = None
    vjp: VjpRule | None = None
    backward: BackwardRule | None = None
    deferred: bool = False

    @property
    def consts(self) -> Iterator[Any]:
        """All values that the rules close over."""
        for consts in (self.jvp and self.jvp.consts, self.vjp and self.vjp.consts):
            yield from consts or ()
        if self.backward is not None:
            yield from compat.open_jaxpr(self.backward.jaxpr).consts


_JVP, _VJP = "jvp_jaxpr_fun", "fwd_jaxpr_thunk"  # the parameters that hold a rule
_cache: weakref.WeakKeyDictionary[Any, dict[int, DerivativeRules]] = weakref.WeakKeyDictionary()


def _key(params: dict[str, Any]) -> int | None:
    """The identity of an equation's rules."""
    rule = params.get(_JVP, params.get(_VJP))
    return None if rule is None else id(rule)


def rules_of(jaxpr: Any, eqn: Any, traced: bool = False) -> DerivativeRules:
    """The rules of an equation of an open jaxpr; if `traced`, none of them is deferred.

    A rule that can't be traced yet (a mesh axis is missing) is None.
    """
    known = _cache.setdefault(jaxpr, {})
    key = _key(eqn.params)
    if key is None:
        return DerivativeRules()
    if key not in known or (traced and known[key].deferred):
        known[key] = _trace(eqn) if traced else _trace_or_defer(eqn)
    return known[key]


def closed_over(jaxpr: Any, eqn: Any) -> Sequence[Any]:
    """The variables of an open jaxpr that the rules of one of its equations close over."""
    if _key(eqn.params) is None:
        return ()
    variables = map(compat.variable_of, rules_of(jaxpr, eqn).consts)
    here = _variables(jaxpr)
    return [v for v in variables if v is not None and v in here]


def closes_over_tracers(jaxpr: Any, eqn: Any) -> bool:
    """Whether the rules of an equation of an open jaxpr close over tracers, whose trace may have ended."""
    return any(compat.variable_of(const) is not None for const in rules_of(jaxpr, eqn).consts)


@once_per_jaxpr
def _variables(jaxpr: Any) -> frozenset[Any]:
    return frozenset([*jaxpr.constvars, *jaxpr.invars, *dataflow(jaxpr).maker_of])


def trace_live() -> dict[int, DerivativeRules]:
    """The rules of the equations traced so far in the current trace."""
    rules: dict[int, DerivativeRules] = {}
    for eqn in compat.traced_equations():
        if (key := _key(eqn.params)) is not None:
            rules[key] = _trace_or_defer(eqn)
    return rules


def remember(jaxpr: Any, rules: dict[int, DerivativeRules]) -> None:
    """Caches the rules that `trace_live` found, for the jaxpr that the trace produced."""
    _cache[compat.open_jaxpr(jaxpr).jaxpr] = rules


def inherit(new: Any, old: Any) -> None:
    """Gives an open jaxpr the rules of another one, whose equations it has."""
    _cache[new] = _cache.setdefault(old, {})


def _trace_or_defer(eqn: Any) -> DerivativeRules:
    return _trace(eqn) if may_close_over_tracers(eqn.params) else DerivativeRules(deferred=True)


def _trace(eqn: Any) -> DerivativeRules:
    rules, params, ins = DerivativeRules(), eqn.params, [v.aval for v in eqn.invars]
    count = len(ins) - params["num_consts"]
    try:
        if _JVP in params:
            rules.jvp = jvp_rule(params, [False] * count)
        else:
            rules.vjp = vjp_rule(params, ins, [True] * count)
            rules.backward = backward_rule(params, rules.vjp, [_cotangent(v.aval) for v in eqn.outvars])
    except Exception:  # JAX reports any error in the rule when it differentiates the equation.
        pass
    return rules


def jvp_rule(params: dict[str, Any], zeros: Sequence[bool]) -> JvpRule:
    """Traces a custom_jvp rule.

    Args:
        params: Parameters of the equation.
        zeros: For each operand, whether its tangent is zero.
    """
    with contexts.planning(contexts.planning.value or "a rule"):
        jaxpr, consts, out_zeros = compat.jvp_jaxpr(params, zeros)
    return JvpRule(present_open(jaxpr), consts, tuple(not zero for zero in zeros), tuple(out_zeros))


def vjp_rule(params: dict[str, Any], ins: Sequence[Any], perturbed: Sequence[bool]) -> VjpRule:
    """Traces a custom_vjp's forward rule.

    Args:
        params: Parameters of the equation.
        ins: Abstract values of its operands.
        perturbed: For each operand, whether the equation is differentiated with respect to it.
    """
    with contexts.planning(contexts.planning.value or "a rule"):
        jaxpr, consts, forwards, trees = compat.fwd_rule(params, perturbed)
    jaxpr = present_open(jaxpr)
    computed = iter(jaxpr.outvars)
    residuals = []
    for operand in forwards:
        if operand is not None:
            residuals.append(Residual(ins[operand], operand=operand))
            continue
        v = next(computed)
        scalar = v.val if isinstance(v, compat.Literal) and isinstance(v.val, (bool, int, float, complex)) else None
        residuals.append(Residual(v.aval, scalar=scalar))
    return VjpRule(jaxpr, consts, tuple(residuals), trees)


def backward_rule(params: dict[str, Any], rule: VjpRule, cotangents: Sequence[Any]) -> BackwardRule:
    """Traces a custom_vjp's backward rule with the dtypes that it was written for.

    Args:
        params: Parameters of the equation.
        rule: Its forward rule.
        cotangents: Abstract values, `SymbolicZero`s, or float0 arrays for outputs that are not floats.
    """
    operands = [r.aval if r.scalar is None else r.scalar for r in rule.residuals] + list(cotangents)
    zeros: list[bool] = []
    logs: list[Any] = []

    def fun(*arrays: Any) -> list[Any]:
        rest = iter(arrays)
        args = [next(rest) if _is_abstract(x) else x for x in operands]
        count = len(rule.residuals)
        cts, logged = compat.call_bwd(params, rule.trees, args[:count], args[count:])
        leaves, tree = jax.tree.flatten(logged)
        logs.append(tree)
        zeros.extend(ct is None or type(ct) is SymbolicZero for ct in cts)
        return [*(ct for ct in cts if not (ct is None or type(ct) is SymbolicZero)), *leaves]

    in_rule = contexts.scaled_losses(contexts.scaled_losses.value and contexts.IN_RULE)
    with in_rule, contexts.planning(contexts.planning.value or "a rule"):
        jaxpr = present(compat.trace(fun, *(compat.example(x) for x in operands if _is_abstract(x))))
    return BackwardRule(jaxpr, tuple(zeros), logs[0])


def _is_abstract(x: Any) -> bool:
    return isinstance(x, jax.core.AbstractValue)


def _cotangent(aval: Any) -> Any:
    """The cotangent of an output with which a backward rule is traced."""
    if compat.is_shaped(aval) and not compat.is_inexact(aval):
        return np.zeros(aval.shape, jax.dtypes.float0)
    return aval


# Derivative rules that close over values of the program in which they are defined.


_MANY = 512  # objects


def may_close_over_tracers(params: dict[str, Any]) -> bool:
    """Whether the derivative rules of an equation hold a tracer, or more objects than are worth a search."""
    pending = [params[name] for name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd") if name in params]
    visited: dict[int, Any] = {}
    while pending:
        x = pending.pop()
        if isinstance(x, jax.core.Tracer) or len(visited) > _MANY:
            return True
        if id(x) not in visited:
            visited[id(x)] = x
            pending += _held_by(x)
    return False


def _held_by(x: Any) -> Iterable[Any]:
    """The objects that a function, a container or another object holds, except the globals of a function."""
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if cell != types.CellType()]
        return (*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
    if isinstance(x, types.MethodType):
        return x.__func__, x.__self__
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, compat.WrappedFun):
        return x.f, *(argument for transform in x.transforms for argument in transform)
    if isinstance(x, dict):
        return x.values()
    if isinstance(x, (tuple, list, set, frozenset)):
        return x
    if isinstance(x, (type, types.ModuleType, jax.core.Trace)) or type(x).__module__.startswith("jaxlib."):
        return (getattr(x, "__wrapped__", None),)
    slots = (getattr(x, name, None) for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ()))
    return *getattr(x, "__dict__", {}).values(), *slots
