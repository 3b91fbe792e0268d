"""Assigns each equation to a list under the rules, with the reason."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from jax import lax

from mpjax.casting.rules import Entry
from mpjax.casting.setting import AS_TRACED, IN_FLOAT32, IN_HALF, Region, Setting, tracked
from mpjax.casting.tolerance import ends_at_tolerance
from mpjax.program import compat
from mpjax.program.graph import paths_of
from mpjax.program.primitives import Op, is_product, primitive
from mpjax.program.source import MARK, NO_REGIONS, join, module_of, scopes

# By name: the list of these equations depends on their parameters.

# Small whole powers are products of the input with itself and need no more range than `mul`.
_HARMLESS_POWERS = frozenset({2, 3})

# How the reasons of float32 that the user may not know of begin.
BY_PRECISION, OPAQUE, EXACT = "the program requests", "opaque:", "exact:"


class Listing(NamedTuple):
    """The list of an equation, the reason, its region, and the user's rule that matched, if any."""

    op: Op
    why: str
    region: Region = Region.NONE
    entry: Entry | None = None


@functools.lru_cache(maxsize=4096)
def _region(scopes: str) -> Region:
    parts = scopes.replace("(", "/").replace(")", "/").split("/")
    marks = [part for part in parts if part.startswith(MARK) and part not in NO_REGIONS]
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


_PRODUCT = Listing(Op.INFER, "a product, which sums nothing")


def _gather(eqn: Any) -> Listing | None:
    return _LISTINGS[Op.MOVE] if eqn.params.get("unique_indices") else None


def _broadcast(eqn: Any) -> Listing | None:
    same_size = getattr(eqn.invars[0].aval, "size", None) == eqn.outvars[0].aval.size
    return _LISTINGS[Op.MOVE] if same_size else None


def _matmul(eqn: Any) -> Listing | None:
    if is_product(eqn):
        return _PRODUCT
    precision = eqn.params.get("precision")
    # JAX's global precision setting is not the author's choice for this matmul.
    if precision is None or precision == compat.default_matmul_precision():
        return None
    if compat.is_algorithm(precision):
        return Listing(Op.DENY, f"{BY_PRECISION} algorithm {precision}")
    if lax.Precision.HIGHEST in (precision if isinstance(precision, tuple) else (precision,)):
        is_jaxs = compat.is_of_linear_algebra(eqn)
        why = f"{EXACT} a part of a decomposition, a solve or its derivative" if is_jaxs else ""
        return Listing(Op.DENY, why or f"{BY_PRECISION} precision HIGHEST")
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
