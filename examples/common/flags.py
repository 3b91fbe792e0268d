"""Flags as the fields of a frozen dataclass, read by argparse.

argparse reports a mistake in one line, groups the help, and tells given flags from defaults, so that a flag without
effect is an error and a trained model keeps the flags that are not given. tyro frames its errors, simple-parsing
accepts abbreviations, and neither tells a given default.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import sys
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

from examples.common.cli import UsageError

C = TypeVar("C", bound=Any)

# Usual names of flags in other scripts, too short for a guess.
_ELSEWHERE = {"--lr": "--learning-rate", "--arch": "--model", "--wd": "--weight-decay", "--data": "--data-dir"}


class Range(NamedTuple):
    """The values that a number may have: from `low` to `high`."""

    text: str
    low: float
    high: float = sys.float_info.max


Count = Annotated[int, Range("1 or more", 1)]
TwoOrMore = Annotated[int, Range("2 or more", 2)]
Natural = Annotated[int, Range("0 or more", 0)]
NotNegative = Annotated[float, Range("0 or more", 0)]
Positive = Annotated[float, Range("a positive number", 5e-324)]
Seed = Annotated[int, Range("0 to 2147483647", 0, 2**31 - 1)]
Share = Annotated[float, Range("0 or more, below 1", 0, math.nextafter(1, 0))]
Part = Annotated[float, Range("0 to 1", 0, 1)]
Some = Annotated[float, Range("more than 0, up to 1", 1e-3, 1)]


Stored = Literal["fixed", "free", "running", ""]


class Group:
    """Flags under one heading of the help.

    Args:
        title: The heading.
        uses: The actions (`config.action`) that use them; None for all.
        stored: Whether they are stored with a run: "fixed" if a resumed run must have the same values, "free" if it
            may change them, "running" if they say how a training runs and nothing about its model; "" if not.
    """

    def __init__(self, title: str, uses: Collection[str] | None = None, stored: Stored = "") -> None:
        self.title, self.uses, self.stored = title, uses, stored

    def __call__(self, default: Any, help: str, *aliases: str, **changed: Any) -> Any:
        """Defines a flag: its default, help, aliases, and differences from its group."""
        own = Group(self.title, changed.get("uses", self.uses), changed.get("stored", self.stored))
        return dataclasses.field(default=default, metadata={"group": own, "help": help, "aliases": aliases})


def parse(config: type[C], program: str, arguments: Sequence[str]) -> C:
    """Parses a command line into a config. Its field `given` holds the names of the given flags.

    The flags of the run that the command line names (`config.of_run`) are the defaults of those that are not given.

    Raises:
        UsageError: A flag is unknown, has an invalid value, or is not used by the chosen action.
    """
    space, rest = _parser(config, program).parse_known_args([*map(_dashed, arguments)])
    if rest:
        known = [name for field in _flags(config) for name in _names(field)]
        name = rest[0].split("=")[0]
        close = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"{program} --help lists all flags."
        raise UsageError(f"{rest[0]}: unknown flag; {hint}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(space).items()}
    for name, (note, policy) in config.foreign.items():
        if (value := given.pop(name, None)) is not None:
            print(f"--{name}: {note}", flush=True)
            meant = "float32" if policy and value in ("0", "false") else policy
            if policy and given.setdefault("policy", meant) != meant:
                raise UsageError(f"--policy {given['policy']} and --{name} {value} disagree: leave out one of them.")
    parsed: Any = config(**{**config.of_run(given), **given, "given": frozenset(given)})
    for field in _flags(config):
        uses = field.metadata["group"].uses
        used = uses is None or parsed.action in uses or getattr(parsed, field.name) is None
        if field.name in given and not used:
            where = f"has no effect in {parsed.action_flag}; it is for {', '.join(sorted(uses))}"
            raise UsageError(f"{_names(field)[0]} {where}. Leave it out.")
    return parsed


def check_ranges(config: Any) -> None:
    """Raises a `UsageError` if a number is out of its flag's range."""
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        value, parts = getattr(config, name), (hint, *typing.get_args(hint))
        for allowed in (allowed for part in parts for allowed in getattr(part, "__metadata__", ())):
            if value is not None and not allowed.low <= value <= allowed.high:
                raise UsageError(f"--{name.replace('_', '-')} {value}: give {allowed.text}.")


