"""What a training step does in which precision, and where its time goes, as pages in the run's folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

import mpjax
from examples.common.hosts import is_main, say

_STEPS = 10  # that are profiled


def audit_step(step: jax.stages.Wrapped, state: Any, batch: Any, folder: Path) -> None:
    """Prints `mpjax.audit` of a step and writes audit.html; the arguments may be abstract."""
    _report(mpjax.audit(step, state, batch), folder / "audit.html")


def profile_step(step: jax.stages.Wrapped, state: Any, batches: Iterable[Any], folder: Path) -> None:
    """Prints `mpjax.profile` of a step, fed from the input pipeline, and writes profile.html."""
    _report(mpjax.profile(step, state, steps=_STEPS, batches=batches), folder / "profile.html")


def _report(report: Any, path: Path) -> None:
    if is_main():
        report.to_html(path)
    say(f"{report}\nwritten to {path}")
