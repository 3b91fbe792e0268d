"""Planted causes, and the answer that each inspection must give.

A cause is planted in the module `planted` of one small model, written in Linen, NNX, Haiku, Equinox, plain JAX, and
under `vmap`; or in a program of its own. Each answer is checked. Rules, overrides and loss scales that a tool advises
are applied, and must reduce the error of the compiled gradient. On the healthy models no tool may recommend anything. A
cell is "as planted", or says what the tool answered instead.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

# Before JAX starts: one cause lies on one of several devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax

from testing.planted.answers import Answer
from testing.planted.causes import CAUSES as FIRST
from testing.planted.kinds import COMPETING, KINDS
from testing.planted.models import LIBRARIES
from testing.planted.programs import ALONE

AS_PLANTED = "as planted"
CAUSES = FIRST | KINDS | COMPETING


def cases() -> dict[str, Callable[[], dict[str, Answer]]]:
    """The cases by name, as `overflow, Linen`; each makes its answers by tool."""

    def of(cause: str, library: str) -> dict[str, Answer]:
        plant, answers = CAUSES[cause]
        model = LIBRARIES[library](plant)
        return {tool: functools.partial(answer, model) for tool, answer in answers.items()}

    in_models = {f"{c}, {name}": functools.partial(of, c, name) for c in CAUSES for name in LIBRARIES}
    return in_models | ALONE


def outcome(answer: Answer) -> str:
    """The cell of an answer."""
    try:
        answer()
    except AssertionError as found:
        return f"answers otherwise: {' '.join(str(found).split())[:300]}"
    except Exception as found:  # a crash is a result
        return f"fails: {type(found).__name__}: {' '.join(str(found).split())[:300]}"
    return AS_PLANTED


def run(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The cells of cases, by tool."""
    with jax.numpy_dtype_promotion("standard"):
        return {name: {tool: outcome(answer) for tool, answer in cases()[name]().items()} for name in names}
