"""Kernels and bytes moved of a compiled step, estimated from its optimised HLO; nothing runs.

Each instruction of the entry computation that does work is a kernel; an instruction of a loop's body is one kernel per
iteration. A kernel reads the needed part of each operand once and writes its results once. Repeated reads and
cache hits are not modelled.

The least time of a step is a bound: each kernel takes a launch and the longer of two times, that in which the device
can move its bytes, and that in which it can do the FLOPs of its matmuls and convolutions.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.inspection.devices import Device
from mpjax.inspection.profiling import hlo
from mpjax.inspection.profiling.hlo import HloModule, Line, iterations

# By name: XLA's opcodes.

_NO_KERNEL = frozenset("parameter constant bitcast tuple get-tuple-element after-all opt-barrier".split())
_SLICES = frozenset("slice dynamic-slice gather".split())
# The operand that is written into the first operand, whose buffer is the result's.
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# A layout in memory space 5 is in the host's memory, which costs the device none.
HOST = "S(5)"
# One with tiles and memory space 1 is in a TPU's vector memory, which costs no bandwidth.
ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{[^{}]*?(T\([^{}]*?S\(1\)|S\(5\))[^{}]*\})?")
# The positions of the source and of the copy among the arrays of its result; of an update, the array's and the slice's.
_COPIES = {
    "copy-start": (1, 0),
    "slice-start": (0, 1),
    "dynamic-slice-start": (0, -2),
    "dynamic-update-slice-start": (0, 1),
}
FLOAT8_CALLS = re.compile(r'custom_call_target="__(cublas\$lt\$matmul\$f8|cudnn\$blockScaledDot)"')
HALF = frozenset({"f16", "bf16"})
LAUNCH = 3e-6  # seconds, of a GPU. The kernels of a TPU are one program.
_NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A launched instruction: its runs per step, the bytes that one run reads and writes, and its FLOPs."""

    name: str
    times: int
    bytes: int
    flops: int = 0


def program_bytes(compiled: Any) -> int:
    """Device memory of a program in XLA's plan: arguments, results and temporaries; donated arguments count once.

    XLA's own figure for the peak has no temporaries on a CPU, and includes vector memory on a TPU.
    """
    plan = compiled.memory_analysis()
    total = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    return total - plan.alias_size_in_bytes


def bytes_moved(text: str) -> int:
    """The bytes that the kernels of a compiled program read and write."""
    program = HloModule(text)
    return bytes_of(kernels(program, program.entry))


def summary(text: str, device: Device, launch: float = LAUNCH) -> dict[str, Any]:
    """Kernels, bytes, matmuls (with convolutions and fused attention) and the least time of a compiled program."""
    program = HloModule(text)
    launched = kernels(program, program.entry)
    instructions = hlo.instructions(program)
    matmuls = [found for found in (instructions[k.name] for k in launched) if found.kind in hlo.ON_TENSOR_CORES]

    def least(kernel: Kernel) -> float:
        return max(kernel.bytes / device.bandwidth, kernel.flops / peak(instructions[kernel.name], device)) + launch

    return {
        "kernels": sum(kernel.times for kernel in launched),
        "bytes_moved": bytes_of(launched),
        "least_seconds": sum(kernel.times * least(kernel) for kernel in launched),
        "compiled_matmuls": len(matmuls),
        "half_matmuls": sum(bool(found.dtypes) and found.dtypes <= HALF for found in matmuls),
        "float8_matmuls": len(FLOAT8_CALLS.findall(text)),
        "float32_matmuls": sum("f32" in found.dtypes for found in matmuls),
    }


def peak(instruction: hlo.Instruction, device: Device) -> float:
    """The peak rate of a matmul or convolution, in FLOP/s."""
    dtypes = [_NAMES[dtype] for dtype in ("f64", "f32", "f16", "bf16") if dtype in instruction.dtypes]
    return device.peak(dtypes[0] if dtypes else "float16", "highest" if instruction.exact else "")


