"""`profile`: the time of a step in the input pipeline, dispatch and device, by kernel and module, and advice on it."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mpjax.inspection.auditing.matmuls import Matmul, matmuls_of
from mpjax.inspection.devices import device_of
from mpjax.inspection.profiling import hlo
from mpjax.inspection.profiling.kernels import Kernel, Recording, Split, traced
from mpjax.inspection.profiling.stepping import Recompilation, Stepper
from mpjax.inspection.reports import Report, Section, added_up, amount, by_key, duration, folded, totals
from mpjax.program.graph import walk
from mpjax.program.source import RECOMPUTED, reason
from mpjax.program.tracing import traced_call

# The share of kernel time in CUDA graphs above which a second trace without them is worth its compilation.
_HIDDEN = 0.05
# Steps measured if each one is compiled: recompilation is slow enough to show in this many.
_STEPS_OF_RECOMPILATION = 3


def profile(
    step: Callable[..., Any],
    *args: Any,
    steps: int = 10,
    batches: Iterable[Any] | None = None,
    carry: int | None = None,
    device: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> ProfileReport:
    """Measures where the time of a training step, or of any function, goes.

    The step runs in a loop like a training loop: it fetches batches, enqueues steps, and waits only at the end. The
    loop runs once without the profiler, for `step_seconds`, and once with it, for the rest of the report. Each instant
    of the traced loop is counted once, so the shares add up to one:

        device     a kernel of the step is running (host work at the same time is hidden and costs nothing)
        input      no kernel is running, and the host is in next(batches), or data is being copied to the device
        compile    no kernel is running, and the step is being recompiled
        dispatch   no kernel is running for any other reason: the host is enqueuing, or launches are too slow

    The loop starts one step early, so that a prefetching pipeline is already running. Compilation and warm-up are
    excluded.

    Args:
        step: Any function of arrays, jitted (`jax.jit`, `nnx.jit`, `eqx.filter_jit`) or not. It runs as it is given. If
            it is not jitted, it is also compiled as a whole, and the report begins with the difference between the two.
        args: Its arguments, as arrays. A step that donates its arguments gets copies, so the originals stay valid.
        steps: Number of steps to measure, once with and once without the profiler.
        batches: Any iterable. `next(batches)` is the last argument of each call, and its time counts as input
            pipeline. A collection that ends is read again from its start.
        carry: Number of leading outputs that replace the leading arguments in the next step. It is 2 for `params,
            opt_state, loss = step(params, opt_state, batch)`. None: if the step donates arguments, as many leading
            outputs as have their structure, shapes and dtypes; otherwise each call gets the same arguments.
        device: The device whose peak rates define MFU, by its name in the device table. None: the device that runs the
            step, if it is in the table.
        kwargs: Keyword arguments of the step.

    Returns:
        A `ProfileReport`: `limit` and `advice`, `step_seconds`, the shares, `kernels`, `tensor_core_share`,
        `mfu`.

    Raises:
        ValueError: `steps` is not positive, `device` is invalid, the batches ended early, or a
            donated argument is not carried.
        TypeError: An argument is a `ShapeDtypeStruct`. The step needs arrays to run.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> step = jax.jit(lambda w, x: (w - 0.1 * x.T @ (x @ w), (x @ w).sum()))
        >>> report = mpjax.profile(step, jnp.eye(64), batches=[jnp.ones((32, 64))] * 3, steps=3)
        >>> abs(report.input_share + report.dispatch_share + report.device_share - 1) < 1e-6
        True

    The kernels come from the trace of `jax.profiler`, and their modules and lines from the metadata of the compiled
    program. The kernels' names show which use Tensor Cores (`mpjax/inspection/profiling/kernels.py`).
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: must be 1 or more")
    if device is not None:
        device_of(device)  # Raises before minutes of measuring.
    stepper = Stepper(step, args, batches, carry, kwargs)
    if not stepper.warm_up():
        steps = min(steps, _STEPS_OF_RECOMPILATION)
    timing = Timing(stepper.timed(steps), stepper.compile_seconds)
    jitted, copied = stepper.jitted, stepper.copied
    whole = detailed = _record(stepper, steps)
    recompilation = stepper.recompilation
    notes = list(stepper.notes())
    # Compiled as a whole, a step that compiles again at each call would keep a value that it changes.
    if not stepper.jitted and not stepper.why_not and recompilation is None:
        stepper = stepper.under_jit()
        stepper.warm_up()
        timing = timing._replace(compiled=stepper.timed(steps))
        detailed = _record(stepper, steps)
    if detailed.hidden > _HIDDEN:
        try:
            stepper.leave_cuda_graphs()
            detailed = _record(stepper, steps)
            notes.append("kernels are from a second trace, without CUDA graphs, which hide what a kernel belongs to")
        except Exception as error:  # The first trace is still valid; a note says what is missing.
            notes.append(
                f"CUDA graphs hide what {detailed.hidden:.0%} of the kernels' time belongs to, and without them the "
                f"step failed ({reason(error)}). XLA_FLAGS=--xla_gpu_enable_command_buffer= turns them off"
            )
    runs_on = jax.devices()[0]
    matmuls: Sequence[Matmul] = ()
    try:
        if not stepper.why_not:
            matmuls = matmuls_of(walk(traced_call(step, (*args, *stepper.last_batch), dict(kwargs or {})).jaxpr))
    except Exception as error:  # The step may be a library's own type; the rest of the report needs no FLOPs.
        notes.append(f"FLOPs are not known: {reason(error)}")
    report = report_of(
        whole,
        detailed,
        timing,
        device=runs_on.device_kind,
        capability=_capability(runs_on),
        recompilation=recompilation,
        jitted=jitted,
        copied=copied,
        reads_at=stepper.reads_at,
        notes=notes,
    )
    return dataclasses.replace(
        report,
        flops=sum(row.flops for row in matmuls if row.phase != RECOMPUTED) if matmuls else None,
        peak_flops=_peak(device or runs_on.device_kind, matmuls),
    )


