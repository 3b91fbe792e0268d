"""Runs the mode that the flags of a script choose."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import mpjax
from examples.common import processes
from examples.common.checkpoints import newest_position
from examples.common.cli import UsageError, disk_problem, one_line, process_id, say
from examples.common.config import INSPECT, PRECISION_FLAGS, RunConfig
from examples.common.flags import names_stored, parse
from examples.common.loop import Interrupted, open_folder, train
from examples.common.processes import SharedError, gather, together
from examples.common.run_folder import RunFolder, of_script, write_json
from examples.common.task import Task
from examples.common.training import DataParallel, Variables
from examples.common.weights import cast_weights, open_arrays, read_about, write_weights
from perf.environment import environment
from perf.memory import is_out_of_memory, peak_bytes, program_bytes

MakeTask = Callable[[Any], Task]


def run(config: RunConfig, kind: type[Task]) -> dict[str, Any]:
    """Runs the action of the flags and returns the content of its result file, such as summary.json.

    Args:
        config: The flags.
        kind: The script's task.

    Raises:
        UsageError: The data or the flags are invalid, or memory is full.
        Interrupted: A signal ended the training. The state is saved.
    """
    try:
        if config.action == "evaluate":
            return evaluate(config, kind)
        if config.action == "predict":
            task, variables = open_model(config, kind)
            return task.predict(variables)
        make = task_maker(config, kind)
        if config.action in INSPECT:
            return inspect(config, make)
        return run_benchmark(config, make) if config.is_benchmark else run_training(config, make)
    except Exception as error:
        if isinstance(error, UsageError) or not is_out_of_memory(error):
            raise
        tried = f"--batch-size {config.batch_size}, --policy {config.policy}: use a smaller one"
        more = "--accumulate keeps the effective batch size; --resume continues from the last checkpoint"
        raise UsageError(f"out of memory at {tried}. {more}.") from error


def task_maker(config: RunConfig, kind: type[Task]) -> MakeTask:
    """A function from flags to tasks on the same data, which are opened once, and the same devices."""
    data = together(lambda: kind.open(config))
    parallel = together(lambda: DataParallel(config.devices, config.fsdp))
    return lambda other: together(lambda: kind(other, parallel, data))


def run_training(config: RunConfig, make: MakeTask) -> dict[str, Any]:
    """Trains in a new folder, or resumes an earlier run."""
    task = make(config)
    with open_folder(config) as folder:
        summary = folder.summary if config.resume else None
        if summary is not None and summary.get("epochs", 0) >= task.epochs:
            task.check_identity(newest_position(folder.checkpoints))  # An export names the outputs.
            say(f"the run in {folder.path} has already finished")
        else:
            summary = train(task, folder)
            task.report(folder.path)
        if config.export is not None:
            summary |= export(task, task.run_variables(folder), folder.path, config.export)
            write_json(folder.path / "summary.json", summary)
    return summary


def inspect(config: RunConfig, make: MakeTask) -> dict[str, Any]:
    """Prints the precision or the time of each operation of a training step, or what half precision would lose."""
    task = make(config)
    step, batch = task.training.train_step, task.example_batches()[-1]
    if config.audit:
        say(str(mpjax.audit(step, task.abstract_state(), task.parallel.like_batch(batch))))
        return {}
    shapes = jax.tree.map(np.shape, batch)
    synthetic = itertools.repeat(task.parallel.put(task.synthetic_batch())) if config.is_benchmark else ()
    read = (batch for epoch in itertools.count() for batch in task.batches(epoch, 0))
    batches = synthetic or (batch for batch in read if jax.tree.map(np.shape, batch) == shapes)
    with contextlib.closing(task):
        if config.profile:
            say(str(mpjax.profile(step, task.initial_state(), steps=10, batches=batches)))
        else:
            state = task.start_state()
            stats, loss = state.stats, task.training.model.loss

            def loss_fn(params: Any, batch: Any) -> jax.Array:
                return loss(params, stats, batch, jax.random.key(0))[0]

            say(str(mpjax.numerics(loss_fn, state.params, batches=itertools.islice(batches, 2))))
    return {}


# The benchmark modes.


def run_benchmark(config: RunConfig, make: MakeTask) -> dict[str, Any]:
    """Measures steps of training or of inference on synthetic data, and writes benchmark.json."""
    task = make(config)
    training = config.mode == "training_benchmark"
    with open_folder(config, "-benchmarks") as folder:
        state: Any = task.initial_state()
        parameters = optax.tree.size(state.params)
        state = state if training else task.training.weights(state)
        batch = task.parallel.put(task.synthetic_batch())
        started = time.perf_counter()
        compiled = (task.training.train_step if training else task.inference_step()).lower(state, batch).compile()
        took, size = time.perf_counter() - started, program_bytes(compiled)

        def step() -> Any:
            nonlocal state
            if not training:
                return compiled(state, batch)
            state, outputs = compiled(state, batch)
            return outputs

        last, seconds = time_steps(step, config.warmup_steps + config.num_iter, ahead=int(training))
        seconds = seconds[config.warmup_steps :]
        speed, milliseconds = task.batch_size * config.num_iter / float(seconds.sum()), seconds * 1e3
        percentiles = {f"p{q}": float(np.percentile(milliseconds, q)) for q in (50, 90, 95, 99)}
        results = {
            **{name: getattr(config, name) for name in ("mode", "policy", "amp", "batch_size", "warmup_steps")},
            "environment": environment(),
            "parameters": parameters,
            "devices": task.parallel.count,
            "iterations": config.num_iter,
            "compile_seconds": took,
            "program_bytes": size,
            f"{task.unit}_per_second": speed,
            "latency_milliseconds": {"avg": float(milliseconds.mean()), **percentiles},
            "peak_memory_bytes": peak_bytes(),
            **{name: last[name].item() for name in ("loss_scale", "skipped_steps") if training},
            **task.benchmark_facts(speed),
        }
        write_json(folder.path / "benchmark.json", results)
    latency = ", ".join(f"{name} {value:.1f}" for name, value in results["latency_milliseconds"].items())
    say(f"latency in ms: {latency}; {size / 2**20:,.0f} MiB; compiled in {took:.1f} s; output in {folder.path}")
    return results


def time_steps(step: Callable[[], Any], count: int, ahead: int) -> tuple[Any, np.ndarray]:
    """Runs a step `count` times.

    Args:
        step: Dispatches a step and returns an output that is ready when the step is done.
        count: Number of steps.
        ahead: How many further steps are dispatched before one is done. One keeps the device busy, as in training. None
            is a server that answers requests one by one.

    Returns:
        The last output, and the seconds between the ends of two steps, [count].
    """
    queued, last, ends = deque[Any](), None, [time.perf_counter()]
    for index in range(count + ahead):
        if index < count:
            queued.append(step())
        if index >= ahead:
            last = jax.block_until_ready(queued.popleft())
            ends.append(time.perf_counter())
    return last, np.diff(ends)


# Tests a trained model of any script, and exports its weights.

# The largest loss of the metric by an export: rounding may flip an entry or two of a small test set.
_TOLERANCE = 0.005


def evaluate(config: RunConfig, kind: type[Task]) -> dict[str, Any]:
    """Tests a trained model in the precision of the flags, regardless of the precision in training."""
    task, variables = open_model(config, kind)
    metrics = task.test(cast_to_policy(task, variables), lambda: None)
    task.report(config.output)
    results = {"policy": config.policy, "amp": config.amp, **metrics, **task.facts()}
    if config.export is not None:
        results |= export(task, variables, config.output or Path(), config.export)
    return results


def open_model(config: RunConfig, kind: type[Task]) -> tuple[Task, Variables]:
    """Opens the model of --weights or of the run in --output, with its float32 variables.

    Flags that are not given have their values of the training.

    Args:
        config: The flags.
        kind: The script's task.

    Raises:
        UsageError: There is no model, it belongs to another script, or it is damaged.
    """
    folder = RunFolder(config.output or Path())
    if config.weights is None:
        settings, description = folder.settings(config.script), folder.description()
    else:
        about = read_about(config.weights)
        settings, description = about.get("settings", {}), about.get("data", {})
        of_script(settings, config.script, "--weights", config.weights)
    given = {name for name in config.given if getattr(config, name) is not None}
    without = ("mode", *PRECISION_FLAGS, *names_stored(config, "running"))
    values = config.like(settings, config.weights or folder.path, given, without)
    trained = type(config)(**{name: getattr(config, name) for name in config.given}, **values, given=config.given)
    task = together(lambda: kind(trained, DataParallel(trained.devices), kind.open(trained, description)))
    if config.weights is None:
        return task, task.run_variables(folder)
    like = jax.eval_shape(task.training.init, 0)
    wanted = Variables(mpjax.get_policy("float32").cast_to_param(like.params), like.stats)
    return task, task.parallel.replicate(open_arrays(config.weights, "--weights").variables(wanted))


def cast_to_policy(task: Task, variables: Variables) -> Variables:
    """Casts variables to the dtypes in which the policy of the flags stores them."""
    return Variables(task.training.policy.cast_to_param(variables.params), variables.stats)


def export(task: Task, variables: Variables, folder: Path, dtype: str) -> dict[str, Any]:
    """Writes weights for inference into a run's folder and tests the file against the float32 weights.

    Args:
        task: Task of the run, with its test data.
        variables: float32 variables.
        folder: Folder of the run.
        dtype: Dtype of the parameters in the file.

    Raises:
        UsageError: A parameter is out of range, or the file tests too much worse. No file is then left.
    """
    name, sign = task.metric
    source = _tested(task, "float32", variables)[name]
    path = folder / f"weights_{dtype}.safetensors"
    about = {"settings": task.config.settings(), "data": task.description(), "dtype": dtype}
    write_weights(path, task.parallel.get(cast_weights(variables, dtype)), about)
    gather(None)  # All read what the first has written.
    written = task.parallel.replicate(open_arrays(path, "--export").variables(variables))
    found = _tested(task, dtype, written)[name]
    if not sign * found >= sign * source - _TOLERANCE - 1 / task.test_count:
        gather(None)
        path.unlink(missing_ok=True)
        worse = f"{task.metric_name} {found:.2%}, but {source:.2%} for the float32 weights"
        raise SharedError(f"--export {dtype}: {worse}; the file was removed. Use another dtype.")
    size = path.stat().st_size
    say(f"{path}: {size / 2**20:.2f} MiB, {task.metric_name} {found:.2%} (float32 weights: {source:.2%})")
    return {"export": str(path), "export_bytes": size, f"export_{name}": found, f"float32_{name}": source}


def _tested(task: Task, dtype: str, variables: Variables) -> dict[str, Any]:
    policy = f"params={dtype},compute={dtype},output=float32"
    other = task.with_flags(policy=policy, amp="module", loss_scale=None)
    return other.test(cast_to_policy(other, variables), lambda: None)


# Runs the command line of a training script: flags, errors, interruption, the final line.

_FORMATS = {
    "policy": "policy {}",
    "latency_milliseconds": "latency {:.1f} ms",
    "real_time_factor": "real-time factor {:.4f}",
    "images_per_second": "{:,.0f} images/s",
    "utterances_per_second": "{:,.0f} utterances/s",
    "audio_hours_per_hour": "{:,.0f} hours of audio/h",
    "loss_scale": "loss scale {:g}",
    "skipped_steps": "skipped steps {}",
}


def main(kind: type[Task], arguments: Sequence[str] | None = None) -> int:
    """Runs a script's command line and returns its exit code.

    It is 2 after a mistake, 1 if some test outputs are inf or NaN, some files unreadable, or every step was skipped.

    Args:
        kind: The script's task.
        arguments: The arguments; None for `sys.argv`.
    """
    config_type = kind.config_type
    program = f"python -m examples.{config_type.script}"
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        config = parse(config_type, program, arguments)
        processes.join(config, program)
        summary = run(config, kind)
        processes.leave(failed=False)
    except Interrupted as interrupted:
        processes.leave(failed=False)
        # Print the whole command, with the folder if it was chosen automatically.
        given = any(word.replace("_", "-").startswith(("--output", "--results-dir")) for word in arguments)
        more = [] if given else ["--output", str(interrupted.output)]
        more += [] if "--resume" in arguments else ["--resume"]
        words = zip(arguments, ["", *arguments], strict=False)  # The run has the flags of --config.
        kept = [word for word, before in words if before != "--config" and word.split("=")[0] != "--config"]
        say(f"{interrupted}; continue with:\n  {program} {shlex.join([*kept, *more])}")
        return interrupted.exit_code
    except KeyboardInterrupt:
        # During a test or a benchmark, or the second Ctrl-C of a training.
        say("\nstopped by Ctrl-C; files already saved are kept")
        return 130  # as shells report it
    except Exception as error:
        if processes.lost_peer(error):
            processes.end(program, "another process of this run")
        shared = isinstance(error, SharedError)
        processes.leave(failed=not shared)
        told = one_line(error) if isinstance(error, UsageError) else None  # None is a bug of the program
        if isinstance(error, OSError) and (why := disk_problem(error)):
            told = f"{error.filename or 'a file'}: {why}. Free disk space, or give a writable folder."
        if told and not (shared and process_id()):
            print(f"{program}: error: {told}", file=sys.stderr)
        if processes.several() and not shared:  # The others have been told, and JAX would wait for them.
            if told is None:
                traceback.print_exc()
            processes.leave_alone(2 if told else 1)
        if told is None:
            raise
        raise SystemExit(2) from error
    if line := final_line(summary, kind):
        say(line)
    failed = summary.get("test_nonfinite") or summary.get("unreadable_files") or not summary.get("trained", True)
    return int(bool(failed))


def final_line(summary: Mapping[str, Any], kind: type[Task]) -> str:
    """The numbers of a summary in one line, with the policy; empty if there are none.

    A training metric is shown only if there is no test metric of that name.
    """
    metrics = {name: f"{head} {{:.2%}}" for name, head in kind.table.items()}
    trained = {name.replace("test_", "train_"): head.replace("test ", "train ") for name, head in metrics.items()}
    formats = {**metrics, **trained, **_FORMATS}
    tested = {name.replace("test_", "train_") for name in summary if name.startswith("test_")}
    names = [name for name in formats if name not in tested and isinstance(summary.get(name), int | float | str)]
    return ", ".join(formats[name].format(summary[name]) for name in names) if names != ["policy"] else ""
