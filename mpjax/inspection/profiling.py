"""`profile`: where a step's time goes: input pipeline, dispatch, device; on the device, by kernel and module."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from mpjax.casting.transform import traced_call
from mpjax.casting.walker import walk
from mpjax.inspection import hlo, kernels, traces
from mpjax.inspection.advice import Advice, advise
from mpjax.inspection.kernels import Kernel, Split
from mpjax.inspection.matmuls import Finding, findings_of, matmuls_of
from mpjax.inspection.reports import Report, Section
from mpjax.inspection.stepping import Stepper, seconds_per_step

# From this share of the kernels' time in CUDA graphs on, a second trace without them is worth its compilation.
_HIDDEN = 0.05


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
        """Seconds of a step by module path, forward and backward; the longest first. `""` is outside of modules."""
        times: dict[str, list[float]] = {}
        for kernel in self.kernels:
            times.setdefault(kernel.module, [0.0, 0.0])[kernel.backward] += kernel.seconds
        return {name: (f, b) for name, (f, b) in sorted(times.items(), key=lambda item: -sum(item[1]))}

    def _part(self, chosen: Iterable[Kernel]) -> float:
        total = self.kernel_seconds
        return sum(kernel.seconds for kernel in chosen) / total if total else 0.0

    def sections(self) -> list[Section]:
        """The report for people."""
        found = [self._summary(), self._by_module(), self._by_kernel()]
        if self.gpu:
            found.append(self._off_tensor_cores())
        lines = [f"{i}. {advice}" for i, advice in enumerate(self.advice, 1)]
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
        return Section("time of a step", "\n".join([*text, *self.notes]), ("", "time", "share"), rows, right={1, 2})

    def _by_module(self) -> Section:
        rows = [
            (name or "-", milli(forward), milli(backward), f"{(forward + backward) / self.kernel_seconds:.1%}")
            for name, (forward, backward) in self.modules().items()
        ]
        return Section("device time by module", "", ("module", "forward", "backward", "share"), rows, right={1, 2, 3})

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
        text = "← is the backward pass" if any(kernel.backward for kernel in self.kernels) else ""
        rows = [row[:columns] for row in rows]
        return Section("device time by kernel", text, header[:columns], rows, right={3, 4, 5})

    def _off_tensor_cores(self) -> Section:
        rows = [(k.module or "-", k.source, k.kind, milli(k.seconds), k.why_not) for k in self.eligible]
        text = "" if rows else "none: every matmul and convolution is on Tensor Cores"
        return Section(
            "eligible for Tensor Cores but not on them", text, ("module", "line", "kind", "time", "why"), rows, {3}
        )


def milli(seconds: float) -> str:
    """A time for people: `12.3 ms`."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} µs"


