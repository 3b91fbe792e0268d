"""Kernels in JAX's profiler trace: their times, instructions and modules, their use of Tensor Cores; the wall time.

`jax.profiler` writes an XSpace (`*.xplane.pb`), and `jax.profiler.ProfileData` reads it without TensorFlow. On a GPU,
CUPTI records each kernel on its stream's line, with the HLO instruction that launched it in `hlo_op`. A kernel has the
stat `kernel_details`, and a copy `memcpy_details` (`xla/backends/profiler/gpu/cupti_collector.cc`). On a CPU, the
runtime records thunks with the stat `hlo_op`, but other threads may do their work: kernel times are not reliable.

XProf's library (`xprof` 2.24, formerly `tensorboard-plugin-profile`) can't replace this file. It reads the same XSpace
through the same `ProfileData` interface, and produces JSON tables of operations and kernels for its page. But it does
not relate host marks to device time, and its 32 MB wheel needs google-cloud-storage, duckdb and a web server.

A trace has no counter for the use of Tensor Cores, which would need Nsight Compute and its privileges. But libraries
include the instruction in a kernel's name. The names and their sources:

- `884`, `1688`, `16816` and so on are the shapes m·n·k of the `mma` instruction (PTX ISA, "Matrix multiply-accumulate
  operation using mma instruction") behind the accumulator's type: `volta_h884gemm`, `turing_fp16_s1688cudnn_fp16`,
  `ampere_bf16_s16816gemm_bf16_128x64`. XProf matches the same ones (`xprof/utils/kernel_stats_utils.cc`).
- `hmma`, `imma`, `wmma`, `wgmma`, `gmma`: the instructions themselves (SASS and PTX), as in
  `cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16`.
- `cutlass_80_tensorop_*`, `cutlass3x_sm90_tensorop_*`: CUTLASS's operator class for Tensor Cores. `simt` is the
  class for ordinary cores.
- `sm80_xmma_*_tensor16x8x16_*`, `sm90_xmma_*`: the generator of cuBLAS and cuDNN. It also generates float32 kernels for
  ordinary cores, with `ffma` in their names: `sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_*_ffma_*`.
- `nvjet_*`: cuBLAS on Hopper and newer, for Tensor Cores only.
- `flash_fwd_kernel`, `fmha_*`: FlashAttention's; its helpers `flash_bwd_dot_do_o` and `flash_bwd_convert_dq` are
  elementwise.
- `volta_sgemm_*`, `ampere_scudnn_*`, `gemv*`, `winograd`, `implicit_convolve_sgemm` and others are for ordinary cores.
- `first_layer_wgrad_kernel`, `conv2d_c1_k1`: cuDNN's on Volta, from XProf's list.

The names of XLA's Triton matmuls (`gemm_fusion_dot_3`) do not show the instruction. `tl.dot` compiles to an `mma` for
half and 8-bit operands, and for float32 operands if TF32 is allowed, on GPUs whose compute capability supports it
(CUDA C++ programming guide, "Compute capabilities").
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.profiler import ProfileData

from mpjax.inspection.profiling import hlo
from mpjax.inspection.reports import added_up, by_key, totals

MARK = "mpjax."  # Prefix of mpjax's own host annotations.
INPUT, DISPATCH, WAIT = "input", "dispatch", "wait"  # The annotations of the loop around a step.


@dataclasses.dataclass(frozen=True)
class Event:
    """One execution of a kernel.

    Args:
        name: The kernel's name; on a CPU the instruction's name.
        op: The HLO instruction that launched it; empty if the trace does not record it.
        program: The HLO module of that instruction; empty if the trace does not record it.
        start, end: Seconds since tracing began.
        device: The device's number.
        run: Identifies the execution of the program; 0 if the trace does not record it.
    """

    name: str
    op: str
    program: str
    start: float
    end: float
    device: int = 0
    run: int = 0

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Trace:
    """The kernels, transfers and host marks of a trace.

    Args:
        kernels: The kernels, by start time.
        transfers: Copies from the host outside all programs, as start and end in seconds.
        marks: The marked times of the host by name, as start and end in seconds.
        gpu: Whether the kernels ran on a GPU.
    """

    kernels: tuple[Event, ...]
    transfers: tuple[tuple[float, float], ...]
    marks: dict[str, list[tuple[float, float]]]
    gpu: bool


def mark(name: str) -> jax.profiler.TraceAnnotation:
    """A context manager that marks the host's time in a trace. It costs nothing if no trace is running."""
    return jax.profiler.TraceAnnotation(MARK + name)


