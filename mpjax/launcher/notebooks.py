"""Reports and tracebacks in IPython, which has its own way to show exceptions, and cells in place of one exit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mpjax.launcher.tracebacks import strip


def attach(summarize: Callable[[], None]) -> None:
    """In IPython, prints the summary after each cell that changes it, and hides the launcher in tracebacks.

    Args:
        summarize: Prints the summary if it has changed.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return

    def show(
        shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType, tb_offset: int | None = None
    ) -> None:
        shell.showtraceback((kind, strip(error.with_traceback(trace)), error.__traceback__), tb_offset=tb_offset)

    shell.set_custom_exc((Exception,), show)
    shell.events.register("post_run_cell", lambda *_: summarize())