def profile(
    step: Callable[..., Any],
    *args: Any,
    steps: int = 10,
    batches: Iterable[Any] | None = None,
    carry: int | None = None,
) -> ProfileReport:
    """Measures where the time of a training step, or of any function, goes.

    The step is run in a loop like a training loop's: batches are fetched, steps enqueued, and nothing is waited
    for but the end. Once without the profiler, for `step_seconds`, and once with it, for all the rest. Each instant of
    the traced loop is counted once:

        device     a kernel of the step is running (whatever the host does meanwhile is hidden, and costs nothing)
        input      none is running, and the host is in next(batches), or data is on its way to the device
        dispatch   none is running for any other reason: the host is enqueuing, or launches come too slowly

    so the three shares add up to one. The loop begins one step early, so that a pipeline which loads ahead is seen
    at work. Compiling and warming up are not in it.

    Args:
        step: a jitted function (`jax.jit`, `nnx.jit`, `eqx.filter_jit`). A plain one is put under `jax.jit`, and the
            report says so.
        args: its arguments, arrays. They stay valid where the step donates them: copies are passed.
        steps: how many steps are measured, once with and once without the profiler.
        batches: any iterable; `next(batches)` is then the last argument of each call, and its time is the input
            pipeline's. A collection is read again from its start when it has ended.
        carry: how many leading outputs replace the leading arguments in the next step, as `params, opt_state, loss =
            step(params, opt_state, batch)` does for two. None: as many as have the same structure, shapes and dtypes.

    Returns:
        The report: `step_seconds`, `input_share`, `dispatch_share`, `device_share`, `kernels`, `tensor_core_share`,
        `advice`.

    Raises:
        ValueError: `steps` is not positive, batches ended early, or a donated argument is not carried on.
        TypeError: an argument is a `ShapeDtypeStruct`: the step has to run.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> step = jax.jit(lambda w, x: (w - 0.1 * x.T @ (x @ w), (x @ w).sum()))
        >>> report = mpjax.profile(step, jnp.eye(64), batches=[jnp.ones((32, 64))] * 3, steps=3)
        >>> abs(report.input_share + report.dispatch_share + report.device_share - 1) < 1e-6
        True

    The kernels are read from the trace of `jax.profiler`; what ties them to modules and lines is the metadata of the
    compiled program. Which of them use Tensor Cores is told by their names (`mpjax/inspection/tensor_cores.py`).
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: must be 1 or more")
    stepper = Stepper(step, args, batches, carry)
    stepper.run(1)  # What only the first call after compilation does.
    timing = Timing(*seconds_per_step(stepper.run, steps), stepper.compile_seconds)
    whole = detailed = _record(stepper, steps)
    notes = list(stepper.notes())
    if whole.hidden > _HIDDEN:
        try:
            stepper.leave_cuda_graphs()
            detailed = _record(stepper, steps)
            notes.append("kernels are from a second trace, without CUDA graphs, which hide what a kernel belongs to")
        except Exception as error:  # Whatever it is, the first trace is there; the report says what is missing.
            notes.append(
                f"CUDA graphs hide what {whole.hidden:.0%} of the kernels' time belongs to, and without them the step "
                f"failed ({type(error).__name__}: {error}). XLA_FLAGS=--xla_gpu_enable_command_buffer= turns them off"
            )
    device = jax.devices()[0]
    return report_of(
        whole,
        detailed,
        timing,
        device=device.device_kind,
        capability=_capability(device),
        findings=_findings(step, (*args, *stepper.last_batch)) if whole.trace.gpu else (),
        notes=notes,
    )


class Timing(NamedTuple):
    """Wall times in seconds, measured without the profiler: see `ProfileReport`."""

    step: float
    alone: float
    compile: float


class Recording:
    """A trace of a step and the program that ran.

    Args:
        trace: of one execution of the step more than `steps`.
        text: the step's optimized HLO.
        steps: how many executions count; the first one only fills the pipeline.

    Attributes:
        events: the kernels of the executions that count.
        start: when they began, in seconds.
        instructions: those of the program, by name.
    """

    def __init__(self, trace: traces.Trace, text: str, steps: int):
        self.trace, self.steps = trace, steps
        self.instructions = hlo.instructions(text)
        events = kernels.of_program(trace, hlo.program_name(text), self.instructions)
        self.events, self.start = kernels.after_first(events, steps + 1)

    @property
    def hidden(self) -> float:
        """The share of the kernels' time in CUDA graphs."""
        return kernels.hidden_share(self.events, self.instructions) if self.trace.gpu else 0.0


def _record(stepper: Stepper, steps: int) -> Recording:
    with traces.tracing() as recorded:
        stepper.run(steps + 1)
    return Recording(recorded[0], stepper.text, steps)


def report_of(
    whole: Recording,
    detailed: Recording,
    timing: Timing,
    *,
    device: str,
    capability: float | None = None,
    findings: Iterable[Finding] = (),
    notes: Iterable[str] = (),
) -> ProfileReport:
    """The report from what was measured.

    Args:
        whole: of the step as it is: the split is of this one.
        detailed: the kernels are of this one; the same, or one without CUDA graphs.
        timing: wall times without the profiler.
        device: its name.
        capability: an NVIDIA GPU's compute capability; None for other devices.
        findings: the audit's, of the step.
        notes: what else to say.
    """
    gpu = detailed.trace.gpu and capability is not None
    split = kernels.split(whole.trace, whole.events, whole.start, whole.steps)
    found = kernels.summed(detailed.events, detailed.instructions, detailed.steps, gpu, capability)
    return ProfileReport(
        device=device,
        steps=whole.steps,
        step_seconds=timing.step,
        alone_seconds=timing.alone,
        compile_seconds=timing.compile,
        split=split,
        kernels=found,
        gpu=gpu,
        advice=advise(split, found, gpu, findings),
        notes=(*notes, *_notes(detailed.trace, gpu)),
    )


def _capability(device: Any) -> float | None:
    """The compute capability of an NVIDIA GPU; AMD's have names such as `gfx942` instead."""
    found = re.fullmatch(r"\d+\.\d+", str(getattr(device, "compute_capability", "")))
    return float(found[0]) if found else None


def _findings(step: Callable[..., Any], args: tuple[Any, ...]) -> Sequence[Finding]:
    return findings_of(matmuls_of(walk(traced_call(step, args, {}).jaxpr)))


def _notes(trace: traces.Trace, gpu: bool) -> Iterable[str]:
    if not trace.kernels:
        yield "the trace has no kernels: the split is by the host's time, in which what overlaps can't be seen"
    elif not trace.gpu:
        yield "no GPU: kernels are those of the CPU, which has no Tensor Cores"
    elif not gpu:
        yield "not an NVIDIA GPU: what its kernels' names say of matrix cores is not known"