def traced(run: Callable[[], None]) -> Trace:
    """The trace of a call."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls are not needed, and tracing them slows the host.
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory(prefix="mpjax_profile_") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        files = sorted(pathlib.Path(folder).glob("**/*.xplane.pb"))
        if not files:
            raise RuntimeError("jax.profiler wrote no trace (*.xplane.pb)")
        return read(ProfileData.from_file(str(files[0])))


def read(data: ProfileData) -> Trace:
    """The kernels and marks of a trace."""
    kernels: list[Event] = []
    transfers: list[tuple[float, float]] = []
    marks: dict[str, list[tuple[float, float]]] = {}
    thunks: list[Event] = []
    for plane in data.planes:
        if plane.name.startswith("/device:GPU:"):
            found, moved = _gpu_events(plane, int(plane.name.rsplit(":", 1)[1].split()[0]))
            kernels += found
            transfers += moved
        elif plane.name == "/host:CPU":
            thunks += _cpu_events(plane)
            for event in (event for line in plane.lines for event in line.events):
                if event.name.startswith(MARK):
                    marks.setdefault(event.name[len(MARK) :], []).append(_span(event))
    gpu = bool(kernels)
    events = sorted(kernels if gpu else thunks, key=lambda event: event.start)
    return Trace(tuple(events), tuple(transfers), {name: sorted(spans) for name, spans in marks.items()}, gpu)


def _span(event: Any) -> tuple[float, float]:
    return event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9


def _gpu_events(plane: Any, device: int) -> tuple[list[Event], list[tuple[float, float]]]:
    kernels, transfers = [], []
    # The plane's other lines summarize the events of the streams' lines.
    for line in (line for line in plane.lines if line.name.startswith("Stream")):
        for event in line.events:
            stats = dict(event.stats)
            moves = "memcpy_details" in stats or "memset_details" in stats
            if "kernel_details" in stats or (moves and "hlo_op" in stats):
                op, program = str(stats.get("hlo_op", "")), str(stats.get("hlo_module", "")).partition("(")[0]
                kernels.append(Event(event.name, op, program, *_span(event), device))
            elif event.name.startswith("MemcpyH2D"):
                transfers.append(_span(event))
    return kernels, transfers


def _cpu_events(plane: Any) -> Iterator[Event]:
    for event in (event for line in plane.lines for event in line.events):
        stats = dict(event.stats)
        if "hlo_op" in stats:
            place = int(stats.get("device_ordinal", 0)), int(stats.get("run_id", 0))
            yield Event(event.name, str(stats["hlo_op"]), str(stats.get("hlo_module", "")), *_span(event), *place)


Spans = Sequence[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted spans of time, merged where they touch.

    Example:
        >>> union([(3, 4), (0, 2), (1, 2.5)])
        [(0, 2.5), (3, 4)]
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def overlap(spans: Spans, others: Spans) -> float:
    """The overlap of the merged `spans` with the merged `others`, in seconds.

    Example:
        >>> overlap([(0, 2), (3, 5)], [(1, 4)])
        2.0
    """
    return max(0.0, float(length(spans) + length(others) - length(union([*spans, *others]))))


def length(spans: Spans) -> float:
    """The length of merged spans in seconds."""
    return sum(end - start for start, end in spans)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """All executions of a kernel for one instruction of the step.

    Args:
        name: The kernel's name; on a CPU the instruction's name.
        op: The HLO instruction; empty if neither the trace nor the name identifies it.
        kind: Matmul, convolution, attention, elementwise, reduction, copy, cast, collective, host callback, loop or
            branch, other.
        module: Module path from named scopes (Flax names modules this way); empty outside all modules.
        source: The source line, `file.py:12`.
        path: The source file, including mpjax's own files.
        backward: Whether it belongs to the backward pass.
        dtype: Operand dtypes of a matmul or convolution, in HLO's names (`f16`, `bf16`, `f32`).
        seconds: Device time in a step.
        calls: Executions in a step.
        tensor_cores: Whether it uses Tensor Cores; None on a CPU or if its name doesn't show it.
        why_not: The reason if a matmul or convolution does not use them.
        updates: Whether it runs outside the gradient of a step that takes one. Most such kernels are the optimizer's.
    """

    name: str
    op: str
    kind: str
    module: str
    source: str
    path: str
    backward: bool
    dtype: str
    seconds: float
    calls: float
    tensor_cores: bool | None
    why_not: str
    updates: bool = False

    @property
    def eligible(self) -> bool:
        """Whether this kind of work can use Tensor Cores."""
        return self.kind in hlo.ON_TENSOR_CORES


@dataclasses.dataclass(frozen=True)
class Split:
    """The wall time of a step, split into parts, in seconds. Each instant is counted once.

    Args:
        device: A kernel of the step is running.
        input: No kernel is running, and the host is fetching the next batch, or a batch is being copied to the device.
        dispatch: No kernel is running for any other reason: the host is enqueuing, or launches are too slow.
        compilation: No kernel is running, and the step is being recompiled.
    """

    device: float
    input: float
    dispatch: float
    compilation: float = 0.0

    @property
    def wall(self) -> float:
        """The wall time of a step."""
        return self.device + self.input + self.dispatch + self.compilation


@dataclasses.dataclass(eq=False, repr=False)
class Recording:
    """A trace of a step and its program.

    Args:
        trace: The trace of `steps` + 1 executions of the step. On each device, they do not overlap.
        text: The step's optimized HLO; empty if each execution runs several programs.
        steps: Number of executions that count. The first execution only fills the pipeline.
        compiled: For each execution, whether it was recompiled.

    Attributes:
        events: The kernels of the executions that count, ordered by their start.
        start: The end of the first execution, in seconds.
        instructions: The program's instructions, by name.
    """

    trace: Trace
    text: dataclasses.InitVar[str]
    steps: int
    compiled: Sequence[bool] = ()

    def __post_init__(self, text: str) -> None:
        program = hlo.HloModule(text)
        self.instructions = hlo.instructions(program)
        # Events without a recorded program are included.
        own = [event for event in self.trace.kernels if event.program in ("", program.name)]
        events = own if program.name and own else list(self.trace.kernels)
        dispatches = self.trace.marks.get(DISPATCH, [])
        if not program.name and len(dispatches) > 1:
            self.start = dispatches[0][1]
            self.events = [event for event in events if event.end > self.start]
        else:
            count = len(events) // (self.steps + 1)  # All have the same kernels.
            self.start = max((event.end for event in events[:count]), default=events[0].start if events else 0.0)
            self.events = events[count:]

    @property
    def hidden(self) -> float:
        """The share of a GPU's kernel time without a known instruction of the program.

        XLA launches most of a program as CUDA graphs (command buffers), whose kernels are recorded under the graph's
        name.
        """
        seconds = totals((event.op in self.instructions, event.seconds) for event in self.events if self.trace.gpu)
        return seconds.get(False, 0.0) / sum(seconds.values()) if seconds else 0.0

    @property
    def comparable(self) -> bool:
        """Whether kernels and host share a clock: the kernels that the host waited for lie within its marks."""
        ends = [end for spans in self.trace.marks.values() for _, end in spans]
        return bool(ends and self.events) and self.events[len(self.events) // 2].start <= max(ends)

    def split(self) -> Split:
        """Splits the time from `start` to the end of the last kernel, per execution."""
        trace, events, start, executions = self.trace, self.events, self.start, self.steps
        dispatches = trace.marks.get(DISPATCH, [])
        compiling = union(span for span, new in zip(dispatches, self.compiled, strict=False) if new)
        if not self.comparable:
            return self._by_host(compiling)
        device = max({event.device for event in events}, key=lambda d: sum(e.seconds for e in events if e.device == d))
        spans = _busy([event for event in events if event.device == device])
        busy = [(max(begin, start), end) for begin, end in spans if end > start]
        stop = max([busy[-1][1], *(end for _, end in dispatches)])
        ours = set(map(id, events))
        # A kernel of another program is that of an input pipeline that computes with JAX.
        others = [(event.start, event.end) for event in trace.kernels if id(event) not in ours and event.start >= start]
        fetching = union([*trace.marks.get(INPUT, ()), *trace.transfers, *others])
        edges = [start, *(edge for span in busy for edge in span), stop]
        idle = zip(edges[::2], edges[1::2], strict=True)
        seconds = length(busy)
        gaps = [gap for gap in idle if gap[1] > gap[0]]
        exposed, compilation = overlap(gaps, fetching), overlap(gaps, compiling)
        dispatch = stop - start - seconds - exposed - compilation
        return Split(*(part / executions for part in (seconds, exposed, dispatch, compilation)))

    def _by_host(self, compiling: Spans) -> Split:
        """The split by the host's times, which do not show overlap, for traces without comparable kernels."""
        spent = {name: length(union(spans)) for name, spans in self.trace.marks.items()}
        executions = self.steps + 1
        compilation = length(compiling) / executions
        device, fetching, dispatch = (spent.get(name, 0.0) / executions for name in (WAIT, INPUT, DISPATCH))
        return Split(device, fetching, dispatch - compilation, compilation)

    def kernels(self, gpu: bool, capability: float | None = None) -> tuple[Kernel, ...]:
        """The kernels of one execution on one device, summed by kernel and instruction, longest first.

        Args:
            gpu: Whether the events are from a GPU.
            capability: The GPU's compute capability.
        """
        by_kernel_name = {kernel_name(name): i for name, i in self.instructions.items()}
        has_gradient = any(instruction.differentiated for instruction in self.instructions.values())
        known = (self.instructions.get(e.op) or by_kernel_name.get(e.name, hlo.UNKNOWN) for e in self.events)
        times = added_up(
            ((event.name, instruction), (event.seconds, 1))
            for event, instruction in zip(self.events, known, strict=True)
            if instruction.kind != hlo.CONTROL  # A CPU's trace also has the kernels inside.
        )
        each = self.steps * len({event.device for event in self.events})
        kernels = []
        for (name, instruction), (seconds, calls) in times.items():
            kind = instruction.kind
            if instruction is hlo.UNKNOWN or (kind in hlo.ON_TENSOR_CORES and gpu):
                kind = work_of(name) or kind  # A library call may be several kernels.
            uses = uses_tensor_cores(name, instruction, capability) if gpu else None
            why_not = _why_not(instruction) if uses is False and kind in hlo.ON_TENSOR_CORES else ""
            updates = has_gradient and instruction is not hlo.UNKNOWN and not instruction.differentiated
            dtype = "/".join(sorted(instruction.dtypes))
            place = instruction.module, instruction.source, instruction.path, instruction.backward, dtype
            kernels.append(
                Kernel(name, instruction.name, kind, *place, seconds / each, calls / each, uses, why_not, updates)
            )
        return tuple(sorted(kernels, key=lambda kernel: -kernel.seconds))


