"""Traces a call together with its arguments' arrays, for the inspections that run a program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from mpjax.casting.autocast import Program, functional, trace
from mpjax.modules import functional as nnx_calls
from mpjax.modules.functional import contains_nnx_object


def trace_to_run(caller: str, fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
    """Traces a call that will be run. Its arguments must be arrays, not shapes."""
    call, pure_args, pure_kwargs, _ = functional(fun, args, kwargs)
    program = trace(call, pure_args, pure_kwargs, None)
    if call is not fun:
        program.names = argument_names(program, args, kwargs)
    for name, array in zip(program.names, program.arrays, strict=True):
        if isinstance(array, (jax.ShapeDtypeStruct, jax.core.Tracer)):
            raise TypeError(
                f"{caller}: the argument {argument_name(name)} is {array}, but the program is run to see its values: "
                f"give arrays, and call {caller} itself outside jit."
            )
    return program


def argument_names(program: Program, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """The tree paths of a program's arguments in `(args, kwargs)`, including those of NNX objects that were split."""
    if not contains_nnx_object((args, kwargs)):
        return list(program.names)
    return nnx_calls.names(program.names, args, kwargs)


def in_host_memory(x: Any) -> bool:
    """Whether NumPy can read an array in place: it lies in host memory, on one device."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return isinstance(x, np.ndarray)
    return [device.platform for device in x.devices()] == ["cpu"]


def below_root(path: str, paths: Collection[str]) -> str:
    """A module path relative to the whole model; empty for the model itself.

    Args:
        path: One of `paths`.
        paths: All module paths. If they have no common root, `path` is returned unchanged.

    Example:
        >>> below_root("Net/Dense_0", ["Net", "Net/Dense_0"]), below_root("up", ["up", "down"])
        ('Dense_0', 'up')
    """
    root, _, rest = path.partition("/")
    is_root = any("/" in other for other in paths) and all(f"{other}/".startswith(f"{root}/") for other in paths)
    return rest if is_root else path


def argument_name(name: str) -> str:
    """Rewrites the tree path of a leaf of `(args, kwargs)` for users: `[0][1]['w']` as `args[1]['w']`."""
    return ("args" if name.startswith("[0]") else "kwargs") + name[3:]
