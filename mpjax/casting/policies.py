"""From a policy and rules to the setting of a plan."""

from __future__ import annotations

import dataclasses
import os

from mpjax.casting.higher_order import HIGHER_ORDER
from mpjax.casting.rules import VARIABLES, Entry, Rules, is_pattern
from mpjax.casting.scaled import Float8, ScaledSetting
from mpjax.casting.setting import Setting
from mpjax.policy import HALF_DTYPES, NORM_PATTERNS, Policy, get_policy
from mpjax.program import contexts
from mpjax.program.formats import format_of
from mpjax.program.primitives import Op


def is_enabled() -> bool:
    """Whether autocast is on: neither `MPJAX_AUTOCAST` nor `autocast_disabled` turns it off."""
    return not contexts.autocast_disabled.value and os.environ.get("MPJAX_AUTOCAST", "1").strip().lower() not in (
        "0",
        "false",
        "off",
    )


def setting_of(policy: Policy, rules: Rules | None) -> Setting | None:
    """The setting for a policy and rules; None if the policy computes in float32."""
    if policy.compute_dtype not in HALF_DTYPES:
        return None
    if rules is None:
        rules = Rules(level="half") if policy == get_policy("O3") else Rules()
    if policy.reduce_dtype == policy.compute_dtype:  # A sum across devices has the dtype of its operand.
        rules = dataclasses.replace(rules, weight_gradients="half")
    scaled = _scaled_setting(rules, policy)
    if contexts.trial.value is not None:
        rules = contexts.trial.value.changed(rules)
    rules = _with_overrides(rules, policy).with_environment()
    recompute, plans_rules = rules.residuals != "full", bool(rules.entries)
    return Setting(
        policy.compute_dtype, rules, HIGHER_ORDER, recompute=recompute, plans_rules=plans_rules, scaled=scaled
    )


def _scaled_setting(rules: Rules, policy: Policy) -> ScaledSetting | None:
    """The options and patterns of matmuls with scales; None if neither the policy nor an override has any."""
    own = format_of(policy.matmul_dtype)
    others = [(pattern, format_of(x.matmul_dtype)) for pattern, x in policy.overrides if pattern not in NORM_PATTERNS]
    first = next((format for format in (own, *(format for _, format in others)) if format is not None), None)
    if first is None:
        if rules.float8 is not None:
            raise ValueError(
                f"Rules(float8={rules.float8!r}): the policy {str(policy)!r} has no float8 matmuls; use "
                "'mixed_float8', or leave the option out."
            )
        return None
    options = rules.float8 or Float8()
    if options.axes and not first.shares_copies:
        raise ValueError(
            f"Rules(float8={options!r}): a scale of {first.name} belongs to one block, which no device shares; leave "
            "axis_name out."
        )
    entries = [*dict.fromkeys(options.allow, first).items(), *dict.fromkeys(options.deny).items(), *others]
    return ScaledSetting(options, own, tuple((_pattern(pattern), format) for pattern, format in entries))


def origin_of(entry: Entry, op: Op, policy: Policy, rules: Rules | None) -> str:
    """Who wrote an entry of a plan's rules: the user's `Rules`, an override of the policy, or the environment."""
    name = entry if isinstance(entry, str) else getattr(entry, "__name__", repr(entry))
    if rules is None or entry not in getattr(rules, op.value):
        for pattern, _ in policy.overrides:
            if _pattern(pattern) == entry:
                return f"the policy's override pattern {pattern!r}"
        if name in os.environ.get(VARIABLES[op.value], ""):
            return f"{VARIABLES[op.value]}: {name!r}"
    return f"Rules({op.value}=...): {name!r}"


def scaled_origin_of(entry: str, setting: ScaledSetting, policy: Policy) -> str:
    """The same of a pattern of the matmuls in a format with scales."""
    for name in ("allow", "deny"):
        if entry in map(_pattern, getattr(setting.options, name)):
            return f"Float8({name}=...): {entry!r}"
    return next(f"the policy's override pattern {p!r}" for p, _ in policy.overrides if _pattern(p) == entry)


def _pattern(pattern: str) -> str:
    """A pattern of a policy's override as one over module paths."""
    return pattern if is_pattern(pattern) else f"*/{pattern}"


def _with_overrides(rules: Rules, policy: Policy) -> Rules:
    """The rules plus a policy's overrides by path.

    Level O2's are skipped: the lists already cover them. An override that differs in its matmul dtype alone changes
    no list.
    """
    added: dict[str, list[str]] = {"allow": [], "deny": []}
    for pattern, other in policy.overrides:
        if pattern not in NORM_PATTERNS and not any(entry == pattern for entry, _ in rules.entries):
            if other.compute_dtype == policy.compute_dtype and {policy.matmul_dtype, other.matmul_dtype} != {None}:
                continue
            added["allow" if other.compute_dtype in HALF_DTYPES else "deny"].append(_pattern(pattern))
    return rules.add(**added) if any(added.values()) else rules
