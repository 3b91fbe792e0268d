"""Tells whether files are still those of before: their names, and the content of some of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

# Entries whose content is read: enough to notice another version of the data, few enough to take no time.
_SAMPLE = 64


def fingerprint(names: Sequence[str], count: int, read: Callable[[int], bytes]) -> str:
    """A hash that changes where a name changes, or the content of a sampled entry.

    Args:
        names: what identifies the data, wherever they lie: names with labels or sizes.
        count: entries there are.
        read: the content of an entry by number; an entry that raises an `OSError` counts as empty.
    """
    digest = hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape"))
    for index in range(0, count, max(1, count // _SAMPLE)):
        try:
            content = read(index)
        except OSError:
            content = b""
        digest.update(f"{len(content)} {hashlib.sha256(content).hexdigest()}".encode())
    return digest.hexdigest()
