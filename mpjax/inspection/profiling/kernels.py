"""Kernels of a trace: whether they use Tensor Cores, their times by instruction and module, and the step's wall time.

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
import re
from collections.abc import Mapping, Sequence

from mpjax.inspection.profiling import hlo, profiler_trace, stepping
from mpjax.inspection.profiling.profiler_trace import Event, Trace
from mpjax.inspection.reports import added_up, by_key


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


def of_program(trace: Trace, program: str) -> list[Event]:
    """The events of one program. Events without a recorded program are included."""
    own = [event for event in trace.kernels if event.program in ("", program)]
    return own if program and own else list(trace.kernels)


def after_first(trace: Trace, events: Sequence[Event], executions: int, program: str) -> tuple[list[Event], float]:
    """The events of all executions except the first, and the end of the first.

    Args:
        trace: The trace, with the host's marks.
        events: The events, ordered by their start.
        executions: Number of executions on each device. They do not overlap.
        program: The program whose events these are; empty if each execution runs several.
    """
    dispatches = trace.marks.get(stepping.DISPATCH, [])
    if not program and len(dispatches) > 1:
        start = dispatches[0][1]
        return [event for event in events if event.end > start], start
    count = len(events) // executions  # All have the same kernels.
    start = max((event.end for event in events[:count]), default=events[0].start if events else 0.0)
    return [*events[count:]], start


def split(trace: Trace, events: Sequence[Event], start: float, executions: int, compiled: Sequence[bool] = ()) -> Split:
    """Splits the time from `start` to the end of the last kernel, per execution.

    Args:
        trace: The trace, with the host's marks.
        events: The kernels of the executions.
        start: The end of the previous kernels, in seconds.
        executions: Number of executions.
        compiled: Whether each call of the step compiled, including the first call.
    """
    dispatches = trace.marks.get(stepping.DISPATCH, [])
    compiling = profiler_trace.union(span for span, new in zip(dispatches, compiled, strict=False) if new)
    if not events or not comparable(trace, events):
        return _by_host(trace, executions, compiling)
    device = max({event.device for event in events}, key=lambda d: sum(e.seconds for e in events if e.device == d))
    spans = _busy([event for event in events if event.device == device])
    busy = [(max(begin, start), end) for begin, end in spans if end > start]
    stop = max([busy[-1][1], *(end for _, end in dispatches)])
    ours = set(map(id, events))
    # A kernel of another program is that of an input pipeline that computes with JAX.
    others = [(event.start, event.end) for event in trace.kernels if id(event) not in ours and event.start >= start]
    fetching = profiler_trace.union([*trace.marks.get(stepping.INPUT, ()), *trace.transfers, *others])
    edges = [start, *(edge for span in busy for edge in span), stop]
    idle = zip(edges[::2], edges[1::2], strict=True)
    seconds = profiler_trace.length(busy)
    gaps = [gap for gap in idle if gap[1] > gap[0]]
    exposed, compilation = profiler_trace.overlap(gaps, fetching), profiler_trace.overlap(gaps, compiling)
    dispatch = stop - start - seconds - exposed - compilation
    return Split(*(part / executions for part in (seconds, exposed, dispatch, compilation)))


def comparable(trace: Trace, events: Sequence[Event]) -> bool:
    """Whether kernels and host share a clock: the kernels that the host waited for lie within its marks."""
    ends = [end for spans in trace.marks.values() for _, end in spans]
    return bool(ends) and events[len(events) // 2].start <= max(ends)


def _by_host(trace: Trace, executions: int, compiling: profiler_trace.Spans) -> Split:
    """The split by the host's times, which do not show overlap, for traces without comparable kernels."""
    spent = {name: profiler_trace.length(profiler_trace.union(spans)) for name, spans in trace.marks.items()}
    compilation = profiler_trace.length(compiling) / (executions + 1)
    names = stepping.WAIT, stepping.INPUT, stepping.DISPATCH
    device, fetching, dispatch = (spent.get(name, 0.0) / (executions + 1) for name in names)
    return Split(device, fetching, dispatch - compilation, compilation)


def _busy(events: Sequence[Event]) -> list[tuple[float, float]]:
    """The times in which a device works. A CPU does so from the start to the end of a program."""
    runs = by_key((event.run or -i, event) for i, event in enumerate(events))
    return profiler_trace.union((min(e.start for e in run), max(e.end for e in run)) for run in runs.values())


def summed(
    events: Sequence[Event],
    instructions: Mapping[str, hlo.Instruction],
    executions: int,
    gpu: bool,
    capability: float | None = None,
) -> tuple[Kernel, ...]:
    """The kernels of one execution on one device, summed by kernel and instruction, longest first.

    Args:
        events: The program's events.
        instructions: The program's instructions, by name.
        executions: Number of executions in the events.
        gpu: Whether the events are from a GPU.
        capability: The GPU's compute capability.
    """
    by_kernel_name = {kernel_name(name): i for name, i in instructions.items()}
    has_gradient = any(instruction.differentiated for instruction in instructions.values())
    known = [instructions.get(event.op) or by_kernel_name.get(event.name, hlo.UNKNOWN) for event in events]
    times = added_up(
        ((event.name, instruction), (event.seconds, 1))
        for event, instruction in zip(events, known, strict=True)
        if instruction.kind != hlo.CONTROL  # A CPU's trace also has the kernels inside.
    )
    each = executions * len({event.device for event in events})
    kernels = []
    for (name, instruction), (seconds, calls) in times.items():
        kind = instruction.kind
        if instruction is hlo.UNKNOWN or (kind in hlo.ON_TENSOR_CORES and gpu):
            kind = work_of(name) or kind  # A library call may be several kernels.
        uses = uses_tensor_cores(name, instruction, capability) if gpu else None
        why_not = _why_not(instruction) if uses is False and kind in hlo.ON_TENSOR_CORES else ""
        updates = has_gradient and instruction is not hlo.UNKNOWN and not instruction.differentiated
        place = instruction.module, instruction.source, instruction.path, instruction.backward
        dtype = "/".join(sorted(instruction.dtypes))
        kernels.append(
            Kernel(name, instruction.name, kind, *place, dtype, seconds / each, calls / each, uses, why_not, updates)
        )
    return tuple(sorted(kernels, key=lambda kernel: -kernel.seconds))


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
