"""The source of an equation: its module path, its pass and the user's line."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from mpjax.program import compat

# The prefix of the named scopes that mpjax opens around regions. Unlike a Python flag, scopes stay with the equations
# through `jit`, `grad` and `vmap`.
MARK = "mpjax."
SCALED = MARK + "scaled"  # around the products with the loss scale
UPDATE = MARK + "update"  # around the decision of an optimizer that expects scaled gradients
TRUE = MARK + "true"  # around functions with derivative rules that receive true cotangents in a scaled loss
OUTSIDE = MARK + "outside"  # around such functions outside of scaled losses
DIVIDED = "divided"  # gradients that mpjax divides by the loss scale
NO_REGIONS = (SCALED, UPDATE, TRUE, OUTSIDE)
FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"
REMATTED = "rematted_computation"  # JAX's scope around the operations that a remat recomputes
_TRANSFORM = re.compile(r"\b\w+\(")
# Matches the mark in `transpose(jvp(mpjax.off))`, which is removed, and not the transformations, which stay.
_MARKED = re.compile(re.escape(MARK) + r"\w+")
_JAX = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@functools.lru_cache(maxsize=4096)
def _text(stack: Any) -> str:
    return str(stack)


def scopes(eqn: Any) -> str:
    """The named scopes of an equation, as `Block_0/attention`."""
    return _text(eqn.source_info.name_stack)


def is_backward(eqn: Any) -> bool:
    """Whether an equation belongs to a backward pass, of which JAX's scopes tell."""
    return "transpose(" in scopes(eqn)


def join(*paths: str) -> str:
    """Joins nested module paths, outermost first."""
    return "/".join(path for path in paths if path)


def source_line(eqn: Any, caller: str = "") -> str:
    """The user's line that an equation comes from, outside of libraries, as `file.py:12`; empty if unknown.

    `caller` is the line of the enclosing equation. An equation of a library's loop or branch may have no user's line.
    """
    frames = compat.user_frames(eqn)
    which = informative_frame([frame.file_name for frame in frames])
    if which is None or (caller and is_library_file(frames[which].file_name)):
        return caller
    return f"{frames[which].file_name.rsplit('/', 1)[-1]}:{frames[which].start_line}"


def apart(site: Any, other: Any) -> str:
    """Where an equation is, apart from the same operation of the same line: its column, or the line of a call."""
    if None in (site, other) or (site.name, site.line) != (other.name, other.line):
        return ""
    for one, two in zip(compat.user_frames(site.eqn), compat.user_frames(other.eqn), strict=False):
        if (one.file_name, one.start_line) != (two.file_name, two.start_line):
            return f", called at {one.file_name.rsplit('/', 1)[-1]}:{one.start_line}"
        if one.start_column != two.start_column:
            return f", column {one.start_column + 1}"
    return ""


def informative_frame(files: Sequence[str]) -> int | None:
    """The index of the frame to report, given the files innermost first: outside of libraries, else of mpjax alone."""
    outside = [i for i, file in enumerate(files) if not file.startswith(_PACKAGE)]
    users = [i for i in outside if not is_library_file(files[i])]
    return next(iter(users or outside), None)


@functools.lru_cache(maxsize=4096)
def is_library_file(name: str) -> bool:
    """Whether a file is in the standard library or in `site-packages`."""
    if name.startswith("<frozen "):  # a library that differentiates at import time
        return True
    path = os.path.abspath(name)
    if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
        return True
    roots = {sysconfig.get_path(root) for root in ("stdlib", "platstdlib")}
    return any(path.startswith(root + os.sep) for root in roots if root)


def module_of(eqn: Any) -> str:
    """The module path of an equation, without mpjax's marks."""
    path = scopes(eqn)
    if MARK not in path:
        return path
    return join(*(_MARKED.sub("", part) for part in path.split("/")))


@functools.lru_cache(maxsize=4096)
def phase_of(module: str) -> str:
    """The pass of a module path with the marks of transformations (JAX marks the backward pass `transpose`)."""
    if REMATTED in module:
        return RECOMPUTED
    return BACKWARD if "transpose(" in module else FORWARD


