"""Runs a script in mixed precision, or inspects a function of it: `python -m mpjax COMMAND module:function`.

The function and its arguments are named, and the script that contains them is not changed:

  python -m mpjax audit train:train_step --args train:example_args
  python -m mpjax explain train.py:loss_fn --args example_args --policy mixed_bfloat16
  python -m mpjax numerics train:loss_fn --args train:batches --html ranges.html
  python -m mpjax plan train:train_step --args train:example_args --target h200 --memory 80GB
  python -m mpjax parity train:make_training --policies mixed_float16 --seeds 5

--args names a function without arguments. It returns a tuple of positional arguments or a dict of keyword arguments;
jax.ShapeDtypeStructs will do for audit, explain and plan. Or it yields batches, or tuples of arguments whose last is a
batch.

Exit codes: 0; 1 if something was found that was asked about (find_nonfinite, search, parity, plan, audit --min-half);
2 for a mistake in the call.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax

import mpjax
from mpjax.inspection.reports import Report, Section
from mpjax.inspection.tools import CALL, TOOLS, Tool


class UsageError(Exception):
    """A mistake that the user of the command line can fix, in the call or in the script."""


class Arguments(NamedTuple):
    """A function's arguments. If batches were yielded, each in turn is the last positional argument."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batches: Iterable[Any] | None = None


def load_function(reference: str, flag: str = "", home: str = "", purpose: str = "") -> Callable[..., Any]:
    """Imports the function that `module:name` or `path/to/script.py:name` refers to.

    Args:
        reference: The text. Without a colon, it is a name in the module `home`, if one is given.
        flag: The command-line option it is the value of, for error messages.
        home: The module of the inspected function, as written on the command line.
        purpose: What the function does, for error messages.

    Raises:
        UsageError: The module or name does not exist, the import fails, or the object is not callable.
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
    if not callable(found):
        raise UsageError(f"{what} is {_article(found)}, and should be a function{purpose}.")
    return found


def load_call(reference: str | None, home: str) -> Arguments:
    """Calls the function that a reference names to make arguments: a tuple, a dict of keywords, or yielded batches.

    Raises:
        UsageError: The object is not a function without arguments, or it returns something else.
    """
    if reference is None:
        return Arguments((), {})
    make = load_function(reference, "--args", home, " that makes the arguments")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise UsageError(f"--args {reference!r}: it is called without arguments, and has {error}.") from error
    made = make()
    if inspect.isgenerator(made):
        return _from_batches(make, reference)
    if isinstance(made, tuple):
        return Arguments(made, {})
    if isinstance(made, dict):
        return Arguments((), made)
    raise UsageError(
        f"--args {reference!r} returned {_article(made)}; return a tuple of arguments (of one: `return x,`), a dict "
        "of keyword arguments, or yield batches."
    )


def bound_arguments(fun: Callable[..., Any], reference: str, call: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a call without its batch. Keywords become positions where they can.

    Raises:
        UsageError: The arguments do not match the function's signature.
    """
    try:
        signature = inspect.signature(fun)
    except ValueError:  # a builtin
        return call.args, call.kwargs
    batch = [] if call.batches is None else ["a batch"]
    try:
        bound = signature.bind(*call.args, *batch, **call.kwargs)
        return (call.args, call.kwargs) if batch else (bound.args, bound.kwargs)
    except TypeError as error:
        given = [type(x).__name__ for x in call.args] + [f"{name}=" for name in call.kwargs] + batch
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


def _from_batches(make: Callable[[], Iterator[Any]], reference: str) -> Arguments:
    """A call from yielded batches, or from yielded tuples of all arguments whose last element is the batch."""
    first = next(make(), None)
    if first is None:
        raise UsageError(f"--args {reference!r} yielded nothing; yield at least one batch.")
    return Arguments(first[:-1] if isinstance(first, tuple) else (), {}, Batches(make))


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
    members = getattr(found, "__dict__", {})
    functions = [n for n, value in members.items() if callable(value) and not n.startswith("_")]
    close = difflib.get_close_matches(name, functions, 1)
    if close:
        return f" (did you mean {close[0]!r}?)."
    return f"; its functions are {', '.join(functions[:8])}." if functions else " and no functions."


def _article(found: Any) -> str:
    name = type(found).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


PROGRAM = "python -m mpjax"

