"""Bounds on the speedup of half: a roofline of a program's FLOPs and bytes in float32 and in half."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpjax._jaxpr.interpreter import is_float
from mpjax._jaxpr.primitives import MATMULS, Op, primitive
from mpjax.casting.autocast import autocast, traced_call
from mpjax.casting.regions import autocast_disabled
from mpjax.inspection.audit.dataflow import Flow, Node, Value, flow_of
from mpjax.inspection.devices import Device
from mpjax.inspection.reports import reason

_REDUCTIONS = ("reduce_", "cum", "arg", "select_and")
# Their result shares the memory of their first operand.
_SAME = ("reshape", "squeeze", "expand_dims", "copy", "detached", "straight_through", "matmul_result")
_PARTIAL = ("gather", "dynamic_slice", "scatter", "dynamic_update_slice")


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """One kernel of a program with all elementwise operations fused.

    Args:
        times: Number of executions.
        flops: FLOPs of one execution of a matmul or convolution; 0 for other kernels.
        dtype, precision: Those of the matmul.
        bytes: Bytes that one execution reads and writes.
        part: One device's share of the work.
    """

    times: int
    flops: int
    dtype: str
    precision: str
    bytes: int
    part: float = 1.0

    def seconds(self, device: Device) -> float:
        """The least time of all executions, in seconds."""
        return max(self.arithmetic_seconds(device), self.part * self.times * (self.bytes / device.bandwidth))

    def arithmetic_seconds(self, device: Device) -> float:
        """The least time of the arithmetic alone, in seconds."""
        once = self.flops / device.peak(self.dtype, self.precision) if self.flops else 0.0
        return self.part * self.times * once


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """A program's kernels, and the bytes that any execution must read and write.

    Args:
        kernels: The kernels when only elementwise operations are fused into their consumers.
        bytes: Bytes of arguments and results. All other arrays could be fused away, as in fused attention.
    """

    kernels: tuple[KernelCost, ...]
    bytes: int

    def seconds(self, device: Device) -> float:
        """The roofline time in seconds: each kernel is bound by arithmetic or by memory."""
        return sum(kernel.seconds(device) for kernel in self.kernels)

    def least(self, device: Device) -> float:
        """The lower bound in seconds for any fusion: all matmuls at peak rate, or arguments and results."""
        arithmetic = sum(kernel.arithmetic_seconds(device) for kernel in self.kernels)
        return max(arithmetic, self.bytes / device.bandwidth)


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of one call as three programs: in float32, as written, and in half as autocast plans it."""

    float32: ProgramCost
    now: ProgramCost
    half: ProgramCost


@dataclasses.dataclass(frozen=True)
class SpeedupBound:
    """Bounds on the speedup of half on a device. `PrecisionReport.speedup_bound` defines T and L.

    Args:
        device: The device's name.
        float32: T of the float32 program, or its measured time. All times are in seconds.
        now: T of the program as written.
        half: T of the program as autocast plans it.
        least_float32: L of the float32 program, or its measured time.
        least_now, least_half: L, the lower bound, of the other two programs.
        matmul_share: The share of matmuls and convolutions in T of the float32 program: Amdahl's parallel fraction.
    """

    device: str
    float32: float
    now: float
    half: float
    least_float32: float
    least_now: float
    least_half: float
    matmul_share: float

    @property
    def speedup(self) -> float:
        """The speedup of the program as written over float32, with elementwise operations fused in both."""
        return _ratio(self.float32, self.now)

    @property
    def limit(self) -> float:
        """`speedup` of the program in half, as autocast plans it."""
        return _ratio(self.float32, self.half)

    @property
    def interval(self) -> tuple[float, float]:
        """`speedup` with elementwise operations fused and with everything fused, the lower first."""
        return _interval(self.speedup, _ratio(self.least_float32, self.least_now))

    @property
    def limit_interval(self) -> tuple[float, float]:
        """`interval` of the program in half, as autocast plans it."""
        return _interval(self.limit, _ratio(self.least_float32, self.least_half))


