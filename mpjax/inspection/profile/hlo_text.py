"""Parses the text of a compiled program (optimized HLO): computations, operands, tracebacks."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

Place = tuple[str, str]  # file and line


@dataclasses.dataclass(frozen=True)
class Line:
    """An instruction of the text."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    called: tuple[str, ...]
    number: int = 0  # The number of a parameter.

    def attribute(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def is_fusion(self) -> bool:
        """Whether it is a fusion. XLA's GPU backend starts some asynchronously."""
        return self.opcode in ("fusion", "fusion-start")

    @property
    def op_name(self) -> str:
        """JAX's name of the instruction: scopes and primitive. For merged instructions, the first name."""
        return self.attribute(r'op_name="([^";]*)')


def sizes(type: str) -> list[tuple[str, int]]:
    """The dtype, in JAX's names, and the bytes of each array of a type.

    Example:
        >>> sizes("(bf16[8,4]{1,0}, pred[3]{0})")
        [('bfloat16', 64), ('bool', 3)]
    """
    return [_size(name, shape) for name, shape in _SHAPE.findall(type)]


def _size(name: str, shape: str) -> tuple[str, int]:
    bits = 8 if name == "pred" else int(re.findall(r"\d+", name)[0])
    count = math.prod(int(size) for size in shape.split(",") if size)
    return _DTYPES.get(name, _long_name(name)), count * bits // 8


def _long_name(name: str) -> str:
    kind = {"s": "int", "u": "uint", "f": "float", "c": "complex"}.get(name[0], name[0])
    return kind + name[1:].replace("e", "_e", 1) if name.startswith("f8") else kind + name[1:]


_DTYPES = {"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_SHAPE = re.compile(r"\b(pred|bf16|[a-z]\d+(?:e\dm\d\w*)?)\[([\d,]*)\]")


class HloModule:
    """A compiled program.

    Args:
        text: The output of `jax.stages.Compiled.as_text`.

    Attributes:
        name: The program's name in traces, as `jit_step`.
        computations: For each computation by name, its lines by name. A fusion calls one computation, a loop two.
        entry: Name of the entry computation.
    """

    def __init__(self, text: str):
        found = re.match(r"HloModule ([\w.\-]+)", text)
        self.name = found[1] if found else ""
        self.computations = dict(_computations(text))
        entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
        self.entry = entry[1] if entry else ""
        self._frames = _frames(text)

    def inside(self, line: Line) -> Iterator[tuple[Line, Mapping[str, Line]]]:
        """The lines of a fusion's computation, root first, each with all lines of its computation."""
        for name in line.called if line.is_fusion else ():
            lines = self.computations.get(name, {})
            for inner in reversed(list(lines.values())):
                yield inner, lines
                yield from self.inside(inner)

    def places(self, line: Line) -> list[Place]:
        """The traceback of a line, innermost frame first."""
        chain = self._frames.get(line.attribute(r"stack_frame_id=(\d+)"), [])
        if chain or "source_file=" not in line.attributes:
            return chain
        return [(line.attribute(r'source_file="([^"]*)"'), line.attribute(r"source_line=(\d+)"))]

    def readers(self, computation: str, line: Line, distance: int) -> Iterator[Line]:
        """The direct and indirect consumers of a line, up to a distance and into fusions, nearest first."""
        near, seen = [(computation, line)], {(computation, line.name)}
        for _ in range(distance):
            found = [x for at in near for x in self._direct_readers(*at) if x[1].opcode not in _ENDS]
            near = [x for x in found if (x[0], x[1].name) not in seen]
            seen.update((where, x.name) for where, x in near)
            yield from (x for _, x in near)

    def _direct_readers(self, computation: str, line: Line) -> Iterator[tuple[str, Line]]:
        for name in self._readers[computation].get(line.name, ()):
            reader = self.computations[computation][name]
            if not reader.is_fusion or reader.called[0] not in self.computations:
                yield computation, reader
                continue
            for parameter in self.computations[reader.called[0]].values():
                if parameter.opcode == "parameter" and reader.operands[parameter.number] == line.name:
                    yield reader.called[0], parameter

    @functools.cached_property
    def _readers(self) -> dict[str, dict[str, list[str]]]:
        return {name: _readers(lines) for name, lines in self.computations.items()}


# The search stops here: these connect almost everything.
_ENDS = frozenset("tuple while conditional".split())


def _readers(lines: Mapping[str, Line]) -> dict[str, list[str]]:
    readers: dict[str, list[str]] = collections.defaultdict(list)
    for line in lines.values():
        for operand in dict.fromkeys(line.operands):
            readers[operand].append(line.name)
    return readers


_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|[^\s(]\S*) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_NUMBERED = re.compile(r"^(\d+) (.*)$")


def _computations(text: str) -> Iterator[tuple[str, dict[str, Line]]]:
    name, lines = "", dict[str, Line]()
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
            number = int(found[4].partition(")")[0]) if found[3] == "parameter" else 0
            lines[found[1]] = Line(found[1], found[2], found[3], operands, attributes, tuple(called), number)


def _arguments(rest: str) -> tuple[tuple[str, ...], str]:
    """The operands' names, and the text after the closing parenthesis."""
    depth = 1
    for end, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if not depth:
            return tuple(re.findall(r"%([\w.\-]+)", rest[:end])), rest[end + 1 :]
    return (), rest


def _frames(text: str) -> dict[str, list[Place]]:
    """The tracebacks, innermost frame first, by frame number. They are at the head of the program's text."""
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
    places: dict[str, Place] = {}
    parents: dict[str, str] = {}
    for frame, fields in tables.get("StackFrames", {}).items():
        location = locations.get(_field(fields, "file_location_id"), "")
        places[frame] = files.get(_field(location, "file_name_id"), "").strip('"'), _field(location, "line")
        parents[frame] = _field(fields, "parent_frame_id")
    # XLA prints the outermost frame as its own parent if its parent numbers are one too high.
    shift = any(frame == parent for frame, parent in parents.items())
    chains: dict[str, list[Place]] = {}
    for frame in sorted(places, key=int):  # A frame follows its parents.
        parent = str(int(parents[frame] or 0) - shift)
        chains[frame] = [places[frame], *chains.get(parent, ())]
    return chains


def _field(text: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\d+)", text)
    return found[1] if found else ""
