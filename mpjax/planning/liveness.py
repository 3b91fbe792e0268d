"""The memory of a compiled program over its schedule: which arrays are live at each instruction, and what they are.

XLA prints a scheduled program. An array lives from the instruction that makes it to the last that reads it. What XLA
does in place has one buffer: the state of a loop, an update of a slice, an aliased operand, a donated argument, and an
elementwise fusion whose operand nobody reads later. A loop's body counts once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from mpjax.inspection.profiling.hlo import HloModule, Line, module_path, sizes
from mpjax.planning.traffic import ARRAY, UPDATES, dimensions, elements_size, flat, source_of
from mpjax.program.source import informative_frame, is_library_file

# By name: XLA's opcodes.

FORWARD, BACKWARD, OUTSIDE = "forward", "backward", "outside"
_ALIASES = frozenset("bitcast opt-barrier optimization-barrier tuple get-tuple-element".split())
_NONE = frozenset("constant after-all partition-id replica-id".split())
# Not element by element.
_MOVES = frozenset(
    "transpose copy reverse gather concatenate pad slice dynamic-slice reduce reduce-window dot sort broadcast".split()
)
_RESULT_OF = re.compile(r"\{(\d*)\}: \((\d+)")


@dataclasses.dataclass(eq=False)
class Buffer:
    """The memory of one array, and of those that take its place.

    Args:
        bytes, dtype, shape: Its size and type; the dtype in JAX's names.
        argument: The number of the program's argument that it is; None for any other.
        result: Whether the program returns it.
        start, end: The first and the last instruction that touches it, by number.
        made, read: The passes that write and read it: `FORWARD`, `BACKWARD`, `OUTSIDE` of differentiation.
        module, source: The module path and the line that made it.
        cast: Whether it is a copy of an argument in another dtype.
        updated: Whether it is named for what is written into a slice of it.
    """

    bytes: int
    dtype: str
    shape: tuple[int, ...]
    argument: int | None = None
    result: bool = False
    start: int = -1
    end: int = -1
    made: set[str] = dataclasses.field(default_factory=set)
    read: set[str] = dataclasses.field(default_factory=set)
    module: str = ""
    source: str = ""
    cast: bool = False
    updated: bool = False

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    def touch(self, now: int) -> None:
        """Notes that an instruction reads or writes it."""
        self.start, self.end = now if self.start < 0 else self.start, now


def pass_of(line: Line) -> str:
    """The pass of an instruction; empty if its name does not tell."""
    name = line.op_name
    if not name:
        return ""
    return BACKWARD if "transpose(" in name else FORWARD if "jvp(" in name else OUTSIDE


def buffers_of(text: str) -> list[Buffer]:
    """The buffers of a compiled program, arguments included.

    Args:
        text: Its optimised HLO, scheduled.
    """
    return _Schedule(HloModule(text), text).run()


def live_bytes(buffers: Sequence[Buffer]) -> list[int]:
    """The bytes in use at each instruction, without the program's arguments."""
    changes = [0] * (max((b.end for b in buffers), default=0) + 2)
    for buffer in buffers:
        if buffer.argument is None and buffer.start >= 0:
            changes[buffer.start] += buffer.bytes
            changes[buffer.end + 1] -= buffer.bytes
    return list(itertools.accumulate(changes))[:-1]


def live_at(buffers: Sequence[Buffer], now: int) -> Iterator[Buffer]:
    """The buffers in use at an instruction, without the program's arguments."""
    return (b for b in buffers if b.argument is None and b.start <= now <= b.end)