def _ratio(float32: float, other: float) -> float:
    return float32 / other if other else 1.0


def _interval(one: float, other: float) -> tuple[float, float]:
    return min(one, other), max(one, other)


def speedup_bound(costs: Costs, device: Device, float32_seconds: float | None = None) -> SpeedupBound:
    """The speedup bound of a program.

    Args:
        costs: The program's costs.
        device: The device.
        float32_seconds: Measured time of the float32 program, in seconds; None to use its roofline.
    """
    roofline, least = costs.float32.seconds(device), costs.float32.least(device)
    matmuls = sum(kernel.seconds(device) for kernel in costs.float32.kernels if kernel.flops)
    return SpeedupBound(
        device=device.name,
        float32=roofline if float32_seconds is None else float32_seconds,
        now=costs.now.seconds(device),
        half=costs.half.seconds(device),
        least_float32=least if float32_seconds is None else float32_seconds,
        least_now=costs.now.least(device),
        least_half=costs.half.least(device),
        matmul_share=matmuls / roofline if roofline else 0.0,
    )


def costs_of(fun: Callable[..., Any], args: Any, kwargs: Any, flow: Flow, devices: int = 1) -> tuple[Costs, list[str]]:
    """The costs of a call in float32, as written and as planned in half, and notes on variants that did not trace.

    Args:
        fun, args, kwargs: The call.
        flow: The graph of the call as written.
        devices: Number of devices; the costs are those of one device.
    """
    now, notes = program_cost(flow, devices=devices), list[str]()
    float32 = planned = now
    operands = (value for node in flow.all_nodes() if node.site.name in MATMULS for value in node.reads[:2])
    dtypes = {value.aval.dtype.name for value in operands}
    half = next((dtype for dtype in ("bfloat16", "float16") if dtype in dtypes), "")
    if half:
        try:
            flow = _without_autocast(fun, args, kwargs)
        except Exception as error:  # the user's function may raise any error without autocast
            notes.append(f"the float32 program is the half program, widened: {reason(error)}")
        # Explicit half is widened to float32, and its casts are dropped.
        float32 = program_cost(flow, widened=True, devices=devices)
    if {"float32", "float64"} & dtypes:
        try:
            planned = program_cost(_under_autocast(fun, args, kwargs, half or "float16"), devices=devices)
        except Exception as error:  # autocast rejects some programs; the rest of the audit is still valid
            notes.append(f"autocast has no plan for it, so 'all in half' is the unchanged program: {reason(error)}")
    return Costs(float32, now, planned), notes


def _without_autocast(fun: Callable[..., Any], args: Any, kwargs: Any) -> Flow:
    with autocast_disabled():
        return flow_of(traced_call(fun, args, kwargs).jaxpr)


def _under_autocast(fun: Callable[..., Any], args: Any, kwargs: Any, half: str) -> Flow:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # They concern execution, and the program is only traced.
        return flow_of(traced_call(autocast(fun, f"mixed_{half}"), args, kwargs).jaxpr)


