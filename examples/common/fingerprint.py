"""Whether files are still those of before: their names and sizes, and the content of some of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

# Files whose content is read: enough to notice another version of the data, few enough to take no time.
_SAMPLE = 64


def fingerprint(names: Sequence[str], paths: Sequence[str | Path]) -> str:
    """A hash that changes where a file is added, removed, renamed or relabelled, or where a sampled one is changed.

    Args:
        names: what a file is called and labelled, wherever the data lie.
        paths: of the same files. One that can't be read counts as empty.
    """
    digest = hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape"))
    step = max(1, len(paths) // _SAMPLE)
    for path in paths[::step]:
        try:
            content = Path(path).read_bytes()
        except OSError:
            content = b""
        digest.update(f"{len(content)} {hashlib.sha256(content).hexdigest()}".encode())
    return digest.hexdigest()
