"""Mistakes of the user, reported in one line with exit code 2; unusable files, of which some may be skipped."""

from __future__ import annotations

import errno
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

# Messages of the operating system, which TensorStore wraps in its own errors.
_DISK_PROBLEMS = [*map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES))]


class UsageError(Exception):
    """A mistake that the user can correct on the command line. Its text is one line."""


def process_id() -> int:
    """The number of this process in its training: 0 prints and writes files. Unlike JAX's own, it starts no devices."""
    from jax._src import distributed  # not at the top: the process that synthesises speech needs no JAX

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
    cause: BaseException | None = error
    while cause is not None:
        known = next((words for words in _DISK_PROBLEMS if words in str(cause)), None)
        if known or (isinstance(cause, OSError) and cause.strerror):
            return known or getattr(cause, "strerror", None)
        cause = cause.__cause__ or cause.__context__
    return None


def optional(module: str, lacking: str) -> Any:
    """Imports a package that only some data need; raises a `UsageError` with the text `lacking` without it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(lacking) from error


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
        with self._lock:
            if len(self) <= self.limit and name not in self.reasons:
                self.reasons[name] = reason
                tqdm.write(f"skipped: {os.path.join(root, name)} ({reason})", file=sys.stderr)
            if len(self) > self.limit:  # None is added any more, so all threads raise the same error.
                last, reason = next(reversed(self.reasons.items()))
                found = f"{len(self)} of {self._total} files can't be used, the last one {os.path.join(root, last)!r}"
                remedy = f"Repair or remove them, or raise {self._flag} {self._share:g}."
                raise UsageError(f"{found} ({reason}); at most {self.limit} may be skipped. {remedy}")
