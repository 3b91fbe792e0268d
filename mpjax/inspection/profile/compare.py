"""Comparison of two profiles by module."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from mpjax.inspection.profile.report import ProfileReport
from mpjax.inspection.reports import Report, Section, duration

# A change below either share, of the module's time or of the step, counts as unchanged: measured times vary.
_NOISE = 0.05
_SMALL = 0.01


@dataclasses.dataclass(frozen=True)
class Change:
    """The device time of a module in two profiles, forward and backward together.

    Args:
        module: Module path; empty outside all modules.
        before, after: Seconds of a step; 0 if the profile has no such module.
    """

    module: str
    before: float
    after: float

    @property
    def saved(self) -> float:
        """Seconds saved in a step."""
        return self.before - self.after


@dataclasses.dataclass(frozen=True)
class Comparison(Report):
    """The changes from one profile to another. `print` it, or read its fields.

    Args:
        before, after: Seconds of a step.
        devices: Names of the two devices.
        changes: Changes by module, most time saved first.
    """

    before: float
    after: float
    devices: tuple[str, str]
    changes: tuple[Change, ...]

    title = "Comparison of profiles"
    main = "changes"
    derived = "speedup"

    @property
    def speedup(self) -> float:
        """The time of a step before over that after."""
        return self.before / self.after

    @property
    def faster(self) -> tuple[Change, ...]:
        """Modules that got faster, most time saved first."""
        return tuple(change for change in self.changes if self._counts(change) and change.saved > 0)

    @property
    def slower(self) -> tuple[Change, ...]:
        """Modules that got slower, most time lost first."""
        return tuple(change for change in reversed(self.changes) if self._counts(change) and change.saved < 0)

    @property
    def unchanged(self) -> tuple[Change, ...]:
        """Modules whose change is within measurement noise, longest first."""
        rest = (change for change in self.changes if not self._counts(change))
        return tuple(sorted(rest, key=lambda change: -change.after))

    def _counts(self, change: Change) -> bool:
        longest = max(change.before, change.after)
        return abs(change.saved) > _NOISE * longest and abs(change.saved) > _SMALL * max(self.before, self.after)

    def sections(self) -> list[Section]:
        """The sections of the printed comparison."""
        lines = [f"{duration(self.before)} a step before, {duration(self.after)} now: {_times(self.speedup)}"]
        if self.devices[0] != self.devices[1]:
            lines.append(f"on different devices: {self.devices[0]} before, {self.devices[1]} now")
        if not self.changes:
            return [Section(self.title, "\n".join([*lines, "modules are not compared: there are no reliable times"]))]
        groups = ("faster", self.faster), ("slower", self.slower), ("unchanged", self.unchanged)
        for name, group in groups:
            most = ", ".join(change.module or "outside of modules" for change in group[:3])
            more = f" and {len(group) - 3} more" if len(group) > 3 else ""
            lines.append(f"{name}: {most}{more}" if group else f"{name}: nothing")
        rows = [
            (
                change.module or "-",
                duration(change.before),
                duration(change.after),
                f"{change.before / change.after:.2f}×" if change.before and change.after else "-",
                ("-" if change.saved >= 0 else "+") + duration(abs(change.saved)),
                name,
            )
            for name, group in groups
            for change in group
        ]
        return [Section(self.title, "\n".join(lines), "module|>before|>now|>speedup|>change|", rows)]


Profiled = ProfileReport | str | os.PathLike[str] | Mapping[str, Any]


def compare(before: Profiled, after: Profiled) -> Comparison:
    """Compares two profiles by module.

    Args:
        before, after: Reports of `mpjax.profile`, or files that their `to_json` wrote.

    Returns:
        A `Comparison`: `print` it, or read its `speedup`, `faster`, `slower` and `unchanged`.

    Raises:
        ValueError: A file is not the JSON of a profile.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> def step(x):
        ...     return (x @ x).sum()
        >>> first, second = (mpjax.profile(step, jnp.eye(n), steps=1) for n in (64, 32))
        >>> mpjax.profile.compare(first, second).devices
        ('cpu', 'cpu')
    """
    old, new = read(before), read(after)
    modules = {name: (_seconds(old, name), _seconds(new, name)) for name in (*old["modules"], *new["modules"])}
    changes = (Change(name, *seconds) for name, seconds in modules.items())
    return Comparison(
        before=old["step_seconds"],
        after=new["step_seconds"],
        devices=(old["device"], new["device"]),
        changes=tuple(sorted(changes, key=lambda change: -change.saved)),
    )


def read(profile: Profiled) -> Mapping[str, Any]:
    """A profile in the form of `ProfileReport.to_dict`."""
    if isinstance(profile, ProfileReport):
        return profile.to_dict()
    if isinstance(profile, Mapping):
        return profile
    with open(profile, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError as error:
            raise ValueError(f"{os.fspath(profile)!r} is not JSON: {error}") from error
    if not isinstance(found, dict) or not {"step_seconds", "modules", "device"} <= set(found):
        raise ValueError(f"{os.fspath(profile)!r} is not a profile: write one with to_json, or --json")
    return found


def _seconds(profile: Mapping[str, Any], module: str) -> float:
    return float(sum(profile["modules"].get(module, ())))


def _times(speedup: float) -> str:
    return f"{speedup:.2f} times faster" if speedup >= 1 else f"{1 / speedup:.2f} times slower"
