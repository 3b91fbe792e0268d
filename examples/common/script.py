"""Runs the command line of a training script: flags, errors, interruption, the final line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from examples.common.cli import UsageError, command_line, disk_problem, fail
from examples.common.flags import parse
from examples.common.hosts import PeerLostError, say
from examples.common.loop import Interrupted
from examples.common.modes import run
from examples.common.task import Task

_BY_CTRL_C = 130  # the exit code that shells report for it
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
        summary = run(parse(config_type, program, arguments, config_type.foreign), kind)
    except Interrupted as interrupted:
        # Print the whole command, with the folder if it was chosen automatically.
        given = any(word.replace("_", "-").startswith(("--output", "--results-dir")) for word in arguments)
        output = () if given else ("--output", str(interrupted.output))
        say(f"{interrupted}; continue with:\n  {command_line(program, arguments, *output, '--resume')}")
        return interrupted.exit_code
    except KeyboardInterrupt:
        # During a test or a benchmark, or the second Ctrl-C of a training.
        say("\nstopped by Ctrl-C; files already saved are kept")
        return _BY_CTRL_C
    except Exception as error:
        usage_error = _as_usage_error(error)
        if usage_error is None:
            raise
        if isinstance(usage_error, PeerLostError):
            with contextlib.suppress(SystemExit):
                fail(program, usage_error)
            sys.stdout.flush()
            # A normal exit would wait for the lost process until JAX aborts this one.
            os._exit(2)
        fail(program, usage_error)
    if line := final_line(summary, kind):
        say(line)
    failed = summary.get("test_nonfinite") or summary.get("unreadable_files") or not summary.get("trained", True)
    return int(bool(failed))


def final_line(summary: Mapping[str, Any], kind: type[Task]) -> str:
    """The numbers of a summary in one line, with the policy; empty if there are none.

    A training metric is shown only if there is no test metric of that name.
    """
    formats = {**kind.final_line, **_FORMATS}
    tested = {name.replace("test_", "train_") for name in summary if name.startswith("test_")}
    names = [name for name in formats if name not in tested and isinstance(summary.get(name), int | float | str)]
    return ", ".join(formats[name].format(summary[name]) for name in names) if names != ["policy"] else ""


def _as_usage_error(error: Exception) -> Exception | None:
    """The error in words for the user; None for a bug of the program."""
    if isinstance(error, UsageError):
        return error
    if isinstance(error, OSError) and (why := disk_problem(error)):
        where = f"{error.filename}: " if error.filename else ""
        return UsageError(f"{where}{why}. Free disk space, or give a writable folder.")
    return None
