"""Loops that end when a tolerance is met: values that their matmuls compute decide how often they run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from mpjax.program.evaluator import evaluate
from mpjax.program.graph import SubJaxpr, sub_jaxprs
from mpjax.program.primitives import primitive

_known: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = weakref.WeakKeyDictionary()


def ends_at_tolerance(eqn: Any, rounds: Callable[[Any], bool]) -> bool:
    """Whether the condition of a `while` depends on the results of rounding equations, in its body or in itself.

    A choice ends the dependence: a loop that samples tokens until it samples the end of the text has no tolerance.

    Args:
        eqn: The `while`.
        rounds: Whether an equation would compute in half. It depends on nothing else.
    """
    condition, body = sub_jaxprs(eqn)
    known, key = _known.setdefault(body.opened, {}), condition.opened
    if key not in known:
        carry = _rounded(body, [False] * len(body.operands), rounds)
        known[key] = any(_rounded(condition, [*[False] * condition.consts, *carry], rounds))
    return known[key]


def _rounded(sub: SubJaxpr, ins: list[bool], rounds: Callable[[Any], bool]) -> list[bool]:
    """Whether each output of a sub-jaxpr depends on a rounding equation, given the same of its inputs."""

    def rule(eqn: Any, operands: list[bool]) -> list[bool]:
        count, inner = len(eqn.outvars), sub_jaxprs(eqn)
        if primitive(eqn.primitive.name).chooses:
            return [False] * count
        if not inner:
            return [rounds(eqn) or any(operands)] * count
        outs = [_rounded(sub, [i is not None and operands[i] for i in sub.operands], rounds) for sub in inner]
        passed = {i for sub in inner for i in sub.operands}
        # The condition of a loop and the index of a branch decide all results.
        decided = any(any(out) for out in outs if len(out) != count)
        decided = decided or any(x for i, x in enumerate(operands) if i not in passed)
        return [decided or any(out[i] for out in outs if len(out) == count) for i in range(count)]

    jaxpr, end = sub.opened, sub.consts + sub.carry
    while True:
        env = dict.fromkeys(jaxpr.constvars, False) | dict(zip(jaxpr.invars, ins, strict=True))
        outs = evaluate(jaxpr, env, rule, constant=lambda literal, eqn: False)
        before = ins[sub.consts : end]
        if len(outs) < len(before):  # the condition of a loop, which returns no carry
            return outs
        carry = [a or b for a, b in zip(before, outs, strict=False)]
        if carry == before:
            return outs
        ins = [*ins[: sub.consts], *carry, *ins[end:]]