def _busy(events: Sequence[Event]) -> list[tuple[float, float]]:
    """The times in which a device works. A CPU does so from the start to the end of a program."""
    runs = by_key((event.run or -i, event) for i, event in enumerate(events))
    return union((min(e.start for e in run), max(e.end for e in run)) for run in runs.values())


_ORDINARY = re.compile(
    r"simt|ffma|[sdh]gemm|[sh]cudnn|gemv|gemmsn|gemmk1|splitk_?reduce|flash_bwd_(dot_do_o|convert_dq)"
    r"|convolve_common_engine|implicit_convolve|winograd|fft2d|dgrad_engine|dgrad2d_alg|wgrad_alg|grouped_direct"
)
_TENSOR_CORES = re.compile(
    r"(?<![0-9])[a-z]?(884|1688|16816|16832|161616|8816|8832)(?![0-9])"
    r"|[hid]mma|[wg]mma|tensorop|tensor\d+x\d+x\d+|xmma_|nvjet"
    r"|flash_(fwd|bwd|fprop|bprop)|fmha"
    r"|first_layer_wgrad_kernel|conv2d_c1_k1"
)
_TRITON = re.compile(r"(nested_)?gemm_fusion|triton_gemm")
_WORK = (  # Helpers first: a library's matmul may consist of several kernels, only one of which is the matmul.
    (hlo.REDUCTION, re.compile(r"splitk_?reduce")),
    (hlo.COPY, re.compile(r"nchwtonhwc|nhwctonchw|tensortransform|tensor_transform")),
    (hlo.ELEMENTWISE, re.compile(r"flash_bwd_(dot_do_o|convert_dq)")),
    (hlo.ATTENTION, re.compile(r"flash|fmha|sdpa|mha_")),
    (hlo.CONVOLUTION, re.compile(r"conv(?!ert)|fprop|dgrad|wgrad|cudnn")),
    (hlo.MATMUL, re.compile(r"gemm|gemv|nvjet|matmul|_dot")),
)
# The first compute capability whose Tensor Cores support operands of this dtype (CUDA programming guide).
_SINCE = {"f16": 7.0, "s8": 7.2, "u8": 7.2, "bf16": 8.0, "f64": 8.0, "f8e4m3fn": 8.9, "f8e5m2": 8.9}
_TF32_SINCE = 8.0


