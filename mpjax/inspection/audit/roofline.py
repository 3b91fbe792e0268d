"""How fast a program can be at most: its kernels' FLOPs and bytes against a device's peak rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import primitive
from mpjax.inspection.audit.dataflow import INPUT, Flow, Node, Value
from mpjax.inspection.devices import Device

_REDUCTIONS = ("reduce_", "cum", "arg", "select_and")


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """One kernel of a program in which all elementwise work is fused.

    Args:
        times: how often it runs.
        flops: of a matmul or convolution, once; 0 for others.
        dtype, precision: of the matmul.
        half: bytes of half arrays inside the program that it reads and writes, once.
        full: bytes of such float32 arrays.
        fixed: bytes of everything else: whole numbers, and the program's own inputs and outputs.
    """

    times: int
    flops: int
    dtype: str
    precision: str
    half: int
    full: int
    fixed: int

    def seconds(self, device: Device) -> float:
        """The least time that it takes as it is."""
        return self._seconds(device, self.dtype, self.half + self.full + self.fixed)

    def seconds_float32(self, device: Device) -> float:
        """The least time with float32 in place of half."""
        return self._seconds(
            device, "float32" if self.dtype != "float64" else "float64", 2 * self.half + self.full + self.fixed
        )

    def seconds_half(self, device: Device) -> float:
        """The least time with half in place of float32, but for the program's inputs and outputs."""
        return self._seconds(device, "float16", self.half + self.full // 2 + self.fixed, "")

    def _seconds(self, device: Device, dtype: str, moved: int, precision: str | None = None) -> float:
        peak = device.peak(dtype, self.precision if precision is None else precision)
        return self.times * max(self.flops / peak, moved / device.bandwidth)


@dataclasses.dataclass(frozen=True)
class SpeedupBound:
    """What half precision can gain at most on a device.

        T = Σ over kernels of max(FLOPs / peak FLOP/s of the dtype, bytes / memory bandwidth)

    Args:
        device: its name.
        float32: T with every half array in float32, in seconds.
        now: T of the program as it is.
        half: T with every float32 array inside the program in half.
        matmul_share: the share of `float32` that matmuls and convolutions take; Amdahl's parallel fraction.
    """

    device: str
    float32: float
    now: float
    half: float
    matmul_share: float

    @property
    def speedup(self) -> float:
        """How much faster than in float32 the program can be as it is."""
        return self.float32 / self.now if self.now else 1.0

    @property
    def limit(self) -> float:
        """How much faster than in float32 it can be with all in half."""
        return self.float32 / self.half if self.half else 1.0


def speedup_bound(kernels: Iterable[KernelCost], device: Device) -> SpeedupBound:
    """The bound of a program of these kernels."""
    kernels = tuple(kernels)
    float32 = sum(kernel.seconds_float32(device) for kernel in kernels)
    now = sum(kernel.seconds(device) for kernel in kernels)
    half = sum(kernel.seconds_half(device) for kernel in kernels)
    matmuls = sum(kernel.seconds_float32(device) for kernel in kernels if kernel.flops)
    return SpeedupBound(device.name, float32, now, half, matmuls / float32 if float32 else 0.0)


def kernel_costs(flow: Flow, results: frozenset[Value] | None = None) -> Iterator[KernelCost]:
    """The kernels of a program when a compiler fuses all elementwise work into what reads it.

    A matmul, a reduction, a gather and the like is a kernel; so is an elementwise result that one of them needs in
    memory, that goes out, or that several read and that is smaller than what it is made of.

    Args:
        flow: the program.
        results: what the whole program returns, where `flow` is the body of a loop or a branch in it.
    """
    results = frozenset(flow.outputs) if results is None else results
    makers = {value: node for node in flow.nodes for value in node.writes}
    readers: dict[Value, int] = {}
    needed = {value for value in flow.outputs if value in makers}
    for node in flow.nodes:
        for value in set(node.reads):
            readers[value] = readers.get(value, 0) + 1
        if _is_root(node) and not _fuses_operands(node):
            needed.update(value for value in node.reads if value in makers)

    sources: dict[Value, frozenset[Value]] = {}
    for node in flow.nodes:
        read = frozenset().union(*(_in_memory(value, sources) for value in node.reads))
        for value in node.writes:
            root = _is_root(node)
            shared = readers.get(value, 0) > 1 and sum(v.bytes for v in read) > value.bytes
            sources[value] = frozenset([value]) if root or shared or value in needed else read
            if not root and value in sources[value] and value.bytes:
                yield _kernel(node, read, (value,), results)
        if node.inner:
            for inner in node.inner:
                yield from kernel_costs(inner, results)
        elif _is_root(node):
            yield _kernel(node, read, node.writes, results)


def _in_memory(value: Value, sources: dict[Value, frozenset[Value]]) -> frozenset[Value]:
    """The arrays that a value is computed from when it is read."""
    if value in sources:
        return sources[value]
    return frozenset([value]) if getattr(value.aval, "shape", ()) else frozenset()


def _is_root(node: Node) -> bool:
    return primitive(node.site.name).kernel


def _fuses_operands(node: Node) -> bool:
    return node.site.name.startswith(_REDUCTIONS) or bool(node.inner)


def _kernel(node: Node, reads: Iterable[Value], writes: Iterable[Value], results: frozenset[Value]) -> KernelCost:
    site = node.site
    sizes = {"half": 0, "full": 0, "fixed": 0}
    for value in (*reads, *writes):
        sizes[_class(value, results)] += value.bytes
    dtype, precision = "", ""
    if site.flops:
        dtypes = [v.aval.dtype for v in node.reads[:2]]
        dtype = max(dtypes, key=lambda d: d.itemsize).name
        precision = "HIGHEST" if "HIGHEST" in str(site.eqn.params.get("precision")) else ""
    return KernelCost(site.times, site.flops // site.times if site.times else 0, dtype, precision, **sizes)


def _class(value: Value, results: frozenset[Value]) -> str:
    if not compat.is_shaped(value.aval) or value.kind == INPUT or value in results:
        return "fixed"
    return {"float32": "full", "float16": "half", "bfloat16": "half"}.get(value.aval.dtype.name, "fixed")
