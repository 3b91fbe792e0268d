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


def does_not_run(program: Callable[[], object]) -> bool:
    """Whether a program raises; a module that is not installed is no fault of the library's."""
    try:
        program()
    except ModuleNotFoundError:
        raise
    except Exception:
        return True
    return False
