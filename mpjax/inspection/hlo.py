"""What a compiled program says of its instructions: module path, source line, kind of work.

Read from the text of the optimized HLO (`jax.stages.Compiled.as_text`), whose metadata XLA keeps through fusion.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping

from mpjax.casting.classify import MARK

MATMUL, CONVOLUTION, ATTENTION = "matmul", "convolution", "attention"
CAST, COPY, REDUCTION, ELEMENTWISE, COLLECTIVE, OTHER = (
    "cast",
    "copy",
    "reduction",
    "elementwise",
    "collective",
    "other",
)
CONTROL = "loop or branch"

# Work that Tensor Cores are made for, and work that waits for memory whatever the dtype of its arithmetic.
ON_TENSOR_CORES = frozenset({MATMUL, CONVOLUTION, ATTENTION})
MEMORY_BOUND = frozenset({CAST, COPY, REDUCTION, ELEMENTWISE})

_TARGETS = (  # Parts of custom call targets of XLA's GPU and CPU backends; the first that is found decides.
    (ATTENTION, ("fmha", "attention", "sdpa")),
    (CONVOLUTION, ("conv",)),
    (MATMUL, ("cublas", "gemm", "matmul", "dot")),
)
_NOTHING = frozenset("parameter constant bitcast tuple get-tuple-element iota broadcast reshape".split())
_COPIES = frozenset(
    "copy copy-start copy-done transpose slice dynamic-slice dynamic-update-slice concatenate pad reverse".split()
)
_REDUCTIONS = frozenset("reduce reduce-window select-and-scatter".split())
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-", "send", "recv")
_CONTROL = frozenset("while conditional call".split())
_OTHERS = frozenset("custom-call sort scatter gather fft cholesky triangular-solve rng rng-bit-generator".split())


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program that runs as a kernel of its own.

    Args:
        name: unique in the program, as `fusion.3`.
        kind: the kind of work, from the opcodes of all that was fused into it.
        module: module path, from named scopes.
        source: the user's line, `file.py:12`.
        path: the file of that line.
        backward: whether it belongs to the transposed part of a gradient.
        dtypes: the floating dtypes that its matmuls and convolutions read, in HLO's names (`f16`, `bf16`, `f32`).
        shapes: operands of the matmul or convolution, as `f32[8,16]`; empty for other kinds.
        exact: whether full float32 precision was asked for (`precision="highest"`), which rules out TF32.
        triton: whether XLA's Triton backend makes it.
    """

    name: str
    kind: str
    module: str
    source: str
    path: str
    backward: bool
    dtypes: frozenset[str] = frozenset()
    shapes: tuple[str, ...] = ()
    exact: bool = False
    triton: bool = False


@dataclasses.dataclass(frozen=True)
class _Line:
    """An instruction as it stands in the text."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    called: tuple[str, ...]

    def attribute(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|[^\s(]\S*) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_NUMBERED = re.compile(r"^(\d+) (.*)$")


def instructions(text: str) -> dict[str, Instruction]:
    """The instructions of a program by name.

    Args:
        text: the optimized HLO.
    """
    computations = dict(_computations(text))
    frames = _frames(text)
    return {
        line.name: _instruction(line, lines, computations, frames)
        for lines in computations.values()
        for line in lines.values()
    }


def program_name(text: str) -> str:
    """The name of a program, as traces give it: `jit_step`."""
    found = re.match(r"HloModule ([\w.\-]+)", text)
    return found[1] if found else ""


def module_path(op_name: str) -> str:
    """The module path in an `op_name` of HLO's metadata, without transformations and the primitive.

    Example:
        >>> module_path("jit(step)/transpose(jvp(ResNet))/Block_0/while/body/Conv_0/conv_general_dilated")
        'ResNet/Block_0/Conv_0'
    """
    found: list[str] = []
    for part in _parts(op_name)[:-1]:
        scopes = _scopes(part)
        if "jvp(" in part and scopes and found[:1] == scopes:
            found = []  # The backward pass of a remat gives the whole path a second time.
        found += scopes
    return "/".join(found)


def _parts(op_name: str) -> list[str]:
    """Splits at slashes that are not inside parentheses."""
    parts, depth = [""], 0
    for char in op_name:
        depth += (char == "(") - (char == ")")
        if char == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


# What JAX writes into a name for its own structure: a named scope of the user's is anything else.
_STRUCTURE = re.compile(
    r"while|body|cond|scan|closed_call|core_call|eval_jaxpr|remat\d?|checkpoint|rematted_computation|branch_\d+_fun"
    r"|custom_[jv][vj]p_call(_jaxpr)?|pjit|shard_map|shmap_body|pmap|xla_pmap|"
)
_TRANSFORMATION = re.compile(r"(\w+)\((.*)\)")


def _scopes(part: str) -> list[str]:
    found = _TRANSFORMATION.fullmatch(part)
    if found:
        return [] if found[1] in ("jit", "pjit") else [s for inner in _parts(found[2]) for s in _scopes(inner)]
    return [] if _STRUCTURE.fullmatch(part) or part.startswith(MARK) else [part]


def _computations(text: str) -> Iterator[tuple[str, dict[str, _Line]]]:
    name, lines = "", dict[str, _Line]()
    for row in text.splitlines():
        if not name:
            start = _COMPUTATION.match(row)
            name, lines = (start[1] if start else ""), {}
        elif row.startswith("}"):
            yield name, lines
            name = ""
        elif found := _INSTRUCTION.match(row):
            operands, attributes = _arguments(found[4])
            branches = _BRANCHES.search(attributes)
            called = [*_CALLED.findall(attributes), *re.findall(r"[\w.\-]+", branches[1] if branches else "")]
            lines[found[1]] = _Line(found[1], found[2], found[3], operands, attributes, tuple(called))


def _arguments(rest: str) -> tuple[tuple[str, ...], str]:
    """The operands' names and what stands behind the closing parenthesis."""
    depth = 1
    for end, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if not depth:
            return tuple(re.findall(r"%([\w.\-]+)", rest[:end])), rest[end + 1 :]
    return (), rest


