"""`python -m examples.imagenet`: trains a ResNet on images in mixed precision."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import tyro

from examples.common.cli import UsageError, command_line, fail
from examples.imagenet.config import Config
from examples.imagenet.inspecting import inspect
from examples.imagenet.loop import Interrupted, run

PROGRAM = "python -m examples.imagenet"


def final_line(summary: dict[str, Any]) -> str:
    """What the run came to, in one line."""
    return (
        f"test accuracy {summary['test_accuracy']:.2%}, policy {summary['policy']}, "
        f"{summary['images_per_second']:,.0f} images/s, loss scale {summary['loss_scale']:g}, "
        f"skipped steps {summary['skipped_steps']}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; mistakes exit with code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        config = tyro.cli(Config, prog=PROGRAM, args=arguments)
        if config.audit or config.profile:
            inspect(config)
            return 0
        summary = run(config)
    except UsageError as error:
        fail(PROGRAM, error)
    except Interrupted as interrupted:
        # In full, as the folder may have been chosen by us.
        output = () if "--output" in " ".join(arguments) else ("--output", str(interrupted.output))
        print(f"{interrupted}; continue with:\n  {command_line(PROGRAM, arguments, *output, '--resume')}")
        return interrupted.exit_code
    print(final_line(summary))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
