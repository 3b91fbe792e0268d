"""Assigns each equation to a list under the rules, with the reason."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from mpjax.casting.formats import Float8Setting
from mpjax.casting.rules import Entry, Rules
from mpjax.casting.tolerance import ends_at_tolerance
from mpjax.program import compat
from mpjax.program.graph import NOBODY, Owners, paths_of
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import MARK, join, module_of, scopes

FLOAT32 = np.dtype(np.float32)

# Small whole powers are products of the input with itself and need no more range than `mul`.
_HARMLESS_POWERS = frozenset({2, 3})


class Region(enum.StrEnum):
    """The regions that the decorators, `autocast_disabled` and autocast functions inside mark."""

    NONE = ""
    HALF = "half"
    HALF_AS_WRITTEN = "half_as_written"
    FLOAT = "float"
    PROMOTE = "promote"
    TOLERANCE = "tolerance"  # not marked: the default for a loop that ends when a tolerance is met
    OFF = "off"
    PLANNED = "planned"


# The regions that run as traced, and why.
AS_TRACED = {Region.OFF: "autocast is disabled here", Region.PLANNED: "an autocast function inside planned it"}

# The regions that run in half, and why.
IN_HALF = {
    Region.HALF: "half_function",
    Region.HALF_AS_WRITTEN: "half_function, traced with float32 arguments",
}

# The regions that run in float32, and why.
IN_FLOAT32 = {Region.FLOAT: "float_function", Region.TOLERANCE: "its loop ends when its matmuls meet a tolerance"}


# How the reasons of float32 that the user may not know of begin.
BY_PRECISION, OPAQUE = "the program requests", "opaque:"


@dataclasses.dataclass(frozen=True)
class Setting:
    """Everything that a plan depends on besides the program. Hashable, because it is part of the plan's key.

    Args:
        half: The half dtype.
        rules: The lists.
        higher_order: The rules of the higher-order primitives, by name.
        region: The user's region that contains the program.
        recompute: Whether to form rematerialisation regions.
        folded: Whether the whole program is cheap, so that it may be part of an outer rematerialisation region.
        looped: Whether the program is in the body of a scan.
        invariants: The number of leading inputs that are the same in all iterations of a loop with this body.
        in_rule: Whether the program is a derivative rule. Rules nested in it are planned only when differentiated,
            because a rule may call its own function (relu's does).
        plans_rules: Whether derivative rules are planned with the program, for its report and for the user's rules that
            match inside; otherwise when JAX differentiates the program, if they can wait.
        path: The module path. Set only if a rule reads it, so that plans are otherwise shared between paths.
        owners: The module paths of equations whose scopes don't name an instance.
        float8: The options of float8 matmuls; None if there are none.
    """

    half: np.dtype
    rules: Rules
    higher_order: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)
    region: Region = Region.NONE
    recompute: bool = False
    folded: bool = False
    looped: bool = False
    invariants: int = 0
    in_rule: bool = False
    plans_rules: bool = False
    path: str = ""
    owners: Owners = NOBODY
    float8: Float8Setting | None = None

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        flags = (self.recompute, self.folded, self.looped, self.invariants, self.in_rule)
        return hash((self.half, self.rules, self.region, flags, self.path, self.owners))

    @property
    def reads_scopes(self) -> bool:
        """Whether a rule matches module paths."""
        return self.rules.reads_scopes or bool(self.float8 and self.float8.entries)

    @functools.cached_property
    def plain(self) -> bool:
        """Whether only the default lists apply."""
        return not self.rules.entries and self.rules.level == "default" and not self.region

    def inside(self, eqn: Any, region: Region, invariants: int = 0) -> Setting:
        """The setting of the sub-jaxprs of an equation; a loop gives the number of its invariant operands."""
        path = join(self.path, module_of(eqn)) if self.reads_scopes else ""
        owners = self.owners.inside(eqn)
        row = self.higher_order[eqn.primitive.name]
        recompute = self.recompute and row.regions_inside
        looped = self.looped or row.is_scan
        now = (self.region, self.path, self.owners, self.recompute, self.looped, self.invariants)
        if (region, path, owners, recompute, looped, invariants) == now:
            return self
        return dataclasses.replace(
            self, region=region, path=path, owners=owners, recompute=recompute, looped=looped, invariants=invariants
        )


class Listing(NamedTuple):
    """The list of an equation, the reason, its region, and the user's rule that matched, if any."""

    op: Op
    why: str
    region: Region = Region.NONE
    entry: Entry | None = None


def tracked(v: Any) -> bool:
    """Whether autocast may choose this value's dtype: a float32 array. float64 is left as the user set it."""
    aval = v.aval
    return compat.is_shaped(aval) and aval.dtype == FLOAT32


@functools.lru_cache(maxsize=4096)
def _region(scopes: str) -> Region:
    marks = [part for part in scopes.replace("(", "/").replace(")", "/").split("/") if part.startswith(MARK)]
    return Region(marks[-1][len(MARK) :]) if marks else Region.NONE


def classify(eqn: Any, setting: Setting) -> Listing:
    """The listing of one equation: by region, then by the user's rules, then by the default lists."""
    path = scopes(eqn)
    if setting.plain and MARK not in path:
        return default_listing(eqn)
    region = (_region(path) if MARK in path else Region.NONE) or setting.region
    listing = default_listing(eqn)
    if region in AS_TRACED:
        # Higher-order primitives are entered: their derivative rules may close over outer values.
        return Listing(Op.ENTER if listing.op is Op.ENTER else Op.OPAQUE, AS_TRACED[region], region)
    if listing.op is Op.OPAQUE or listing.op is Op.CONVERT:
        return listing._replace(region=region)
    if region and region != Region.TOLERANCE:
        return _in_region(listing, region, eqn.primitive.name)
    matched = setting.rules.match(eqn, paths_of(eqn, join(setting.path, module_of(eqn)), setting.owners))
    if matched is not None:
        return _by_rule(listing, *matched)
    if region:
        return _in_region(listing, region, eqn.primitive.name)
    return _at_level(listing, setting.rules.level, eqn.primitive.name)


def default_listing(eqn: Any) -> Listing:
    """The listing of an equation under the default lists."""
    name = eqn.primitive.name
    op = primitive(name).op
    if op is Op.OPAQUE:
        return Listing(Op.OPAQUE, f"{name} runs as traced")
    special = _SPECIAL.get(name)
    return (special and special(eqn)) or _LISTINGS[op]


_LISTINGS = {op: Listing(op, op.value) for op in Op}


def _integer_pow(eqn: Any) -> Listing | None:
    return _LISTINGS[Op.INFER] if eqn.params["y"] in _HARMLESS_POWERS else None


def _div(eqn: Any) -> Listing | None:
    # Division by a constant is a multiplication. Division by a variable has the square of the reciprocal
    # in its derivative, which easily leaves float16's range, so it runs in float32 like a sum.
    return _LISTINGS[Op.INFER] if isinstance(eqn.invars[1], compat.Literal) else None


def _gather(eqn: Any) -> Listing | None:
    return _LISTINGS[Op.MOVE] if eqn.params.get("unique_indices") else None


def _broadcast(eqn: Any) -> Listing | None:
    same_size = getattr(eqn.invars[0].aval, "size", None) == eqn.outvars[0].aval.size
    return _LISTINGS[Op.MOVE] if same_size else None


def _matmul(eqn: Any) -> Listing | None:
    precision = eqn.params.get("precision")
    # JAX's global precision setting is not the author's choice for this matmul.
    if precision is None or precision == compat.default_matmul_precision():
        return None
    if compat.is_algorithm(precision):
        return Listing(Op.DENY, f"{BY_PRECISION} algorithm {precision}")
    if lax.Precision.HIGHEST in (precision if isinstance(precision, tuple) else (precision,)):
        return Listing(Op.DENY, f"{BY_PRECISION} precision HIGHEST")
    return None


def _scatter(eqn: Any) -> Listing | None:
    function = eqn.params["update_jaxpr"]  # of `x.at[i].apply(function)`
    return None if function is None else Listing(Op.OPAQUE, "the function that it applies was traced for float32")


def _jit(eqn: Any) -> Listing | None:
    return Listing(Op.OPAQUE, "a jit with layouts") if compat.jit_options(eqn.params) is None else None


def is_inner_product(eqn: Any) -> bool:
    """Whether a matmul only computes inner products, which Tensor Cores don't speed up."""
    if eqn.primitive.name != "dot_general":
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    ranks = (len(v.aval.shape) for v in eqn.invars)
    return all(len(c) + len(b) == rank for c, b, rank in zip(contracted, batch, ranks, strict=True))


def _rounds(eqn: Any) -> bool:
    allowed = primitive(eqn.primitive.name).op is Op.ALLOW and not _matmul(eqn) and not is_inner_product(eqn)
    return allowed and any(map(tracked, eqn.invars))


def _while(eqn: Any) -> Listing | None:
    return UNTIL_TOLERANCE if ends_at_tolerance(eqn, _rounds) else None


UNTIL_TOLERANCE = Listing(Op.ENTER, IN_FLOAT32[Region.TOLERANCE], Region.TOLERANCE)

_SPECIAL = {
    "integer_pow": _integer_pow,
    "div": _div,
    "gather": _gather,
    "scatter": _scatter,
    "broadcast_in_dim": _broadcast,
    "dot_general": _matmul,
    "conv_general_dilated": _matmul,
    "jit": _jit,
    "pjit": _jit,
    "while": _while,
}


def _in_region(listing: Listing, region: Region, name: str) -> Listing:
    if listing.op is Op.ENTER:
        return listing._replace(region=region)
    if region == Region.PROMOTE:
        widest = Op.INFER if listing.op in (Op.ALLOW, Op.DENY, Op.WIDE) else listing.op
        return Listing(widest, "promote_function: the widest dtype of its inputs", region)
    op: Op
    if region in IN_FLOAT32:
        op = Op.DENY if listing.op in (Op.ALLOW, Op.INFER, Op.WIDE) else listing.op
        return Listing(op, IN_FLOAT32[region], region)
    movable = listing.op in (Op.DENY, Op.INFER, Op.WIDE) and not primitive(name).float32_only
    return Listing(Op.ALLOW if movable else listing.op, IN_HALF[region], region)


def _by_rule(listing: Listing, entry: Entry, op: Op) -> Listing:
    shown = entry if isinstance(entry, str) else getattr(entry, "__name__", "a predicate")
    why = f"rule {op.value}={shown!r}"
    if listing.op is Op.ENTER:
        region = {Op.ALLOW: Region.HALF, Op.DENY: Region.FLOAT}.get(op, Region.NONE)
        return Listing(Op.ENTER, why, region, entry)
    if listing.op is Op.READ:
        return Listing(Op.READ, why, Region.NONE, entry)
    return Listing(op, why, Region.NONE, entry)


def _at_level(listing: Listing, level: str, name: str) -> Listing:
    if level == "conservative" and listing.op in (Op.INFER, Op.WIDE):
        return Listing(Op.DENY, "level 'conservative'")
    if level == "half" and listing.op in (Op.DENY, Op.INFER, Op.WIDE) and not primitive(name).float32_only:
        return Listing(Op.ALLOW, "level 'half'")
    return listing._replace(region=Region.NONE) if level == "half" else listing
