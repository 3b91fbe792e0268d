"""Images that can not be read: named once, counted, and too many of them an error."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from tqdm import tqdm

from examples.common.cli import UsageError
from examples.imagenet.data import Unreadable


class UnreadableImages:
    """Names each unreadable image once on stderr, and ends the run where there are too many.

    Args:
        total: images in the split.
        share: of `total` that may be unreadable; one image always may, unless `share` is 0.
    """

    def __init__(self, total: int, share: float) -> None:
        self.limit = min(max(1, math.floor(total * share)), total - 1) if share else 0
        self._share = share
        self.paths: set[str] = set()

    def add(self, found: Sequence[Unreadable]) -> None:
        for path, reason in found:
            if path in self.paths:
                continue
            self.paths.add(path)
            tqdm.write(f"skipped, not readable as an image: {path} ({reason})", file=sys.stderr)
            if len(self.paths) > self.limit:
                raise UsageError(
                    f"{len(self.paths)} images can not be read, the last one {path!r} ({reason}); at most "
                    f"{self.limit} may be skipped. Repair or remove them, or raise --max-unreadable {self._share:g}."
                )
