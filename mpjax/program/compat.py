"""The differences between the JAX versions that mpjax supports (0.10 to 0.12), and the private parts of JAX.

No other file of mpjax imports `jax._src` or checks the version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax._src import config, core, dispatch, dtypes, source_info_util, traceback_util
from jax._src import linear_util as lu
from jax._src.core import NamedAxisEffect, get_axis_env, no_effects, shaped_abstractify
from jax._src.core import set_current_trace as set_current_trace
from jax._src.core import trace_ctx as trace_ctx
from jax._src.dtypes import canonicalize_value
from jax._src.earray import EArray
from jax._src.interpreters import ad, mlir, pxla
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.lax import _convert_element_type, canonicalize_precision
from jax._src.lax.lax import ragged_dot_general_p as ragged_dot_general_p
from jax._src.mesh import get_abstract_mesh
from jax._src.mesh import use_abstract_mesh as use_abstract_mesh
from jax._src.shard_map import ShardMapTrace, _as_manual_mesh, _extend_axis_env
from jax._src.sharding_impls import physical_sharding
from jax._src.tree_util import dispatch_registry
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

# By name: JAX changed the parameters of these primitives. This file is below the table.

Literal, Var = jex.Literal, jex.Var
WrappedFun = lu.WrappedFun


class Opened(NamedTuple):
    """A jaxpr and the values of its constvars, independent of the JAX version."""

    jaxpr: Any
    consts: Sequence[Any]


def open_jaxpr(jaxpr: Any) -> Opened:
    """Splits a `ClosedJaxpr`. A `Jaxpr` has no constants. (Since JAX 0.12 they are one class.)"""
    return Opened(jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else Opened(jaxpr, ())


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of a primitive is a jaxpr, open or closed."""
    return isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr))


# The upcoming implementations of `checkpoint`, `custom_jvp`, `custom_vjp` and `scan`, each a flag, use the primitive
# `call_hi_primitive`. It hides loops behind mutable references (`scan`), and its rules may not close over values.
_FLAGS = ("remat3", "custom_jvp3", "custom_vjp3", "scan3")
_UPCOMING = [getattr(config, name) for name in _FLAGS if hasattr(config, name)]


@contextlib.contextmanager
def present_primitives() -> Iterator[None]:
    """A context in which code is traced without the upcoming implementations, whatever the user's flags say."""
    with contextlib.ExitStack() as stack:
        for flag in _UPCOMING:
            if flag.value:
                stack.enter_context(flag(False))
        yield


def trace(fun: Callable[..., Any], *args: Any) -> Any:
    """The closed jaxpr of `fun(*args)`: `jax.make_jaxpr`, without its cache and its cost."""
    leaves, tree = jax.tree.flatten(args)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(fun(*jax.tree.unflatten(tree, leaves)))

    info = lu.DebugInfo("autocast", getattr(fun, "__name__", "a function"), None, None)
    avals = [shaped_abstractify(x) for x in leaves]
    with present_primitives():
        jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(lu.wrap_init(flat, debug_info=info), avals)
    return jex.ClosedJaxpr(jaxpr, consts)


def present_call(eqn: Any) -> Callable[..., Any] | None:
    """The call of a `call_hi_primitive` by the present implementation of the same function; None for any other call.

    Without a flag, JAX uses such a primitive for a `custom_vjp` with `generic_batching`, and for `lax.custom_root`.

    Args:
        eqn: The equation.

    Returns:
        A function of its operands, which returns a list of its results.
    """
    hi = eqn.params.get("_prim")
    make = _PRESENT.get(type(hi).__name__) if type(hi).__module__.startswith("jax._src.") else None
    pure = all(isinstance(effect, NamedAxisEffect) for effect in hi.effects)  # of sums across devices
    return make(hi) if make is not None and pure else None


def _present_checkpoint(hi: Any) -> Callable[..., Any]:
    return jax.checkpoint(jex.jaxpr_as_fun(hi.jaxpr), policy=hi.policy, prevent_cse=hi.prevent_cse)


def _expanded(hi: Any) -> Callable[..., Any]:
    return lambda *arrays: jax.tree.leaves(hi.expand(*jax.tree.unflatten(hi.in_tree, arrays)))


def _present_jvp(hi: Any) -> Callable[..., Any]:
    def jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        tangents = map(ad.replace_rule_output_symbolic_zeros, tangents)
        outs, dots = hi.jvp(*(jax.tree.unflatten(hi.in_tree, xs) for xs in (primals, tangents)))
        dots = jax.tree.leaves(dots, is_leaf=lambda x: isinstance(x, (ad.Zero, SymbolicZero)))
        return jax.tree.leaves(outs), list(map(ad.instantiate_zeros, dots))

    fun = jax.custom_jvp(_expanded(hi))
    fun.defjvp(jvp, symbolic_zeros=True)
    return fun


