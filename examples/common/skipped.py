"""Skips unusable files: each is reported once, and too many are an error."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from examples.common.cli import UsageError

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

    @property
    def counts(self) -> dict[str, int]:
        """Counts of skipped files by reason without details (the part before `:`)."""
        return dict(Counter(reason.split(":")[0] for reason in list(self.reasons.values())))

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
