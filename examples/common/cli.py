"""Command-line errors: mistakes of the user are reported in one line with exit code 2, without a traceback."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

# Messages of the operating system, which TensorStore wraps in its own errors.
_DISK_PROBLEMS = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "Read-only file system",
    "Permission denied",
)


class UsageError(Exception):
    """A mistake that the user can correct on the command line. Its text is one line."""


def fail(program: str, error: Exception) -> NoReturn:
    """Prints an error as one line on stderr and exits with code 2."""
    print(f"{program}: error: {one_line(error)}", file=sys.stderr)
    raise SystemExit(2)


def one_line(error: BaseException, limit: int | None = None) -> str:
    """The text of an error in one line, cut at `limit` characters."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if limit is None or len(line) <= limit else line[: limit - 3] + "..."


def disk_problem(error: BaseException) -> str | None:
    """The disk problem that caused an error; None if another problem did."""
    for cause in _causes(error):
        for known in _DISK_PROBLEMS:
            if known in str(cause):
                return known
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def command_line(program: str, arguments: Sequence[str], *extra: str) -> str:
    """The shell command for `program` with `arguments` and the words of `extra` that `arguments` lacks."""
    missing = [word for word in extra if word not in arguments]
    return f"{program} {shlex.join([*arguments, *missing])}".rstrip()


def listing(names: Sequence[str], limit: int = 5) -> str:
    """Lists at most `limit` names as `a, b, c`, then the number of further names."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