def _present_vjp(hi: Any) -> Callable[..., Any]:
    count = len(jax.tree.leaves(hi.in_avals[:2]))  # values closed over, which have no cotangents

    def fwd(*arrays: Any) -> tuple[list[Any], Any]:
        values = [x.value if hi.symbolic_zeros else x for x in arrays]
        perturbed = [x.perturbed if hi.symbolic_zeros else True for x in arrays]
        outs, residuals = hi.fwd(jax.tree.unflatten(hi.in_tree, perturbed), *jax.tree.unflatten(hi.in_tree, values))
        return jax.tree.leaves(outs), residuals

    def bwd(residuals: Any, cotangents: Any) -> tuple[Any, Any]:
        found, logs = hi.bwd(residuals, jax.tree.unflatten(hi.out_tree, cotangents))
        found = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, (ad.Zero, SymbolicZero)))
        return (*[None] * count, *(None if isinstance(x, ad.Zero) else x for x in found)), logs

    return custom_vjp(_expanded(hi), fwd, bwd, symbolic_zeros=hi.symbolic_zeros)


_PRESENT = {
    "RematTraced": _present_checkpoint,
    "CustomJVPTraced": _present_jvp,
    "CustomVJPTraced": _present_vjp,
    "CustomRoot": _present_jvp,
    "OptRemat": _expanded,  # of a gradient: it has no derivative of its own
}


def name_of(eqn: Any) -> str:
    """The name of an equation's primitive; of a `call_hi_primitive`, that of the class that defines it."""
    return type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else str(eqn.primitive.name)


def equation_of(call: Callable[..., Any], eqn: Any) -> Any:
    """An equation with the primitive of a call in place of its own: that of the call's equation, or a `jit` of it."""
    avals = [v.aval for v in eqn.invars]
    opened = open_jaxpr(trace(call, *avals))
    if len(opened.jaxpr.eqns) != 1 or opened.jaxpr.eqns[0].invars != opened.jaxpr.invars:
        opened = open_jaxpr(trace(jax.jit(call), *avals))
    (new,) = opened.jaxpr.eqns
    return eqn.replace(primitive=new.primitive, params=new.params, effects=new.effects)


def with_backward_rule(eqn: Any, around: Callable[..., Any]) -> Any:
    """A `custom_vjp` equation whose backward rule runs as `around(rule, *residuals, *cotangents)`."""
    rule = eqn.params["bwd"]

    def run(*args: Any) -> Any:
        return around(rule.call_wrapped, *args)

    return eqn.replace(params={**eqn.params, "bwd": lu.wrap_init(run, debug_info=rule.debug_info)})


def closed_like(jaxpr: Any, new: Any) -> Any:
    """The closed jaxpr of another open one, with the constants of the first."""
    return jex.ClosedJaxpr(new, open_jaxpr(jaxpr).consts)


def variable_of(tracer: Any) -> Any:
    """The jaxpr variable of a tracer; None for any other value."""
    value = getattr(tracer, "val", None) if isinstance(tracer, jax.core.Tracer) else None
    return value if isinstance(value, Var) else None


def is_of_current_trace(x: Any) -> bool:
    """Whether an array is a tracer of the innermost trace."""
    return isinstance(x, core.Tracer) and x._trace is trace_ctx.trace


def same_trace(a: Any, b: Any) -> bool:
    """Whether two tracers belong to the same trace."""
    return a._trace is b._trace


def contracts_rows(dtype: Any) -> bool:
    """Whether a matmul of this dtype with a float32 result must multiply matrices and contract the rows of both.

    XLA's CPU compiler (0.10 to 0.12) rewrites any other bfloat16 matmul with a transposed result into a form that it
    can't run.
    """
    return dtype == jax.numpy.bfloat16 and platform() == "cpu"


def platform() -> str:
    """The platform for which a program is traced: that of the mesh in context, else that of JAX's default device."""
    device = get_abstract_mesh().abstract_device
    if device is not None:  # JAX 0.10 has only its kind: "cpu", "TPU v5 lite", "NVIDIA H200".
        kind = device.device_kind.partition(" ")[0].lower()
        return kind if kind in ("cpu", "tpu") else "gpu"
    default = jax.config.jax_default_device
    if default is None:
        return jax.default_backend()
    return default if isinstance(default, str) else default.platform


def device() -> Any:
    """The device for which a program is traced: that of the mesh in context, of which only the kind may be known."""
    return get_abstract_mesh().abstract_device or jax.devices()[0]


def lowers_for_devices(primitive: Any) -> None:
    """Says that the lowering of a primitive asks for the devices, as JAX's partitioned custom calls do."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def is_partitioned() -> bool:
    """Whether XLA may split the program over devices: outside of `shard_map`, by a mesh or by sharded arguments."""
    mesh = get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() > 1
    sizes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(size > 1 and axis_type != jax.sharding.AxisType.Manual for axis_type, size in sizes)


def shards_layout_constraints() -> bool:
    """Whether a layout constraint keeps an array sharded: before JAX 0.12, XLA gathered all of it."""
    return jax.__version_info__ >= (0, 12) or jax.device_count() == 1


def is_exported(ctx: Any) -> bool:
    """Whether a program is lowered for `jax.export`, whose stable custom calls don't include layout constraints."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def constrains_layouts(ctx: Any) -> bool:
    """Whether the lowering of a primitive may constrain a layout."""
    return shards_layout_constraints() and not is_exported(ctx)


