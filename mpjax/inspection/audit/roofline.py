"""What half precision can gain at most: a program's FLOPs and bytes, in float32 and in half, against peak rates."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator

from mpjax._jaxpr.interpreter import is_float
from mpjax._jaxpr.primitives import primitive
from mpjax.inspection.audit.dataflow import Flow, Node, Value
from mpjax.inspection.devices import Device

_REDUCTIONS = ("reduce_", "cum", "arg", "select_and")
# Their result is their first operand, in the same memory.
_SAME = ("reshape", "squeeze", "expand_dims", "copy", "detached", "lent", "matmul_result")
_PARTIAL = ("gather", "dynamic_slice", "scatter", "dynamic_update_slice")


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """One kernel of a program in which all elementwise work is fused.

    Args:
        times: how often it runs.
        flops: of a matmul or convolution, once; 0 for others.
        dtype, precision: of the matmul.
        bytes: what it reads and writes, once.
        part: the share that is one device's, where several do it together.
    """

    times: int
    flops: int
    dtype: str
    precision: str
    bytes: int
    part: float = 1.0

    def seconds(self, device: Device) -> float:
        """The least time that it takes."""
        return max(self.arithmetic_seconds(device), self.part * self.times * (self.bytes / device.bandwidth))

    def arithmetic_seconds(self, device: Device) -> float:
        """The least time of its arithmetic alone."""
        once = self.flops / device.peak(self.dtype, self.precision) if self.flops else 0.0
        return self.part * self.times * once


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """A program's kernels, and what every way to run it has to read and write.

    Args:
        kernels: with all elementwise work fused into what reads it, and nothing else.
        bytes: its arguments and results. All other arrays could be fused away, as fused attention does.
    """

    kernels: tuple[KernelCost, ...]
    bytes: int

    def seconds(self, device: Device) -> float:
        """The roofline: each kernel waits for its arithmetic or for memory."""
        return sum(kernel.seconds(device) for kernel in self.kernels)

    def least(self, device: Device) -> float:
        """The time that nothing can beat, however much is fused: all matmuls at peak rate, or arguments and results."""
        arithmetic = sum(kernel.arithmetic_seconds(device) for kernel in self.kernels)
        return max(arithmetic, self.bytes / device.bandwidth)


@dataclasses.dataclass(frozen=True)
class Costs:
    """One call as three programs: in float32, as it is, and as autocast plans it in half."""

    float32: ProgramCost
    now: ProgramCost
    half: ProgramCost


@dataclasses.dataclass(frozen=True)
class SpeedupBound:
    """What half precision can gain on a device; `PrecisionReport.speedup_bound` says what T and L are.

    Args:
        device: its name.
        float32: T of the program in float32, or its measured time; in seconds.
        now: T of the program as it is.
        half: T of the program as autocast plans it.
        least_float32: L in float32, or the measured time.
        least_now, least_half: L of the other two, which nothing can beat.
        matmul_share: the share of T in float32 that matmuls and convolutions take; Amdahl's parallel fraction.
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
        """How much faster than in float32 the program is as it is, with elementwise work fused in both."""
        return _ratio(self.float32, self.now)

    @property
    def limit(self) -> float:
        """`speedup` with all in half, as autocast plans it."""
        return _ratio(self.float32, self.half)

    @property
    def interval(self) -> tuple[float, float]:
        """The speedup as it is, between elementwise work fused and everything fused, in both programs alike."""
        return _interval(self.speedup, _ratio(self.least_float32, self.least_now))

    @property
    def limit_interval(self) -> tuple[float, float]:
        """`interval` with all in half."""
        return _interval(self.limit, _ratio(self.least_float32, self.least_half))


def _ratio(float32: float, other: float) -> float:
    return float32 / other if other else 1.0


def _interval(one: float, other: float) -> tuple[float, float]:
    return min(one, other), max(one, other)


