"""The rules of the higher-order primitives: backward analysis, forward inference and issuing, one file per family."""

from collections.abc import Mapping

from mpjax.casting.higher_order.branches import COND
from mpjax.casting.higher_order.calls import CALLS
from mpjax.casting.higher_order.custom_derivatives import CUSTOM_JVP, CUSTOM_VJP
from mpjax.casting.higher_order.loops import SCAN, WHILE
from mpjax.casting.higher_order.sub_jaxpr import HigherOrder

# By name: each has rules of its own; a test holds them against the table.

HIGHER_ORDER: Mapping[str, HigherOrder] = {
    **CALLS,
    "cond": COND,
    "scan": SCAN,
    "while": WHILE,
    "custom_jvp_call": CUSTOM_JVP,
    "custom_vjp_call": CUSTOM_VJP,
}
