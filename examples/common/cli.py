"""Mistakes of the user, reported in one line with exit code 2; unusable files, of which some may be skipped."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from jax._src import distributed
from tqdm import tqdm

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


def process_id() -> int:
    """The number of this process in its training: 0 prints and writes files. Unlike JAX's own, it starts no devices."""
    return distributed.global_state.process_id


def say(text: str) -> None:
    """Prints above a progress bar, once for all processes."""
    if process_id() == 0:
        tqdm.write(text)
        sys.stdout.flush()


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


def listing(names: Sequence[str], limit: int = 5) -> str:
    """Lists at most `limit` names as `a, b, c`, then the number of further names."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


# Skips unusable files: each is reported once, and too many are an error.

T = TypeVar("T")


class UnusableFileError(Exception):
    """A file or an entry of a shard is damaged or of another type. The text is the reason without the file name."""


def each_readable(paths: Sequence[Path], read: Callable[[Path], T], flag: str) -> tuple[dict[Path, T], int]:
    """Reads files, and names those that can't be read on stderr.

    Returns:
        The contents by path, and the number of unreadable files.

    Raises:
        UsageError: None can be read.
    """
    found, unreadable = {}, 0
    for path in paths:
        try:
            found[path] = read(path)
        except UnusableFileError as error:
            unreadable += 1
            if unreadable == len(paths):
                raise UsageError(f"{flag} {str(path)!r}: {error}.") from error
            print(f"{flag} {str(path)!r}: {error}", file=sys.stderr)
    return found, unreadable


class SkippedFiles:
    """Reports each skipped file once on stderr and ends the run if there are too many. Thread-safe.

    Args:
        total: Total number of files.
        share: Share of `total` that may be skipped. At least one file may be, unless `share` is 0.
        flag: The flag that sets `share`, for the message.

    Attributes:
        limit: Number of files that may be skipped.
        reasons: Reasons of the skipped files, by name.
    """

    def __init__(self, total: int, share: float, flag: str) -> None:
        self.limit = min(max(1, math.floor(total * share)), total - 1) if share else 0
        self.reasons: dict[str, str] = {}
        self._total, self._share, self._flag = total, share, flag
        self._lock = threading.Lock()
        self._failure: str | None = None

    def __len__(self) -> int:
        return len(self.reasons)

    def add(self, name: str, reason: str, root: str = "") -> None:
        """Reports a file the first time that it is skipped.

        Args:
            name: Name of the file.
            reason: The reason in a few words.
            root: Folder that the name is relative to, for the message.

        Raises:
            UsageError: Too many files were skipped.
        """
        path = os.path.join(root, name)
        with self._lock:
            if self._failure is None and name not in self.reasons:
                self.reasons[name] = reason
                tqdm.write(f"skipped: {path} ({reason})", file=sys.stderr)
                if len(self.reasons) > self.limit:
                    # All threads raise the same error, whichever is noticed first.
                    self._failure = (
                        f"{len(self.reasons)} of {self._total} files can't be used, the last one {path!r} ({reason}); "
                        f"at most {self.limit} may be skipped. Repair or remove them, or raise {self._flag} "
                        f"{self._share:g}."
                    )
        if self._failure is not None:
            raise UsageError(self._failure)
