"""Import hooks that patch JAX and optax when the script imports them."""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

from mpjax.launcher.options import PROGRAM, LaunchError, Options

PATCHED = ("jax", "optax", "equinox", "jax.experimental.checkify", "jax.example_libraries.optimizers")


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function right after a module was executed. Queries (`importlib.util.find_spec`) change nothing.

    Args:
        name: Name of the module.
        call: The function, without arguments.
    """

    def __init__(self, name: str, call: Callable[[], None]):
        self.name, self.call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders give. Its loader calls the function after it has executed the module."""
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, AfterImport))
        specs = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._call_after(spec.loader)
        return spec

    def _call_after(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            run(module)
            if module.__name__ == self.name:
                self.call()

        loader.exec_module = exec_module


_LATEST: list[AfterImport] = []  # the hooks of the latest call of `install`


def install(options: Options, main: bool = False) -> None:
    """Runs the script of this process in mixed precision, from its import of JAX on.

    Args:
        options: See `Options`.
        main: Whether this is the process of `mpjax run`, rather than one that inherited the environment.

    Raises:
        LaunchError: JAX is already imported. The script may hold JAX functions that cannot be replaced.
    """
    if "jax" in sys.modules:
        raise LaunchError(
            "JAX is imported already (by sitecustomize, a .pth file, or the program that called this): functions that "
            "other modules took from it can no longer be replaced. Make the script the first to import JAX."
        )
    # With both `python -m mpjax run` and MPJAX_AUTOCAST_ALL, the later options apply.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AfterImport)]
    shorten_tracebacks()
    done: list[Any] = []
    # The script may import optax first, which imports JAX. If it never does, the hook costs nothing.
    hooks = [AfterImport(name, functools.partial(_patch, name, done, options, main)) for name in PATCHED]
    sys.meta_path[:0] = _LATEST[:] = hooks
    atexit.register(_check_at_exit, hooks[0], done, main and not options.quiet)


def _check_at_exit(of_jax: AfterImport, done: list[Any], always: bool) -> None:
    """Says so if the script ran wholly in float32 because JAX was not imported, or not through the hook."""
    if of_jax not in _LATEST:  # `install` was called again
        return
    if "jax" not in sys.modules:
        if always and not hasattr(sys, "last_value"):  # A script that failed may have ended before.
            print("mpjax run: nothing was cast to half: the script did not import JAX", file=sys.stderr)
    elif not done:
        print(
            "mpjax run: error: nothing was cast to half: JAX was imported, but not through Python's import system, so "
            "its gradient functions were not replaced. Import it with a plain `import jax`.",
            file=sys.stderr,
        )


def _patch(name: str, done: list[Any], options: Options, main: bool) -> None:
    """Patches a module that was executed. `done` holds the `Patches`, from the first execution of JAX on."""
    from mpjax.launcher.patches import Patches
    from mpjax.program.compat import hide_frames

    if name == "jax" and not done:
        done.append(Patches(_session_or_exit(options, main)))
        hide_frames(_PACKAGE)
    for patches in done:
        patches.patch(name)
        for own in PATCHED if name == "jax" else ():
            if own.startswith("jax.") and own in sys.modules:  # JAX has imported it itself
                patches.patch(own)


def _session_or_exit(options: Options, main: bool) -> Any:
    from mpjax.launcher.report import Report, dry_run
    from mpjax.launcher.session import Session

    try:
        session = Session(options)
    except LaunchError as error:
        _LATEST.clear()  # The error says enough: no report at exit.
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    report = Report(session, always=main)
    session.watchers.append(report.traced)
    attach(report.summary)
    if options.dry_run:
        session.watchers.append(dry_run)
    return session


def patch(options: Options) -> Any:
    """Patches JAX and optax in this process. The returned `Patches` can undo it."""
    from mpjax.launcher.patches import Patches
    from mpjax.launcher.session import Session

    patches = Patches(Session(options))
    for name in PATCHED:
        if importlib.util.find_spec(name):
            patches.patch(name)
    return patches


# Tracebacks of the script's errors without the launcher's frames.


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RUNNERS = ("<frozen runpy>", runpy.__file__)


def shorten_tracebacks() -> None:
    """Makes Python print uncaught exceptions without mpjax's frames, unless mpjax raised them."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        return before(kind, strip(error.with_traceback(trace)), error.__traceback__)

    sys.excepthook = show


def strip(error: BaseException) -> BaseException:
    """Removes mpjax's frames from the tracebacks of an error and of all that Python shows with it."""
    shown = [error]
    for each in shown:  # It grows. An error may be its own cause.
        each.__traceback__ = stripped(each.__traceback__)
        inside = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        others = (each.__cause__, each.__context__, *inside)
        shown += [other for other in others if other is not None and id(other) not in map(id, shown)]
    return error


def stripped(trace: TracebackType | None) -> TracebackType | None:
    """Removes mpjax's frames from a traceback, or only those before the script's if mpjax raised the error."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    ours = [_is_ours(entry) for entry in entries]
    first = ours.index(False) if False in ours else 0
    kept = [entry for entry, is_ours in zip(entries[first:], ours[first:], strict=True) if ours[-1] or not is_ours]
    result = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _is_ours(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith((_PACKAGE, *_RUNNERS))


# Reports and tracebacks in IPython, which has its own way to show exceptions, and cells in place of one exit.


def attach(summarize: Callable[[], None]) -> None:
    """In IPython, prints the summary after each cell that changes it, and hides the launcher in tracebacks.

    Args:
        summarize: Prints the summary if it has changed.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:
        return

    def show(
        shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType, tb_offset: int | None = None
    ) -> None:
        shell.showtraceback((kind, strip(error.with_traceback(trace)), error.__traceback__), tb_offset=tb_offset)

    shell.set_custom_exc((Exception,), show)
    shell.events.register("post_run_cell", lambda *_: summarize())
