"""`audit`: the precision of each operation of a function, from its trace alone."""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from mpjax.casting.setting import Trial
from mpjax.inspection.auditing.communication import Collective, collectives, device_count, widens_bfloat16
from mpjax.inspection.auditing.constants import as_written
from mpjax.inspection.auditing.matmuls import casts_of, findings_of, matmuls_of, traffic_gain, widened_at
from mpjax.inspection.auditing.report import Kept
from mpjax.inspection.auditing.report import PrecisionReport as PrecisionReport
from mpjax.inspection.auditing.risks import Risk, risks_of
from mpjax.inspection.devices import device_of, local_device
from mpjax.inspection.reports import added_up, totals
from mpjax.program import compat, contexts
from mpjax.program.dtypes import is_float
from mpjax.program.graph import Site, not_entered, operands_read, walk
from mpjax.program.inlining import Flow, Node, Value, flow_of
from mpjax.program.objects import filled
from mpjax.program.owners import owners_of
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import BACKWARD, FORWARD, SCALED, UPDATE, reason, scopes
from mpjax.program.tracing import TracedCall, traced_call

# By name: what each kind of higher-order primitive means for the figures.


def audit(
    fun: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    device: str | None = None,
    min_half: float | None = None,
) -> PrecisionReport:
    """Reports the precision of matmuls and convolutions, what keeps them off Tensor Cores, and where half is risky.

    The call is traced, not run. If its arguments are sharded over several devices, or it contains a `shard_map`, it is
    also compiled for those devices to find their collectives, which can take minutes.

    FLOPs are counted for matmuls and convolutions on real floating-point numbers, by the dtype of their operands, over
    all devices. A multiply-add is two FLOPs. A `scan` counts all its iterations, a `while` one iteration, and a `cond`
    all its branches. Modules come from named scopes (Flax Linen's, Haiku's, `jax.named_scope`).

    Args:
        fun: Any JAX function: a loss, a gradient, a whole train step. It may use autocast, explicit half or float32.
        *args: The arguments of the call. `jax.ShapeDtypeStruct`s can replace arrays, and NNX and Equinox modules are
            supported. Arguments that are not arrays are passed through unchanged.
        kwargs: Keyword arguments of the call.
        device: The device in "Speed at most", as `PrecisionReport.speedup_bound` takes it; by default JAX's own device,
            if its peak rates are known.
        min_half: The least share of the FLOPs in half, for `PrecisionReport.failure` and the command's exit status.

    Returns:
        A `PrecisionReport`: `print` it, read its `flops`, `half_share`, `findings` and `risks`, write it with
        `to_html`, `to_json` or `to_csv`, or call `assert_half()` in a test.

    Raises:
        ValueError: The peak rates of `device` are not known.
        Exception: Any error that `fun` raises while it is traced.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss_fn(w, x):
        ...     return jnp.mean(jax.nn.relu(x @ w) @ w)
        >>> w = x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
        >>> mpjax.audit(jax.grad(mpjax.autocast(loss_fn, "mixed_bfloat16")), w, x).half_share
        1.0
        >>> [(found.kind, found.share) for found in mpjax.audit(loss_fn, w, x).findings]
        [('dtype', 1.0)]

    Source: the checks are those of NVIDIA's DLProf and PyProf, and of its guide "Train With Mixed Precision".
    """
    kwargs = dict(kwargs or {})
    # An unknown device raises before the program is traced.
    tpu = device_of(device).is_tpu if device is not None else compat.platform() == "tpu"
    program, flow, sites = _read(fun, args, kwargs)
    matmuls = matmuls_of(sites)
    residuals, kept_in, notes = _residuals(program, flow, sites)
    scores = 0 if tpu else _scores(fun, args, kwargs, residuals, sites)
    communication, unknown = _communication(program, args, kwargs, sites)
    devices = max([device_count((args, kwargs)), *(site.devices for site in sites)])
    return PrecisionReport(
        name=getattr(fun, "__name__", type(fun).__name__),
        matmuls=matmuls,
        findings=findings_of(matmuls, tpu, widened_at(flow)),
        risks=(*_unscaled(sites), *risks_of(flow, functools.partial(as_written, fun, args, kwargs))),
        residuals=None if residuals is None else totals((v.aval.dtype.name, v.bytes) for v in residuals if v.bytes),
        kept=_kept(residuals or (), kept_in),
        scores=scores,
        casts=casts_of(sites),
        notes=(*notes, *unknown, *_notes(sites)),
        communication=communication,
        devices=devices,
        device=device or local_device(),
        min_half=min_half,
        tpu=tpu,
        traffic=traffic_gain(sites),
    )


