"""Advice on the limits of a step, with the numbers behind it, greatest gain first."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Sequence

from mpjax.inspection.profiling import hlo
from mpjax.inspection.profiling.kernels import Kernel, Split
from mpjax.inspection.profiling.stepping import Recompilation
from mpjax.inspection.reports import duration, totals

# For each limit, the share of the step above which advice is given, the words before the share, and what to do.
_FILE = pathlib.Path(__file__).with_name("limits.csv")
_LIMITS = {row["limit"]: row for row in csv.DictReader(_FILE.read_text("utf-8").splitlines())}


@dataclasses.dataclass(frozen=True)
class Advice:
    """One recommended change.

    Args:
        text: The change and its reason.
        share: The share of the step's time that it concerns.
        limit: A short name of the limit, as `input pipeline`.
    """

    text: str
    share: float
    limit: str

    @property
    def bound(self) -> float:
        """The speedup of the step if that time were zero (Amdahl)."""
        return float("inf") if self.share >= 1 else 1 / (1 - self.share)

    def __str__(self) -> str:
        return f"{self.text} (at most {self.bound:.1f}x faster without)" if self.share < 0.99 else self.text


def advise(
    split: Split,
    kernels: Sequence[Kernel],
    gpu: bool,
    *,
    recompilation: Recompilation | None = None,
    callbacks: Sequence[hlo.Instruction] = (),
    outside: float | None = None,
    ranked: bool = True,
) -> tuple[Advice, ...]:
    """Advice on a step, ranked by the share of its time.

    Args:
        split: The split of the step's time.
        kernels: The step's kernels.
        gpu: Whether it ran on a GPU. Advice on half precision applies only there.
        recompilation: The step's recompilation during the measurement.
        callbacks: The step's host callbacks.
        outside: For a step that is not jitted, the share of its time that the compiled step does not take.
        ranked: Whether the kernels' times are reliable.
    """
    found = [_advice("input pipeline", split.input / split.wall)]
    if outside is not None:
        found.append(_advice("code outside of jit", outside))
    elif gpu and callbacks:
        found.append(_advice("host callbacks", split.dispatch / split.wall, f" ({_called(callbacks)})"))
    else:
        found.append(_advice("dispatch", split.dispatch / split.wall))
    if recompilation:
        again = (
            f": {recompilation.steps} of {recompilation.measured} steps were compiled again, "
            f"{duration(recompilation.seconds)} each ({recompilation})"
        )
        remedy = "pad batches to one shape or to a few, and drop a smaller last one"
        remedy = remedy if recompilation.changed else "make it once"
        found.append(_advice("recompilation", split.compilation / split.wall, again, remedy))
    # Kernels may overlap, so their times are scaled to add up to the device time.
    scale = split.device / split.wall / (sum(kernel.seconds for kernel in kernels) or 1.0)
    by_limit: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_limit.setdefault(limit_of(kernel, gpu), []).append(kernel)
    for limit, chosen in by_limit.items():
        if limit in _LIMITS and (ranked or limit == "host callbacks"):
            times = totals((kernel.module, kernel.seconds) for kernel in chosen)
            most = max(times, key=lambda module: times[module])
            detail = f", the most in {most}" if most else ""
            detail = f" ({_called(chosen)})" if limit == "host callbacks" else detail
            found.append(_advice(limit, scale * sum(times.values()), detail))
    return tuple(sorted((advice for advice in found if advice), key=lambda advice: -advice.share))


def _advice(limit: str, share: float, detail: str = "", remedy: str = "") -> Advice | None:
    row = _LIMITS[limit]
    text = f"{row['words']} {share:.0%} of the step{detail}: {remedy or row['remedy']}"
    return Advice(text, share, limit) if share >= float(row["worth"]) else None


def limit_of(kernel: Kernel, gpu: bool) -> str:
    """The limit that a kernel's time belongs to; empty for matmuls as they should be, and for unknown kinds."""
    path = kernel.path.replace("\\", "/")
    if kernel.kind in (*hlo.MEMORY_BOUND, hlo.CAST) and "/mpjax/loss_scale/" not in path:
        if kernel.updates or "/optax/" in path:
            return "optimizer"
        return "casts" if kernel.kind == hlo.CAST else "memory traffic"
    if gpu and kernel.eligible and kernel.dtype != "f64":
        return "float32 matmuls" if kernel.dtype == "f32" else "matmuls" if kernel.tensor_cores is False else ""
    if kernel.kind in (hlo.CALLBACK, hlo.COLLECTIVE):
        return "host callbacks" if kernel.kind == hlo.CALLBACK else "collectives"
    return "loss scaling" if "/mpjax/loss_scale/" in path else ""


def _called(callbacks: Iterable[hlo.Instruction | Kernel]) -> str:
    """The callbacks with their lines: `pure_callback at train.py:12`."""
    names = (re.sub(r"\.\d+$", "", getattr(c, "op", "") or c.name) for c in callbacks)
    return ", ".join(dict.fromkeys(f"{name} at {c.source or '?'}" for name, c in zip(names, callbacks, strict=True)))
