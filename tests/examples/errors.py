"""How a script's mistakes end."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def line_of_error(main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a mistake in a script's call ends in, with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(lines) == 1
    return lines[0]
