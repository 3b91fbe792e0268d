"""Puts attentions and losses of a program into forms that cost less, so that autocast plans them like any other."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from mpjax.casting.attention import prepare as attention
from mpjax.casting.attention.division import AVERAGE, divided_last
from mpjax.casting.attention.kernel import ATTENTION, is_sought
from mpjax.casting.cross_entropy.head import CROSS_ENTROPY
from mpjax.casting.cross_entropy.prepare import without_logits
from mpjax.casting.recompute import with_recomputed
from mpjax.casting.setting import Setting
from mpjax.program import derivative_rules

# The equations that stand for a product in these forms.
FORMS = (ATTENTION, CROSS_ENTROPY, AVERAGE)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A program with its attentions and losses in such forms.

    Args:
        jaxpr: The open jaxpr.
        refused: Those that stay as they are written: what each is, an equation of it, and the reason.
    """

    jaxpr: Any
    refused: tuple[tuple[str, Any, str], ...] = ()


# Of each jaxpr, the form in place of it, None if it stays, and what is refused. A value must not hold its own key.
_cache: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, Any]]] = weakref.WeakKeyDictionary()


def prepared(jaxpr: Any, setting: Setting) -> Prepared:
    """An open jaxpr with its attentions and losses in other forms, as the rules ask for."""
    known = _cache.setdefault(jaxpr, {})
    if setting not in known:
        found = _prepare(jaxpr, setting)
        changed = None if found.jaxpr is jaxpr else found.jaxpr
        known[setting] = changed, found.refused
        if changed is not None:
            derivative_rules.inherit(changed, jaxpr)
            _cache.setdefault(changed, {})[setting] = None, found.refused
    form, refused = known[setting]
    return Prepared(jaxpr if form is None else form, refused)


def _prepare(jaxpr: Any, setting: Setting) -> Prepared:
    refused: list[tuple[str, Any, str]] = []
    if is_sought(setting.rules.attention):
        jaxpr, unfused = attention.with_attentions(jaxpr, setting)
        refused += (("attention", *each) for each in unfused)
    if setting.rules.cross_entropy == "fused":
        jaxpr, written = without_logits(jaxpr, setting)
        refused += (("cross_entropy", *each) for each in written)
    return Prepared(with_recomputed(divided_last(jaxpr, setting), setting), tuple(refused))
