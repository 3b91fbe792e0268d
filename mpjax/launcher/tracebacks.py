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
        return before(kind, strip(error.with_traceback(trace)), error.__traceback__)

    sys.excepthook = show


def strip(error: BaseException) -> BaseException:
    """Removes mpjax's frames from the tracebacks of an error and of all that Python shows with it."""
    shown = [error]
    for each in shown:  # It grows. An error may be its own cause.
        each.__traceback__ = stripped(each.__traceback__)
        inside = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        others = (each.__cause__, each.__context__, *inside)
        shown += [other for other in others if other is not None and id(other) not in map(id, shown)]
    return error


def stripped(trace: TracebackType | None) -> TracebackType | None:
    """Removes mpjax's frames from a traceback, or only those before the script's if mpjax raised the error."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    ours = [_is_ours(entry) for entry in entries]
    first = ours.index(False) if False in ours else 0
    kept = [entry for entry, is_ours in zip(entries[first:], ours[first:], strict=True) if ours[-1] or not is_ours]
    result = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith((_PACKAGE, *_RUNNERS))
