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
    """What it came to, in one line: of a training, a test, or a benchmark of one policy; empty for the rest."""
    parts = []
    split = "test" if "test_accuracy" in summary else "train"
    if f"{split}_accuracy" in summary:
        parts.append(f"{split} accuracy {summary[f'{split}_accuracy']:.2%}")
    if parts or "images_per_second" in summary:
        parts.append(f"policy {summary['policy']}")
    if "images_per_second" in summary:
        parts.append(f"{summary['images_per_second']:,.0f} images/s")
    if "loss_scale" in summary:
        parts.append(f"loss scale {summary['loss_scale']:g}")
    if "skipped_steps" in summary:
        parts.append(f"skipped steps {summary['skipped_steps']}")
    return ", ".join(parts)


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
    if line := final_line(summary):
        say(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
