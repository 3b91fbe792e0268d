"""Puts each attention of a program into one equation, so that autocast plans it like any other.

Calls (`jit`) that hold only a part of an attention are inlined first. Those that hold all of it stay: it
is found when their own program is planned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mpjax.casting.attention.find import attentions
from mpjax.casting.attention.flat import Inlined
from mpjax.casting.attention.kernel import ATTENTION, Options, options_of, platform
from mpjax.casting.attention.parts import Attention
from mpjax.casting.classify import classify
from mpjax.casting.setting import Setting
from mpjax.kernels.attention_kernels import kernel_of
from mpjax.program import compat
from mpjax.program.dataflow import variables
from mpjax.program.derivative_rules import may_close_over_tracers
from mpjax.program.graph import SubJaxpr, sub_jaxprs
from mpjax.program.primitives import Op
from mpjax.program.source import reason

# By name: the calls that may be inlined are those without a meaning of their own.


Refused = tuple[tuple[Any, str], ...]
# Not `custom_jvp`: a derivative rule of the program stays.
_CALLS = ("jit", "pjit", "closed_call", "call", "eval_jaxpr")


_consts: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def remember(jaxpr: Any, consts: Sequence[Any]) -> None:
    """Notes the constants of an open jaxpr, which may hold the masks of its attentions."""
    pairs = zip(jaxpr.constvars, consts, strict=True)
    _consts[jaxpr] = {v: x for v, x in pairs if not isinstance(x, jax.core.Tracer)}


def constants(jaxpr: Any) -> dict[Any, Any]:
    """The known constants of an open jaxpr, by variable."""
    return _consts.get(jaxpr, {})


def _issued(attention: Attention, flow: Inlined, setting: Setting) -> tuple[list[Any], Options] | str:
    """The operands and options of an attention, or why it is not fused: by its form, by the rules, or by the kernel."""
    if attention.why_not:
        return attention.why_not
    of_constants = not compat.is_explicit(attention.scores.invars[0].aval)
    if of_constants and compat.is_explicit(attention.values.outvars[0].aval):
        return "its queries are constants, which are not on the explicit mesh of its results"
    listings = [classify(eqn, setting) for eqn in (attention.scores, attention.values)]
    why = next((each.why for each in listings if each.op is not Op.ALLOW), "")
    try:
        issued = why or options_of(attention, flow, setting)
    except Exception as error:  # A program that this code did not foresee still runs as it is written.
        return f"its form was not understood: {reason(error)}"
    rounds = not isinstance(issued, str) and kernel_of(issued[1].form, platform()) == "cudnn"
    return _WIDE_BIAS if rounds and _has_wide_bias(attention, flow, setting) else issued


_WIDE_BIAS = "its bias is a float32 result of what its queries or keys are computed from, and cuDNN takes it in half"


def _has_wide_bias(attention: Attention, flow: Inlined, setting: Setting) -> bool:
    """Whether a bias is computed in float32, after its last matmul, from what the queries or keys are computed from.

    Such a bias may be larger than the scores (minus the squared norm of the keys), and the gradient of the keys then
    has twice the error. A mask is exact in half, and parameters are cast to half where attention is not fused, too.
    """
    biases = [bias.v for bias in attention.biases if not flow.is_constant(bias.v)]
    shared = {v for v in flow.reached([v for v, _ in attention.parts[:2]]) if not flow.is_constant(v)}
    waiting, known = biases, set(biases)
    while waiting:
        eqn = flow.maker(waiting.pop())
        op = None if eqn is None else classify(eqn, setting).op
        if op is None or op is Op.ALLOW:
            continue
        if op is Op.DENY and not shared.isdisjoint(flow.reached(eqn.invars)):
            return True
        new = [v for v in variables(eqn.invars) if compat.is_inexact(v.aval) and v not in known]
        waiting += new
        known.update(new)
    return False


def with_attentions(original: Any, setting: Setting) -> tuple[Any, Refused]:
    """An open jaxpr with its attentions as single equations, and those that are not fused.

    Each of these is the equation of its values, with the reason.
    """
    jaxpr = _with_masks_inside(original)
    return _with_attentions(jaxpr, setting, _consts.get(original, {})) if _may_contain(jaxpr) else (jaxpr, ())


def _with_attentions(jaxpr: Any, setting: Setting, consts: Mapping[Any, Any]) -> tuple[Any, Refused]:
    flat, origins = inlined(jaxpr, lambda eqn: not contains_all(eqn))
    flow = Inlined(flat, consts)
    here = [each for each in attentions(flow) if _is_here(each, origins)]
    if not here:
        return jaxpr, ()
    refused, needed = [], set()
    for each in here:
        issued = _issued(each, flow, setting)
        if isinstance(issued, str):
            refused.append((each.values, issued))
        else:
            needed |= {
                id(origins[key]) for key in (*map(id, (*each.inside, each.values)), *flow.visited) if key in origins
            }
    if not needed:
        return jaxpr, tuple(refused)
    flat, _ = inlined(jaxpr, lambda eqn: id(eqn) in needed, inside=True)
    flow, fused = Inlined(flat, consts), {}
    for each in attentions(flow):
        issued = _issued(each, flow, setting)
        if not isinstance(issued, str):
            fused[id(each.values)] = _equation(each.values, *issued)
    eqns = [fused.get(id(eqn), eqn) for eqn in flat.eqns]
    return flat.replace(eqns=eqns), tuple(refused)


# A mask is often made outside of the layers that read it.
_ENTERED = ("jit", "pjit", "closed_call", "call", "eval_jaxpr", "remat2", "checkpoint", "scan", "cond", "shard_map")


def _with_masks_inside(jaxpr: Any) -> Any:
    """An open jaxpr whose sub-jaxprs compute the constant masks that they take, if they may contain attention."""
    flow, eqns = None, []
    for eqn in jaxpr.eqns:
        inside = sub_jaxprs(eqn) if eqn.primitive.name in _ENTERED else ()
        if any(_may_contain(inner.opened, deep=True) and not _has_rules(inner.opened) for inner in inside):
            flow = flow or Inlined(jaxpr)
            for inner in inside:
                eqn = _mask_inside(eqn, inner, flow)
        eqns.append(eqn)
    changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr.replace(eqns=eqns) if changed else jaxpr


def _mask_inside(eqn: Any, inner: SubJaxpr, flow: Inlined) -> Any:
    """An equation whose sub-jaxpr computes the constants among its operands."""
    jaxpr, of_masks, names = inner.opened, [], {}
    for v, i in list(zip(jaxpr.invars, inner.operands, strict=True))[: inner.consts]:
        if i is None or not getattr(v.aval, "shape", ()) or not _means_the_same_inside(eqn, i, v):
            continue
        within: dict[Any, Any] = {}
        for maker in flow.makers(eqn.invars[i]) or ():
            ins = [within.get(x, x) if isinstance(x, compat.Var) else x for x in maker.invars]
            outs = [compat.new_variable(x) for x in maker.outvars]
            within.update(zip(maker.outvars, outs, strict=True))
            of_masks.append(maker.replace(invars=ins, outvars=outs))
        if within:
            names[v] = within[eqn.invars[i]]
    if not names:
        return eqn

    def read(v: Any) -> Any:
        return names.get(v, v) if isinstance(v, compat.Var) else v

    rest = [each.replace(invars=[read(v) for v in each.invars]) for each in jaxpr.eqns]
    new = jaxpr.replace(eqns=[*of_masks, *rest], outvars=[read(v) for v in jaxpr.outvars])
    return compat.with_sub_jaxpr(eqn, inner.jaxpr, new)


def _means_the_same_inside(eqn: Any, i: int, v: Any) -> bool:
    """Whether each device gets the whole of an operand, in whose type no explicit axes differ inside."""
    mesh = eqn.invars[i].aval.sharding.mesh
    if mesh._any_axis_explicit and mesh != v.aval.sharding.mesh:
        return False
    return eqn.primitive.name != "shard_map" or not compat.axes_of_spec(eqn.params["in_specs"][i])


def _equation(values: Any, operands: Sequence[Any], options: Options) -> Any:
    return values.replace(primitive=ATTENTION, invars=list(operands), params={"options": options})


def _may_contain(jaxpr: Any, deep: bool = False) -> bool:
    """Whether a jaxpr and its calls (if `deep`, all its sub-jaxprs) have an exponential and two matmuls."""
    names: list[str] = []

    def collect(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if deep or eqn.primitive.name in _CALLS:
                for inner in sub_jaxprs(eqn):
                    collect(inner.opened)
            if eqn.primitive.name in ("exp", "dot_general"):
                names.append(eqn.primitive.name)

    collect(jaxpr)
    return "exp" in names and names.count("dot_general") > 1


_whole: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def contains_all(eqn: Any) -> bool:
    """Whether a call contains an attention from queries to values."""
    for inner in sub_jaxprs(eqn):
        jaxpr = inner.opened
        if jaxpr not in _whole:
            flat = inlined(jaxpr, lambda eqn: True)[0] if _may_contain(jaxpr) else None
            _whole[jaxpr] = flat is not None and any(True for _ in attentions(Inlined(flat)))
        if _whole[jaxpr]:
            return True
    return False


def _is_here(attention: Attention, origins: dict[int, Any]) -> bool:
    """Whether an attention is not inside a single equation."""
    if attention.scores is attention.values:  # The search failed.
        return True
    return len({id(origins[id(eqn)]) for eqn in (attention.scores, attention.values)}) > 1


def inlined(jaxpr: Any, chosen: Callable[[Any], bool], inside: bool = False) -> tuple[Any, dict[int, Any]]:
    """An open jaxpr with the equations of some of its calls in place of the calls.

    Args:
        jaxpr: The jaxpr.
        chosen: Whether to inline a call of the jaxpr.
        inside: Whether to inline all calls inside a chosen call; otherwise those that are `chosen`.

    Returns:
        The jaxpr, and for the `id` of each of its equations the equation of the given jaxpr that it was in.
    """
    eqns: list[Any] = []
    origins: dict[int, Any] = {}
    stands_for: dict[Any, Any] = {}  # The variable that an inlined result stands for.

    def add(eqn: Any, names: dict[Any, Any], around: Any, origin: Any, chosen: Callable[[Any], bool]) -> None:
        def read(v: Any) -> Any:
            return v if isinstance(v, compat.Literal) else names.get(v, v)

        ins = [read(v) for v in eqn.invars]
        if (opened := _body(eqn)) is not None and chosen(eqn) and _is_plain(eqn, opened):
            inner = opened.jaxpr
            within = dict(zip(inner.invars, ins[len(ins) - len(inner.invars) :], strict=True))
            outer = eqn if around is None else compat.in_scopes_of(eqn, around)
            for each in inner.eqns:
                add(each, within, outer, origin or eqn, (lambda eqn: True) if inside else chosen)
            for v, out in zip(eqn.outvars, inner.outvars, strict=True):
                names[v] = out if isinstance(out, compat.Literal) else within.get(out, out)
            return
        if around is not None:
            renamed = [compat.new_variable(v) for v in eqn.outvars]
            names.update(zip(eqn.outvars, renamed, strict=True))
            eqn = compat.in_scopes_of(eqn, around).replace(invars=ins, outvars=renamed)
        elif any(a is not b for a, b in zip(ins, eqn.invars, strict=True)):
            new = eqn.replace(invars=ins)
            origin, eqn = eqn, new
        eqns.append(eqn)
        origins[id(eqn)] = origin or eqn

    for eqn in jaxpr.eqns:
        add(eqn, stands_for, None, None, chosen)
    outs = [v if isinstance(v, compat.Literal) else stands_for.get(v, v) for v in jaxpr.outvars]
    return (jaxpr.replace(eqns=eqns, outvars=outs) if eqns != list(jaxpr.eqns) else jaxpr), origins


def _body(eqn: Any) -> Any:
    """The open jaxpr that an equation runs: of a call, or of a switch in which Pallas alone differs (`jnp.diag`)."""
    platforms = eqn.params.get("branches_platforms")
    if platforms is not None and {name for names in platforms for name in names or ()} == {"mosaic"}:
        return compat.open_jaxpr(eqn.params["branches"][platforms.index(None)])
    return compat.open_jaxpr(compat.call_jaxpr(eqn.params)) if eqn.primitive.name in _CALLS else None


def _is_plain(eqn: Any, opened: Any) -> bool:
    """Whether a call may be inlined: no shardings, no donation, no constants, no rules that close over values."""
    params = eqn.params
    if opened.jaxpr.constvars or eqn.effects or any(params.get("donated_invars", ())):
        return False
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return all(map(compat.is_unspecified, shardings)) and not _has_rules(opened.jaxpr)


def _has_rules(jaxpr: Any) -> bool:
    """Whether an equation has a derivative rule that may close over a value of the program."""
    return any(
        ("jvp_jaxpr_fun" in inner.params or "fwd_jaxpr_thunk" in inner.params) and may_close_over_tracers(inner.params)
        for inner in jaxpr.eqns
    )
