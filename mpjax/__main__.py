"""`python -m mpjax`: runs a script in mixed precision, or inspects a function of one, without a change to it."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher or an inspection, and returns the exit code.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    if (sys.argv[1:] if arguments is None else list(arguments))[:1] == ["run"]:
        from mpjax.launcher.cli import main as run

        return run(None if arguments is None else arguments[1:])
    from mpjax.inspection.cli import main as inspect

    return inspect(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
