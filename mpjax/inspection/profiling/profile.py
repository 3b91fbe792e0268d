"""`profile`: the time of a step in the input pipeline, dispatch and device, and by kernel and module."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from mpjax.inspection.auditing.matmuls import Matmul, matmuls_of
from mpjax.inspection.devices import device_of
from mpjax.inspection.profiling import hlo, kernels, profiler_trace
from mpjax.inspection.profiling.hlo import HloModule
from mpjax.inspection.profiling.report import ProfileReport as ProfileReport
from mpjax.inspection.profiling.report import advise
from mpjax.inspection.profiling.stepping import Recompilation, Stepper
from mpjax.inspection.reports import totals
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
    notes = list(stepper.notes())
    # Compiled as a whole, a step that compiles again at each call would keep a value that it changes.
    if not stepper.jitted and not stepper.why_not and whole.recompilation is None:
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


@dataclasses.dataclass(eq=False, repr=False)
class Recording:
    """A trace of a step and its program.

    Args:
        trace: The trace of `steps` + 1 executions of the step.
        text: The step's optimized HLO.
        steps: Number of executions that count. The first execution only fills the pipeline.
        recompilation: The compilations in the executions that count, if any.
        compiled: For each execution, whether it was recompiled.

    Attributes:
        events: The kernels of the executions that count.
        start: Their start, in seconds.
        instructions: The program's instructions, by name.
    """

    trace: profiler_trace.Trace
    text: dataclasses.InitVar[str]
    steps: int
    recompilation: Recompilation | None = None
    compiled: Sequence[bool] = ()

    def __post_init__(self, text: str) -> None:
        program = HloModule(text)
        self.instructions = hlo.instructions(program)
        events = kernels.of_program(self.trace, program.name)
        self.events, self.start = kernels.after_first(self.trace, events, self.steps + 1, program.name)

    @property
    def hidden(self) -> float:
        """The share of a GPU's kernel time without a known instruction of the program.

        XLA launches most of a program as CUDA graphs (command buffers), whose kernels are recorded under the graph's
        name.
        """
        seconds = totals((event.op in self.instructions, event.seconds) for event in self.events if self.trace.gpu)
        return seconds.get(False, 0.0) / sum(seconds.values()) if seconds else 0.0


def _record(stepper: Stepper, steps: int) -> Recording:
    with profiler_trace.tracing() as recorded:
        stepper.run(steps + 1)
    text = stepper.text if stepper.jitted else ""
    return Recording(recorded[0], text, steps, stepper.recompilation, stepper.compiled)


def report_of(
    whole: Recording,
    detailed: Recording,
    timing: Timing,
    *,
    device: str,
    capability: float | None = None,
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
        split=kernels.split(whole.trace, whole.events, whole.start, whole.steps, whole.compiled),
        kernels=kernels.summed(detailed.events, detailed.instructions, detailed.steps, gpu, capability),
        gpu=gpu,
        advice=(),
        notes=(*notes, *_notes(whole, gpu)),
        recompilation=whole.recompilation,
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
    elif not kernels.comparable(recording.trace, recording.events):
        yield "kernels and host have no common clock: the split is by the host's time, which hides overlap"
    if recording.events and not recording.trace.gpu:
        yield "no GPU: kernels are those of the CPU, which has no Tensor Cores, and whose kernel times are not reliable"
    elif recording.events and not gpu:
        yield "not an NVIDIA GPU: mpjax can't tell from its kernels' names whether they use matrix cores"
