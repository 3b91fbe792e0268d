"""Communication between devices: the collectives of the compiled program, with their dtypes and bytes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpjax.inspection.profiling.hlo import HloModule, Line, iterations, module_path, sizes
from mpjax.inspection.reports import Section, added_up, amount, by_key
from mpjax.program import compat

# By name: XLA's opcodes.

OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
# These compute sums or maxima, so their dtype is also that of the arithmetic.
REDUCTIONS = ("all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind, dtype, device group and module.

    Args:
        op: `"all-gather"`, `"all-reduce"`, `"reduce-scatter"`, `"all-to-all"`, `"collective-permute"`.
        dtype: Dtype of the arrays sent; for a reduction, also of the sum.
        group: Number of devices that take part; 0 for all.
        module: Module path of the first array, from named scopes.
        arrays: Number of arrays sent in one step. An array in a loop counts once for each iteration.
        bytes: Total size on each device, after a gather or before a reduction.
    """

    op: str
    dtype: str
    group: int
    module: str
    arrays: int
    bytes: int

    @property
    def is_sum_in_half(self) -> bool:
        """Whether it is a sum in 16 bits or fewer."""
        floats = self.dtype.startswith(("float", "bfloat"))
        return self.op in REDUCTIONS and floats and np.dtype(jax.numpy.dtype(self.dtype)).itemsize <= 2


def device_count(args: Any) -> int:
    """The number of devices that the arguments are sharded over."""
    return max(map(len, _device_sets(args)), default=1)


def widens_bfloat16(args: Any) -> bool:
    """Whether the collectives are those of XLA's CPU backend, which sends bfloat16 arrays in float32."""
    platforms = [device.platform for devices in _device_sets(args) for device in devices]
    return next(iter(platforms), compat.platform()) == "cpu"


def _device_sets(args: Any) -> list[set[jax.Device]]:
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    return [s.device_set for s in shardings if isinstance(s, jax.sharding.Sharding)]


def collectives(text: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program.

    Args:
        text: The output of `jax.stages.Compiled.as_text`.

    Returns:
        The collectives, most bytes first. All branches of a conditional count. A loop with an unknown trip count
        counts as one iteration.

    Example:
        >>> collectives('''HloModule jit_step
        ... ENTRY %main (p: f32[8]) -> f32[8] {
        ...   %p = f32[8] parameter(0)
        ...   ROOT %sum = f32[8] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
        ... }''')
        (Collective(op='all-reduce', dtype='float32', group=4, module='', arrays=1, bytes=32),)
    """
    program = HloModule(text)
    merged = added_up(
        ((op, dtype, _group(line), _module(line)), (times, times * size))
        for line, lines, times in _lines(program, program.entry, 1)
        if (op := line.opcode.removesuffix("-start")) in OPS
        for dtype, size in _sent(op, line, lines)
    )
    found = [Collective(*key, *total) for key, total in merged.items()]
    return tuple(sorted(found, key=lambda row: -row.bytes))


def communication_section(every: Sequence[Collective]) -> Section:
    """The section of the printed report. Collectives that differ only in their module are one row."""
    cells, merged = [], by_key(((row.op, row.dtype, row.group), row) for row in every)
    for (op, dtype, group), alike in sorted(merged.items(), key=lambda pair: -_bytes(pair[1])):
        first, *others = dict.fromkeys(row.module for row in alike if row.module) or ["-"]
        where = first + (f" and {len(others)} more" if others else "")
        arrays = sum(row.arrays for row in alike)
        cells.append((op, dtype, str(group or "all"), str(arrays), amount(_bytes(alike), "B"), where))
    gathered = _bytes(row for row in every if row.op == "all-gather")
    summed = _bytes(row for row in every if row.op in REDUCTIONS)
    in_half = _bytes(row for row in every if row.is_sum_in_half)
    text = (
        f"a step on each device: {amount(gathered, 'B')} gathered, {amount(summed, 'B')} reduced, "
        + (f"{amount(in_half, 'B')} of it summed in half" if in_half else "none of it summed in half")
        if every
        else "nothing is sent between the devices"
    )
    return Section("Communication", text, "collective|dtype|>devices|>arrays|>bytes|where", cells)


def _bytes(rows: Iterable[Collective]) -> int:
    return sum(row.bytes for row in rows)


def _lines(program: HloModule, computation: str, times: int) -> Iterator[tuple[Line, dict[str, Line], int]]:
    """The lines of a computation and its callees, each with its computation's lines and its execution count."""
    lines = program.computations.get(computation, {})
    for line in lines.values():
        yield line, lines, times
        trips = iterations(program, line, lines) if line.opcode == "while" else 1
        for called in line.called:
            yield from _lines(program, called, times * trips)


def _sent(op: str, line: Line, lines: dict[str, Line]) -> list[tuple[str, int]]:
    """The dtype and bytes of each array that a collective sends."""
    if op == "all-gather":
        arrays = sizes(line.type)
        # An all-gather-start returns its operands before its results.
        return arrays[len(arrays) // 2 :] if line.opcode.endswith("-start") else arrays
    operands = (lines[name].type for name in line.operands if name in lines)
    return [array for type_ in operands for array in sizes(type_)]


def _group(line: Line) -> int:
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line.attributes):
        return int(found[1])
    # Newer compilers name the mesh's axes: `mesh['data'=4,'model'=2] {'model'}`.
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line.attributes):
        axis_sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])  # a whole axis, or a part of it
        return math.prod(int(part) if part else axis_sizes[name] for name, part in axes)
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", line.attributes):
        return len(found[1].split(","))
    return 2 if "source_target_pairs" in line.attributes else 0


def _module(line: Line) -> str:
    """The module path of a collective; of its first array if several are combined."""
    name = line.op_name
    grouped = re.match(r"(.*?)\(([^()]*?):", name)  # `jit(step)/(up/dot_general:down/dot_general)`
    return module_path(grouped[1] + grouped[2] if grouped and grouped[1].endswith("/") else name)
