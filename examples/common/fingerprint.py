"""Detects changes in a set of files from their names and the content of a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

# Number of entries to read: enough to notice another version of the data, few enough to be fast.
_SAMPLE = 64


def fingerprint(names: Sequence[str], count: int, read: Callable[[int], bytes]) -> str:
    """A hash that changes if a name or the content of a sampled entry changes.

    Args:
        names: Names with labels or sizes, which identify the data independently of its folder.
        count: Number of entries.
        read: Returns the content of an entry by number. An entry that raises an `OSError` counts as empty.
    """
    digest = hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape"))
    for index in range(0, count, max(1, count // _SAMPLE)):
        try:
            content = read(index)
        except OSError:
            content = b""
        digest.update(f"{len(content)} {hashlib.sha256(content).hexdigest()}".encode())
    return digest.hexdigest()