def scan_split(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of loop-invariant and of carried operands of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def shard_map_options(params: dict[str, Any]) -> dict[str, Any]:
    """The options of `jax.shard_map`, besides the function and its specs."""
    axes = params["manual_axes"] if "manual_axes" in params else params["newly_manual_axes"]
    return {"mesh": params["mesh"], "axis_names": set(axes), "check_vma": params["check_vma"]}


@contextlib.contextmanager
def on_its_devices(params: dict[str, Any]) -> Iterator[None]:
    """A context with the mesh axes that a shard_map's function was traced under."""
    mesh, axes = params["mesh"], frozenset(shard_map_options(params)["axis_names"])
    inside = use_abstract_mesh(_as_manual_mesh(mesh, axes))
    with _extend_axis_env(mesh, axes), inside, config._check_vma(params["check_vma"]):
        yield


def jit_options(params: dict[str, Any]) -> dict[str, Any] | None:
    """The options of `jax.jit`, besides shardings and donation; None if its public API can't express them."""
    layouts = (*params["in_layouts"], *params["out_layouts"])
    if any(layout is not None for layout in layouts):
        return None
    options = {"keep_unused": params["keep_unused"], "inline": params["inline"]}
    if params["compiler_options_kvs"]:
        options["compiler_options"] = dict(params["compiler_options_kvs"])
    return options


def with_metadata(fun: Callable[..., Any], params: dict[str, Any]) -> Callable[..., Any]:
    """`fun` under an `xla_metadata_call` with these parameters (since JAX 0.12)."""
    from jax.experimental.xla_metadata import xla_metadata_call2

    given = params["ad_metadata"]
    of_derivatives = given if given == "same" else dict(given)
    return xla_metadata_call2(fun, dict(params["xla_metadata"]), ad_metadata=of_derivatives)


def as_composite(fun: Callable[..., Any], params: dict[str, Any]) -> Callable[..., Any]:
    """`fun` as a `lax.composite` with these parameters."""
    attributes = {
        name: jax.tree.unflatten(tree, [getattr(leaf, "val", leaf) for leaf in leaves])  # of a hashable array
        for name, leaves, tree in params["attributes"]
    }
    composite = jax.lax.composite(lambda *arrays, **_: fun(*arrays), params["name"], params["version"])
    return lambda *arrays: composite(*arrays, **attributes)


def is_unspecified(sharding: Any) -> bool:
    """Whether a sharding in a jit's params is unspecified."""
    return type(sharding).__name__ == "UnspecifiedValue"


def bind_params(primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of `primitive.bind`, given those of an equation.

    The derivative rules that JAX makes of a jaxpr return its literals, which become arrays. A rule that a user wrote
    returns arrays, and in the residuals any Python number, on which its backward rule may branch.
    """
    bound: dict[str, Any] = primitive.get_bind_params(params)
    if primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        fun, *rules = bound["subfuns"]
        bound["subfuns"] = (fun, *map(_returning_arrays, rules))
    return bound


def _returning_arrays(rule: WrappedFun) -> WrappedFun:
    def one(x: Any) -> Any:
        return x if isinstance(x, (bool, int, float, complex)) else as_array(x)

    return lu.wrap_init(lambda *args: jax.tree.map(one, rule.call_wrapped(*args)), debug_info=rule.debug_info)


def as_array(x: Any) -> Any:
    """A literal as an array. The tangent of an integer and a symbolic zero are returned unchanged."""
    if isinstance(x, (jax.Array, SymbolicZero)) or getattr(x, "dtype", None) == jax.dtypes.float0:
        return x
    return jax.numpy.asarray(x)


def jvp_jaxpr(params: dict[str, Any], zeros: Sequence[bool]) -> tuple[Any, Sequence[Any], Sequence[bool]]:
    """The user's custom_jvp rule as a jaxpr, which takes the primals and the nonzero tangents.

    Returns the jaxpr with open constvars, their values, and which output tangents are zero.
    """
    with present_primitives():
        return params["jvp_jaxpr_fun"].call_wrapped(*zeros)


def jvp_function(params: dict[str, Any]) -> Any:
    """The user's custom_jvp rule and its static arguments, equal for calls of one function; None if JAX hides them."""
    pending = [params["jvp_jaxpr_fun"].f]
    for fun in pending:
        held = [cell.cell_contents for cell in getattr(fun, "__closure__", None) or () if cell != types.CellType()]
        for rule in (x for x in held if isinstance(x, WrappedFun)):
            # JAX stores a result of each call behind a function of its own.
            transforms = [(fun, *(x for x in static if not _is_output(x))) for fun, static in rule.transforms]
            return rule.f, tuple(transforms), rule.params
        pending += [x for x in held if isinstance(x, types.FunctionType)]
    return None


def _is_output(x: Any) -> bool:
    return getattr(x, "__qualname__", "").startswith("transformation_with_aux")


def fwd_rule(
    params: dict[str, Any], perturbed: Sequence[bool]
) -> tuple[Any, Sequence[Any], Sequence[int | None], Sequence[Any]]:
    """Traces the user's custom_vjp forward rule. A rule with symbolic zeros may raise for some operands.

    Returns its jaxpr, with open constvars, their values, for each residual the index of the operand that it equals, or
    None, and the trees of this trace that its backward rule needs (`call_bwd`).
    """
    with _undisturbed(params["fwd_jaxpr_thunk"]) as stores, present_primitives():
        jaxpr, consts = params["fwd_jaxpr_thunk"].call_wrapped(*perturbed)
        _, _, forwards = params["out_trees"]()
        return jaxpr, consts, forwards, [_stored(store) for store in stores]


ZEROS_REACH_RULES = jax.__version_info__ >= (0, 12)  # JAX gives any custom_vjp's backward rule symbolic zeros.


def call_bwd(
    params: dict[str, Any], trees: Sequence[Any], residuals: Sequence[Any], cotangents: Sequence[Any]
) -> tuple[list[Any], dict[str, Any] | None]:
    """Calls the user's custom_vjp backward rule. Returns the cotangents (None for symbolic zeros) and the logs."""
    with _undisturbed(params["fwd_jaxpr_thunk"]) as stores:
        _store(stores, trees)
        out, logs = params["bwd"].call_wrapped(*residuals, *cotangents), None
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], (list, tuple)):
        out, logs = out  # since JAX 0.12
    return [None if type(ct).__name__ == "Zero" else ct for ct in out], logs


