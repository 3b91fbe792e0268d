"""`python -m examples.imagenet`: trains, tests and measures image classifiers in mixed precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from examples.common import script
from examples.imagenet.config import Config
from examples.imagenet.modes import run

PROGRAM = "python -m examples.imagenet"


def final_line(summary: dict[str, Any]) -> str:
    """The result of a training, a test, or a benchmark of one policy in one line; empty for the rest."""
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
    return script.main(PROGRAM, Config, run, final_line, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