def bytes_of(launched: Iterable[Kernel]) -> int:
    return sum(kernel.times * kernel.bytes for kernel in launched)


def kernels(program: HloModule, computation: str) -> list[Kernel]:
    """The kernels of a computation.

    A loop with an unknown trip count counts as one iteration. A conditional counts as its branch that moves most bytes.
    """
    found: list[Kernel] = []
    lines = program.computations[computation]
    for line in lines.values():
        if line.opcode == "while":
            trips = iterations(program, line, lines)
            body = kernels(program, line.attribute(r"\bbody=%?([\w.\-]+)"))
            found += [dataclasses.replace(kernel, times=trips * kernel.times) for kernel in body]
        elif line.opcode in ("conditional", "call"):
            found += max((kernels(program, name) for name in line.called), key=bytes_of)
        elif line.opcode not in _NO_KERNEL and not line.opcode.endswith("-done"):
            parts = [(line, lines), *program.inside(line)]
            flops = sum(_flops(part, siblings) for part, siblings in parts)
            found.append(Kernel(line.name, 1, _bytes(program, lines, line), flops))
    return found


def _flops(line: Line, siblings: Mapping[str, Line]) -> int:
    """FLOPs of a matmul or convolution, where a multiply-add counts as two; 0 for any other line."""
    operands = [dimensions(siblings[name].type) for name in line.operands[:2] if name in siblings]
    labels, out = line.attribute(r"dim_labels=([\w?]+->\w+)"), dimensions(line.type)
    if labels and line.opcode == "convolution" and len(operands) == 2:
        return _convolution_flops(line, labels, operands, out)
    if labels and len(operands) == 2:
        kernel, result = operands[1], out
        if "BackwardFilter" in line.attributes:
            kernel, result = out, operands[1]
        elif "BackwardInput" in line.attributes:
            result = operands[0]
        features = kernel[labels.partition("_")[2].index("o")]
        return 2 * math.prod(result) * math.prod(kernel) // max(features, 1)
    contracted = line.attribute(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)").replace('"', "")
    if contracted and operands:
        return 2 * math.prod(out) * math.prod(operands[0][int(d)] for d in contracted.split(","))
    return 0