@contextlib.contextmanager
def _undisturbed(thunk: Any) -> Iterator[list[Any]]:
    """A context for tracing a rule: yields the rule's stores, clears the caches, and restores both afterwards.

    JAX caches the jaxpr of a forward rule for each choice of perturbed operands, but the trees of its results only for
    the latest trace, and none if that raised. Another trace would break the next gradient of the program.
    """
    stores, memos = _remembered(thunk)
    before, traces = [_stored(store) for store in stores], [dict(memo) for memo in memos]
    for memo in memos:
        memo.clear()
    try:
        yield stores
    finally:
        _store(stores, before)
        for memo, trace in zip(memos, traces, strict=True):
            memo.clear()
            memo.update(trace)


def _stored(store: Any) -> Any:
    try:
        return store.val
    except lu.StoreException:  # The store is empty.
        return None


def _store(stores: Sequence[Any], values: Sequence[Any]) -> None:
    for store, value in zip(stores, values, strict=True):
        store.reset()
        if value is not None:
            store.store(value)


def _remembered(thunk: Any) -> tuple[list[Any], list[dict[Any, Any]]]:
    """The stores of a JAX function and of the functions that it closes over, and the caches of `_memoize`."""
    stores: dict[int, Any] = {}
    memos: list[dict[Any, Any]] = []
    pending, visited = [thunk], set()
    while pending:
        fun = pending.pop()
        if id(fun) in visited:
            continue
        visited.add(id(fun))
        if isinstance(fun, lu.WrappedFun):
            stores.update((id(store), store) for store in fun.stores if store is not None)
            pending.append(fun.f)
        elif isinstance(fun, types.FunctionType) and fun.__module__.startswith("jax."):
            cells = (cell.cell_contents for cell in fun.__closure__ or ())
            enclosed = dict(zip(fun.__code__.co_freevars, cells, strict=True))
            if fun.__qualname__.startswith("_memoize."):
                memos.append(enclosed["cells"])
            pending += enclosed.values()
    return list(stores.values()), memos


def custom_vjp(
    fun: Callable[..., Any],
    fwd: Callable[..., Any],
    bwd: Callable[..., tuple[tuple[Any, ...], dict[str, Any] | None]],
    symbolic_zeros: bool,
) -> Callable[..., Any]:
    """`fun` with a derivative rule whose backward rule returns cotangents and logs. JAX supports logs since 0.12."""
    rewritten = jax.custom_vjp(fun)
    if hasattr(rewritten, "defvjp_with_logs"):
        rewritten.defvjp_with_logs(fwd, bwd, symbolic_zeros=symbolic_zeros)
    else:
        rewritten.defvjp(fwd, lambda *args: bwd(*args)[0], symbolic_zeros=symbolic_zeros)
    return rewritten


class EquationContext:
    """A context with the named scopes, the source line and the JAX settings that an equation was traced under."""

    __slots__ = ("_settings", "_source")

    def __init__(self, eqn: Any, skipped: int = 0):
        """Args: eqn: the equation; skipped: the number of its outermost scopes that are already open."""
        info = eqn.source_info
        own = info.name_stack[skipped:] if skipped else info.name_stack
        stack = source_info_util.current_name_stack() + own
        self._source = source_info_util.user_context(info.traceback, name_stack=stack)
        self._settings = eqn.ctx.manager

    def __enter__(self) -> None:
        self._source.__enter__()
        self._settings.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._settings.__exit__(*exception)
        self._source.__exit__(*exception)


def _with_scopes(eqn: Any, stack: Any) -> Any:
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def in_scope(eqn: Any, name: str) -> Any:
    """An equation in one more named scope."""
    return _with_scopes(eqn, eqn.source_info.name_stack.extend(name))


def in_scopes_of(eqn: Any, around: Any) -> Any:
    """An equation of a call's sub-jaxpr, with the named scopes of the call too."""
    return _with_scopes(eqn, around.source_info.name_stack + eqn.source_info.name_stack)


def add_scope(eqn: Any, name: str) -> None:
    """Puts an equation of a new program into a further named scope."""
    eqn.source_info = in_scope(eqn, name).source_info


def with_sub_jaxpr(eqn: Any, old: Any, new: Any) -> Any:
    """An equation with another open jaxpr in place of one of its sub-jaxprs, open or closed."""

    def replaced(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(replaced, value))
        if value is not old and not (is_jaxpr(value) and open_jaxpr(value).jaxpr is old):
            return value
        return jex.ClosedJaxpr(new, value.consts) if hasattr(value, "consts") else new

    return eqn.replace(params={key: replaced(value) for key, value in eqn.params.items()})