def speedup_bound(costs: Costs, device: Device, float32_seconds: float | None = None) -> SpeedupBound:
    """The bound of a program.

    Args:
        costs: of it.
        device: what it runs on.
        float32_seconds: the measured time of the program in float32; None for its roofline.
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


def program_cost(flow: Flow, widened: bool = False, devices: int = 1) -> ProgramCost:
    """The cost of a program on each device.

    Args:
        flow: the program.
        devices: how many run it. Outside of `shard_map` they are taken to share all work and all arrays evenly.
        widened: whether half arrays are float32 and casts between floating dtypes are nothing: the float32 program of
            one that was written in half.
    """
    read_whole = {v for node in flow.all_nodes() for i, v in enumerate(node.reads) if i > 0 or not _is_partial(node)}
    made_whole = {v for node in flow.nodes if not _is_partial(node) for v in node.writes}
    read = [value for value in flow.inputs if value in read_whole]
    written = [value for value in set(flow.outputs) if value in made_whole]
    outside = sum(_bytes(value, widened) for value in (*read, *written))
    return ProgramCost(tuple(_kernel_costs(flow, widened, devices)), outside // devices)


def _kernel_costs(flow: Flow, widened: bool, devices: int) -> Iterator[KernelCost]:
    """The kernels of a program when a compiler fuses all elementwise work into what reads it.

    A matmul, a reduction, a gather and the like is a kernel; so is an elementwise result that one of them needs in
    memory, that goes out, or that several read and that is smaller than what it is made of.

    Args:
        flow: the program, or the body of a loop or a branch in it.
        widened, devices: as in `program_cost`.
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
        if node.inner:
            for inner in node.inner:
                yield from _kernel_costs(inner, widened, devices)
        elif _is_root(node):
            yield _kernel(node, read, node.writes, widened, devices)


def _aliases(flow: Flow, widened: bool) -> dict[Value, Value]:
    """The values that are others in the same memory, or would be if floating dtypes were one."""
    same: dict[Value, Value] = {}
    for node in flow.nodes:
        if node.site.name in _SAME or (widened and _is_cast(node)):
            same[node.writes[0]] = same.get(node.reads[0], node.reads[0])
    return same


def _in_memory(value: Value, sources: dict[Value, frozenset[Value]]) -> frozenset[Value]:
    """The arrays that a value is computed from when it is read."""
    if value in sources:
        return sources[value]
    return frozenset([value]) if getattr(value.aval, "shape", ()) else frozenset()


def _is_root(node: Node) -> bool:
    return primitive(node.site.name).kernel


def _is_partial(node: Node) -> bool:
    """Whether a node reads or writes a part of its first operand only."""
    return node.site.name.startswith(_PARTIAL)


def _fuses_operands(node: Node) -> bool:
    return node.site.name.startswith(_REDUCTIONS) or bool(node.inner)


def _kernel(node: Node, reads: Iterable[Value], writes: Iterable[Value], widened: bool, devices: int) -> KernelCost:
    site = node.site
    dtype, precision = "", ""
    if site.flops:
        dtypes = [v.aval.dtype for v in node.reads[:2]]
        dtype = max(dtypes, key=lambda d: d.itemsize).name
        dtype = "float32" if widened and _is_half(dtype) else dtype
        precision = "HIGHEST" if "HIGHEST" in str(site.eqn.params.get("precision")) else ""
    moved = sum(_bytes(value, widened) for value in (*reads, *writes))
    flops = site.flops // site.times if site.times else 0
    return KernelCost(site.times, flops, dtype, precision, moved, site.devices / devices)


def _is_cast(node: Node) -> bool:
    return node.site.name == "convert_element_type" and all(map(is_float, (*node.reads, *node.writes)))


def _bytes(value: Value, widened: bool) -> int:
    """Its size in memory; of half arrays, if these are widened, in float32."""
    if widened and value.bytes and _is_half(value.aval.dtype.name):
        return 4 * value.bytes // value.aval.dtype.itemsize
    return value.bytes


def _is_half(dtype: str) -> bool:
    return dtype in ("float16", "bfloat16") or dtype.startswith("float8")
