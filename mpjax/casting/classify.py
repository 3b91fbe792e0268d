"""What each equation is under the rules: the list it is in, and by whose word."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import Op, primitive
from mpjax._jaxpr.source import MARK, join, scopes
from mpjax.casting.rules import Entry, Rules

FLOAT32 = np.dtype(np.float32)

# Small whole powers are products of the input with itself and no wider than `mul`.
_HARMLESS_POWERS = frozenset({2, 3})

# The regions that the decorators and `autocast_disabled` mark.
HALF_REGION, FLOAT_REGION, PROMOTE_REGION, OFF_REGION = "half", "float", "promote", "off"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a plan depends on besides the program: hashable, for it is part of the plan's key."""

    half: np.dtype
    rules: Rules
    region: str = ""
    recompute: bool = False  # form islands
    folded: bool = False  # no island of its own: the program is cheap, and may be a part of one around it
    looped: bool = False  # in the body of a scan
    path: str = ""  # kept up only if a rule reads it: plans are shared between paths otherwise

    @functools.cached_property
    def plain(self) -> bool:
        """Whether only the default lists speak."""
        return not self.rules.entries and self.rules.level == "default" and not self.region

    def inside(self, eqn: Any, region: str) -> Setting:
        """The setting of the program inside an equation."""
        path = join(self.path, scopes(eqn)) if self.rules.reads_scopes else ""
        # In a remat everything is computed again already; a custom rule stores what its author says.
        recompute = self.recompute and eqn.primitive.name not in _NO_ISLANDS
        looped = self.looped or eqn.primitive.name == "scan"
        if (region, path, recompute, looped) == (self.region, self.path, self.recompute, self.looped):
            return self
        return dataclasses.replace(self, region=region, path=path, recompute=recompute, looped=looped)


_NO_ISLANDS = frozenset({"remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "while"})


class Verdict(NamedTuple):
    """The list that an equation is in, why, the region it stands in, and the user's rule if one decided."""

    op: Op
    why: str
    region: str = ""
    entry: Entry | None = None


def tracked(v: Any) -> bool:
    """Whether autocast may choose this value's dtype: a float32 array. float64 is left as the user set it."""
    return compat.is_shaped(v.aval) and v.aval.dtype == FLOAT32


@functools.lru_cache(maxsize=4096)
def _region(scopes: str) -> str:
    marks = [part for part in scopes.replace("(", "/").replace(")", "/").split("/") if part.startswith(MARK)]
    return marks[-1][len(MARK) :] if marks else ""


def classify(eqn: Any, setting: Setting) -> Verdict:
    """The verdict on one equation: region, then the user's rules, then the default lists."""
    path = scopes(eqn)
    if setting.plain and MARK not in path:
        return _default(eqn)
    region = (_region(path) if MARK in path else "") or setting.region
    if region == OFF_REGION:
        return Verdict(Op.OPAQUE, "autocast is disabled here", region)
    verdict = _default(eqn)
    if verdict.op is Op.OPAQUE or verdict.op is Op.CONVERT:
        return verdict._replace(region=region)
    if region:
        return _in_region(verdict, region, eqn.primitive.name)
    matched = setting.rules.match(eqn, join(setting.path, path))
    if matched is not None:
        return _by_rule(verdict, *matched)
    return _at_level(verdict, setting.rules.level, eqn.primitive.name)


def _default(eqn: Any) -> Verdict:
    name = eqn.primitive.name
    op = primitive(name).op
    if op is Op.OPAQUE:
        return Verdict(Op.OPAQUE, f"{name} is not known")
    special = _SPECIAL.get(name)
    return (special and special(eqn)) or _VERDICTS[op]


_VERDICTS = {op: Verdict(op, op.value) for op in Op}


def _integer_pow(eqn: Any) -> Verdict | None:
    return _VERDICTS[Op.INFER] if eqn.params["y"] in _HARMLESS_POWERS else None


def _div(eqn: Any) -> Verdict | None:
    # By a constant it is a multiplication. By a variable, the derivative has the square of its
    # reciprocal, which leaves float16's range soon: float32, like an operation with a sum.
    return _VERDICTS[Op.INFER] if isinstance(eqn.invars[1], compat.Literal) else None


def _gather(eqn: Any) -> Verdict | None:
    return _VERDICTS[Op.MOVE] if eqn.params.get("unique_indices") else None


def _broadcast(eqn: Any) -> Verdict | None:
    same_size = getattr(eqn.invars[0].aval, "size", None) == eqn.outvars[0].aval.size
    return _VERDICTS[Op.MOVE] if same_size else None


def _matmul(eqn: Any) -> Verdict | None:
    precision = eqn.params.get("precision")
    if type(precision).__name__.startswith("DotAlgorithm"):
        return Verdict(Op.OPAQUE, f"the user fixed the algorithm {precision}")
    return None


def _cond(eqn: Any) -> Verdict | None:
    if eqn.params.get("branches_platforms"):
        return Verdict(Op.OPAQUE, "lax.platform_dependent can't be re-issued")
    return None


def _jit(eqn: Any) -> Verdict | None:
    return Verdict(Op.OPAQUE, "a jit with layouts") if compat.jit_options(eqn.params) is None else None


_SPECIAL = {
    "integer_pow": _integer_pow,
    "div": _div,
    "gather": _gather,
    "broadcast_in_dim": _broadcast,
    "dot_general": _matmul,
    "cond": _cond,
    "jit": _jit,
    "pjit": _jit,
}


def _in_region(verdict: Verdict, region: str, name: str) -> Verdict:
    if verdict.op is Op.ENTER:
        return verdict._replace(region=region)
    if region == PROMOTE_REGION:
        widest = Op.INFER if verdict.op in (Op.ALLOW, Op.DENY, Op.WIDE) else verdict.op
        return Verdict(widest, "promote_function: the widest of its inputs", region)
    op: Op
    if region == FLOAT_REGION:
        op = Op.DENY if verdict.op in (Op.ALLOW, Op.INFER, Op.WIDE) else verdict.op
        return Verdict(op, "float_function", region)
    movable = verdict.op in (Op.DENY, Op.INFER, Op.WIDE) and not primitive(name).float32_only
    return Verdict(Op.ALLOW if movable else verdict.op, "half_function", region)


def _by_rule(verdict: Verdict, entry: Entry, op: Op) -> Verdict:
    shown = entry if isinstance(entry, str) else getattr(entry, "__name__", "a predicate")
    why = f"rule {op.value}={shown!r}"
    if verdict.op is Op.ENTER:
        region = {Op.ALLOW: HALF_REGION, Op.DENY: FLOAT_REGION}.get(op, "")
        return Verdict(Op.ENTER, why, region, entry)
    if verdict.op is Op.READ:
        return Verdict(Op.READ, why, "", entry)
    return Verdict(op, why, "", entry)


def _at_level(verdict: Verdict, level: str, name: str) -> Verdict:
    if level == "conservative" and verdict.op in (Op.INFER, Op.WIDE):
        return Verdict(Op.DENY, "level 'conservative'")
    if level == "half" and verdict.op in (Op.DENY, Op.INFER, Op.WIDE) and not primitive(name).float32_only:
        return Verdict(Op.ALLOW, "level 'half'")
    return verdict
