"""The progress of a comparison on stderr: a bar on a terminal, otherwise one line per run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from mpjax.inspection.parity.running import Run
from mpjax.inspection.reports import duration

Cell = TypeVar("Cell")


class Progress:
    """Counts and displays runs. The bar needs tqdm; without it each run prints a line.

    Args:
        shown: Whether to write anything.
    """

    def __init__(self, shown: bool):
        self._total, self._count, self._shown, self._bar = 0, 0, shown, _bar() if shown else None
        self._name = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def over(self, cells: Sequence[Cell]) -> Sequence[Cell]:
        """Adds cells to the total number of runs and returns them."""
        self._total += len(cells)
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.refresh()
        return cells

    def looking(self, policy: str) -> None:
        """Shows that the search for evidence on a policy starts."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{policy} is worse: finding the cause")
        elif self._shown:
            print(f"{policy} is worse: finding the cause", file=sys.stderr, flush=True)

    def started(self, policy: str, seed: int) -> None:
        """Shows that a run starts."""
        self._name = f"{policy}, seed {seed}"
        if self._bar is not None:
            self._bar.set_postfix_str(self._name)

    def tick(self, step: int, loss: float) -> None:
        """Shows the number of steps taken and the last loss."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._name}: step {step}, loss {loss:.4g}")

    def done(self, run: Run, kept: bool) -> None:
        """Counts a run that has finished, or that was read from the folder."""
        self._count += 1
        if self._bar is not None:
            self._bar.update()
        elif self._shown:
            how = "done before" if kept else duration(run.seconds)
            print(
                f"[{self._count}/{self._total}] {run.policy}, seed {run.seed}: {run.metric:.5g} ({how})",
                file=sys.stderr,
                flush=True,
            )


def _bar() -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=0, unit="run", dynamic_ncols=True)