def new_variable(v: Any) -> Any:
    """A variable like this one; an unused result stays the same."""
    return v if type(v).__name__ == "DropVar" else Var(v.aval)


def common_scopes(eqns: Sequence[Any]) -> Any:
    """The named scopes that enclose all of these equations."""
    stacks = [eqn.source_info.name_stack for eqn in eqns]
    levels = zip(*(stack.stack for stack in stacks), strict=False)
    shared = itertools.takewhile(lambda scopes: scopes.count(scopes[0]) == len(scopes), levels)
    return stacks[0][: len([*shared])]


def in_scopes(scopes: Any = None) -> Any:
    """A context in the named scopes of its caller and further ones, wherever it is entered."""
    stack = source_info_util.current_name_stack()
    return source_info_util.set_name_stack(stack if scopes is None else stack + scopes)


def user_frames(eqn: Any) -> list[Any]:
    """The frames of an equation's traceback outside of JAX, innermost first."""
    return list(source_info_util.user_frames(eqn.source_info.traceback))


# JAX's functions of linear algebra that are matmuls, and have an argument `precision`.
_MATMULS = frozenset({"matmul", "multi_dot", "tensordot", "vecdot"})


def is_of_linear_algebra(eqn: Any) -> bool:
    """Whether JAX's own code for a decomposition, a solve or a derivative of these makes an equation."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    inside = itertools.takewhile(lambda frame: not source_info_util.is_user_filename(frame.file_name), frames)
    names = {frame.function_name for frame in inside if frame.file_name.endswith("linalg.py")}
    return bool(names) and names.isdisjoint(_MATMULS)


def with_weak_type(x: Any, aval: Any) -> Any:
    """The array with the weak type of an abstract value (a weak dtype, as of a Python scalar, yields to others)."""
    if aval.weak_type == jax.typeof(x).weak_type:
        return x
    return _convert_element_type(x, aval.dtype, weak_type=aval.weak_type)


def is_staging() -> bool:
    """Whether operations become equations of a jaxpr: not under other transformations, and not outside of a trace."""
    return type(trace_ctx.trace) is pe.DynamicJaxprTrace and not config.eager_constant_folding.value


def is_high(primitive: Any, arrays: Sequence[Any], params: dict[str, Any]) -> bool:
    """Whether JAX replaces an equation by others when it lowers a program, for which the program must be marked."""
    return bool(primitive.is_high(*map(jax.typeof, arrays), **params))


def add_equation(primitive: Any, arrays: Sequence[Any], params: dict[str, Any], outs: Sequence[Any]) -> Any:
    """Adds an equation with known results to the jaxpr that is traced, as JAX does to inline a jaxpr into another."""
    trace, source = trace_ctx.trace, source_info_util.current()
    canonical = (x if isinstance(x, jax.core.Tracer) else canonicalize_value(x) for x in arrays)
    tracers = [trace.to_jaxpr_tracer(x, source_info=source) for x in canonical]
    results = trace.emit_eqn(tracers, outs, primitive, params, no_effects, source)
    return results if primitive.multiple_results else results[0]


def vary(x: Any, axes: tuple[Any, ...]) -> Any:
    """Marks an array as varying along mesh axes, in a `shard_map` that checks this."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes that an array varies along, in a `shard_map` that checks this."""
    return varying_axes_of(jax.typeof(x))


def varying_axes_of(aval: Any) -> frozenset[str]:
    """The mesh axes that the array of an abstract value varies along, in a `shard_map` that checks this."""
    return frozenset(aval.manual_axis_type.varying)


def replicated(x: Any) -> Any:
    """The array on every device if its mesh has explicit axes, which restrict indexing; otherwise the array itself."""
    aval = jax.typeof(x)
    explicit = is_shaped(aval) and aval.sharding.mesh._any_axis_explicit
    return jax.sharding.reshard(x, PartitionSpec(*[None] * aval.ndim)) if explicit else x


def gathered(x: Any, dims: Sequence[int], multiple: int) -> Any:
    """The array, on every device along some dimensions that explicit axes split, if they split a multiple of elements.

    A dimension that is not the first, whose elements are not contiguous on a device, is split in any case.
    """
    aval = jax.typeof(x)
    if not is_explicit(aval):
        return x
    spec, parts = aval.sharding.spec, aval.sharding.shard_shape(aval.shape)
    if all(spec[d] is None for d in dims[1:]) and math.prod(parts[d] for d in dims) % multiple == 0:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*(None if d in dims else name for d, name in enumerate(spec))))


def on_current_mesh(x: Any) -> Any:
    """A traced array on every device of the current mesh, if it is of another one (`jax.sharding.auto_axes`)."""
    here = jax.sharding.get_abstract_mesh()
    if here.empty or here.manual_axes or not isinstance(x, jax.core.Tracer) or not is_shaped(x.aval):
        return x
    own = jax.typeof(x).sharding.mesh
    return x if own.empty or own == here else jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim))


