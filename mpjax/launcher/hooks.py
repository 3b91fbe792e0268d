"""Import hooks that patch JAX and optax when the script imports them."""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from mpjax.launcher import tracebacks
from mpjax.launcher.options import LaunchError, Options

PROGRAM = "python -m mpjax run"


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once, right after a module is imported.

    Args:
        name: Name of the module.
        call: The function, without arguments.
    """

    def __init__(self, name: str, call: Callable[[], None]):
        self.name, self.call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that calls the function."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.call)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, call: Callable[[], None]):
        self.loader, self.call = loader, call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.call()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


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
    tracebacks.install()
    if main and not options.quiet:
        atexit.register(_report_missing_jax)
    sessions: list[Any] = []
    sys.meta_path.insert(0, AfterImport("jax", lambda: sessions.append(_patch_or_exit(options, main))))
    # The script may import optax first, which imports JAX. If it never does, the hook costs nothing.
    sys.meta_path.insert(0, AfterImport("optax", lambda: _patch_optax(sessions[0])))


def _report_missing_jax() -> None:
    if "jax" not in sys.modules:
        print("mpjax run: nothing was cast to half: the script did not import JAX", file=sys.stderr, flush=True)


def _patch_or_exit(options: Options, main: bool) -> Any:
    from mpjax.launcher.patches import Patches
    from mpjax.launcher.report import DryRun, Report
    from mpjax.launcher.session import Session

    try:
        session = Session(options)
    except LaunchError as error:
        fail(str(error))
    Patches(session).patch_jax()
    session.watchers.append(Report(session, always=main))
    if options.dry_run:
        session.watchers.append(DryRun())
    return session


def _patch_optax(session: Any) -> None:
    from mpjax.launcher.patches import Patches

    Patches(session).patch_optax()


def patch(options: Options) -> Any:
    """Patches JAX and optax in this process. The returned `Patches` can undo it."""
    from mpjax.launcher.patches import Patches
    from mpjax.launcher.session import Session

    patches = Patches(Session(options))
    patches.patch_jax()
    patches.patch_optax()
    return patches


def fail(message: str) -> NoReturn:
    """Ends the process with a message and exit code 2."""
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    raise SystemExit(2)
