"""Files that a run leaves out because they are no good: each named once, and too many of them an error."""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from examples.common.cli import UsageError


class SkippedFiles:
    """Names each skipped file once on stderr, and ends the run where there are too many; for any thread.

    Args:
        total: files there are.
        share: of `total` that may be skipped; one file always may, unless `share` is 0.
        flag: that sets `share`, for the message.
    """

    def __init__(self, total: int, share: float, flag: str) -> None:
        self._limit = min(max(1, math.floor(total * share)), total - 1) if share else 0
        self._total, self._share, self._flag = total, share, flag
        self._reasons: dict[Path, str] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def counts(self) -> dict[str, int]:
        """How many files were skipped, by the reason without its details (what is before `:`)."""
        return dict(Counter(reason.split(":")[0] for reason in self._reasons.values()))

    def add(self, path: Path, reason: str) -> None:
        """Names a file, the first time that it is skipped.

        Raises:
            UsageError: it is one too many.
        """
        with self._lock:
            if path in self._reasons:
                return
            self._reasons[path] = reason
            count = len(self._reasons)
        tqdm.write(f"skipped: {path} ({reason})", file=sys.stderr)
        if count > self._limit:
            raise UsageError(
                f"{count} of {self._total} files can not be used, the last one {str(path)!r} ({reason}); at most "
                f"{self._limit} may be skipped. Repair or remove them, or raise {self._flag} {self._share}."
            )