def on_mesh_of(aval: Any) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX computes on the mesh of an abstract value, which `jax.sharding.auto_axes` changes."""
    here, own = jax.sharding.get_abstract_mesh(), aval.sharding.mesh
    return contextlib.nullcontext() if here.empty or own.empty or own == here else use_abstract_mesh(own)


def is_shaped(aval: Any) -> bool:
    """Whether an abstract value is an array: not a reference, a token or a key."""
    return type(aval) is jax.core.ShapedArray


def is_inexact(aval: Any) -> bool:
    """Whether an abstract value is an array of floats or complex numbers."""
    return is_shaped(aval) and jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)


@functools.cache
def known_primitives() -> frozenset[str]:
    """The names of all primitives that this JAX can lower or lists as public."""
    public = {value.name for name, value in vars(jex.primitives).items() if name.endswith("_p")}
    return frozenset(public | {primitive.name for primitive in getattr(mlir, "_lowerings", ())})


@functools.cache
def finfo(dtype: Any) -> Any:
    """The limits of a floating dtype, including bfloat16."""
    return jax.numpy.finfo(dtype)


def barriers(params: dict[str, Any], size: int) -> tuple[bool, ...]:
    """For each operand of a remat, whether the backward pass puts a barrier on it. JAX may use one flag for all."""
    flags = params["prevent_cse"]
    return flags if isinstance(flags, tuple) else (flags,) * size


def call_jaxpr(params: dict[str, Any]) -> Any:
    """The sub-jaxpr of a call-like equation."""
    return next(params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call") if name in params)


_SYMBOLIC = 256  # estimate of a symbolic dimension, usually the batch, for comparing sizes


def numel(aval: Any) -> int:
    """The number of elements of an array; an estimate if its shape is symbolic (`jax.export`)."""
    return math.prod(n if isinstance(n, int) else _SYMBOLIC for n in aval.shape)


def is_algorithm(precision: Any) -> bool:
    """Whether the `precision` of a dot names an algorithm (`lax.DotAlgorithm`, `lax.DotAlgorithmPreset`).

    The preset `DEFAULT` does not: it leaves the choice to the backend.
    """
    return type(precision).__name__.startswith("DotAlgorithm") and precision is not jax.lax.DotAlgorithmPreset.DEFAULT


def default_matmul_precision() -> Any:
    """The precision that `jax_default_matmul_precision` gives a matmul without a `precision`."""
    return canonicalize_precision(None)


def is_tracing() -> bool:
    """Whether a transformation is running (`jit`, `grad`, `vmap`, ...), so that operations don't run at once."""
    return not trace_ctx.is_top_level()


def is_compiling() -> bool:
    """Whether operations, or what transformations make of them, are added to a jaxpr, rather than run at once."""
    return any(isinstance(trace, pe.DynamicJaxprTrace) for trace in _traces())


def is_differentiating(trace: Any = None) -> bool:
    """Whether operations of a trace, by default the current one, are differentiated, in forward or reverse mode."""
    return any(type(each).__name__ in ("JVPTrace", "LinearizeTrace") for each in _traces(trace))


def is_differentiated(x: Any) -> bool:
    """Whether an array is differentiated, or may be: `jit` doesn't say which of its arguments will be."""
    while type(getattr(x, "_trace", None)).__name__ == "BatchTrace":
        x = x.val
    return isinstance(x, jax.core.Tracer) and is_differentiating(x._trace)


def part_of_custom_vjp(outer: Any) -> str:
    """`"fun"` in a function with a custom_vjp rule, `"fwd"` in its forward rule, else an empty string.

    Args:
        outer: A tracer of the code around such a function. JAX runs an eager forward rule below its trace.
    """
    traces = list(_traces())
    names = [getattr(getattr(getattr(t, "frame", None), "debug_info", None), "traced_for", "") or "" for t in traces]
    part = next((name.removeprefix("custom_vjp ") for name in names if name.startswith("custom_vjp ")), "")
    is_below = outer._trace not in traces and any(t in traces for t in _traces(outer._trace))
    return part or ("fwd" if is_below else "")


def hide_frames(folder: str) -> None:
    """Removes the frames of a folder's files where JAX removes its own: from errors that pass through its functions."""
    traceback_util.register_exclusion(folder)


def in_eager_shard_map() -> bool:
    """Whether a `shard_map` around runs its operations one by one, because it is not in `jax.jit`."""
    return any(isinstance(trace, ShardMapTrace) for trace in _traces())


def _traces(trace: Any = None) -> Iterator[Any]:
    """A trace, by default the current one, and those below it."""
    trace = trace_ctx.trace if trace is None else trace
    while trace is not None:
        yield trace
        trace = getattr(trace, "below", None) or getattr(trace, "parent_trace", None)


def under_jet() -> bool:
    """Whether the current trace is one of `jax.experimental.jet`, which has rules for few primitives."""
    return type(trace_ctx.trace).__name__ == "JetTrace"


def checkpoint(fun: Callable[..., Any], args: Sequence[Any], prevent_cse: Any, policy: Any) -> Sequence[Any]:
    """Calls `jax.checkpoint(fun)`, or `fun` under jet, which has no rule for it."""
    if under_jet():
        return fun(*args)
    _correct_flags()
    with present_primitives():
        return jax.checkpoint(fun, prevent_cse=prevent_cse, policy=policy)(*args)