class _Schedule:
    """Runs through a program in the order of its schedule."""

    def __init__(self, program: HloModule, text: str):
        self.program, self.now = program, 0
        self.buffers: dict[Buffer, None] = {}
        head = text[: text.find("\n")]
        aliased = head.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
        self.donated = {int(out or 0): int(argument) for out, argument in _RESULT_OF.findall(aliased)}

    def run(self) -> list[Buffer]:
        lines = self.program.computations[self.program.entry]
        parameters = sorted((x for x in lines.values() if x.opcode == "parameter"), key=lambda x: x.number)
        arguments = [self._new(line, argument=line.number) for line in parameters]
        given = dict(enumerate(arguments))
        results = {out: given[argument][0] for out, argument in self.donated.items() if argument in given}
        for buffer in self._computation(self.program.entry, given, results):
            buffer.result = buffer.argument is None
            buffer.touch(self.now)
        return list(self.buffers)

    def _computation(self, name: str, given: Mapping[int, list[Buffer]], results: Mapping[int, Buffer]) -> list[Buffer]:
        """Runs a computation.

        Args:
            name: Its name.
            given: The buffers of its parameters, by number.
            results: The buffers into which it must write its results, by position.
        """
        lines = self.program.computations[name]
        root = list(lines.values())[-1]
        values: dict[str, list[Buffer]] = {}
        fixed = _fixed(lines, root, results)
        outer = {*itertools.chain(*given.values())}
        last = _last_reads(lines)
        for line in lines.values():
            self.now += 1
            operands = [values.get(operand, []) for operand in line.operands]
            dying = [
                buffer
                for name, operand in zip(line.operands, operands, strict=True)
                for buffer in operand
                if last[name] == line.name and buffer not in outer and buffer.argument is None
            ]
            values[line.name] = self._line(line, lines, operands, given, fixed, dying)
            if line.opcode not in _ALIASES:
                for buffer in itertools.chain(*operands, values[line.name]):
                    buffer.touch(self.now)
        return values[root.name]

    def _line(
        self,
        line: Line,
        lines: Mapping[str, Line],
        operands: Sequence[list[Buffer]],
        given: Mapping[int, list[Buffer]],
        fixed: Mapping[tuple[str, int], Buffer],
        dying: Sequence[Buffer],
    ) -> list[Buffer]:
        joined = [buffer for operand in operands for buffer in operand]
        match line.opcode:
            case "parameter":
                return given.get(line.number, [])
            case "get-tuple-element":
                return self._element(line, lines, operands[0])
            case "while":
                body = line.attribute(r"\bbody=%?([\w.\-]+)")
                self._computation(body, {0: joined}, dict(enumerate(joined)))
                return joined
            case "call" | "conditional":
                return self._called(line, operands)
        if line.opcode in _ALIASES:
            return joined
        if line.opcode in _NONE:
            return []
        if line.opcode.endswith("-done"):
            return joined[-len(arrays(line.type)) or None :]
        if line.opcode.endswith("-start"):  # Until it is done, its operands stay.
            started = dataclasses.replace(line, type=_started(line))
            return [*joined, *self._made(started, operands, fixed, dying)]
        return self._made(line, operands, fixed, dying)

    def _element(self, line: Line, lines: Mapping[str, Line], operand: list[Buffer]) -> list[Buffer]:
        index = int(line.attribute(r"\bindex=(\d+)"))
        counts = [len(arrays(part)) for part in elements(lines[line.operands[0]].type)]
        start = sum(counts[:index])
        return operand[start : start + counts[index]]

    def _called(self, line: Line, operands: Sequence[list[Buffer]]) -> list[Buffer]:
        """A call, or a conditional, whose results are new buffers that each branch writes."""
        if line.opcode == "call":
            return self._computation(line.called[0], dict(enumerate(operands)), {})
        outs = self._new(line)
        for branch, operand in zip(line.called, operands[1:], strict=False):
            self._computation(branch, {0: operand}, dict(enumerate(outs)))
        return outs

    def _made(
        self,
        line: Line,
        operands: Sequence[list[Buffer]],
        fixed: Mapping[tuple[str, int], Buffer],
        dying: Sequence[Buffer],
    ) -> list[Buffer]:
        """The results of an instruction that runs."""
        kind = pass_of(self.program.named(line))
        for buffer in itertools.chain(*operands):
            buffer.read.add(kind)
        outs: list[Buffer] = []
        in_place = dict(self._in_place(line))
        reusable = self._elementwise(line) if dying and "kind=kLoop" in line.attributes else ()
        dying = [b for number in reusable for b in operands[number] if b in dying]
        for i, new in enumerate(self._new(line, keep=False)):
            place = in_place.get(i)
            reused = next((b for b in dying if b.bytes == new.bytes and b not in outs), None)
            if place is not None and place < len(operands) and len(operands[place]) == 1:
                buffer = operands[place][0]
            else:
                buffer = fixed.get((line.name, i)) or (reused if reused is not None else new)
            self.buffers[buffer] = None
            self._note(buffer, line, kind, operands, i if place is not None else None)
            outs.append(buffer)
        return outs

    def _note(
        self, buffer: Buffer, line: Line, kind: str, operands: Sequence[list[Buffer]], update: int | None
    ) -> None:
        """Notes which instruction wrote a buffer; the first whose pass is known names it.

        An update of a slice, such as what an iteration of a scan keeps, has the name of what it writes first.
        """
        written = None if update is None else self._written(line, update, operands)
        if kind and (not buffer.made - {""} or (written is not None and not buffer.updated)):
            buffer.updated = written is not None
            if isinstance(written, Buffer):
                buffer.module, buffer.source = written.module, written.source
            else:
                buffer.module, buffer.source = self._place(written or self.program.named(line))
        buffer.made.add(kind)
        large = [b for operand in operands for b in operand if b.elements == buffer.elements]
        converts = "convert" in line.name or line.opcode == "convert"
        buffer.cast = converts and any(b.argument is not None and b.dtype != buffer.dtype for b in large)

    def _place(self, line: Line) -> tuple[str, str]:
        places = self.program.places(line)
        which = informative_frame([path for path, _ in places])
        file, number = ("", "") if which is None else places[which]
        source = "" if not file or is_library_file(file) else f"{file.rsplit('/', 1)[-1]}:{number}"
        return module_path(line.op_name), source

    def _written(self, line: Line, result: int, operands: Sequence[list[Buffer]]) -> Line | Buffer | None:
        """What an update of a slice writes: the line that makes it in the same fusion, or the operand."""
        if not line.is_fusion:
            return next(iter(operands[1]), None) if line.opcode in UPDATES else None
        inner = flat(self.program, line.called[0])
        root = list(inner.values())[-1]
        update = _source(inner, root.operands[result] if root.opcode == "tuple" else root.name)
        if update.opcode != "dynamic-update-slice":
            return None
        written = _source(inner, update.operands[1])
        if written.opcode == "parameter":
            return next(iter(operands[written.number]), None)
        return written if written.op_name else None

    def _elementwise(self, line: Line) -> list[int]:
        """The operands that a fusion reads element by element, in the order of its result."""
        inner = flat(self.program, line.called[0])
        moved = {line.number: {name} for name, line in inner.items() if line.opcode == "parameter"}
        for name, each in inner.items():
            for reached in moved.values():
                reached |= {name} if reached & {*each.operands} else set()
        kinds = {number: {inner[name].opcode for name in reached} for number, reached in moved.items()}
        return [number for number, opcodes in kinds.items() if not opcodes & _MOVES and number < len(line.operands)]

    def _in_place(self, line: Line) -> Iterator[tuple[int, int]]:
        """The results that are written into operands: the position of each, and of its operand."""
        aliases = line.attributes.partition("output_to_operand_aliasing={")[2].partition("custom_call_target")[0]
        yield from ((int(out or 0), int(operand)) for out, operand in _RESULT_OF.findall(aliases))
        if line.opcode in UPDATES:
            yield 0, 0
        if line.is_fusion:
            inner = flat(self.program, line.called[0])
            root = list(inner.values())[-1]
            for i, name in enumerate(root.operands if root.opcode == "tuple" else (root.name,)):
                update = _source(inner, name)
                if update.opcode in UPDATES and (first := _source(inner, update.operands[0])).opcode == "parameter":
                    yield i, first.number

    def _new(self, line: Line, argument: int | None = None, keep: bool = True) -> list[Buffer]:
        made = [Buffer(size, dtype, shape, argument) for dtype, size, shape in arrays(line.type)]
        self.buffers.update(dict.fromkeys(made if keep else ()))
        return made


