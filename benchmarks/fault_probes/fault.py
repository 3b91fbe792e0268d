"""What a fault and a probe are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

Probe = Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and for each library to which it can apply the program that tells whether it has it."""

    name: str
    probes: dict[str, Probe]
