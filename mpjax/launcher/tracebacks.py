"""Tracebacks of the script's errors without the launcher's frames."""

from __future__ import annotations

import os
import runpy
import sys
from types import TracebackType
from typing import Any

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RUNNERS = ("<frozen runpy>", runpy.__file__)


def install() -> None:
    """Makes Python print uncaught exceptions without mpjax's frames, unless mpjax raised them."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        trace, cause = stripped(trace), error
        while cause := cause.__cause__ or cause.__context__:  # type: ignore[assignment]
            cause.__traceback__ = stripped(cause.__traceback__)
        return before(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def stripped(trace: TracebackType | None) -> TracebackType | None:
    """Removes mpjax's frames from a traceback, or only those before the script's if mpjax raised the error."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    ours = [_is_ours(entry) for entry in entries]
    if all(ours):
        kept = entries
    elif ours[-1]:
        kept = entries[ours.index(False) :]
    else:
        kept = [entry for entry, is_ours in zip(entries, ours, strict=True) if not is_ours]
    result = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _is_ours(entry: TracebackType) -> bool:
    filename = entry.tb_frame.f_code.co_filename
    return filename.startswith(_PACKAGE) or filename in _RUNNERS