@functools.cache
def _correct_flags() -> None:
    """Corrects JAX's rules that add operands to a remat with one flag per operand, but no flags for them.

    They are `checkify`, a remat under a `jax.checkpoint` whose policy saves one of its values, and the derivative of a
    remat that calls a function whose rule closes over an array.
    """
    from jax._src import ad_checkpoint, checkify

    remat = ad_checkpoint.remat_p
    check: Any = checkify.error_checks[remat]
    split: Any = pe.partial_eval_jaxpr_custom_rules[remat]
    jvp: Any = ad.primitive_jvps[remat]

    def checked(*args: Any, prevent_cse: Any, **params: Any) -> Any:
        if isinstance(prevent_cse, tuple):
            errors = [x for x in args if isinstance(x, checkify.Error)]
            prevent_cse = (False,) * len(jax.tree.leaves(errors)) + prevent_cse
        return check(*args, prevent_cse=prevent_cse, **params)

    def with_saved(unknown: Any, staged: Any, *rest: Any) -> Any:
        known, params = split.args[1](unknown, staged, *rest)
        flags, saved = params["prevent_cse"], rest[2]
        if isinstance(flags, tuple) and len(flags) == sum(staged):
            params["prevent_cse"] = (True,) * saved + flags
        return known, params

    def with_constants(primals: Any, tangents: Any, *, jaxpr: Any, prevent_cse: Any, **params: Any) -> Any:
        if isinstance(prevent_cse, tuple):
            nonzeros = [type(tangent) is not ad.Zero for tangent in tangents]
            differentiated, _ = ad.jvp_jaxpr(pe.close_jaxpr(jaxpr), nonzeros, False)
            prevent_cse = (False,) * len(differentiated.consts) + prevent_cse
        return jvp(primals, tangents, jaxpr=jaxpr, prevent_cse=prevent_cse, **params)

    checkify.error_checks[remat] = checked
    ad.primitive_jvps[remat] = with_constants
    pe.partial_eval_jaxpr_custom_rules[remat] = functools.partial(split.func, split.args[0], with_saved)


def recompute_always(primitive: Any) -> None:
    """Lets a `jax.checkpoint` recompute a primitive of array operands, whatever its policy saves.

    JAX rounds what a policy saves by `reduce_precision`, to which float8_e4m3fn has infinities instead of its largest
    numbers.
    """

    def rule(saves: Any, unknown: Sequence[bool], staged: Sequence[bool], eqn: Any) -> Any:
        operands = [v for v, is_staged in zip(eqn.invars, staged, strict=True) if isinstance(v, Var) and not is_staged]
        results = [any(unknown)] * len(eqn.outvars), [True] * len(eqn.outvars)
        return None if any(unknown) else eqn, eqn, *results, operands

    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def set_linearization(primitive: Any, rule: Callable[..., Any]) -> None:
    """Gives a primitive a rule for `jax.linearize`, in addition to its JVP rule.

    Without this rule, JAX traces and partially evaluates the JVP rule at each equation of each gradient.

    Args:
        primitive: A primitive with one result.
        rule: `rule(nonzeros, *primals, **params)` returns the result, whether it has a tangent, and a function that
            computes this tangent from the operands' tangents (`Zero` where `nonzeros` is False).
    """
    has_structured = jax.__version_info__ >= (0, 12)

    def linearization(_is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, **params: Any) -> Any:
        out, has_tangent, tangent_of = rule(nonzeros, *primals, **params)
        if has_structured:
            return out, has_tangent, None, None, lambda _, __, *tangents: tangent_of(*tangents)
        return out, has_tangent, None, lambda _, *tangents: tangent_of(*tangents)

    ad.primitive_linearizations[primitive] = linearization


def bilinear_transpose(primitive: Any, ct: Any, operands: Sequence[Any], which: int, params: dict[str, Any]) -> Any:
    """The cotangent of one operand of a matmul or convolution, by JAX's own transpose rule.

    Args:
        primitive: `dot_general`, `conv_general_dilated` or `ragged_dot_general`, or an object with a rule of its own.
        ct: The cotangent of its result.
        operands: Its operands; the one to differentiate is an undefined primal.
        which: The index of that operand.
        params: The primitive's parameters.
    """
    rule = getattr(primitive, "transpose", None) or ad.primitive_transposes[primitive]
    return rule(ct, *operands, **params)[which]


def explicit_cotangent_sharding(
    primitive: Any, ct: Any, operands: Sequence[Any], which: int, params: dict[str, Any]
) -> NamedSharding | None:
    """The sharding of that cotangent on a mesh with explicit axes; None on any other mesh, where XLA chooses it."""
    if not operands[which].aval.sharding.mesh._any_axis_explicit:
        return None

    def cotangent(ct: Any, *known: Any) -> Any:
        every = (*known[:which], operands[which], *known[which:])
        return bilinear_transpose(primitive, ct, every, which, params)

    known = (*operands[:which], *operands[which + 1 :])
    sharding: NamedSharding = trace(cotangent, ct, *known).out_avals[0].sharding
    return sharding


def is_explicit(aval: Any) -> bool:
    """Whether the array of an abstract value is on a mesh with explicit axes."""
    return bool(aval.sharding.mesh._any_axis_explicit)


def transposed(sharding: NamedSharding | None, order: Sequence[int]) -> NamedSharding | None:
    """The sharding of an array after `lax.transpose(array, order)`; a dimension that `order` lacks has size 1."""
    if sharding is None:
        return None
    partitions = tuple(sharding.spec._partitions[d] for d in order)
    return sharding.update(spec=sharding.spec.update(partitions=partitions))