def _convolution_flops(line: Line, labels: str, operands: list[list[int]], out: list[int]) -> int:
    """FLOPs of a convolution, without multiplications by padding or between dilated elements.

    XLA for TPUs writes the batch of a matmul as a spatial dimension with a window as large, which visits one element of
    the batch at each position.
    """
    labelled = zip(re.split(r"_|->", labels), (*operands, out), strict=True)
    lhs, kernel, result = (dict(zip(names, sizes, strict=True)) for names, sizes in labelled)
    window = dict(part.split("=") for part in line.attribute(r"window=\{([^}]*)").split())
    multiplied = result["b"] * result["f"] * kernel["i"]
    for i, dimension in enumerate(sorted(set(kernel) - {"i", "o"})):
        stride, dilation, inner = (
            int(window[name].split("x")[i]) if name in window else 1 for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        low = int(window["pad"].split("x")[i].partition("_")[0]) if "pad" in window else 0
        starts = np.arange(result[dimension])[:, None] * stride - low
        places = starts + np.arange(kernel[dimension]) * inner
        inside = (places >= 0) & (places <= (lhs[dimension] - 1) * dilation) & (places % dilation == 0)
        multiplied *= int(inside.sum())
    return 2 * multiplied


def dimensions(hlo_type: str) -> list[int]:
    """The shape of an array, or of the first array of a tuple."""
    found = ARRAY.search(hlo_type)
    return [int(d) for d in found[3].split(",") if d] if found else []


def _bytes(program: HloModule, siblings: Mapping[str, Line], line: Line) -> int:
    if line.opcode in _COPIES:
        arrays = list(ARRAY.finditer(line.type))
        source, copy = (arrays[i] for i in _COPIES[line.opcode])
        return elements_size(copy) * ((not source[4]) + (not copy[4]))
    if line.is_fusion:
        lines = flat(program, line.called[0])
        root, sources = list(lines.values())[-1], [x for x in lines.values() if x.opcode == "parameter"]
    else:
        root, sources = line, [siblings[name] for name in dict.fromkeys(line.operands)]
        lines = {x.name: x for x in (*sources, root)}
    results = [lines[name] for name in root.operands] if root.opcode == "tuple" else [root]
    updates = [_in_place(lines, result, sources) for result in results]
    needed = _needed(lines, results, {update.name for update in updates if update})
    read = sum(needed[source.name] * size(source.type) for source in sources)
    written = sum(
        size(lines[update.operands[UPDATES[update.opcode]]].type if update else result.type)
        for result, update in zip(results, updates, strict=True)
    )
    return math.ceil(read) + written


def flat(program: HloModule, computation: str) -> dict[str, Line]:
    """The lines of a fusion's computation, with those of fusions inside it, as XLA for TPUs nests them."""
    lines: dict[str, Line] = {}
    known: dict[str, str] = {}  # the names of other lines by those of fusions and of their parameters
    for line in program.computations[computation].values():
        line = dataclasses.replace(line, operands=tuple(known.get(name, name) for name in line.operands))
        if not line.is_fusion:
            lines[line.name] = line
            continue
        for inner in flat(program, line.called[0]).values():
            known[inner.name] = f"{line.name}/{inner.name}"
            if inner.opcode == "parameter":
                known[inner.name] = line.operands[inner.number]
                continue
            operands = tuple(known[name] for name in inner.operands)
            lines[known[inner.name]] = dataclasses.replace(inner, name=known[inner.name], operands=operands)
        known[line.name] = known[inner.name]
    return lines


def _in_place(lines: Mapping[str, Line], result: Line, sources: list[Line]) -> Line | None:
    """The operand that updates part of a source in the source's own buffer."""
    update = source_of(lines, result)
    if update.opcode in UPDATES and source_of(lines, lines[update.operands[0]]) in sources:
        return update
    return None


def source_of(lines: Mapping[str, Line], line: Line, passing: Sequence[str] = ("bitcast",)) -> Line:
    """The line whose value this is, before instructions that only pass it on."""
    while line.opcode in passing and line.operands and line.operands[0] in lines:
        line = lines[line.operands[0]]
    return line


def _needed(lines: Mapping[str, Line], results: list[Line], in_place: set[str]) -> Mapping[str, float]:
    """The share of each value that the results need, propagated backwards from the results."""
    needed: dict[str, float] = collections.defaultdict(float)
    for result in results:
        needed[result.name] = 1.0
    for line in reversed(list(lines.values())):
        for position, name in enumerate(line.operands):
            if name not in lines:
                continue
            share = needed[line.name]
            if position == 0 and line.opcode in _SLICES:
                share *= size(line.type) / max(size(lines[name].type), 1)
            elif position == 0 and line.name in in_place:
                # A scatter reads the elements that it adds to; a dynamic update of a slice only writes.
                read = size(lines[line.operands[2]].type) if line.opcode == "scatter" else 0
                share = read / max(size(lines[name].type), 1)
            needed[name] = min(1.0, needed[name] + share)
    return needed


def size(hlo_type: str) -> int:
    """Bytes of an array, or of all arrays of a tuple, by its type in HLO.

    Example:
        >>> size("(f16[2,3]{1,0}, pred[4]{0})")
        16
    """
    return sum(elements_size(array) for array in ARRAY.finditer(hlo_type) if not array[4])


def elements_size(array: re.Match[str]) -> int:
    return math.prod(int(d) for d in array[3].split(",") if d) * (int(array[2] or 8) // 8)