class Timing(NamedTuple):
    """Wall times in seconds, measured without the profiler: see `ProfileReport`."""

    step: float
    compile: float
    compiled: float | None = None


def _record(stepper: Stepper, steps: int) -> Recording:
    trace = traced(lambda: stepper.run(steps + 1))
    return Recording(trace, stepper.text if stepper.jitted else "", steps, stepper.compiled)


def report_of(
    whole: Recording,
    detailed: Recording,
    timing: Timing,
    *,
    device: str,
    capability: float | None = None,
    recompilation: Recompilation | None = None,
    notes: Iterable[str] = (),
    **conditions: Any,
) -> ProfileReport:
    """The report of a measurement.

    Args:
        whole: The recording of the step as written, used for the split.
        detailed: The recording used for the kernels: `whole`, or one without CUDA graphs.
        timing: Wall times without the profiler.
        device: The device's name.
        capability: An NVIDIA GPU's compute capability; None for other devices.
        recompilation: The compilations in the executions that count, if any.
        notes: Further notes.
        conditions: `jitted`, `copied` and `reads_at` of `advise`.
    """
    gpu = detailed.trace.gpu and capability is not None
    report = ProfileReport(
        device=device,
        steps=whole.steps,
        step_seconds=timing.step,
        compile_seconds=timing.compile,
        compiled_seconds=timing.compiled,
        split=whole.split(),
        kernels=detailed.kernels(gpu, capability),
        gpu=gpu,
        advice=(),
        notes=(*notes, *_notes(whole, gpu)),
        recompilation=recompilation,
    )
    callbacks = [i for i in detailed.instructions.values() if i.kind == hlo.CALLBACK]
    return dataclasses.replace(report, advice=advise(report, callbacks=callbacks, **conditions))


def _peak(device: str, matmuls: Sequence[Matmul]) -> float | None:
    """The device's peak FLOP/s in the dtype of most of the FLOPs; None if unknown."""
    if not matmuls:
        return None
    flops = totals(((row.dtype, row.precision if row.precision == "HIGHEST" else ""), row.flops) for row in matmuls)
    try:
        return device_of(device).peak(*max(flops, key=lambda key: flops[key]))
    except ValueError:
        return None


