"""Tells whether the script or a library is calling."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable
from types import FrameType

# Packages that differentiate on behalf of their caller (`nnx.grad`, `eqx.filter_grad`, `hk.grad`, ...).
_CONDUITS = frozenset("jax flax equinox haiku jaxtyping beartype typeguard functools contextlib".split())
_LAUNCHER = __name__.rpartition(".")[0]


class Callers:
    """Distinguishes the script's code from library code.

    Code in the standard library or in `site-packages` is library code. All other code belongs to the script.

    Args:
        packages: Top-level packages that count as the script's code wherever they are installed.
    """

    def __init__(self, packages: Iterable[str] = ()):
        self.packages = frozenset(packages)
        self.seen: set[str] = set()  # the packages that have called
        self._is_library_file = functools.lru_cache(maxsize=None)(is_library_file)

    def script_line(self) -> str:
        """The calling line of the script, as `train.py:12`; empty if a library is calling."""
        frame = self._nearest()
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else ""

    def _nearest(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = frame.f_globals.get("__name__") or ""
            root = name.partition(".")[0]
            if root in self.packages:
                self.seen.add(root)
                return frame
            if root not in _CONDUITS and name != _LAUNCHER and not name.startswith(f"{_LAUNCHER}."):
                return None if root == "mpjax" or self._is_library_file(frame.f_code.co_filename) else frame
            frame = frame.f_back
        return None


def is_library_file(filename: str) -> bool:
    """Whether a file is in the standard library or in `site-packages`."""
    if filename.startswith("<frozen "):  # a library that differentiates at import time
        return True
    path = os.path.abspath(filename)
    if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
        return True
    roots = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return any(path.startswith(root + os.sep) for root in roots if root)
