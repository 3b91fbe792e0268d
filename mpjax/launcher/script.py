"""Runs a script or a module as Python does, with its `__main__`, `sys.argv`, exit code and tracebacks."""

from __future__ import annotations

import builtins
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from mpjax.launcher.options import LaunchError


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
    vars(main).update(__file__=path, __builtins__=builtins, __annotations__={}, __cached__=None)
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
