"""`python -m examples.speech.seeds`: the same training in several precisions with several seeds, as one table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

import mpjax
from examples.common import seeds
from examples.common.seeds import Column, Way
from examples.speech.__main__ import final_line
from examples.speech.config import Config
from examples.speech.modes import run

PROGRAM = "python -m examples.speech.seeds"


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Trains every policy with every seed and prints a table; takes the flags of examples.speech too."""

    policies: tuple[str, ...] = ("float32", "mixed_float16", "mixed_bfloat16")
    """Policies to compare."""

    amps: tuple[Literal["module", "autocast"], ...] = ("module",)
    """Ways to apply them; autocast only where it is one: it keeps parameters float32, and float32 as it is."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to train each of them with."""

    output: Path = Path("runs/speech-seeds")
    """Folder for a folder of each run and the table; runs that are there already are continued or reused."""

    def ways(self) -> list[Way]:
        """The flags of each row of the table."""
        return [
            {"policy": name, "amp": amp}
            for name, amp in itertools.product(self.policies, self.amps)
            if amp == "module" or _has_autocast_form(name)
        ]


def _has_autocast_form(name: str) -> bool:
    policy = mpjax.get_policy(name)
    return policy.param_dtype == "float32" and policy.compute_dtype != "float32"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; mistakes exit with code 2."""

    def train(flags: list[str]) -> dict[str, Any]:
        return run(tyro.cli(Config, prog=PROGRAM, args=flags))

    return seeds.main(PROGRAM, Seeds, train, final_line, [Column("WER", "wer"), Column("CER", "cer")], arguments)


if __name__ == "__main__":
    raise SystemExit(main())
