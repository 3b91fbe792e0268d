"""`python -m examples.imagenet`: trains, tests and measures image classifiers in mixed precision."""

from __future__ import annotations

from collections.abc import Sequence

from examples.common import script
from examples.imagenet.config import Config
from examples.imagenet.modes import run

PROGRAM = "python -m examples.imagenet"
FORMATS = {
    "test_accuracy": "test accuracy {:.2%}",
    "train_accuracy": "train accuracy {:.2%}",
    "policy": "policy {}",
    "images_per_second": "{:,.0f} images/s",
    "loss_scale": "loss scale {:g}",
    "skipped_steps": "skipped steps {}",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; usage errors exit with code 2."""
    return script.main(PROGRAM, Config, run, FORMATS, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
