"""Unusable files, which a run skips: each is named once, and too many of them are an error."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import Counter
from typing import Any

from tqdm import tqdm

from examples.common.cli import UsageError


class UnusableFileError(Exception):
    """A file, or an entry of a shard, is damaged or something else; the text is the reason, without its name."""


class SkippedFiles:
    """Names each skipped file once on stderr, and ends the run where there are too many; for any thread.

    Args:
        total: files there are.
        share: of `total` that may be skipped; one file always may, unless `share` is 0.
        flag: that sets `share`, for the message.

    Attributes:
        limit: files that may be skipped.
        reasons: of the skipped files, by name.
    """

    def __init__(self, total: int, share: float, flag: str) -> None:
        self.limit = min(max(1, math.floor(total * share)), total - 1) if share else 0
        self.reasons: dict[str, str] = {}
        self._total, self._share, self._flag = total, share, flag
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.reasons)

    @property
    def counts(self) -> dict[str, int]:
        """Counts of skipped files by the reason without its details (the part before `:`)."""
        return dict(Counter(reason.split(":")[0] for reason in self.reasons.values()))

    def add(self, name: str, reason: str, root: str = "") -> None:
        """Names a file, the first time that it is skipped.

        Args:
            name: by which the file is known.
            reason: in a few words.
            root: folder that the name is below, for the message.

        Raises:
            UsageError: it is one too many.
        """
        with self._lock:
            if name in self.reasons:
                return
            self.reasons[name] = reason
            count = len(self.reasons)
        path = os.path.join(root, name)
        tqdm.write(f"skipped: {path} ({reason})", file=sys.stderr)
        if count > self.limit:
            raise UsageError(
                f"{count} of {self._total} files can't be used, the last one {path!r} ({reason}); at most "
                f"{self.limit} may be skipped. Repair or remove them, or raise {self._flag} {self._share:g}."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}  # worker processes only read the limit
