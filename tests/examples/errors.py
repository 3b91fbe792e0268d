"""The error line of a script."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def line_of_error(main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a script with a mistake in its arguments; checks exit code 2 and returns the only error line."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(lines) == 1
    return lines[0]
