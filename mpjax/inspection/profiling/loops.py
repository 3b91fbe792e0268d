"""The trip counts of compiled loops."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpjax.inspection.profiling.hlo import HloModule, Line


def iterations(program: HloModule, loop: Line, siblings: Mapping[str, Line]) -> int:
    """The trip count of a loop; 1 if it is unknown.

    XLA for TPUs prints none. There the loop's counter tells it, if it starts and ends at constants.

    Args:
        program: The program.
        loop: A line with opcode `while`.
        siblings: The lines of its computation.

    Example:
        >>> program = HloModule('''HloModule jit_step
        ... %test (p: (s32[], f32[4])) -> pred[] {
        ...   %p = (s32[], f32[4]) parameter(0)
        ...   %i = s32[] get-tuple-element(%p), index=0
        ...   %end = s32[] constant(11)
        ...   ROOT %less = pred[] compare(%i, %end), direction=LT
        ... }
        ... %step (q: (s32[], f32[4])) -> (s32[], f32[4]) {
        ...   %q = (s32[], f32[4]) parameter(0)
        ...   %j = s32[] get-tuple-element(%q), index=0
        ...   %x = f32[4] get-tuple-element(%q), index=1
        ...   %two = s32[] constant(2)
        ...   %next = s32[] add(%j, %two)
        ...   ROOT %both = (s32[], f32[4]) tuple(%next, %x)
        ... }
        ... ENTRY %main (y: f32[4]) -> (s32[], f32[4]) {
        ...   %y = f32[4] parameter(0)
        ...   %start = s32[] constant(1)
        ...   %counter = s32[] copy(%start)
        ...   %all = (s32[], f32[4]) tuple(%counter, %y)
        ...   ROOT %loop = (s32[], f32[4]) while(%all), condition=%test, body=%step
        ... }''')
        >>> lines = program.computations["main"]
        >>> iterations(program, lines["loop"], lines)
        5
    """
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(known)
    try:
        return _counted(program, loop, siblings)
    except (LookupError, ValueError):
        return 1


def _counted(program: HloModule, loop: Line, siblings: Mapping[str, Line]) -> int:
    """The trips of a loop of the form `while counter < end: counter += step`; `LookupError` for any other."""
    condition, body = (
        program.computations[loop.attribute(rf"\b{name}=%?([\w.\-]+)")] for name in ("condition", "body")
    )
    test, results = (list(lines.values())[-1] for lines in (condition, body))  # XLA prints the root last.
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        raise LookupError(test.name)
    place = _place(condition, test.operands[0])
    start = _integer(siblings, _origin(siblings, loop.operands[0]).operands[place])
    update = _origin(body, results.operands[place])
    if update.opcode != "add" or _place(body, update.operands[0]) != place:
        raise LookupError(update.name)
    return len(range(start, _integer(condition, test.operands[1]), _integer(body, update.operands[1])))


def _origin(lines: Mapping[str, Line], name: str) -> Line:
    """The line whose value this is, before copies."""
    line = lines[name]
    return _origin(lines, line.operands[0]) if line.opcode in ("copy", "bitcast") else line


def _place(lines: Mapping[str, Line], name: str) -> int:
    """The position of a value in the loop's state; `ValueError` if it is no part of it."""
    return int(_origin(lines, name).attribute(r"\bindex=(\d+)"))


def _integer(lines: Mapping[str, Line], name: str) -> int:
    line = _origin(lines, name)
    if line.opcode != "constant" or not re.match(r"[su]\d+\[\]", line.type):
        raise LookupError(name)
    return line.number