def names_stored(config: Any, *how: Stored) -> list[str]:
    """The names of the flags that are stored with a run in one of these ways."""
    return [field.name for field in _flags(config) if field.metadata["group"].stored in how]


def stored_flags(config: Any) -> dict[str, Any]:
    """The flags that are stored with a run, as JSON."""
    values = {name: getattr(config, name) for name in names_stored(config, "fixed", "free", "running")}
    paths = {name: several(value) for name, value in values.items() if isinstance(value, Path)}
    return values | {name: ",".join(str(part.absolute()) for part in parts) for name, parts in paths.items()}


def several(path: Path) -> list[Path]:
    """The path, or the paths of several that are joined by commas."""
    return [path] if path.exists() else [*map(Path, str(path).split(","))]


def as_text(name: str, value: Any) -> str:
    """A flag as on a command line."""
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed} {value}"


def from_json(config: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the result of `stored_flags` to arguments of the config. Unknown names are dropped."""
    hints = typing.get_type_hints(config)
    names = {field.name for field in _flags(config)}
    kept = {name: value for name, value in values.items() if name in names}
    return {name: value if value is None else _read(hints[name], value) for name, value in kept.items()}


def _flags(config: Any) -> list[dataclasses.Field[Any]]:
    without = getattr(config, "without", ())
    return [field for field in dataclasses.fields(config) if "group" in field.metadata and field.name not in without]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists all flags).")


def _parser(config: type[Any], program: str) -> _Parser:
    how: dict[str, Any] = {"allow_abbrev": False, "argument_default": argparse.SUPPRESS}
    parser = _Parser(prog=program, usage="%(prog)s [FLAGS]", description=config.__doc__, **how)
    hints = typing.get_type_hints(config)
    groups: dict[str, Any] = {}
    for field in _flags(config):
        title = field.metadata["group"].title
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        text = (field.metadata["help"] + _default_text(field.default)).replace("%", "%%")
        options = _argument_options(hints[field.name], field.default)
        group.add_argument(*_names(field), dest=field.name, help=text, **options)
    switch: dict[str, Any] = {"nargs": "?", "const": "1", "type": str.lower, "choices": ("true", "false", "1", "0")}
    for name, (note, _) in config.foreign.items():
        parser.add_argument("--" + name.replace("_", "-"), help=note, **switch)
    return parser


def _default_text(default: Any) -> str:
    if default in (None, ()) or isinstance(default, bool):
        return ""
    return f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"


def _argument_options(hint: Any, default: Any = None) -> dict[str, Any]:
    """Arguments of `add_argument` for a flag of this type."""
    hint = _without_none(hint)
    if hint is bool:
        return {"action": "store_true" if default is False else argparse.BooleanOptionalAction}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", **_argument_options(typing.get_args(hint)[0])}
    if hint is Path:
        # A flag with an empty value, as in `--data_dir=`, counts as not given.
        return {"type": lambda text: Path(text).expanduser() if text else None, "metavar": "PATH"}
    return {"type": hint, "metavar": {int: "N", float: "X"}.get(hint, "TEXT")}


def _read(hint: Any, value: Any) -> Any:
    hint = _without_none(hint)
    if typing.get_origin(hint) is tuple:
        return tuple(_read(typing.get_args(hint)[0], item) for item in value)
    return Path(value) if hint is Path else value


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return next(part for part in typing.get_args(hint) if part is not types.NoneType)
    return hint


def _names(field: dataclasses.Field[Any]) -> list[str]:
    return ["--" + field.name.replace("_", "-"), *field.metadata["aliases"]]


def _dashed(word: str) -> str:
    """Rewrites `--num_iter=5` as `--num-iter=5`, since other scripts use underscores."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
