"""The command line: `python -m mpjax audit|explain|numerics|profile|nonfinite module:function`."""

from __future__ import annotations

import argparse
import dataclasses
import html
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mpjax
from mpjax.inspection.entry_point import Call, UsageError, check_call, load_call, load_function
from mpjax.inspection.reports import Report, Section

PROGRAM = "python -m mpjax"

_EPILOG = """
The function and its arguments are named, and the script that holds them is left as it is:

  python -m mpjax audit train:train_step --args train:example_args
  python -m mpjax explain train.py:loss_fn --args example_args --policy mixed_bfloat16
  python -m mpjax numerics train:loss_fn --args train:batches --html ranges.html

--args names a function without arguments. It returns a tuple of positional arguments or a dict of keyword arguments;
jax.ShapeDtypeStructs will do for audit and explain. Or it yields batches, or tuples of arguments whose last is a batch.
"""


@dataclasses.dataclass(frozen=True)
class Printed(Report):
    """Something that prints as text, as a report."""

    heading: str
    text: str
    data: dict[str, Any]

    @property
    def title(self) -> str:
        return self.heading

    def sections(self) -> list[Section]:
        return [Section("", figure=f"<pre>{html.escape(self.text)}</pre>")]

    def to_dict(self) -> dict[str, Any]:
        return self.data

    def __str__(self) -> str:
        return self.text


def _audit(fun: Callable[..., Any], call: Call, options: argparse.Namespace) -> Report:
    return mpjax.audit(fun, *_first(call), **call.kwargs)


def _explain(fun: Callable[..., Any], call: Call, options: argparse.Namespace) -> Report:
    plan = mpjax.explain(fun, *_first(call), **call.kwargs)
    data = {"flops": plan.flops, "half_share": plan.half_share, "rows": plan.to_dicts()}
    return Printed(f"Plan of {_name(fun)}", str(plan), data)


def _nonfinite(fun: Callable[..., Any], call: Call, options: argparse.Namespace) -> Report:
    found = mpjax.find_nonfinite(fun, *_first(call), **call.kwargs)
    title = f"Inf and NaN in {_name(fun)}"
    if found is None:
        return Printed(title, "all results are finite", {"found": None})
    return Printed(title, str(found), {"found": dataclasses.asdict(found)})


def _numerics(fun: Callable[..., Any], call: Call, options: argparse.Namespace) -> Report:
    args = _positional(call)
    given = {"loss_scale": options.loss_scale, "has_aux": options.has_aux, "dtype": options.dtype}
    return mpjax.numerics(fun, *args, batches=call.batches, **given)


def _profile(fun: Callable[..., Any], call: Call, options: argparse.Namespace) -> Report:
    return mpjax.profile(fun, *_positional(call), batches=call.batches, steps=options.steps)


_COMMANDS: dict[str, tuple[Callable[[Callable[..., Any], Call, argparse.Namespace], Report], str]] = {
    "audit": (_audit, "what runs in which precision, what keeps it from Tensor Cores, what half may spoil"),
    "explain": (_explain, "the plan that autocast makes, and why"),
    "numerics": (_numerics, "ranges of activations and gradients of a loss function, and the loss scale to take"),
    "profile": (_profile, "where the time of a step goes"),
    "nonfinite": (_nonfinite, "the first operation that makes an inf or NaN; exits with 1 if there is one"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        arguments: without the program's name; None for those of the process.

    Returns:
        0; 1 if `nonfinite` found something or `audit --min-half` fails; 2 after a mistake in the call.
    """
    options = _parser().parse_args(arguments)
    home = options.function.rpartition(":")[0]
    try:
        fun = load_function(options.function)
        call = load_call(options.args, home)
        check_call(fun, options.function, call)
        report = _COMMANDS[options.command][0](_with_policy(fun, options.policy), call, options)
    except UsageError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    print(report)
    for path, write in ((options.html, report.to_html), (options.json, report.to_json)):
        if path:
            write(path)
    return _code(report, options)


def _code(report: Any, options: argparse.Namespace) -> int:
    if options.command == "nonfinite":
        return int(report.data["found"] is not None)
    if options.command == "audit" and options.min_half is not None:
        try:
            report.assert_half(options.min_half)
        except AssertionError as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("function", metavar="module:function", help="the function; script.py:function will do")
    shared.add_argument("--args", metavar="module:make_args", help="the function that makes its arguments")
    shared.add_argument("--policy", help="run it under mpjax.autocast with this policy, as mixed_float16")
    shared.add_argument("--html", metavar="FILE", help="write the report as one page")
    shared.add_argument("--json", metavar="FILE", help="write the report as JSON")
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__, epilog=_EPILOG, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    added = {
        name: commands.add_parser(
            name, parents=[shared], help=text, description=text, epilog=_EPILOG, formatter_class=plain
        )
        for name, (_, text) in _COMMANDS.items()
    }
    added["audit"].add_argument(
        "--min-half", type=float, metavar="SHARE", help="exit with 1 if less of the FLOPs is half"
    )
    added["numerics"].add_argument("--loss-scale", type=float, help="the present loss scale")
    added["numerics"].add_argument("--has-aux", action="store_true", help="the function returns (loss, aux)")
    added["numerics"].add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    added["profile"].add_argument("--steps", type=int, default=10, help="how many steps are measured")
    return parser


def _with_policy(fun: Callable[..., Any], policy: str | None) -> Callable[..., Any]:
    if policy is None:
        return fun
    try:
        return mpjax.autocast(fun, policy)
    except ValueError as error:
        raise UsageError(f"--policy {policy!r}: {error}") from error


def _first(call: Call) -> tuple[Any, ...]:
    """The arguments of one call."""
    return call.args if call.batches is None else (*call.args, next(iter(call.batches)))


def _positional(call: Call) -> tuple[Any, ...]:
    """The arguments for what takes positional ones only."""
    if call.kwargs:
        raise UsageError(
            "--args returned keyword arguments; numerics and profile take positional ones: return a tuple."
        )
    return call.args


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", type(fun).__name__)
