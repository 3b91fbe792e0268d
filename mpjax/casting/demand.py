"""The backward half of planning: which values does a Tensor Core operation read further on.

Each value gets a set of flags, from its readers back to it. They say whether anything gains from
having the value in half; where nothing does (the loss, the final softmax), it stays in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import Op, primitive
from mpjax.casting.classify import Setting, Verdict, classify, tracked

LIVE = 1  # something reads it
WANT_FLOAT = 2  # something reads it in float32
MAY_HALF = 4  # an operation of any dtype reads it, on the way to one that runs in half
WANT_HALF = 8  # an operation that runs in half reads it, as it is or moved about
RETURNED = 16  # the function returns it as it is
HALVES = MAY_HALF | WANT_HALF

OUTPUT = LIVE | WANT_FLOAT | RETURNED


class Demand(NamedTuple):
    """What a program's readers ask of its values, and the verdict on each of its equations."""

    flags: dict[Any, int]
    verdicts: tuple[Verdict, ...]
    inputs: tuple[int, ...]


_cache: weakref.WeakKeyDictionary[Any, dict[Any, Demand]] = weakref.WeakKeyDictionary()


def demand(jaxpr: Any, wanted: tuple[int, ...], setting: Setting) -> Demand:
    """What is asked of each value of a jaxpr, given what is asked of its outputs."""
    known = _cache.setdefault(jaxpr, {})
    key = (wanted, setting)
    if key not in known:
        known[key] = _demand(jaxpr, wanted, setting)
    return known[key]


def _demand(jaxpr: Any, wanted: tuple[int, ...], setting: Setting) -> Demand:
    flags: dict[Any, int] = {}

    def ask(v: Any, what: int) -> None:
        if not isinstance(v, compat.Literal):
            flags[v] = flags.get(v, 0) | what

    for v, what in zip(jaxpr.outvars, wanted, strict=True):
        ask(v, what)
    verdicts = []
    for eqn in reversed(jaxpr.eqns):
        verdict = classify(eqn, setting)
        verdicts.append(verdict)
        outs = [flags.get(v, 0) for v in eqn.outvars]
        if not any(outs) and not eqn.effects:
            continue  # dead
        if verdict.op is Op.ENTER:
            for v, what in zip(eqn.invars, inputs_of(eqn, outs, setting.inside(eqn, verdict.region)), strict=True):
                ask(v, what)
        else:
            what = _operand(verdict, outs)
            if verdict.op is Op.INFER and primitive(eqn.primitive.name).join:
                what = LIVE | outs[0]
            if verdict.op is Op.INFER and _unary(eqn):
                # A norm's output that an activation takes to a matmul is half before the activation.
                what |= outs[0] & WANT_HALF
            for v in eqn.invars:
                ask(v, what if tracked(v) else LIVE)
    return Demand(flags, tuple(reversed(verdicts)), tuple(flags.get(v, 0) for v in jaxpr.invars))


def _unary(eqn: Any) -> bool:
    """Whether an equation follows one float value: relu, but not the difference from a mean."""
    return len({v for v in eqn.invars if not isinstance(v, compat.Literal) and tracked(v)}) == 1


def _operand(verdict: Verdict, outs: Sequence[int]) -> int:
    """What an ordinary equation asks of its operands."""
    out = 0
    for what in outs:
        out |= what
    if verdict.op is Op.ALLOW:
        return LIVE | WANT_HALF
    if verdict.op is Op.MOVE:
        return LIVE | out
    if verdict.op is Op.INFER:
        return LIVE | (MAY_HALF if out & HALVES else WANT_FLOAT)
    if verdict.op is Op.WIDE:
        return LIVE | WANT_FLOAT | (MAY_HALF if out & HALVES else 0)
    return LIVE | WANT_FLOAT


def inputs_of(eqn: Any, outs: Sequence[int], setting: Setting) -> Sequence[int]:
    """What an equation with a program inside asks of its operands."""
    inputs = _INPUTS.get(eqn.primitive.name, _call)(eqn.params, tuple(outs), setting)
    if eqn.primitive.name in _CALLS and len(outs) == 1 and outs[0] & WANT_HALF and _unary(eqn):
        # An activation as a function, silu: the same, if nothing in it needs float32.
        inputs = [what | WANT_HALF if what & MAY_HALF and not what & WANT_FLOAT else what for what in inputs]
    # What the program inside does not read is handed to it all the same.
    return [LIVE | what if tracked(v) else LIVE for v, what in zip(eqn.invars, inputs, strict=True)]