def work_of(name: str) -> str:
    """The kind of work in a library kernel's name, as `Instruction.kind`; empty if unknown.

    Example:
        >>> work_of("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tensor16x8x16_g1__5x_cudnn")
        'convolution'
    """
    return next((kind for kind, pattern in _WORK if pattern.search(name.lower())), "")


def uses_tensor_cores(
    name: str, instruction: hlo.Instruction = hlo.UNKNOWN, capability: float | None = None
) -> bool | None:
    """Whether a GPU kernel runs on Tensor Cores.

    Args:
        name: The kernel's name in the trace.
        instruction: The HLO instruction that launched it, if known.
        capability: The GPU's compute capability, as 9.0; None if unknown, which assumes 9.0.

    Returns:
        True or False; None for matmuls, convolutions and attention whose name does not show it.

    Example:
        >>> uses_tensor_cores("ampere_fp16_s16816gemm_fp16_128x64_nn"), uses_tensor_cores("ampere_sgemm_128x64_nn")
        (True, False)
    """
    lower = name.lower()
    if _ORDINARY.search(lower):
        return False
    if _TENSOR_CORES.search(lower):
        return True
    if (work_of(name) or instruction.kind) not in hlo.ON_TENSOR_CORES:
        return False
    if instruction is hlo.UNKNOWN:
        return None
    if instruction.triton or _TRITON.match(lower):
        return all(takes(dtype, instruction.exact, capability) for dtype in instruction.dtypes or {"f32"})
    # Without Triton, XLA itself generates plain loops.
    return False if lower.startswith(kernel_name(instruction.name).lower()) else None


def kernel_name(instruction: str) -> str:
    """The name of the kernel that XLA generates for an instruction: `gemm_fusion_dot_3` for `gemm_fusion_dot.3`."""
    return re.sub(r"\W", "_", instruction)


def takes(dtype: str, exact: bool = False, capability: float | None = None) -> bool:
    """Whether Tensor Cores support operands of a dtype (in HLO's names). Float32 runs as TF32 unless `exact`."""
    since = _TF32_SINCE if dtype == "f32" and not exact else _SINCE.get(dtype, float("inf"))
    return since <= (9.0 if capability is None else capability)


def _why_not(instruction: hlo.Instruction) -> str:
    """Why a matmul or convolution is not on Tensor Cores, as far as its instruction shows."""
    if instruction is hlo.UNKNOWN:
        return "the trace does not name its operation"
    if "f32" in instruction.dtypes:
        return "float32 at precision=highest" if instruction.exact else "float32"
    if "f64" in instruction.dtypes:
        return "float64"
    return "the library chose a kernel without them: a small matmul, or dimensions that are not multiples of 8"