def _frames(text: str) -> dict[str, str]:
    """The file and line of each stack frame: `path:12`. (The tables stand at the head of the program's text.)"""
    tables: dict[str, dict[str, str]] = {}
    table: dict[str, str] = {}
    for row in text.splitlines():
        if row in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(row, {})
        elif row and (found := _NUMBERED.match(row)):
            table[found[1]] = found[2]
        elif _COMPUTATION.match(row):
            break
    files, locations = tables.get("FileNames", {}), tables.get("FileLocations", {})
    frames = {}
    for frame, fields in tables.get("StackFrames", {}).items():
        location = locations.get(_field(fields, "file_location_id"), "")
        frames[frame] = f"{files.get(_field(location, 'file_name_id'), '').strip(chr(34))}:{_field(location, 'line')}"
    return frames


def _field(text: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\d+)", text)
    return found[1] if found else ""


def _instruction(
    line: _Line,
    siblings: Mapping[str, _Line],
    computations: Mapping[str, Mapping[str, _Line]],
    frames: Mapping[str, str],
) -> Instruction:
    fused = [(line, siblings), *(_inside(line, computations) if line.opcode == "fusion" else ())]
    kinds = [_own_kind(inner) for inner, _ in fused]
    kind = _kind(kinds, [inner for inner, _ in fused])
    # The matmul tells more of a fusion than its last operation, which gives the fusion its metadata.
    heavy = next(((inner, at) for (inner, at), k in zip(fused, kinds, strict=True) if k in ON_TENSOR_CORES), None)
    named = [inner for inner, _ in ([heavy] if heavy else []) + fused if "op_name=" in inner.attributes]
    op_name = named[0].attribute(r'op_name="([^";]*)') if named else ""  # Merged instructions have several.
    place = _place(named[0], frames) if named else ""
    shapes = tuple(_shapes(*heavy)) if heavy else ()
    return Instruction(
        line.name,
        kind,
        module_path(op_name),
        place.rsplit("/", 1)[-1],
        place.rpartition(":")[0],
        "transpose(" in op_name,
        frozenset(shape.split("[")[0] for shape in shapes),
        shapes,
        bool(heavy and re.search(r"highest|dot_f32_f32_f32\b", heavy[0].attributes.lower())),
        "__triton" in line.attributes,
    )


def _place(line: _Line, frames: Mapping[str, str]) -> str:
    place = frames.get(line.attribute(r"stack_frame_id=(\d+)"), "")
    if place or "source_file=" not in line.attributes:
        return place
    path, number = line.attribute(r'source_file="([^"]*)"'), line.attribute(r"source_line=(\d+)")
    return f"{path}:{number}"


def _inside(
    line: _Line, computations: Mapping[str, Mapping[str, _Line]]
) -> Iterator[tuple[_Line, Mapping[str, _Line]]]:
    for name in line.called:
        lines = computations.get(name, {})
        for inner in reversed(list(lines.values())):  # The root stands last, and is what the fusion is about.
            yield inner, lines
            if inner.opcode == "fusion":
                yield from _inside(inner, computations)


def _shapes(line: _Line, siblings: Mapping[str, _Line]) -> Iterator[str]:
    for operand in line.operands[:2]:
        if operand in siblings and "[" in siblings[operand].type:
            yield siblings[operand].type.partition("{")[0]


def _own_kind(line: _Line) -> str:
    if line.opcode == "dot":
        return MATMUL
    if line.opcode == "convolution":
        return CONVOLUTION
    if line.opcode == "custom-call":
        target = line.attribute(r'custom_call_target="([^"]*)"').lower()
        return next((kind for kind, parts in _TARGETS if any(part in target for part in parts)), OTHER)
    if line.opcode.startswith(_COLLECTIVES):
        return COLLECTIVE
    if line.opcode in _CONTROL:
        return CONTROL
    if line.opcode in _OTHERS:
        return OTHER
    if line.opcode in _REDUCTIONS:
        return REDUCTION
    if line.opcode in _COPIES:
        return COPY
    return CAST if line.opcode == "convert" else ELEMENTWISE


def _kind(kinds: list[str], lines: list[_Line]) -> str:
    """The kind of a kernel from the kinds of its parts: the heaviest; what does no work has no say."""
    parts = {k for k, line in zip(kinds, lines, strict=True) if line.opcode not in _NOTHING and line.opcode != "fusion"}
    order = (CONVOLUTION, MATMUL, ATTENTION, COLLECTIVE, CONTROL, OTHER, REDUCTION, ELEMENTWISE, CAST, COPY)
    return next((kind for kind in order if kind in parts), COPY)
