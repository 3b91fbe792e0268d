"""`python -m examples.imagenet`: trains, tests and measures image classifiers in mixed precision."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tyro

from examples.common.cli import UsageError, command_line, fail
from examples.common.hosts import say
from examples.common.loop import Interrupted
from examples.imagenet.config import Config
from examples.imagenet.modes import run

PROGRAM = "python -m examples.imagenet"


def final_line(summary: dict[str, Any]) -> str:
    """What a training came to, in one line."""
    split = "test" if "test_accuracy" in summary else "train"
    return (
        f"{split} accuracy {summary[f'{split}_accuracy']:.2%}, policy {summary['policy']}, "
        f"{summary['images_per_second']:,.0f} images/s, loss scale {summary['loss_scale']:g}, "
        f"skipped steps {summary['skipped_steps']}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; mistakes exit with code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        summary = run(tyro.cli(Config, prog=PROGRAM, args=arguments))
    except UsageError as error:
        fail(PROGRAM, error)
    except Interrupted as interrupted:
        # In full, as the folder may have been chosen by us.
        given = any(word.startswith(("--output", "--results-dir")) for word in arguments)
        output = () if given else ("--output", str(interrupted.output))
        say(f"{interrupted}; continue with:\n  {command_line(PROGRAM, arguments, *output, '--resume')}")
        return interrupted.exit_code
    say(final_line(summary))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
