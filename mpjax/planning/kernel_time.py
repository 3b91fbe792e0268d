"""The time of a compiled step on a GPU, kernel by kernel, from bytes, FLOPs and machine code; nothing runs.

    seconds = 3 µs + few × max(bytes / (0.75 × bandwidth), work)
    few     = 2 if registers and shared memory leave room for fewer than 16 warps on a multiprocessor, else 1
    work    = warps × cycles of the busiest pipe / (0.8 × 4 × multiprocessors × clock)        kernels that XLA generates
              FLOPs / (share × peak rate)                            matmuls, convolutions and cuDNN's attention

The shares of bandwidth and issue rate and the factor are fitted to five steps of GPT-2 medium on an H200: they give the
time of their kernels without Tensor Cores within 5%, and within 8% that of steps of BERT-base and ResNet-50, to which
nothing was fitted. The shares of the peak rates are fitted to all ten, and give that of the other kernels within 7%:
XLA tunes matmuls on the device, and a program that is compiled without one is not tuned. Whole steps are within 5%.

Not modelled: contended atomics (a scatter-add in bfloat16 into two rows made a step of 48 ms one of 121), cache hits,
work of the host, collectives, and time in which kernels overlap. Other GPUs were not measured.
"""

from __future__ import annotations

import collections
import math
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

from mpjax.inspection.profiling import hlo
from mpjax.inspection.profiling.hlo import HloModule, Line
from mpjax.planning.executable import NO_DISASSEMBLER, Code, Launch, codes, disassembler, launches
from mpjax.planning.target import Gpu, Target
from mpjax.planning.traffic import LAUNCH, Kernel, dimensions, kernels, peak

ACCURACY = "the model of kernels gave ten steps on an H200 within 5%; no other GPU was measured"
UNREADABLE = (
    "no time of kernels: the executables of this version of JAX do not list their launches (JAX 0.12's do), or "
    "nvdisasm does not know the device"
)

_BANDWIDTH, _ISSUE, _FEW = 0.75, 0.8, 2.0
_FEWEST_WARPS = 16
# The share of the peak rate that matmuls (of float32: in TF32), convolutions and cuDNN's attention reach.
_SHARES = {hlo.MATMUL: 0.8, hlo.CONVOLUTION: 0.55, hlo.ATTENTION: 0.43}
_SHARE_OF_FLOAT32 = 0.6
# Cycles for which an instruction of a warp takes its pipe, of a quarter of a multiprocessor; others take 1, of any.
# Source: the throughput of arithmetic instructions in the CUDA C++ programming guide, for 8.0 and 9.0.
_PIPES = {
    2: "LOP3 SEL ISETP PRMT SHF IADD3 FMNMX HMNMX2 VIADD LEA FSETP FSEL VIMNMX HSETP2 PLOP3 IABS VHMNMX F2FP I2FP",
    4: "SHFL LDS STS LDSM STSM LDG STG LDL STL RED ATOM ATOMG ATOMS",
    8: "MUFU F2F I2F F2I FRND POPC FLO",
}
_CYCLES = {opcode: cycles for cycles, opcodes in _PIPES.items() for opcode in opcodes.split()}


class Timed(NamedTuple):
    """A kernel of a step.

    Args:
        kernel: Its name, runs, bytes and FLOPs.
        seconds: The time of one run.
        launch: Its launch; None for kernels of libraries, and copies.
    """

    kernel: Kernel
    seconds: float
    launch: Launch | None


def unavailable(target: Target | None) -> str:
    """Why the kernels of a step compiled for a device can't be timed; empty if they can."""
    if target is None or target.gpu is None or target.rates is None:
        return "there is no model of the time of kernels for this device"
    return "" if disassembler() else f"no time of kernels: {NO_DISASSEMBLER}"


def timed(text: str, serialised: bytes, target: Target) -> list[Timed]:
    """The time of each kernel of a compiled step; empty if it is `UNREADABLE`.

    Args:
        text: Its optimised HLO.
        serialised: `compiled.runtime_executable().serialize()`.
        target: The GPU that it was compiled for, for which `unavailable` is empty.
    """
    assert target.gpu is not None
    assert target.rates is not None
    found = {launch.name: launch for launch in launches(serialised)}
    if not found:
        return []
    try:
        read = codes((launch.cubin for launch in found.values()), target.gpu.capability)
    except subprocess.CalledProcessError:
        return []
    program = HloModule(text)
    instructions = hlo.instructions(program)
    lines = {name: line for computation in program.computations.values() for name, line in computation.items()}
    rows: list[Timed] = []
    for kernel in kernels(program, program.entry):
        launch = found.get(kernel.name)
        instruction = instructions[kernel.name]
        if instruction.kind in _SHARES:
            flops = kernel.flops or _attention_flops(lines[kernel.name])
            share = min(_SHARES[instruction.kind], _SHARE_OF_FLOAT32 if "f32" in instruction.dtypes else 1.0)
            work, few = flops / (share * peak(instruction, target.rates)), False
        else:
            work = _seconds_of_code(kernel, launch, read[launch.cubin], target.gpu) if launch else 0.0
            few = launch is not None and warps_per_core(launch, target.gpu) < _FEWEST_WARPS
        moving = kernel.bytes / (_BANDWIDTH * target.rates.bandwidth)
        rows.append(Timed(kernel, max(moving, work) * (_FEW if few else 1.0) + LAUNCH, launch))
    return rows


def seconds_of(rows: Iterable[Timed]) -> float:
    """The time of a step: of all runs of its kernels, one after another."""
    return sum(row.kernel.times * row.seconds for row in rows)


def warps_per_core(launch: Launch, gpu: Gpu) -> int:
    """The warps of a launch that fit on a multiprocessor of a GPU at once.

    Example:
        >>> launch = Launch("fusion", 8192, 256, registers=168, stack=0, shared=128, cubin=b"")
        >>> warps_per_core(launch, Gpu("9.0", 132, 1.83, 50 * 2**20))
        8
    """
    warps = -(-launch.threads // 32)
    rounded = -(-max(launch.registers, 1) // 8) * 8  # Registers are given to a warp in units of 256.
    of_shared = (gpu.shared + 1024) // (launch.shared + 1024)  # CUDA takes 1 KiB of each block.
    return warps * max(1, min(65536 // (32 * rounded * warps), gpu.threads // (32 * warps), of_shared, 32))


def _seconds_of_code(kernel: Kernel, launch: Launch, code: Code, gpu: Gpu) -> float:
    """The time in which the multiprocessors issue a kernel's instructions."""
    counts = collections.Counter(code.opcodes)
    pipes = [sum(cycles * counts[name] for name, of in _CYCLES.items() if of == cycles) for cycles in _PIPES]
    # A loop is run as often as it takes to move the kernel's bytes.
    once = launch.blocks * launch.threads * code.moved
    passes = max(1.0, kernel.bytes / once) if code.loops and once else 1.0
    return launch.warps * passes * max(len(code.opcodes), *pipes) / (_ISSUE * 4 * gpu.cores * gpu.clock * 1e9)


def _attention_flops(line: Line) -> int:
    """FLOPs of cuDNN's attention, all scores: two matmuls of queries and keys forward, and five backward.

    XLA gives the operands as `[batch, length, heads, width]`.
    """
    shapes = line.attribute(r"operand_layout_constraints=\{(.*?\})\}").split("}, ")
    queries, keys = (dimensions(shape) for shape in shapes[:2])
    return (10 if "Backward" in line.attributes else 4) * math.prod(queries) * keys[1]
