"""Resolves `module:function` references of the command line to functions and their arguments."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, NamedTuple


class UsageError(Exception):
    """A mistake that the user of the command line can fix, in the call or in the script."""


class Call(NamedTuple):
    """A function's arguments. If batches were yielded, each in turn is the last positional argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batches: Iterable[Any] | None = None


def load(reference: str, flag: str = "", home: str = "") -> Any:
    """Imports the object that `module:name` or `path/to/script.py:name` refers to.

    Args:
        reference: The text. Without a colon, it is a name in the module `home`, if one is given.
        flag: The command-line option it is the value of, for error messages.
        home: The module of the inspected function, as written on the command line.

    Raises:
        UsageError: The module or name does not exist, or the import fails.
    """
    source, colon, name = reference.rpartition(":")
    if not colon and home:
        source, colon = home, ":"
    what = f"{flag} {reference!r}".strip()
    if not source or not name:
        raise UsageError(f"{what}: expected module:name, as train:loss_fn, or script.py:name.")
    found: Any = _module(source, what)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{what}: {source} has no {part!r}{_hint(part, found)}")
        found = getattr(found, part)
    return found


def load_function(reference: str) -> Callable[..., Any]:
    """The function that a reference names.

    Raises:
        UsageError: The object does not exist or is not callable.
    """
    found = load(reference)
    if not callable(found):
        raise UsageError(f"{reference!r} is {_article(found)}, and should be a function.")
    return found


def load_call(reference: str | None, home: str) -> Call:
    """Calls the function that a reference names to make arguments: a tuple, a dict of keywords, or yielded batches.

    Raises:
        UsageError: The object is not a function without arguments, or it returns something else.
    """
    if reference is None:
        return Call((), {})
    make = load(reference, "--args", home)
    if not callable(make):
        raise UsageError(
            f"--args {reference!r} is {_article(make)}, and should be a function that makes the arguments."
        )
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise UsageError(f"--args {reference!r}: it is called without arguments, and has {error}.") from error
    made = make()
    if inspect.isgenerator(made):
        return _from_batches(make, reference)
    if isinstance(made, tuple):
        return Call(made, {})
    if isinstance(made, dict):
        return Call((), made)
    raise UsageError(
        f"--args {reference!r} returned {_article(made)}; return a tuple of arguments (of one: `return x,`), a dict "
        "of keyword arguments, or yield batches."
    )


def bound_arguments(fun: Callable[..., Any], reference: str, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a call without its batch. Keywords become positions where they can.

    Raises:
        UsageError: The arguments do not match the function's signature.
    """
    try:
        signature = inspect.signature(fun)
    except ValueError:  # a builtin
        return call.args, call.kwargs
    try:
        bound = signature.bind(*call.args, *((None,) if call.batches is not None else ()), **call.kwargs)
        return (bound.args, bound.kwargs) if call.batches is None else (call.args, call.kwargs)
    except TypeError as error:
        given = [type(x).__name__ for x in call.args] + [f"{name}=" for name in call.kwargs]
        given += ["a batch"] if call.batches is not None else []
        raise UsageError(
            f"{reference!r} takes {signature}, and was given ({', '.join(given)}): {error}. Make its arguments with "
            "--args module:make_args."
        ) from error


class Batches:
    """The batches of a generator function. Each iteration starts from the first batch."""

    def __init__(self, make: Callable[[], Iterator[Any]]):
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return (made[-1] if isinstance(made, tuple) else made for made in self._make())


def _from_batches(make: Callable[[], Iterator[Any]], reference: str) -> Call:
    """A call from yielded batches, or from yielded tuples of all arguments whose last element is the batch."""
    first = next(make(), None)
    if first is None:
        raise UsageError(f"--args {reference!r} yielded nothing; yield at least one batch.")
    return Call(first[:-1] if isinstance(first, tuple) else (), {}, Batches(make))


def _module(source: str, what: str) -> ModuleType:
    directory, name = "", source
    if source.endswith(".py"):
        if not os.path.isfile(source):
            raise UsageError(f"{what}: there is no file {source!r} in {os.getcwd()}.")
        directory, name = os.path.split(os.path.abspath(source.removesuffix(".py")))
    # As `python script.py` does, so that a script can import modules in its folder.
    sys.path.insert(0, directory or os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UsageError(f"{what}: {source} imports {error.name!r}, which is not installed.") from error
        beside = sorted(entry.removesuffix(".py") for entry in os.listdir() if entry.endswith(".py"))
        close = difflib.get_close_matches(name, beside, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else f"; here are {', '.join(beside[:8]) or 'no .py files'}"
        raise UsageError(f"{what}: no module {name!r} in {os.getcwd()} nor installed{hint}.") from error
    except Exception as error:
        raise UsageError(f"{what}: importing {source} fails with {type(error).__name__}: {error}") from error


def _hint(name: str, found: Any) -> str:
    functions = (
        [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
        if hasattr(found, "__dict__")
        else []
    )
    close = difflib.get_close_matches(name, functions, 1)
    if close:
        return f" (did you mean {close[0]!r}?)."
    return f"; its functions are {', '.join(functions[:8])}." if functions else " and no functions."


def _article(found: Any) -> str:
    name = type(found).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"
