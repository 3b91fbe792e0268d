"""`python -m examples.imagenet.seeds`: the same training in several precisions with several seeds, as one table."""

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
from examples.imagenet.__main__ import final_line
from examples.imagenet.config import Config
from examples.imagenet.modes import run

PROGRAM = "python -m examples.imagenet.seeds"


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Trains every policy with every seed and prints a table; takes the flags of examples.imagenet too."""

    policies: tuple[str, ...] = ("float32", "mixed_float16", "mixed_bfloat16")
    """Policies to compare."""

    amps: tuple[Literal["module", "autocast"], ...] = ("module", "autocast")
    """Ways to apply them; autocast only where it is one: it keeps parameters float32, and float32 as it is."""

    loss_scales: tuple[str, ...] = ("dynamic", "1024")
    """Loss scales of the policies that compute in float16; the others have the range to do without."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Seeds to train each of them with."""

    output: Path = Path("runs/imagenet-seeds")
    """Folder for a folder of each run and the table; runs that are there already are continued or reused."""

    def ways(self) -> list[Way]:
        """The flags of each row of the table."""
        ways: list[Way] = []
        for name, amp, scale in itertools.product(self.policies, self.amps, self.loss_scales):
            policy = mpjax.get_policy(name)
            if amp == "autocast" and (policy.param_dtype != "float32" or policy.compute_dtype == "float32"):
                continue
            way = {"policy": name, "amp": amp, "loss-scale": scale if policy.compute_dtype == "float16" else "1"}
            if way not in ways:
                ways.append(way)
        return ways


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; mistakes exit with code 2."""

    def train(flags: list[str]) -> dict[str, Any]:
        return run(tyro.cli(Config, prog=PROGRAM, args=flags))

    return seeds.main(PROGRAM, Seeds, train, final_line, [Column("test accuracy", "test_accuracy")], arguments)


if __name__ == "__main__":
    raise SystemExit(main())
