"""`custom_jvp` and `custom_vjp`: keeps the author's derivative rule, and plans it like any other program.

A rule is traced for float32, so values are cast to the traced dtypes at its boundary. The matmuls inside run in half
too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from mpjax.casting.classify import Listing
from mpjax.casting.higher_order.calls import uses_of_call
from mpjax.casting.higher_order.sub_jaxpr import (
    Convention,
    HigherOrder,
    as_traced,
    convention_of,
    enter,
    flatten_operands,
    function_of,
    passed_in,
    plan_call,
)
from mpjax.casting.infer import plan_jaxpr
from mpjax.casting.inference import Inference
from mpjax.casting.lattice import FULL, HALF, PARAMETER, TRACED, Inferred, Level, Storage, storage_of
from mpjax.casting.plan import Plan, Step
from mpjax.casting.rewrite import MixedValue, array_of, arrays_of, run, values_of
from mpjax.casting.setting import Region, Setting, tracked
from mpjax.casting.uses import Use, uses
from mpjax.kernels.weight_gradients import detached
from mpjax.program import compat, contexts
from mpjax.program.derivative_rules import (
    BackwardRule,
    DerivativeRules,
    JvpRule,
    VjpRule,
    backward_rule,
    closes_over_tracers,
    jvp_rule,
    rules_of,
    vjp_rule,
)
from mpjax.program.linearity import check_scaled_rule

# By name: rules of `custom_jvp` and `custom_vjp` have different forms.

_WANTED = {HALF: Use.READ | Use.HALF, FULL: Use.READ | Use.FLOAT, TRACED: Use.READ}


@dataclasses.dataclass(slots=True)
class WithRules:
    """A function with derivative rules.

    Args:
        plan: The plan of the function.
        convention: The storage dtypes of its operands.
        unread: For each result, whether it is unused. Rules don't compute unused results, because the values that
            they close over may be gone.
        jvp: The custom_jvp rule and its plan.
        forward: The forward rule of a custom_vjp and its plan.
        backward: The backward rule of a custom_vjp and its plan.
    """

    plan: Plan
    convention: Convention
    unread: Sequence[bool] = ()
    jvp: tuple[JvpRule, Plan] | None = None
    forward: tuple[VjpRule, Plan] | None = None
    backward: tuple[BackwardRule, Plan] | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the sub-jaxprs."""
        return (self.plan,)

    @property
    def rules(self) -> tuple[Plan, ...]:
        """The plans of the derivative rules."""
        return tuple(pair[1] for pair in (self.jvp, self.forward, self.backward) if pair is not None)

    @property
    def ins(self) -> list[Inferred | None]:
        """The inferred dtypes of the operands as they are passed."""
        return [
            x if x is None else Inferred(Level.HALF if storage == HALF else x.level, storage)
            for x, (_, storage) in zip(self.plan.ins, self.convention, strict=True)
        ]


