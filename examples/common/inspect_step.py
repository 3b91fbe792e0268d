"""Reports the precision and the time of each operation of a training step, as text and HTML pages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

import mpjax
from examples.common.hosts import is_main, say

_STEPS = 10  # to profile


def audit_step(step: jax.stages.Wrapped, state: Any, batch: Any, folder: Path | None) -> None:
    """Prints `mpjax.audit` of a step and writes audit.html. State and batch may be abstract."""
    _report(mpjax.audit(step, state, batch), folder, "audit.html")


def profile_step(step: jax.stages.Wrapped, state: Any, batches: Iterable[Any], folder: Path | None) -> None:
    """Prints `mpjax.profile` of a step with batches of the input pipeline, and writes profile.html."""
    _report(mpjax.profile(step, state, steps=_STEPS, batches=batches), folder, "profile.html")


def _report(report: Any, folder: Path | None, name: str) -> None:
    say(str(report))
    if folder is not None and is_main():
        folder.mkdir(parents=True, exist_ok=True)
        report.to_html(folder / name)
        say(f"written to {folder / name}")
