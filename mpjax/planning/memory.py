"""What a compiled step holds in memory at its peak, by kind, module and line; and over its schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from mpjax.inspection.reports import added_up, folded, totals
from mpjax.planning.arguments import PARAMETERS
from mpjax.planning.liveness import BACKWARD, FORWARD, OUTSIDE, Buffer, buffers_of, live_at, live_bytes
from mpjax.planning.step import Compiled

GRADIENTS, KEPT, SCORES, LOGITS = "gradients", "kept activations", "scores", "logits"
CASTS, RESULTS, WORKSPACE = "casts of parameters", "results", "workspace"
_POINTS = 200  # of the picture


@dataclasses.dataclass(frozen=True)
class Held:
    """Arrays of one kind that one line of a module makes, as they are at the peak.

    Args:
        kind: Their kind.
        module, source: The module path and the line that make them; empty for arguments.
        dtype: Their dtype.
        bytes: Their size together.
        count: Their number.
    """

    kind: str
    module: str
    source: str
    dtype: str
    bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a compiled step.

    Args:
        peak: XLA's plan, in bytes.
        held: What is held at the peak, most bytes first.
        timeline: At up to 200 instructions in the order of the schedule, the bytes by kind.
    """

    peak: int
    held: tuple[Held, ...]
    timeline: tuple[dict[str, int], ...] = dataclasses.field(repr=False)

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes at the peak by kind, most first. They add up to `peak`."""
        found = totals((row.kind, row.bytes) for row in self.held)
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def memory_of(compiled: Compiled, scores: Collection[int], logits: Collection[int]) -> Memory:
    """The memory of a compiled step.

    Args:
        compiled: The step.
        scores, logits: The numbers of elements of the arrays of scores and of logits.
    """
    buffers = buffers_of(compiled.text)
    kinds = compiled.traced.kinds
    sizes = {b.elements for b in buffers if b.argument is not None and kinds[b.argument] == PARAMETERS} - {1}
    named = {b: kind_of(b, kinds, sizes, scores, logits) for b in buffers}
    bytes_at = live_bytes(buffers)
    at = bytes_at.index(max(bytes_at))
    live = [*(b for b in buffers if b.argument is not None), *live_at(buffers, at)]
    modules = folded(b.module for b in live)
    rows = added_up(
        ((named[b], *(("", "") if b.argument is not None else (modules[b.module], b.source)), b.dtype), (b.bytes, 1))
        for b in live
        if b.bytes
    )
    held = [Held(*place, size, count) for place, (size, count) in rows.items()]
    rest = compiled.peak - sum(row.bytes for row in held)
    held += [Held(WORKSPACE, "", "", "", rest, 1)] if rest else []  # scratch of kernels, padding, reuse
    arguments = totals((named[b], b.bytes) for b in buffers if b.argument is not None)
    step = max(1, len(bytes_at) // _POINTS)
    timeline = [
        totals([*arguments.items(), *((named[b], b.bytes) for b in live_at(buffers, now))])
        for now in sorted({*range(0, len(bytes_at), step), at})
    ]
    return Memory(compiled.peak, tuple(sorted(held, key=lambda row: -row.bytes)), tuple(timeline))


def kind_of(
    buffer: Buffer, kinds: Sequence[str], parameters: Collection[int], scores: Collection[int], logits: Collection[int]
) -> str:
    """The kind of a buffer.

    Args:
        buffer: The buffer.
        kinds: Those of the arguments.
        parameters: The numbers of elements of the parameters.
        scores, logits: Those of arrays of scores and of logits.
    """
    if buffer.argument is not None:
        return kinds[buffer.argument]
    if buffer.cast and buffer.elements in parameters:
        return CASTS
    if BACKWARD in buffer.made and FORWARD not in buffer.made and (OUTSIDE in buffer.read or buffer.result):
        return GRADIENTS
    of_layer = math.prod(buffer.shape[1:])  # of what a scan over layers keeps
    for kind, counts in ((LOGITS, logits), (SCORES, scores)):
        if buffer.elements in counts or of_layer in counts:
            return kind
    if buffer.result:
        return RESULTS
    return KEPT if BACKWARD in buffer.read and not buffer.made <= {BACKWARD, ""} else WORKSPACE