def zero_tangent(primal: Any) -> Any:
    """The symbolic zero tangent of a value, as a primitive's JVP rule returns it."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def abstract_eval_in(primitive: Any, dtype: Any, avals: Sequence[Any], params: dict[str, Any]) -> Any:
    """The abstract result of a primitive whose first two operands are cast to a dtype."""
    cast = [aval.update(dtype=dtype, weak_type=False) for aval in avals[:2]]
    out, _ = primitive.abstract_eval(*cast, *avals[2:], **params)
    return out


@functools.lru_cache(maxsize=4096)
def scalar_of(aval: Any, dtype: Any) -> Any:
    """The abstract value of a scalar that is reduced from an array."""
    return trace(jax.numpy.max, aval).out_avals[0].update(dtype=dtype, weak_type=False)


def in_named_axes() -> bool:
    """Whether the current trace has named axes: in a `shard_map`, or in a `vmap` with an axis name."""
    return bool(get_axis_env().axis_sizes)


def vary_like(out: Any, arrays: Sequence[Any]) -> list[Any]:
    """Marks arrays as varying along the mesh axes that a result varies along, in a `shard_map` that checks this."""
    axes = tuple(varying_axes(out))
    return [vary(x, axes) for x in arrays] if axes else list(arrays)


def axes_of_spec(spec: Any) -> set[str]:
    """The mesh axes that a partition spec shards over, excluding its unreduced and reduced axes."""
    names: set[str] = set()
    for entry in getattr(spec, "_partitions", spec):
        names |= set(entry) if isinstance(entry, (tuple, list)) else {entry} if entry is not None else set()
    return names


class TracedEquation(NamedTuple):
    """An equation of a trace that has not ended. Its variables have an `aval`."""

    primitive: Any
    params: dict[str, Any]
    source_info: Any
    invars: Sequence[Any]
    outvars: Sequence[Any]


def traced_equations() -> Iterator[TracedEquation]:
    """The equations of the current trace. Inner traces have ended: their equations are in those of this one."""
    for reference in getattr(getattr(trace_ctx.trace, "frame", None), "tracing_eqns", ()):
        eqn = reference() if callable(reference) else reference
        if eqn is not None:
            yield TracedEquation(eqn.primitive, eqn.params, eqn.source_info, eqn.in_tracers, eqn.outvars)


def equations_behind(arrays: Any) -> list[TracedEquation]:
    """The equations of the current trace that a tree of arrays is computed from, the last one first."""
    needed, found = {variable_of(x) for x in jax.tree.leaves(arrays)} - {None}, []
    for eqn in reversed([*traced_equations()]):
        if not needed.isdisjoint(eqn.outvars):
            needed |= {variable_of(x) for x in eqn.invars} - {None}
            found.append(eqn)
    return found


class _EmptyArray(EArray):
    nbytes = 0


# How JAX passes an array to a compiled function, and what a program that closes over one contains.
pxla.shard_arg_handlers[_EmptyArray] = pxla.shard_arg_handlers[EArray]
core.pytype_aval_mappings[_EmptyArray] = core.pytype_aval_mappings[EArray]
dtypes.canonicalize_value_handlers[_EmptyArray] = lambda x: x
dispatch_registry.register_node(_EmptyArray, lambda x: ((x._data,), x.aval), lambda aval, xs: _EmptyArray(aval, xs[0]))
mlir.register_constant_handler(
    _EmptyArray, lambda x, aval: mlir.get_constant_handler(np.ndarray)(np.zeros((*x.shape, 0), np.int8), aval)
)


class _EmptyRules:
    allow_conversion = False

    @staticmethod
    def physical_element_aval(dtype: Any) -> Any:
        return core.ShapedArray((0,), np.dtype(np.int8))

    @staticmethod
    def tangent_dtype(dtype: Any) -> Any:
        return dtype.tangent

    @staticmethod
    def zero(dtype: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return _EmptyArray(core.ShapedArray((), dtype), jax.numpy.zeros(0, np.int8))

    @staticmethod
    def global_sharded_result_handler(aval: Any, sharding: Any, committed: bool) -> Any:
        make = pxla.global_result_handlers[core.ShapedArray]
        stored = make(core.physical_aval(aval), physical_sharding(aval, sharding), committed)
        return stored.wrap(functools.partial(_EmptyArray, aval))


@dataclasses.dataclass(frozen=True)
class Empty(dtypes.ExtendedDType):
    """The dtype of arrays that take no memory. Their derivatives have elements of another dtype.

    Args:
        tangent: The dtype of their derivatives.
    """

    tangent: Any
    _rules = _EmptyRules
    type = jax.dtypes.extended
    itemsize = 0

    @property
    def name(self) -> str:
        """The name in printed programs."""
        return f"empty[{self.tangent}]"


def example(aval: Any, dtype: Any = None) -> Any:
    """An argument to trace with, given its abstract value and, optionally, another dtype."""
    return aval if dtype is None or dtype == aval.dtype else aval.update(dtype=dtype, weak_type=False)


def is_inlined(params: dict[str, Any]) -> bool:
    """Whether JAX inlines a call of a function under `jit` where it traces it, as most functions of `jax.numpy`."""
    inline = params["inline"]  # a bool before JAX 0.12
    return inline is True or getattr(inline, "name", "") == "JAX_EARLY"


def kept_as_call(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of such a call that is not inlined."""
    inline = params["inline"]
    return {**params, "inline": False if isinstance(inline, bool) else type(inline)("auto")}
