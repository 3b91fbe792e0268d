"""The plan of a program: the dtype of each value, and why.

A plan depends only on the jaxpr and the setting (no Python ids, no dict order), so the same program gives the same
rewritten jaxpr and compilation caches hit. Plans of sub-jaxprs are cached by jaxpr: a layer that is called many times
is planned once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from mpjax.casting.attention.prepare import remember
from mpjax.casting.inference import Inference
from mpjax.casting.inference_rules import BY_LIST
from mpjax.casting.lattice import FULL, HALF, PARAMETER, Inferred
from mpjax.casting.plan import MatmulCounts, Plan
from mpjax.casting.prepare import prepared
from mpjax.casting.setting import Setting, tracked
from mpjax.casting.uses import RESULT, Use
from mpjax.program import compat

_cache: weakref.WeakKeyDictionary[Any, dict[Any, Plan]] = weakref.WeakKeyDictionary()


def plan_jaxpr(jaxpr: Any, ins: tuple[Inferred | None, ...], wanted: tuple[Use, ...], setting: Setting) -> Plan:
    """The plan of a jaxpr.

    Args:
        jaxpr: An open or closed jaxpr.
        ins: The inferred dtypes of its inputs.
        wanted: The uses of its outputs.
        setting: Half dtype, rules, region.
    """
    jaxpr, consts = compat.open_jaxpr(jaxpr)
    if consts:
        remember(jaxpr, consts)
    known = _cache.setdefault(jaxpr, {})
    key = (ins, wanted, setting)
    if key not in known:
        program = prepared(jaxpr, setting)
        known[key] = Inference(program.jaxpr, ins, wanted, setting, BY_LIST).plan()
        known[key].unfused = program.refused
        known[key].counts += MatmulCounts(unfused=frozenset((kind, why) for kind, _, why in program.refused))
    return known[key]


def plan_function(jaxpr: Any, setting: Setting, arrays: Sequence[Any] = ()) -> Plan:
    """The plan of a jaxpr whose inputs are castable, and whose outputs are returned in float32.

    Args:
        jaxpr: The jaxpr.
        setting: Half dtype, rules, region.
        arrays: Its inputs, if some of those that it was traced for as float32 are half.
    """
    opened = compat.open_jaxpr(jaxpr).jaxpr
    dtypes = [x.dtype for x in arrays] or [v.aval.dtype for v in opened.invars]
    storages = (HALF if dtype == setting.half else FULL for dtype in dtypes)
    given = zip(opened.invars, storages, strict=True)
    ins = tuple(Inferred(PARAMETER.level, storage) if tracked(v) else None for v, storage in given)
    wanted = tuple(RESULT if tracked(v) else Use.READ for v in opened.outvars)
    return plan_jaxpr(opened, ins, wanted, setting)