def _uses(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    # Cotangents have the dtypes of the operands. Operands count as activations, because a rule may read them
    # differently than the function.
    outs = tuple(use.without(Use.RETURNED) for use in outs)
    if eqn.primitive.name == "custom_jvp_call":
        return uses_of_call(eqn, outs, setting)
    return uses(compat.call_jaxpr(eqn.params), outs, setting).inputs


def _infer(inference: Inference, eqn: Any, listing: Listing) -> Step:
    inner = plan_call(inference, eqn, listing, compat.call_jaxpr(eqn.params))
    # A custom_vjp's backward rule may contain matmuls that the function lacks, so it is entered if it takes a float32
    # operand. A rule that closes over values of this program must receive them as operands. A rule that closes over
    # values of an enclosing program, whose trace has ended, must not compute unused results.
    bare = eqn.primitive.name == "custom_jvp_call" or not any(map(tracked, eqn.invars))
    in_rule = inference.setting.in_rule
    if inner.unchanged and bare and (in_rule or not closes_over_tracers(inference.jaxpr, eqn)):
        return as_traced(inference, eqn, listing, inner.outs, inner)
    reads = zip(eqn.invars, inner.in_reads, strict=True)
    storages = [[passed_in(inference.value(v), mask)] for v, mask in reads]
    unread = tuple(not use for use in inference.wanted_of(eqn))
    entered = WithRules(inner, convention_of(inference, eqn, storages), unread)
    rules = DerivativeRules()
    if not in_rule:
        rules = rules_of(inference.jaxpr, eqn, traced=inference.setting.plans_rules)
    if rules.jvp is not None:
        entered.jvp = rules.jvp, _plan_jvp(rules.jvp, entered, eqn.params)
    if rules.vjp is not None and rules.backward is not None:
        forward = _plan_forward(rules.vjp, entered, eqn.params)
        is_float = [compat.is_inexact(v.aval) for v in inner.outvars]
        residuals = _residuals(rules.vjp, entered, forward)
        planned = _plan_backward(rules.backward, residuals, entered, is_float, eqn.params["num_consts"])
        entered.forward, entered.backward = (rules.vjp, forward), (rules.backward, planned)
    return enter(eqn, listing, inner.outs, entered, "entered; the rule is kept")


# Rules.


def _plan_rule(
    jaxpr: Any, consts: Sequence[Any], ins: Sequence[Inferred | None], wanted: Any, setting: Setting
) -> Plan:
    """The plan of a rule's jaxpr, whose constants are constvars or leading inputs, depending on the JAX version.

    Results whose entry in `wanted` is None are dropped.
    """
    jaxpr = compat.open_jaxpr(jaxpr).jaxpr
    if None in wanted:
        jaxpr = jaxpr.replace(outvars=[v for v, use in zip(jaxpr.outvars, wanted, strict=True) if use is not None])
    leading = [PARAMETER if tracked(v) else None for v in jaxpr.invars[: len(jaxpr.invars) - len(ins)]]
    assert len(leading) in (0, len(consts)), "a rule's jaxpr takes its constants, then its operands"
    taken = tuple(use for use in wanted if use is not None)
    return plan_jaxpr(jaxpr, (*leading, *ins), taken, dataclasses.replace(setting, in_rule=True))


def _closed_over(step: Step, operands: Sequence[Any]) -> list[Any]:
    """The arrays that the rules close over. They become operands, because a rule runs after this trace has ended."""
    arrays = [x[FULL] if isinstance(x, MixedValue) else x for x in operands[len(step.eqn.invars) :]]
    return [detached.bind(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in arrays]


def _run_rule(planned: Plan, consts: Sequence[Any], arrays: Sequence[Any], closed: Mapping[Any, Any]) -> list[Any]:
    """Runs a rule on arrays and returns the values of its results.

    Args:
        planned: Its plan.
        consts: Its constants, some of which are variables of the enclosing program.
        arrays: Its operands.
        closed: The arrays of those variables.
    """
    half = planned.setting.half
    constants = [closed.get(compat.variable_of(const), const) for const in consts]
    count = len(planned.invars) - len(arrays)
    values = values_of([*constants[:count], *arrays], planned.ins, half)
    return run(planned, constants[count:], values)


def _wanted(entered: WithRules) -> list[Use | None]:
    """The uses of the results of a rule; None for an unused result."""
    storages = map(storage_of, entered.plan.outs)
    return [None if unread else _WANTED[s] for s, unread in zip(storages, entered.unread, strict=True)]


def _array(value: Any, storage: Storage) -> Any:
    """A result of a rule in a storage dtype. The tangent of an integer is returned unchanged."""
    return compat.as_array(array_of(value, storage) if isinstance(value, MixedValue) else value)


# custom_jvp.


def _plan_jvp(rule: JvpRule, entered: WithRules, params: dict[str, Any]) -> Plan:
    first = params["num_consts"]
    ins, invars = entered.ins[first:], entered.plan.invars[first:]
    # The tangent of an integer is float0, which cannot be cast.
    tangents = [x if compat.is_inexact(v.aval) else None for x, v in zip(ins, invars, strict=True)]
    outs = _wanted(entered)
    perturbed = [x for x, has_tangent in zip(tangents, rule.has_tangent, strict=True) if has_tangent]
    wanted = [*outs, *(use for use, zero in zip(outs, rule.zeros, strict=True) if not zero)]
    return _plan_rule(rule.jaxpr, rule.consts, [*ins, *perturbed], wanted, entered.plan.setting)


def _issue_jvp(step: Step, operands: Sequence[Any], outer: Plan) -> Sequence[Any]:
    entered: WithRules = step.inner
    params, outs = step.eqn.params, entered.plan.outs
    first, count = params["num_consts"], len(entered.convention)
    body = function_of(entered.plan, entered.convention, params["call_jaxpr"])
    fun = jax.custom_jvp(lambda *arrays: body(*arrays[:count]))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        closed = dict(zip(step.closures, primals[count:], strict=True))
        primals, tangents = primals[first:count], tangents[first:count]
        zeros = [type(t) is SymbolicZero for t in tangents]
        if entered.jvp is not None and not any(zeros):
            traced, planned = entered.jvp
        else:
            traced = jvp_rule(params, zeros)
            planned = _plan_jvp(traced, entered, params)
            if not any(zeros):
                entered.jvp = traced, planned
        nonzero = [t for t, zero in zip(tangents, zeros, strict=True) if not zero]
        results = iter(_run_rule(planned, traced.consts, [*primals, *nonzero], closed))
        out = _with_unread(results, entered, outer.setting.half)
        dots = [
            _zero(p) if zero or unread else _array(next(results), storage_of(x))
            for p, zero, unread, x in zip(out, traced.zeros, entered.unread, outs, strict=True)
        ]
        return tuple(out), tuple(dots)

    fun.defjvp(rule, symbolic_zeros=params["symbolic_zeros"])
    arrays = [*flatten_operands(entered.convention, operands), *_closed_over(step, operands)]
    return values_of(fun(*arrays), outs, outer.setting.half)


def _with_unread(results: Iterator[Any], entered: WithRules, half: np.dtype) -> list[Any]:
    """The results of a rule. JAX requires all of them, so those that nothing reads, and the rule drops, are zeros."""
    planned = entered.plan
    types = [
        v.aval.update(dtype=half) if storage_of(x) == HALF else v.aval
        for v, x in zip(planned.outvars, planned.outs, strict=True)
    ]
    return [
        ad.zeros_like_aval(aval) if skipped else _array(next(results), storage_of(x))
        for aval, skipped, x in zip(types, entered.unread, planned.outs, strict=True)
    ]


def _zero(primal: Any) -> Any:
    if jnp.issubdtype(primal.dtype, jnp.inexact):
        return jnp.zeros_like(primal)
    return np.zeros(primal.shape, jax.dtypes.float0)


# custom_vjp.


def _plan_forward(rule: VjpRule, entered: WithRules, params: dict[str, Any]) -> Plan:
    residuals = [Use.READ | Use.MAY_HALF] * rule.num_computed
    ins = entered.ins[params["num_consts"] :]
    return _plan_rule(rule.jaxpr, rule.consts, ins, [*residuals, *_wanted(entered)], entered.plan.setting)


def _residuals(rule: VjpRule, entered: WithRules, forward: Plan) -> list[Inferred | None]:
    """The inferred dtypes of the residuals that are arrays, as stored."""
    computed, stored = iter(forward.outs), []
    for residual in rule.residuals:
        x = next(computed) if residual.operand is None else entered.ins[residual.operand]
        if residual.scalar is None:
            stored.append(x)
    return stored


def _plan_backward(
    backward: BackwardRule,
    residuals: Sequence[Inferred | None],
    entered: WithRules,
    has_cotangent: Sequence[bool],
    first: int,
) -> Plan:
    """The plan of a backward rule for the given cotangents, none of which is float0."""
    levels = {HALF: Level.HALF, FULL: Level.FLOAT}
    cotangents = [
        None if x is None else Inferred(levels[x.storage], x.storage)
        for x, taken in zip(entered.plan.outs, has_cotangent, strict=True)
        if taken
    ]
    ins = [storage_of(x) for x in entered.ins[first:]]
    wanted = [_WANTED[storage] for storage, zero in zip(ins, backward.zeros, strict=True) if not zero]
    wanted += [_WANTED[FULL]] * backward.logs.num_leaves
    setting = entered.plan.setting
    # It may run the iterations of the loop again. They must take the decisions that they took in float32.
    region = Region.TOLERANCE if entered.plan.counts.loops else setting.region
    setting = dataclasses.replace(setting, in_rule=True, region=region)
    return plan_jaxpr(backward.jaxpr, (*residuals, *cotangents), tuple(wanted), setting)


def _issue_vjp(step: Step, operands: Sequence[Any], outer: Plan) -> Sequence[Any]:
    entered: WithRules = step.inner
    params, half, outs = step.eqn.params, outer.setting.half, entered.plan.outs
    num_consts, symbolic = params["num_consts"], params["symbolic_zeros"]
    arrays = flatten_operands(entered.convention, operands)
    # JAX refuses to differentiate values that a custom_vjp closes over, so these stay closed over here.
    constant, arguments = arrays[:num_consts], arrays[num_consts:]
    count = len(arguments)
    body = function_of(entered.plan, entered.convention, params["call_jaxpr"])
    in_avals = [v.aval for v in step.eqn.invars]
    is_scaled = bool(contexts.scaled_losses.value)
    latest: dict[str, Any] = {}  # The backward rule uses the forward rule that ran last.

    def fun(*args: Any) -> tuple[Any, ...]:
        return body(*constant, *args[:count])

    def fwd(*args: Any) -> tuple[Any, Any]:
        perturbed = [arg.perturbed for arg in args[:count]]
        args = tuple(arg.value for arg in args)
        args, extra = args[:count], args[count:]
        if entered.forward is not None and (all(perturbed) or not symbolic):
            rule, planned = entered.forward
        else:
            rule, traced_for = _forward_rule(params, in_avals, perturbed)
            planned = _plan_forward(rule, entered, params)
            if all(traced_for):
                entered.forward = rule, planned
        latest["rule"], latest["inferred"] = rule, _residuals(rule, entered, planned)
        results = _run_rule(planned, rule.consts, args, dict(zip(step.closures, extra, strict=True)))
        computed = iter(arrays_of(results[: rule.num_computed], planned.outs[: rule.num_computed]))
        everything = (*constant, *args)
        stored = [next(computed) if r.operand is None else everything[r.operand] for r in rule.residuals]
        stored = [x for x, r in zip(stored, rule.residuals, strict=True) if r.scalar is None]
        outs_of_rule = _with_unread(iter(results[rule.num_computed :]), entered, half)
        return tuple(outs_of_rule), (stored, extra)

    def bwd(residuals: tuple[list[Any], Sequence[Any]], cotangents: Sequence[Any]) -> tuple[Any, Any]:
        stored, extra = residuals
        rule: VjpRule = latest["rule"]
        # A rule that JAX has batched knows by its symbolic zeros that no example shares a cotangent.
        if not symbolic and (entered.backward is not None or not compat.ZEROS_REACH_RULES):
            cotangents = [_instantiated(ct) for ct in cotangents]
        inexact = [compat.is_inexact(v.aval) for v in entered.plan.outvars]
        has_cotangent = [
            type(ct) is not SymbolicZero and is_float for ct, is_float in zip(cotangents, inexact, strict=True)
        ]
        planned_rule = entered.forward is not None and rule is entered.forward[0]
        if entered.backward is not None and planned_rule and has_cotangent == inexact:
            backward, planned = entered.backward
        else:
            avals = [v.aval for v in entered.plan.outvars]
            backward = backward_rule(params, rule, [_traced_as(ct, a) for ct, a in zip(cotangents, avals, strict=True)])
            planned = _plan_backward(backward, latest["inferred"], entered, has_cotangent, num_consts)
            if planned_rule and has_cotangent == inexact:
                entered.backward = backward, planned
        if is_scaled:
            check_scaled_rule(step.eqn, backward.jaxpr, len(rule.arrays), backward.zeros.count(False))
        taken = [*stored, *(ct for ct, taken in zip(cotangents, has_cotangent, strict=True) if taken)]
        closed = dict(zip(step.closures, extra, strict=True))
        results = iter(_run_rule(planned, compat.open_jaxpr(backward.jaxpr).consts, taken, closed))
        ins = [storage_of(x) for x in entered.ins[num_consts:]]
        gradients = [
            None if zero else _array(next(results), storage) for storage, zero in zip(ins, backward.zeros, strict=True)
        ]
        logs = jax.tree.unflatten(backward.logs, [_array(x, FULL) for x in results])
        return (*gradients, *(None for _ in extra)), logs

    # Symbolic zeros also for a rule without: they say which operands are differentiated.
    rewritten = compat.custom_vjp(fun, fwd, bwd, symbolic_zeros=True)
    if compat.in_eager_shard_map():
        rewritten = jax.jit(rewritten)  # JAX has no symbolic zeros there.
    return values_of(rewritten(*arguments, *_closed_over(step, operands)), outs, half)


def _forward_rule(
    params: dict[str, Any], ins: Sequence[Any], perturbed: Sequence[bool]
) -> tuple[VjpRule, Sequence[bool]]:
    """A forward rule and the operands for which it was traced.

    A rule without symbolic zeros is the same for all, unless JAX issued the equation again: its constants are operands
    then, and the rule raises for those if they are differentiated.
    """
    if not params["symbolic_zeros"]:
        try:
            return vjp_rule(params, ins, [True] * len(perturbed)), [True] * len(perturbed)
        except Exception:  # The next call raises it if it has another cause.
            pass
    return vjp_rule(params, ins, perturbed), perturbed


def _instantiated(ct: Any) -> Any:
    """A cotangent as an array, on the devices of its output."""
    if type(ct) is not SymbolicZero:
        return ct
    aval: Any = ct.aval
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    return ad.instantiate_zeros(ad.Zero(aval))


def _traced_as(ct: Any, aval: Any) -> Any:
    """A cotangent in the dtype of the traced output, for tracing its rule."""
    if type(ct) is SymbolicZero:
        return SymbolicZero(compat.example(ct.aval, aval.dtype)) if compat.is_inexact(aval) else ct
    return compat.example(jax.typeof(ct), aval.dtype) if compat.is_inexact(aval) else ct


CUSTOM_JVP = HigherOrder(_uses, _infer, _issue_jvp, regions_inside=False)
CUSTOM_VJP = HigherOrder(_uses, _infer, _issue_vjp, regions_inside=False)
