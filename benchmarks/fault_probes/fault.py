"""The types of faults and probes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

Probe = Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and a probe for each library that it can apply to."""

    name: str
    probes: dict[str, Probe]
