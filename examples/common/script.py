"""Runs the command line of a training script: flags, errors, interruption, the final line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from examples.common.cli import UsageError, command_line, disk_problem, fail
from examples.common.config import RunConfig
from examples.common.flags import parse
from examples.common.hosts import PeerLostError, say
from examples.common.loop import Interrupted

C = TypeVar("C", bound=RunConfig)

_BY_CTRL_C = 130  # the exit code that shells report for it


def main(
    program: str,
    config: type[C],
    run: Callable[[C], dict[str, Any]],
    formats: Mapping[str, str],
    arguments: Sequence[str] | None,
) -> int:
    """Runs a command line and returns its exit code: 2 after a mistake, 1 if some test outputs are inf or
    NaN, or every step was skipped.

    Args:
        program: The command that users type.
        config: The dataclass of the flags.
        run: Runs the action of the flags and returns the content of summary.json.
        formats: Format strings of the final line, by key of the summary.
        arguments: The arguments; None for `sys.argv`.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        summary = run(parse(config, program, arguments, config.foreign))
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
    if line := final_line(summary, formats):
        say(line)
    return 1 if summary.get("test_nonfinite") or not summary.get("trained", True) else 0


def final_line(summary: Mapping[str, Any], formats: Mapping[str, str]) -> str:
    """The numbers of a summary in one line, with the policy; empty if there are none.

    A training metric is shown only if there is no test metric of that name.
    """
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
