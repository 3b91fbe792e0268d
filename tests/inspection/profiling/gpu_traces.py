"""Profiler traces made by hand, as jax.profiler would write them on a GPU: real kernel names, invented times."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from mpjax.inspection.profiling.kernels import Kernel, Split
from mpjax.inspection.profiling.profile import Advice, ProfileReport, advise


class Span(NamedTuple):
    """One event: microseconds since tracing began, and the stats that the trace gives it."""

    name: str
    start: float
    end: float
    stats: Mapping[str, str] = {}


def kernel(name: str, start: float, end: float, op: str = "", program: str = "jit_step") -> Span:
    """A kernel as CUPTI reports it."""
    stats = {"kernel_details": "regs:128 grid:64,1,1 block:256,1,1 occ_pct:50"}
    return Span(name, start, end, stats | ({"hlo_op": op, "hlo_module": program} if op else {}))


def transfer(start: float, end: float) -> Span:
    """A copy of a batch to the GPU, outside of any program."""
    return Span("MemcpyH2D", start, end, {"memcpy_details": "kind_src:pageable kind_dst:device size:4096"})


def profile_data(planes: Mapping[str, Mapping[str, Iterable[Span]]]) -> ProfileData:
    """A trace from its planes, their lines and the events on these."""
    return ProfileData.from_text_proto("\n".join(_plane(name, lines) for name, lines in planes.items()))


def _plane(name: str, lines: Mapping[str, Iterable[Span]]) -> str:
    names: dict[str, int] = {}
    stats: dict[str, int] = {}
    body = []
    for number, (line, spans) in enumerate(lines.items()):
        events = []
        for span in spans:
            values = " ".join(
                f'stats {{ metadata_id: {stats.setdefault(key, len(stats) + 1)} str_value: "{value}" }}'
                for key, value in span.stats.items()
            )
            start, duration = round(span.start * 1e6), round((span.end - span.start) * 1e6)
            identity = names.setdefault(span.name, len(names) + 1)
            events.append(f"events {{ metadata_id: {identity} offset_ps: {start} duration_ps: {duration} {values} }}")
        body.append(f'lines {{ id: {number + 1} name: "{line}" {" ".join(events)} }}')
    for kind, table in (("event", names), ("stat", stats)):
        body += [f'{kind}_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}' for n, i in table.items()]
    return f'planes {{ name: "{name}" {" ".join(body)} }}'


def advised(
    split: Split, kernels: Iterable[Kernel] = (), gpu: bool = True, compiled: float | None = None, **given: Any
) -> tuple[Advice, ...]:
    """The advice on a step with these times."""
    return advise(ProfileReport("NVIDIA X", 1, 1.0, 0.0, split, tuple(kernels), gpu, (), (), compiled), **given)