def _capability(device: Any) -> float | None:
    """The compute capability of an NVIDIA GPU; None for others. (AMD GPUs have names such as `gfx942` instead.)"""
    found = re.fullmatch(r"\d+\.\d+", str(getattr(device, "compute_capability", "")))
    return float(found[0]) if found else None


def _notes(recording: Recording, gpu: bool) -> Iterable[str]:
    if not recording.events:
        yield "the trace has no kernels: the split is by the host's time, which hides overlap"
    elif not recording.comparable:
        yield "kernels and host have no common clock: the split is by the host's time, which hides overlap"
    if recording.events and not recording.trace.gpu:
        yield "no GPU: kernels are those of the CPU, which has no Tensor Cores, and whose kernel times are not reliable"
    elif recording.events and not gpu:
        yield "not an NVIDIA GPU: mpjax can't tell from its kernels' names whether they use matrix cores"


_LEAST_WORK = 0.25  # The share of a step above which matmuls may be its limit.
_FIRST = 3  # Pieces of advice at the top of the report.


@dataclasses.dataclass(frozen=True)
class ProfileReport(Report):
    """Where the time of a step goes. `print` it, read its fields, or write it with `to_json` or `to_html`.

    Args:
        device: Name of the device, as `NVIDIA H100 80GB HBM3` or `cpu`.
        steps: Number of measured steps.
        step_seconds: Wall time of a step in a running loop, without the profiler.
        compile_seconds: Time of tracing and compiling once.
        traced_seconds: Wall time of a step under the profiler. Shares and kernels refer to these steps.
        split: Seconds of a traced step on the device, in the input pipeline, in dispatch and in compilation.
        kernels: Device time by kernel and instruction, longest first.
        gpu: Whether the device is an NVIDIA GPU, whose kernel names show the use of Tensor Cores.
        advice: The recommended changes, greatest gain first.
        notes: Remarks on the measurement and the limits of the figures.
        compiled_seconds: Wall time of a step that was given without jit when it is compiled as a whole; None otherwise.
        flops: FLOPs of the step's matmuls and convolutions on each device, without recomputation in the backward pass.
            None if unknown.
        peak_flops: The device's peak FLOP/s in the dtype of most of the FLOPs; None if unknown.
        recompilation: Compilations during the measurement; None if there were none.
    """

    device: str
    steps: int
    step_seconds: float
    compile_seconds: float
    split: Split
    kernels: tuple[Kernel, ...]
    gpu: bool
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    compiled_seconds: float | None = None
    flops: int | None = None
    peak_flops: float | None = None
    recompilation: Recompilation | None = None

    heading = "profile"
    main = "kernels"
    derived = (
        "traced_seconds input_share dispatch_share device_share compilation_share outside_share flops_per_second mfu "
        "limit tensor_core_share modules"
    )

    @property
    def traced_seconds(self) -> float:
        """Wall time of a step under the profiler."""
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
        """The share of the step in which the device is busy."""
        return self.split.device / self.split.wall

    @property
    def compilation_share(self) -> float:
        """The share of the step spent recompiling it."""
        return self.split.compilation / self.split.wall

    @property
    def outside_share(self) -> float | None:
        """The share of a step given without jit that its compiled program does not take; None for a jitted step."""
        return None if self.compiled_seconds is None else max(0.0, 1 - self.compiled_seconds / self.step_seconds)

    @property
    def limit(self) -> str:
        """The main limit of the step, as `input pipeline` or `recompilation`; empty if nothing stands out.

        A step should be limited by `matmuls and convolutions`. There may still be advice on the rest of the step.
        """
        if self._work_share > max(_LEAST_WORK, self.advice[0].share if self.advice else 0.0):
            return "matmuls and convolutions"
        return self.advice[0].limit if self.advice else ""

    @property
    def _work_share(self) -> float:
        """The share of the step in matmuls, convolutions and attention; on a GPU, only those on Tensor Cores."""
        work = (k for k in self.kernels if k.eligible and k.tensor_cores is not False)
        return self.device_share * self._part(work) * (1 - (self.outside_share or 0)) if self.reliable else 0.0

    @property
    def reliable(self) -> bool:
        """Whether the kernels' times are reliable. Those of a CPU are not: its threads share the work, and wait."""
        return self.device != "cpu"

    @property
    def flops_per_second(self) -> float | None:
        """FLOPs of matmuls and convolutions per second of a step, on each device."""
        return None if self.flops is None else self.flops / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: `flops_per_second` over `peak_flops`. Chowdhery et al., "PaLM", 2022, appendix B."""
        achieved = self.flops_per_second
        return None if achieved is None or self.peak_flops is None else achieved / self.peak_flops

    @property
    def kernel_seconds(self) -> float:
        """The total time of a step's kernels. It exceeds the device time where kernels overlap."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def tensor_core_share(self) -> float | None:
        """The share of kernel time in kernels that use Tensor Cores; None without an NVIDIA GPU."""
        return self._part(kernel for kernel in self.kernels if kernel.tensor_cores) if self.gpu else None

    @property
    def modules(self) -> dict[str, tuple[float, float]]:
        """Forward and backward seconds of a step by module path, longest first. `""` is outside all modules.

        If no named scope exists (Flax NNX has none), the lines that call the layers replace the module paths. Empty on
        a CPU, whose kernel times are not reliable.
        """
        if not self.reliable:
            return {}
        named = any(kernel.module for kernel in self.kernels)
        times = added_up(
            (k.module if named else k.source, (0.0, k.seconds) if k.backward else (k.seconds, 0.0))
            for k in self.kernels
        )
        return dict(sorted(times.items(), key=lambda item: -sum(item[1])))

    def _part(self, chosen: Iterable[Kernel]) -> float:
        total = self.kernel_seconds
        return sum(kernel.seconds for kernel in chosen) / total if total else 0.0

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        kernels = [self._by_module(), self._by_kernel()] if self.reliable else []
        rest = "\n".join(f"{i}. {advice}" for i, advice in enumerate(self.advice, 1) if i > _FIRST)
        return [self._verdict(), self._times(), *kernels, *([Section("more advice", rest)] if rest else [])]

    def _verdict(self) -> Section:
        lines = [f"{duration(self.step_seconds)} a step on {self.device}, over {self.steps} steps"]
        if self.compiled_seconds is not None:
            lines[0] += f", as given, without jit; {duration(self.compiled_seconds)} compiled as a whole"
        if self.limit:
            share = max(self._work_share, self.advice[0].share if self.advice else 0.0)
            lines.insert(0, f"limited by {self.limit}: {share:.0%} of the step")
        else:
            lines.insert(0, f"nothing stands out: the device is busy {self.device_share:.0%} of the step")
        lines += [f"{i}. {advice}" for i, advice in enumerate(self.advice[:_FIRST], 1)]
        return Section("", "\n".join(lines))

    def _times(self) -> Section:
        split = self.split
        parts = [("device", split.device), ("input pipeline", split.input), ("dispatch", split.dispatch)]
        parts += [("compilation", split.compilation)] if split.compilation else []
        rows = [(name, duration(seconds), f"{seconds / split.wall:.1%}") for name, seconds in parts]
        text = [
            f"{duration(self.step_seconds)} a step in a loop; compiled in {duration(self.compile_seconds)}",
            f"{duration(self.traced_seconds)} a step while traced, which the shares below refer to",
        ]
        if self.flops and self.flops_per_second:
            used = "" if self.mfu is None else f": MFU {self.mfu:.1%} of {amount(self.peak_flops or 0, 'FLOP/s')}"
            text.append(f"{amount(self.flops, 'FLOP')} a step, {amount(self.flops_per_second, 'FLOP/s')}{used}")
        if self.tensor_core_share is not None:
            text.append(f"Tensor Cores: {self.tensor_core_share:.1%} of the kernels' time")
        return Section("Time of a step", "\n".join([*text, *self.notes]), "|>time|%share", rows)

    def _by_module(self) -> Section:
        what = "module" if any(kernel.module for kernel in self.kernels) else "line"
        modules = self.modules
        names = folded(modules) if what == "module" else {name: name for name in modules}
        merged = added_up((names[name], times) for name, times in modules.items())
        rows = [
            (name or "-", duration(forward), duration(backward), f"{(forward + backward) / self.kernel_seconds:.1%}")
            for name, (forward, backward) in sorted(merged.items(), key=lambda item: -sum(item[1]))
        ]
        return Section(f"Device time by {what}", "", f"{what}|>forward|>backward|%share", rows)

    def _by_kernel(self) -> Section:
        columns = "module|kind|kernel|>calls|>time|%share|Tensor Cores"
        marks = {True: "yes", False: "no: ", None: "?"}
        rows: list[tuple[str, ...]] = [
            (
                (kernel.module or "-") + (" ←" if kernel.backward else ""),
                f"{kernel.kind} {kernel.dtype}".strip(),
                kernel.name,
                f"{kernel.calls:.3g}",
                duration(kernel.seconds),
                f"{self._part([kernel]):.1%}",
                marks[kernel.tensor_cores] + kernel.why_not if kernel.eligible else "-",
            )
            for kernel in self.kernels
        ]
        text = ["← is the backward pass"] if any(kernel.backward for kernel in self.kernels) else []
        if self.kernel_seconds > 1.05 * self.split.device > 0:
            text.append(f"some run at the same time: {duration(self.kernel_seconds)} in {duration(self.split.device)}")
        if not self.gpu:
            columns, rows = columns.removesuffix("|Tensor Cores"), [row[:-1] for row in rows]
        return Section("Device time by kernel", "\n".join(text), columns, rows)