_ABOUT, _, _EPILOG = (__doc__ or "").partition("\n\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: Arguments without the program's name; None for `sys.argv[1:]`.

    Returns:
        0; 1 if the report is a failure (see `Report.failure`); 2 after a mistake in the call, reported in one line.
    """
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help()
        return 2
    options = parser.parse_args(arguments)
    tool = next(tool for tool in TOOLS if tool.name == options.command)
    files = [(path, suffix) for suffix in ("html", "json", "csv") if (path := getattr(options, suffix))]
    try:
        for path, suffix in files:
            _check_writable(path, suffix)
        report = _report(tool, options)
        for path, suffix in files:
            getattr(report, f"to_{suffix}")(path)
    except Exception as error:  # a mistake, or raised by the function, by what makes its arguments, or by the tool
        if options.traceback:
            traceback.print_exception(error)
        print(f"{PROGRAM}: error: {_in_one_line(error)}", file=sys.stderr)
        return 2
    print(report.text(options.all))
    failure = report.failure()
    if tool.name == "audit" and failure:  # The other reports begin with it.
        print(f"\n{failure}", file=sys.stderr)
    return int(bool(failure))


def _report(tool: Tool, options: argparse.Namespace) -> Report:
    fun, function = load_function(options.function), getattr(mpjax, tool.name)
    keywords = {option.name: getattr(options, option.name) for option in tool.options if option not in CALL}
    if CALL[0] not in tool.options:
        return function(fun, **keywords)
    call = load_call(options.args, options.function.rpartition(":")[0])
    args, kwargs = bound_arguments(fun, options.function, call)
    if CALL[1] in tool.options and options.policy is not None:
        try:
            mpjax.get_policy(options.policy)
        except ValueError as error:
            raise UsageError(f"--policy {options.policy!r}: {error}") from error
        fun = mpjax.autocast(fun, options.policy)
    if call.batches is not None and "batches" in inspect.signature(function).parameters:
        keywords["batches"] = call.batches
    elif call.batches is not None:
        args = (*args, next(iter(call.batches)))
    return function(fun, *args, kwargs=kwargs, **keywords) or AllFinite()


class AllFinite(Report):
    """The report of `find_nonfinite` where there is nothing to find."""

    heading = "all results are finite"

    def sections(self) -> list[Section]:
        """The one line that is printed."""
        return [Section(self.title)]

    def to_dict(self) -> dict[str, Any]:
        """An empty finding."""
        return {"found": None}

    def table(self) -> list[dict[str, Any]]:
        """No rows."""
        return []


def _check_writable(path: str, suffix: str) -> None:
    """Raises a UsageError if a file can't be written: before minutes of measuring rather than after them."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise UsageError(f"--{suffix} {path!r}: can't write this file, it is a directory.")
    if not os.path.isdir(folder) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"--{suffix} {path!r}: can't write this file: no such directory, or no permission.")


_NEEDS_VALUES = (
    "the function needs the values of its arguments (numpy code, float(x), an if): inspections trace it as jax.jit "
    "does, so use jax.numpy, and remove code that prints or logs"
)


def _in_one_line(error: Exception) -> str:
    """An error and a hint for fixing it, in one line."""
    if isinstance(error, UsageError):
        return str(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if isinstance(error, (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError)):
        return f"{_NEEDS_VALUES}. {text}"
    notes = [note for note in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in note]  # JAX's own
    text = "; ".join([text, *notes])
    return f"{text} (--traceback shows where)" if not isinstance(error, (ValueError, TypeError)) else text


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("function", metavar="module:function", help="the function; or script.py:function")
    shared.add_argument("--all", action="store_true", help="print every row of the tables")
    shared.add_argument("--html", metavar="FILE", help="write the report as one page")
    shared.add_argument("--json", metavar="FILE", help="write the report as JSON")
    shared.add_argument("--csv", metavar="FILE", help="write the rows of the main table")
    shared.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
    plain: Any = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(PROGRAM, description=_ABOUT, epilog=_EPILOG, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    # `mpjax.__main__` runs it. It is added here only to appear in the list of commands.
    commands.add_parser("run", add_help=False, help="run a training script in mixed precision, unchanged")
    for tool in TOOLS:
        about = {"help": tool.question, "description": tool.question, "epilog": _EPILOG, "formatter_class": plain}
        command = commands.add_parser(tool.name, parents=[shared], **about)
        for option in tool.options:
            command.add_argument(option.flag, help=option.help, **option.argparse)
    return parser
