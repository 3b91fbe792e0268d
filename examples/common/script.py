"""What a training script does around its run: flags, mistakes, interruption, the final line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

from examples.common.cli import UsageError, command_line, fail
from examples.common.hosts import say
from examples.common.loop import Interrupted

C = TypeVar("C")


def main(
    program: str,
    config: type[C],
    run: Callable[[C], dict[str, Any]],
    final_line: Callable[[dict[str, Any]], str],
    arguments: Sequence[str] | None,
) -> int:
    """Runs a command line and returns its exit code; mistakes exit with code 2.

    Args:
        program: as people call it.
        config: the dataclass of the flags.
        run: does what they say and returns what is in summary.json.
        final_line: says what that came to; empty for nothing.
        arguments: of the command line; those of this process if None.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        summary = run(tyro.cli(config, prog=program, args=arguments))
    except UsageError as error:
        fail(program, error)
    except Interrupted as interrupted:
        # In full, as the folder may have been chosen by us.
        given = any(word.replace("_", "-").startswith(("--output", "--results-dir")) for word in arguments)
        output = () if given else ("--output", str(interrupted.output))
        say(f"{interrupted}; continue with:\n  {command_line(program, arguments, *output, '--resume')}")
        return interrupted.exit_code
    if line := final_line(summary):
        say(line)
    return 0