def _read(fun: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[TracedCall, Flow, list[Site]]:
    """The traced call, and its equations in both forms."""
    program = traced_call(fun, args, kwargs)
    owners = owners_of(program.jaxpr, program.names)
    return program, flow_of(program.jaxpr, owners), list(walk(program.jaxpr, owners=owners))


def _unscaled(sites: list[Site]) -> list[Risk]:
    """The risk of a training step that updates by a loss scale, and scales no gradient."""
    marks = {mark for site in sites for mark in (UPDATE, SCALED) if mark in scopes(site.eqn)}
    if marks != {UPDATE} or all(site.phase == FORWARD for site in sites):
        return []
    why = "mpjax scales no gradient: use mpjax.value_and_grad, or grads_are_scaled=True if the loop scales the loss"
    return [Risk("unscaled", "", "", "loss_scale", "float16", (BACKWARD,), 1, why)]


def _communication(
    program: TracedCall, args: Any, kwargs: Any, sites: list[Site]
) -> tuple[tuple[Collective, ...] | None, list[str]]:
    """The collectives of a call, or None for one device; and a note if they could not be determined."""
    if device_count((args, kwargs)) == 1 and not any(site.name in ("shard_map", "xla_pmap") for site in sites):
        return None, []
    try:  # It is compiled, and not run.
        compiled = jax.jit(jax.extend.core.jaxpr_as_fun(program.jaxpr)).lower(*program.arrays).compile()
        found = collectives(compiled.as_text() or "")
    except Exception as error:  # such as a mesh of devices that this machine does not have
        return None, [f"communication is not known, because the program can't be compiled here: {reason(error)}"]
    uses_bfloat16 = any(v.aval.dtype == jnp.bfloat16 for site in sites for v in site.outvars if is_float(v))
    widened = found and uses_bfloat16 and widens_bfloat16((args, kwargs))
    return found, [_WIDENED] if widened else []


_WIDENED = (
    "communication is that of XLA's CPU backend, which sends bfloat16 arrays as float32: a GPU or TPU sends half of "
    "their bytes"
)


def _kept(residuals: Sequence[Value], flow: Flow) -> tuple[Kept, ...]:
    """The kept values by the operation that makes them, most bytes first."""

    def marks_saved(node: Node) -> bool:
        """Whether a checkpoint's policy marks its operand."""
        return node.site.name in ("reduce_precision", "name")

    rows = (
        ((node.site.path, node.site.source, node.site.name, value.aval.dtype.name), (value.bytes, 1))
        for value in residuals
        if value.bytes and (node := flow.maker(flow.source(value, marks_saved))) is not None
    )
    found = (Kept(*place, size, count) for place, (size, count) in added_up(rows).items())
    return tuple(sorted(found, key=lambda row: -row.bytes))


def residuals_of(flow: Flow) -> Iterator[Value]:
    """The values that a program with a gradient keeps from its forward pass for its backward pass.

    Each value counts once, however often it is read. The program's inputs and constants do not count: they are kept
    anyway. Arrays filled with one constant do not count either: XLA creates them where they are read. A half copy of a
    weight counts. Residuals within a loop's body count once, as each iteration frees them.
    """
    forward: set[Value] = set()
    filled: set[Value] = set()
    kept: dict[Value, None] = {}
    for node in flow.nodes:
        row = primitive(node.site.name)
        if node.site.phase != FORWARD:
            reads = (value for value, read in zip(node.reads, operands_read(node.site.eqn), strict=True) if read)
            kept |= dict.fromkeys(value for value in map(_whole, reads) if value in forward)
            continue
        fills = row.whole or row.op is Op.CONVERT
        if fills and all(value.constant is not None or value in filled for value in node.reads):
            filled.update(node.writes)
        else:
            forward.update(node.writes)
        for inner in node.inner:
            yield from residuals_of(inner)
    yield from kept


def _whole(value: Value) -> Value:
    return value if value.whole is None else _whole(value.whole)


def _residuals(program: TracedCall, flow: Flow, sites: list[Site]) -> tuple[list[Value] | None, Flow, list[str]]:
    """What is kept for the backward pass, and of which program. Without a backward pass, its gradient is traced."""
    if any(site.phase != FORWARD for site in sites):
        return list(residuals_of(flow)), flow, []
    gradient = gradient_of(program)
    if gradient is None:
        note = "its gradient was not inspected: the first positional argument or the results have no real numbers"
        return None, flow, [note]
    shapes = [jax.ShapeDtypeStruct(a.shape, jax.typeof(a).dtype) for a in program.arrays]
    try:
        with contexts.scaled_losses(()):  # the user did not differentiate it
            traced = compat.trace(gradient, *shapes)
    except Exception as error:  # custom derivative rules may raise any error
        return None, flow, [f"the function has no gradient: {reason(error)}"]
    flow = flow_of(traced, owners_of(traced, program.names))
    return list(residuals_of(flow)), flow, ["kept for the backward pass: for the gradient of the first argument"]


def _scores(fun: Callable[..., Any], args: Any, kwargs: Any, residuals: list[Value] | None, sites: list[Site]) -> int:
    """Residual bytes that fused attention does not keep: the call is traced again with it."""
    if not residuals or not {"exp", "dot_general"} <= {site.name for site in sites}:
        return 0
    trial = Trial({"attention": "fused" if compat.platform() in ("cuda", "gpu") else "xla"})
    with contexts.trial(trial), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The first trace has warned.
        fused, _, _ = _residuals(*_read(fun, args, kwargs))
    # Arrays with an element for each score of an attention that is fused, for all layers of a scan or all devices.
    kept, needed = (
        collections.Counter(v.bytes for v in values if any(v.aval.size % count == 0 for count in trial.scores))
        for values in (residuals, fused or residuals)
    )
    return sum((kept - needed).elements())


def gradient_of(program: TracedCall) -> Callable[..., Any] | None:
    """The gradient of a traced function with respect to its first argument.

    If the first result is a scalar, it is the loss and the other results are auxiliary. Otherwise all results count.
    """
    opened = compat.open_jaxpr(program.jaxpr).jaxpr
    first = [i for i, name in enumerate(program.names) if name.startswith("[0][0]") and is_float(opened.invars[i])]
    outs = [i for i, v in enumerate(opened.outvars) if is_float(v)]
    if not first or not outs:
        return None
    if outs[0] == 0 and not opened.outvars[0].aval.shape:
        outs = outs[:1]

    def gradient(*arrays: Any) -> Any:
        def results(chosen: list[Any]) -> list[Any]:
            outputs = program.fun(*filled(arrays, first, chosen))
            return [outputs[i] for i in outs]

        values, pullback = jax.vjp(results, [arrays[i] for i in first])
        return pullback([jnp.ones_like(value) for value in values])

    return gradient


def _notes(sites: list[Site]) -> Iterator[str]:
    """The limits of the figures for this program."""
    around = {name for site in sites if site.flops for name in site.inside}
    if "while" in around:
        yield "a while loop with matmuls counts as one iteration: its length is not known before it runs"
    if "cond" in around:
        yield "all branches of a cond count, though only one runs"
    for place in not_entered(sites):
        yield f"not inspected: {place}"
