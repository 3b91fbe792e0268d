"""The result of `profile`: shares of the step's time, kernels and modules, advice; as text, JSON and HTML."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable
from typing import Any

from mpjax.inspection.profile.advice import Advice
from mpjax.inspection.profile.kernels import Kernel, Split
from mpjax.inspection.reports import WIDTH, Report, Section


@dataclasses.dataclass(frozen=True)
class ProfileReport(Report):
    """Where the time of a step goes: attributes for programs, `print` for people, `to_json` and `to_html`.

    Args:
        device: what it ran on, as `NVIDIA H100 80GB HBM3` or `cpu`.
        steps: how many steps were measured.
        step_seconds: wall time of a step in a running loop, measured without the profiler.
        alone_seconds: wall time of a step that is waited for, from fetching its batch to its results.
        compile_seconds: tracing and compiling, once.
        traced_seconds: wall time of a step while the profiler ran; shares and kernels are of these steps.
        split: the seconds of a traced step on the device, in the input pipeline and in dispatch.
        kernels: device time by kernel and instruction, the longest first.
        gpu: whether the kernels are an NVIDIA GPU's, whose names tell the use of Tensor Cores.
        advice: what to do, the greatest gain first.
        notes: what to know when reading the figures.
    """

    device: str
    steps: int
    step_seconds: float
    alone_seconds: float
    compile_seconds: float
    split: Split
    kernels: tuple[Kernel, ...]
    gpu: bool
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]

    title = "profile"

    @property
    def traced_seconds(self) -> float:
        """Wall time of a step while the profiler ran."""
        return self.split.wall

    @property
    def input_share(self) -> float:
        """The share of the step in which the device waits for a batch."""
        return self.split.input / self.split.wall

    @property
    def dispatch_share(self) -> float:
        """The share of the step in which the device waits for the host to enqueue or launch."""
        return self.split.dispatch / self.split.wall

    @property
    def device_share(self) -> float:
        """The share of the step in which the device works."""
        return self.split.device / self.split.wall

    @property
    def kernel_seconds(self) -> float:
        """The times of all kernels of a step together; more than the device's where they overlap."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def tensor_core_share(self) -> float | None:
        """The share of the kernels' time in kernels that use Tensor Cores; None without an NVIDIA GPU."""
        if not self.gpu:
            return None
        return self._part(kernel for kernel in self.kernels if kernel.tensor_cores)

    @property
    def eligible(self) -> tuple[Kernel, ...]:
        """Matmuls, convolutions and attention that do not use Tensor Cores, the longest first; empty without a GPU."""
        return tuple(kernel for kernel in self.kernels if kernel.eligible and kernel.tensor_cores is False)

    def modules(self) -> dict[str, tuple[float, float]]:
        """Seconds of a step by module path, forward and backward; the longest first. `""` is outside of modules.

        Where no scope names any module (Flax NNX has none), the lines that call the layers take their place.
        """
        times: dict[str, list[float]] = {}
        named = any(kernel.module for kernel in self.kernels)
        for kernel in self.kernels:
            times.setdefault(kernel.module if named else kernel.source, [0.0, 0.0])[kernel.backward] += kernel.seconds
        return {name: (f, b) for name, (f, b) in sorted(times.items(), key=lambda item: -sum(item[1]))}

    def _part(self, chosen: Iterable[Kernel]) -> float:
        total = self.kernel_seconds
        return sum(kernel.seconds for kernel in chosen) / total if total else 0.0

    def sections(self) -> list[Section]:
        """The report for people."""
        found = [self._summary(), self._by_module(), self._by_kernel()]
        if self.gpu:
            found.append(self._off_tensor_cores())
        lines = [
            textwrap.fill(f"{i}. {advice}", WIDTH, subsequent_indent="   ") for i, advice in enumerate(self.advice, 1)
        ]
        lines = lines or [f"nothing stands out: the device is busy {self.device_share:.0%} of the step"]
        return [*found, Section("advice, by the share of the step that it is about", "\n".join(lines))]

    def to_dict(self) -> dict[str, Any]:
        """The report for programs."""
        shares = {name: getattr(self, name) for name in ("input_share", "dispatch_share", "device_share")}
        skipped = ("kernels", "advice", "split", "notes")
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped},
            "traced_seconds": self.traced_seconds,
            **shares,
            "tensor_core_share": self.tensor_core_share,
            "modules": {name: {"forward": f, "backward": b} for name, (f, b) in self.modules().items()},
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
            "advice": [{"text": advice.text, "share": advice.share} for advice in self.advice],
            "notes": list(self.notes),
        }

    def table(self) -> list[dict[str, Any]]:
        """The kernels, the longest first."""
        return [dataclasses.asdict(kernel) for kernel in self.kernels]

    def _summary(self) -> Section:
        parts = (("device", self.split.device), ("input pipeline", self.split.input), ("dispatch", self.split.dispatch))
        rows = [(name, milli(seconds), f"{seconds / self.split.wall:.1%}") for name, seconds in parts]
        text = [
            f"{milli(self.step_seconds)} a step ({milli(self.alone_seconds)} alone) on {self.device}, over "
            f"{self.steps} steps; compiled in {self.compile_seconds:.1f} s",
            f"{milli(self.traced_seconds)} a step while traced: what follows is of these",
        ]
        if self.tensor_core_share is not None:
            text.append(f"Tensor Cores: {self.tensor_core_share:.1%} of the kernels' time")
        figure = bar((name, seconds / self.split.wall) for name, seconds in parts)
        header = ("", "time", "share")
        return Section("time of a step", "\n".join([*text, *self.notes]), header, rows, right={1, 2}, figure=figure)

    def _by_module(self) -> Section:
        rows = [
            (name or "-", milli(forward), milli(backward), f"{(forward + backward) / self.kernel_seconds:.1%}")
            for name, (forward, backward) in self.modules().items()
        ]
        what = "module" if any(kernel.module for kernel in self.kernels) else "line"
        return Section(f"device time by {what}", "", (what, "forward", "backward", "share"), rows, right={1, 2, 3})

    def _by_kernel(self) -> Section:
        # A CPU's kernels have no names of their own, so there is room for the line.
        header = ("module", "kind", "kernel" if self.gpu else "line", "calls", "time", "share", "Tensor Cores")
        marks = {True: "yes", False: "no", None: "?"}
        rows: list[tuple[str, ...]] = [
            (
                (kernel.module or "-") + (" ←" if kernel.backward else ""),
                f"{kernel.kind} {kernel.dtype}".strip(),
                kernel.name if self.gpu else kernel.source,
                f"{kernel.calls:.3g}",
                milli(kernel.seconds),
                f"{self._part([kernel]):.1%}",
                marks[kernel.tensor_cores] if kernel.eligible else "-",
            )
            for kernel in self.kernels
        ]
        columns = len(header) if self.gpu else len(header) - 1
        text = ["← is the backward pass"] if any(kernel.backward for kernel in self.kernels) else []
        if self.kernel_seconds > 1.05 * self.split.device > 0:
            text.append(f"some run at the same time: {milli(self.kernel_seconds)} in {milli(self.split.device)}")
        rows = [row[:columns] for row in rows]
        return Section("device time by kernel", "\n".join(text), header[:columns], rows, right={3, 4, 5})

    def _off_tensor_cores(self) -> Section:
        rows = [(k.module or "-", k.source, k.kind, milli(k.seconds), k.why_not) for k in self.eligible]
        text = "" if rows else "none: every matmul and convolution is on Tensor Cores"
        return Section(
            "eligible for Tensor Cores but not on them", text, ("module", "line", "kind", "time", "why"), rows, {3}
        )


def milli(seconds: float) -> str:
    """A time for people: `12.3 ms`."""
    # A microsecond less than a millisecond would be 1e+03 µs.
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 or not seconds else f"{seconds * 1e6:.3g} µs"


def bar(shares: Iterable[tuple[str, float]]) -> str:
    """A horizontal bar of shares that add up to one, as an inline SVG."""
    parts, at = [], 0.0
    for (name, share), color in zip(shares, ("#4878a8", "#c8673c", "#9a9a9a"), strict=True):
        label = f"{name} {share:.0%}"
        parts.append(
            f'<rect x="{at:.1f}" width="{600 * share:.1f}" height="28" fill="{color}"><title>{label}</title></rect>'
        )
        if share > 0.2:
            parts.append(f'<text x="{at + 6:.1f}" y="19" fill="white">{label}</text>')
        at += 600 * share
    return f'<svg width="600" height="28" role="img">{"".join(parts)}</svg>'