def program_cost(flow: Flow, widened: bool = False, devices: int = 1) -> ProgramCost:
    """The cost of a program on each device.

    Args:
        flow: The program.
        devices: Number of devices. Outside `shard_map`, work and arrays are assumed to be shared evenly.
        widened: Whether to count half arrays as float32 and drop casts between floating dtypes. This gives the float32
            program of one that was written in half.
    """
    read_whole = {v for node in flow.all_nodes() for i, v in enumerate(node.reads) if i > 0 or not _is_partial(node)}
    made_whole = {v for node in flow.nodes if not _is_partial(node) for v in node.writes}
    read = [value for value in flow.inputs if value in read_whole]
    written = [value for value in set(flow.outputs) if value in made_whole]
    outside = sum(_bytes(value, widened) for value in (*read, *written))
    return ProgramCost(tuple(_kernel_costs(flow, widened, devices)), outside // devices)


def _kernel_costs(flow: Flow, widened: bool, devices: int) -> Iterator[KernelCost]:
    """The kernels of a program when a compiler fuses all elementwise operations into their consumers.

    Matmuls, reductions, gathers and similar operations are kernels. So is an elementwise result that such a kernel
    needs in memory, that is an output, or that has several consumers and is smaller than its operands.

    Args:
        flow: The program, or a loop body or branch in it.
        widened, devices: As in `program_cost`.
    """
    same = _aliases(flow, widened)
    nodes = [node for node in flow.nodes if not same.keys() & set(node.writes)]
    reads = {id(node): [same.get(value, value) for value in node.reads] for node in nodes}
    made = {value for node in nodes for value in node.writes}
    readers = collections.Counter(value for node in nodes for value in set(reads[id(node)]))
    needed = made & {same.get(value, value) for value in flow.outputs}
    for node in nodes:
        if _is_root(node) and not _fuses_operands(node):
            needed.update(made.intersection(reads[id(node)]))

    sources: dict[Value, frozenset[Value]] = {}
    for node in nodes:
        read = frozenset().union(*(_in_memory(value, sources) for value in reads[id(node)]))
        for value in node.writes:
            root = _is_root(node)
            shared = readers[value] > 1 and sum(v.bytes for v in read) > value.bytes
            sources[value] = frozenset([value]) if root or shared or value in needed else read
            if not root and value in sources[value] and value.bytes:
                yield _kernel(node, read, (value,), widened, devices)
        if _is_entered(node):
            for inner in node.inner:
                yield from _kernel_costs(inner, widened, devices)
        elif _is_root(node):
            yield _kernel(node, read, node.writes, widened, devices)


def _aliases(flow: Flow, widened: bool) -> dict[Value, Value]:
    """The values that share memory with another value, or would if all floating dtypes were the same."""
    same: dict[Value, Value] = {}
    for node in flow.nodes:
        if node.site.name in _SAME or (widened and _is_cast(node)):
            same[node.writes[0]] = same.get(node.reads[0], node.reads[0])
    return same


def _in_memory(value: Value, sources: dict[Value, frozenset[Value]]) -> frozenset[Value]:
    """The arrays in memory that a value is computed from when it is read."""
    if value in sources:
        return sources[value]
    return frozenset([value]) if getattr(value.aval, "shape", ()) else frozenset()


def _is_root(node: Node) -> bool:
    return primitive(node.site.name).kernel


def _is_partial(node: Node) -> bool:
    """Whether a node reads or writes only a part of its first operand."""
    return node.site.name.startswith(_PARTIAL)


def _fuses_operands(node: Node) -> bool:
    return node.site.name.startswith(_REDUCTIONS) or _is_entered(node)


def _is_entered(node: Node) -> bool:
    """Whether a node's sub-jaxprs are programs of kernels, not the code of one kernel."""
    return bool(node.inner) and primitive(node.site.name).op is Op.ENTER


def _kernel(node: Node, reads: Iterable[Value], writes: Iterable[Value], widened: bool, devices: int) -> KernelCost:
    site = node.site
    dtype, precision = "", ""
    if site.flops:
        dtypes = [v.aval.dtype for v in node.reads[:2]]
        dtype = max(dtypes, key=lambda d: d.itemsize).name
        dtype = "float32" if widened and _is_half(dtype) else dtype
        found = str(site.eqn.params.get("precision"))
        precision = next((name for name in ("HIGHEST", "HIGH") if name in found), "")
    moved = sum(_bytes(value, widened) for value in (*reads, *writes))
    flops = site.flops // site.times if site.times else 0
    return KernelCost(site.times, flops, dtype, precision, moved, site.devices / devices)


def _is_cast(node: Node) -> bool:
    return node.site.name == "convert_element_type" and all(map(is_float, (*node.reads, *node.writes)))


def _bytes(value: Value, widened: bool) -> int:
    """A value's size in memory; with `widened`, half arrays count as float32."""
    if widened and value.bytes and _is_half(value.aval.dtype.name):
        return 4 * value.bytes // value.aval.dtype.itemsize
    return value.bytes


def _is_half(dtype: str) -> bool:
    return dtype in ("float16", "bfloat16") or dtype.startswith("float8")