def elements(hlo_type: str) -> list[str]:
    """The types of a tuple's elements.

    Example:
        >>> elements("(f32[2,3]{1,0}, (s32[], pred[4]{0}))")
        ['f32[2,3]{1,0}', '(s32[], pred[4]{0})']
    """
    found, depth, start = [], 0, 1
    for i, char in enumerate(hlo_type):
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or (char == ")" and depth == 0):
            found.append(hlo_type[start:i].strip())
            start = i + 1
    return found


def _started(line: Line) -> str:
    """The type of the result of an asynchronous instruction, whose own type has its operands and a context as well."""
    parts = elements(line.type) if line.type.startswith("(") and line.opcode != "all-reduce-start" else []
    return parts[line.opcode != "copy-start"] if len(parts) > 1 else line.type


def arrays(hlo_type: str) -> list[tuple[str, int, tuple[int, ...]]]:
    """The dtype, the bytes in device memory and the shape of each array of a type."""
    return [
        (sizes(found[0])[0][0], 0 if found[4] else elements_size(found), tuple(dimensions(found[0])))
        for found in ARRAY.finditer(hlo_type)
    ]


def _last_reads(lines: Mapping[str, Line]) -> dict[str, str]:
    """The line that reads each value last, under any of its names."""
    last: dict[str, str] = {}
    for line in reversed(list(lines.values())):
        reader = last.get(line.name, line.name) if line.opcode in _ALIASES else line.name
        for operand in line.operands:
            last.setdefault(operand, reader)
    return last


def _source(lines: Mapping[str, Line], name: str) -> Line:
    """The line whose value this is, before bitcasts and copies."""
    return source_of(lines, lines[name], ("bitcast", "copy"))


def _fixed(lines: Mapping[str, Line], root: Line, results: Mapping[int, Buffer]) -> dict[tuple[str, int], Buffer]:
    """The instructions, by name and position of the result, that must write into given buffers."""
    found = {}
    for i, buffer in results.items():
        name, index = (root.operands[i] if root.opcode == "tuple" else root.name), 0 if root.opcode == "tuple" else i
        while (line := lines[name]).opcode in ("bitcast", "get-tuple-element") or line.opcode.endswith("-done"):
            index = int(line.attribute(r"\bindex=(\d+)")) if line.opcode == "get-tuple-element" else index
            name = line.operands[0]
        found[name, index] = buffer
    return found
