"""The command line of `python -m mpjax run`."""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from mpjax.launcher import cli, hooks
from mpjax.launcher.options import DEFAULT_POLICY, PROGRAM, LaunchError, Options, read_rules

_EPILOG = """
Arguments after the script or the module are passed to it:

  python -m mpjax run train.py --epochs 10                    # mixed_float16 with dynamic loss scaling
  python -m mpjax run --policy mixed_bfloat16 -m my.trainer
  MPJAX_AUTOCAST_ALL=mixed_float16 python train.py            # the same, set by the environment

MPJAX_AUTOCAST=0 and MPJAX_ALLOWLIST_ADD, MPJAX_DENYLIST_ADD, MPJAX_INFERLIST_ADD work as they do with mpjax.autocast.
docs/launcher.md describes what happens to the script.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a script in mixed precision.

    Args:
        arguments: The arguments after `run`; None for those in `sys.argv`.

    Returns:
        2 after a mistake in the call. Otherwise the process ends as it would without the launcher.
    """
    command_line = list(sys.argv[2:] if arguments is None else arguments)
    parsed = parser().parse_args(command_line)
    try:
        is_module, target, rest = _target(parsed)
        cli.check(target, is_module)
        options = options_of(parsed)
        os.environ.update(options.environment())
        hooks.install(options, main=True)
    except LaunchError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    cli.run(target, rest, is_module)
    return 0


def options_of(parsed: argparse.Namespace) -> Options:
    """The options of a command line: those of the rules file, then the flags.

    Raises:
        LaunchError: The rules file is invalid.
    """
    fields = read_rules(parsed.rules) if parsed.rules else {}
    fields["deny"] = (*fields.get("deny", ()), *parsed.deny)
    names = ("policy", "attention", "any_gradient", "evaluations", "init_scale", "quiet", "dry_run")
    explain = os.path.abspath(parsed.explain) if parsed.explain else ""
    return Options(**fields, **{name: getattr(parsed, name) for name in names}, explain=explain)


def _target(parsed: argparse.Namespace) -> tuple[bool, str, list[str]]:
    if parsed.module:
        return True, parsed.module[0], [*parsed.module[1:], *parsed.script]
    if not parsed.script:
        raise LaunchError("name a script, or a module after -m.")
    return False, parsed.script[0], parsed.script[1:]


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    plain = argparse.RawDescriptionHelpFormatter
    description = "Runs a training script in mixed precision, unchanged."
    result = argparse.ArgumentParser(PROGRAM, description=description, epilog=_EPILOG, formatter_class=plain)
    result.add_argument("--policy", default=DEFAULT_POLICY, help="what mpjax.get_policy reads (default: %(default)s)")
    result.add_argument("--rules", metavar="FILE", help="TOML: lists allow, deny, infer, packages; table [overrides]")
    result.add_argument(
        "--deny", metavar="PATTERN", action="append", default=[], help="keep this in float32; repeatable"
    )
    result.add_argument(
        "--attention",
        default="auto",
        help="as in mpjax.Rules: 'auto', 'fused' (rows of any length) or 'unfused' (default: %(default)s)",
    )
    result.add_argument(
        "--any-gradient", action="store_true", help="the script updates its parameters by hand (bfloat16 only)"
    )
    result.add_argument("--evaluations", action="store_true", help="cast evaluations of trained parameters too")
    result.add_argument("--init-scale", type=float, default=2.0**15, help="the first loss scale (default: %(default)g)")
    result.add_argument("--explain", metavar="FILE", help="write the plan of each program to a file")
    result.add_argument("--dry-run", action="store_true", help="print the audit of the first training step and exit")
    result.add_argument("--quiet", action="store_true", help="print only errors, and gradients that stay in float32")
    result.add_argument("-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="run a module")
    result.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a script and its arguments")
    return result


# Runs a script or a module as Python does, with its `__main__`, `sys.argv`, exit code and tracebacks.


def check(target: str, is_module: bool) -> None:
    """Checks that a target can be run.

    Raises:
        LaunchError: The script or module does not exist.
    """
    if not is_module:
        if not os.path.exists(target):
            raise LaunchError(f"no such script: {target}")
        if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
            raise LaunchError(f"{target} is a folder without a __main__.py")
        return
    sys.path.insert(0, os.getcwd())
    try:
        if importlib.util.find_spec(target) is None:
            raise LaunchError(f"no such module: {target}")
    except (ImportError, ValueError) as error:
        raise LaunchError(f"no such module: {target} ({error})") from error
    finally:
        sys.path.pop(0)


def run(target: str, arguments: Sequence[str], is_module: bool) -> None:
    """Runs the target in this process, as `python target` or `python -m target`.

    Exceptions of the script propagate. `tracebacks` shows them without the launcher's frames.
    """
    sys.argv = [target, *arguments]
    path = os.path.abspath(target)  # as Python's own `__main__` has it
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __builtins__=builtins, __annotations__={}, __cached__=None, __loader__=loader)
    sys.modules["__main__"] = main  # in place of the launcher's
    if is_module:
        sys.path[0] = os.getcwd()
        # The function behind `python -m`. It keeps `__main__` the script's, for pickles and child processes.
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
    elif os.path.isdir(target):
        sys.path[0] = path
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        sys.path[0] = os.path.dirname(path)
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))
