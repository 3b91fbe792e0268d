"""Peak memory of a compiled program and its live arrays, from XLA's statistics and schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mpjax.inspection.profile.hlo import Instruction
from mpjax.inspection.profile.hlo_text import HloModule, Line, sizes
from mpjax.inspection.reports import added_up, totals

# Their results alias their operands. A loop updates its carry in place.
_ALIASES = frozenset("bitcast tuple get-tuple-element optimization-barrier while copy-done all-reduce-done".split())


@dataclasses.dataclass(frozen=True)
class Holder:
    """Arrays of one line that are alive at a program's peak memory.

    Args:
        module: Module path; empty outside all modules.
        source: The line that creates them.
        backward: Whether the backward pass creates them.
        arrays: Number of arrays.
        bytes: Their total size.
    """

    module: str
    source: str
    backward: bool
    arrays: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a step on one device, in bytes.

    Args:
        peak: Total of arguments, results and temporary buffers, as XLA allocates them. Donated arrays count once.
        arguments, results, temporaries: The parts. Results exclude those that reuse donated arguments.
        holders: The live arrays when temporary arrays are at their peak in the schedule, largest first. XLA may put
            several of them into one buffer.
    """

    peak: int
    arguments: int
    results: int
    temporaries: int
    holders: tuple[Holder, ...]


def memory_of(executable: Any, text: str, instructions: Mapping[str, Instruction]) -> Memory | None:
    """The memory of a compiled step; None if the backend has no statistics.

    Args:
        executable: The compiled step, such as a `jax.stages.Compiled`.
        text: Its optimized HLO.
        instructions: The program's instructions, by name.
    """
    try:
        stats = getattr(executable, "compiled", executable).memory_analysis()
    except Exception:  # backends raise different errors
        return None
    if stats is None:
        return None
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    results = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    holders = _holders(HloModule(text), instructions)
    return Memory(arguments + results + temporaries, arguments, results, temporaries, holders)


def _holders(program: HloModule, instructions: Mapping[str, Instruction]) -> tuple[Holder, ...]:
    alive = [(instructions[line.name], _bytes(line)) for line in _alive_at_peak(program, program.entry)[1]]
    rows = added_up(((found.module, found.source, found.backward), (1, size)) for found, size in alive)
    holders = (Holder(*place, *row) for place, row in rows.items())
    return tuple(sorted(holders, key=lambda holder: -holder.bytes))


def _alive_at_peak(program: HloModule, computation: str) -> tuple[int, list[Line]]:
    """The peak bytes of temporary arrays in a computation, and the instructions that produce them."""
    lines = list(program.computations.get(computation, {}).values())
    bases: dict[str, frozenset[str]] = {}  # The arrays that a result aliases.
    last: dict[str, int] = {}
    for i, line in enumerate(lines):
        operands = frozenset().union(*(bases.get(name, frozenset()) for name in line.operands))
        own = frozenset([line.name]) if line.opcode not in ("parameter", "constant") else frozenset[str]()
        bases[line.name] = operands if line.opcode in _ALIASES else own
        last |= dict.fromkeys(operands | bases[line.name], i)
    if lines:
        last |= dict.fromkeys(bases[lines[-1].name], len(lines))  # Results stay alive.
    created: dict[str, int] = {line.name: i for i, line in enumerate(lines) if line.name in last}
    freed = totals((last[name], _bytes(lines[i])) for name, i in created.items())
    most, at, inside, total = 0, 0, list[Line](), 0
    for i, line in enumerate(lines):
        total += _bytes(line) if line.name in created else 0
        inner = max((_alive_at_peak(program, called) for called in _bodies(line)), key=lambda x: x[0], default=(0, []))
        if total + inner[0] > most:
            most, at, inside = total + inner[0], i, inner[1]
        total -= freed.get(i, 0)
    return most, [*(lines[i] for name, i in created.items() if i <= at <= last[name]), *inside]


def _bodies(line: Line) -> tuple[str, ...]:
    return line.called if line.opcode in ("while", "conditional", "call") else ()


def _bytes(line: Line) -> int:
    return sum(size for _, size in sizes(line.type))