@functools.lru_cache(maxsize=4096)
def path_of(module: str) -> str:
    """A module path without the marks of transformations: `Net/Dense_0` for `transpose(jvp(Net))/Dense_0`."""
    parts: list[str] = []
    for part in split_scopes(module):
        name = _TRANSFORM.sub("", part).rstrip(")") if "(" in part else part
        if "jvp(" in part and (parts[:1] == [name] or (not name and module.startswith("transpose("))):
            parts = []  # The backward pass of a remat repeats the whole path.
        if name and name != REMATTED:
            parts.append(name)
    return "/".join(parts)


@functools.lru_cache(maxsize=4096)
def without_einsums(path: str) -> str:
    """A module path without the scopes that `jnp.einsum` opens, which are no modules: `Net` for `Net/bij,bkj->bik`."""
    return "/".join(part for part in path.split("/") if not ("," in part and "->" in part))


def split_scopes(module: str) -> list[str]:
    """Splits at slashes that are not inside parentheses: `jvp(a/b)/c` has two parts."""
    parts: list[str] = []
    for part in module.split("/"):
        if parts and parts[-1].count("(") > parts[-1].count(")"):
            parts[-1] += f"/{part}"
        else:
            parts.append(part)
    return parts


def user_stacklevel() -> int:
    """The `stacklevel` with which its caller warns about the user's line: outside of mpjax, JAX and layer libraries."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and is_library(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level if frame is not None else 2


def is_library(file: str) -> bool:
    """Whether a file belongs to mpjax, JAX, a layer library or optax."""
    return file.startswith((_PACKAGE, _JAX)) or is_library_file(file)


def traceback_line(error: BaseException) -> str:
    """The user's line that an error comes from, as `file.py:12`; empty if there is none."""
    latest = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not is_library(file):
            latest = f"{os.path.basename(file)}:{line}"
    return latest


def reason(error: BaseException) -> str:
    """The class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def name_of(fun: Any) -> str:
    """The name of a function with its line in the script, as `step (train.py:12)`: several may have one name."""
    name, code = function_name(fun), getattr(inspect.unwrap(fun), "__code__", None)
    if code is None or is_library_file(code.co_filename):
        return name
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def function_name(fun: Any) -> str:
    return getattr(fun, "__name__", type(fun).__name__)


# Packages that act on behalf of their caller (`nnx.grad`, `eqx.filter_grad`, `hk.grad`, `copy.deepcopy`, ...).
_CONDUITS = frozenset(
    "jax flax equinox haiku jaxtyping beartype typeguard functools contextlib copy pickle cloudpickle dill".split()
)
# The functions by which a program is traced: `nnx.jit(nnx.grad(f))` differentiates inside of them.
_TRACES = {(f"{__package__}.{module}", name) for module in ("compat", "tracing") for name in ("trace", "flat")}


class Callers:
    """Distinguishes the script's code from library code.

    Code in the standard library or in `site-packages` is library code. All other code belongs to the script.

    Args:
        packages: Top-level packages that count as the script's code wherever they are installed.
        ours: The package that asks: its frames belong to its caller.
    """

    def __init__(self, packages: Iterable[str], ours: str):
        self.packages, self._ours = frozenset(packages), ours
        self.seen: set[str] = set()  # the packages that have called

    def script_line(self) -> str:
        """The calling line of the script, as `train.py:12`; empty if a library is calling."""
        frame, library = self._nearest()
        return "" if frame is None or library else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

    def library(self) -> str:
        """The package that is calling; empty if it is the script, or mpjax."""
        frame, library = self._nearest()
        return library if frame is not None and library != "mpjax" else ""

    def _nearest(self) -> tuple[types.FrameType | None, str]:
        """The nearest frame that calls on its own behalf, and its package if it is a library's."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            name = frame.f_globals.get("__name__") or ""
            root = name.partition(".")[0]
            if root in self.packages:
                self.seen.add(root)
                return frame, ""
            traces = (name, frame.f_code.co_name) in _TRACES
            if root not in _CONDUITS and not traces and not f"{name}.".startswith(f"{self._ours}."):
                return frame, root if root == "mpjax" or is_library_file(frame.f_code.co_filename) else ""
            frame = frame.f_back
        return None, ""