def call_jaxpr(params: dict[str, Any]) -> Any:
    """The program inside a call-like equation."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in params:
            return params[name]
    raise KeyError(f"no jaxpr among {sorted(params)}")


def _call(params: dict[str, Any], outs: tuple[int, ...], setting: Setting) -> Sequence[int]:
    return demand(compat.open_jaxpr(call_jaxpr(params)).jaxpr, outs, setting).inputs


def _rule(params: dict[str, Any], outs: tuple[int, ...], setting: Setting) -> Sequence[int]:
    # A custom rule's cotangents have the dtypes of its operands, so they are read as activations:
    # whatever the forward program reads, the rule may read another way.
    return _call(params, tuple(what & ~RETURNED for what in outs), setting)


def _cond(params: dict[str, Any], outs: tuple[int, ...], setting: Setting) -> Sequence[int]:
    branches = [demand(compat.open_jaxpr(b).jaxpr, outs, setting).inputs for b in params["branches"]]
    merged = [0] * len(branches[0])
    for inputs in branches:
        merged = [a | b for a, b in zip(merged, inputs, strict=True)]
    return [LIVE, *merged]


def scan_demand(params: dict[str, Any], outs: tuple[int, ...], setting: Setting) -> tuple[tuple[int, ...], Demand]:
    """What is asked of a scan's body outputs, at the fixed point of its carry, and the body's demand."""
    num_consts, num_carry = compat.scan_split(params)
    body = compat.open_jaxpr(params["jaxpr"]).jaxpr
    return _carry_fixpoint(body, outs, num_consts, num_carry, setting)


def while_demand(params: dict[str, Any], outs: tuple[int, ...], setting: Setting) -> tuple[tuple[int, ...], Demand]:
    """The same for the body of a `while`; its condition reads the carry in float32."""
    condition = _condition(params, setting)
    carry = condition.inputs[params["cond_nconsts"] :]
    outs = tuple(out | read for out, read in zip(outs, carry, strict=True))
    body = compat.open_jaxpr(params["body_jaxpr"]).jaxpr
    return _carry_fixpoint(body, outs, params["body_nconsts"], len(outs), setting)


def _condition(params: dict[str, Any], setting: Setting) -> Demand:
    return demand(compat.open_jaxpr(params["cond_jaxpr"]).jaxpr, (OUTPUT,), setting)


def _carry_fixpoint(
    body: Any, outs: tuple[int, ...], num_consts: int, num_carry: int, setting: Setting
) -> tuple[tuple[int, ...], Demand]:
    wanted = outs
    while True:
        found = demand(body, wanted, setting)
        carry = found.inputs[num_consts : num_consts + num_carry]
        wider = tuple(a | b for a, b in zip(wanted, carry, strict=False)) + wanted[num_carry:]
        if wider == wanted:
            return wanted, found
        wanted = wider  # flags only grow, so this ends


def _scan(params: dict[str, Any], outs: tuple[int, ...], setting: Setting) -> Sequence[int]:
    wanted, found = scan_demand(params, outs, setting)
    num_consts, num_carry = compat.scan_split(params)
    inputs = list(found.inputs)
    for i in range(num_carry):
        inputs[num_consts + i] |= wanted[i] & ~RETURNED
    return inputs


def _while(params: dict[str, Any], outs: tuple[int, ...], setting: Setting) -> Sequence[int]:
    wanted, found = while_demand(params, outs, setting)
    consts = _condition(params, setting).inputs[: params["cond_nconsts"]]
    body = found.inputs[: params["body_nconsts"]]
    return [*consts, *body, *(what & ~RETURNED for what in wanted)]


_CALLS = frozenset({"jit", "pjit", "custom_jvp_call"})
_INPUTS = {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": _rule,
    "custom_vjp_call": _rule,
}
