"""Command lines: mistakes of the caller end in one line and exit code 2, never in a traceback."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn


class UsageError(Exception):
    """Something that the person at the command line can mend; its text is one line."""


def fail(program: str, error: Exception) -> NoReturn:
    """Prints an error as one line on stderr and exits with code 2."""
    line = " ".join(str(error).split())
    print(f"{program}: error: {line}", file=sys.stderr)
    raise SystemExit(2)


def command_line(program: str, arguments: Sequence[str], *extra: str) -> str:
    """The shell command that runs `program` with `arguments` and whatever of `extra` is not there yet."""
    missing = [word for word in extra if word not in arguments]
    return f"{program} {shlex.join([*arguments, *missing])}".rstrip()


def listing(names: Sequence[str], limit: int = 5) -> str:
    """`a, b, c` with at most `limit` names, then how many more there are."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
