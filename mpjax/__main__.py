"""`python -m mpjax`: runs an unmodified script in mixed precision, or inspects one of its functions."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the launcher or an inspection, and returns the exit code.

    Args:
        arguments: Arguments without the program's name. Defaults to those of the process.
    """
    if (sys.argv[1:] if arguments is None else list(arguments))[:1] == ["run"]:
        from mpjax.launcher.cli import main as run

        return run(None if arguments is None else arguments[1:])
    from mpjax.inspection.cli import main as inspect

    return inspect(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