# Advice on the limits of a step, with the numbers behind it, greatest gain first.


# For each limit, the share of the step above which advice is given, the words before the share, and what to do.
_FILE = pathlib.Path(__file__).with_name("limits.csv")
_LIMITS = {row["limit"]: row for row in csv.DictReader(_FILE.read_text("utf-8").splitlines())}


_MANY_BYTES = 1 << 20  # of NumPy arrays, from which copying them takes longer than a call


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
    report: ProfileReport,
    *,
    callbacks: Sequence[hlo.Instruction] = (),
    jitted: bool = True,
    copied: int = 0,
    reads_at: Sequence[str] = (),
) -> tuple[Advice, ...]:
    """Advice on a step, ranked by the share of its time.

    Args:
        report: Its measurement, without advice. Advice on half precision applies only on a GPU.
        callbacks: The step's host callbacks.
        jitted: Whether the step is one compiled program.
        copied: The bytes of NumPy arrays among the arguments of each call, which it copies to the device.
        reads_at: The lines of the step that wait for the value of an array.
    """
    gpu, recompilation = report.gpu, report.recompilation
    wait = f", and {', '.join(reads_at)} {'wait' if reads_at[1:] else 'waits'} for the value of an array"
    found = [_advice("input pipeline", report.input_share)]
    waiting = report.dispatch_share
    if recompilation:
        pass  # What else the host does, no measurement tells: a jit of all of it might fix a value that changes.
    elif report.outside_share is not None:
        found.append(_advice("code outside of jit", report.outside_share, wait if reads_at else ""))
    elif not jitted:
        found.append(_advice("host work in the step", waiting, wait if reads_at else ""))
    elif gpu and callbacks:
        found.append(_advice("host callbacks", waiting, f" ({_called(callbacks)})"))
    elif copied >= _MANY_BYTES:
        found.append(_advice("transfer", waiting, f" ({amount(copied, 'B')} of NumPy arrays)"))
    else:
        found.append(_advice("dispatch", waiting))
    if recompilation:
        again = (
            f": {recompilation.steps} of {recompilation.measured} steps were compiled again, "
            f"{duration(recompilation.seconds)} each ({recompilation})"
        )
        remedy = "pad batches to one shape or to a few, and drop a smaller last one"
        remedy = remedy if recompilation.changed else "make a function once, and a value that changes an array argument"
        found.append(_advice("recompilation", report.compilation_share, again, remedy))
    # Kernels may overlap, so their times are scaled to add up to the device time.
    scale = report.device_share / (report.kernel_seconds or 1.0)
    for limit, chosen in by_key((limit_of(kernel, gpu), kernel) for kernel in report.kernels).items():
        if limit in _LIMITS and (report.reliable or limit == "host callbacks"):
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
