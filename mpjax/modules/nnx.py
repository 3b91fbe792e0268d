"""`with_policy` for Flax NNX: the modules of a cloned model become instances of subclasses.

The methods of such a class follow the rules of its layer. While they run, reading an attribute that holds a parameter
gives a copy of it, whose value yields to the dtype of what it meets. The model itself keeps its parameters, so the
policy does not affect `nnx.state`, gradients, optimizers and checkpoints.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from mpjax.modules import linen
from mpjax.modules.explicit_dtypes import warn_explicit_dtypes
from mpjax.modules.layers import (
    Kind,
    attributes_inside,
    call,
    cast,
    cast_parameter,
    default_arguments,
    is_flax_attend,
    is_real_float,
    keep_loop_variables,
    keeps_matmuls,
    kind_of,
    leave,
    own_dtype,
    reading_of,
    stays_wide,
)
from mpjax.modules.matmuls import attend, read
from mpjax.policy import NORM_PATTERNS, Policy, path_string, warn_unused_overrides
from mpjax.program import contexts
from mpjax.program.scopes import become, is_container, method_names, module_scope, setting_of


@dataclasses.dataclass(frozen=True)
class _Placement:
    """The settings of a policy for a module at its path in a model.

    Args:
        policy: The model's policy.
        path: The module's path in the model if the policy has overrides by path. Otherwise empty, so that modules at
            different paths have the same class and can be stacked.
        dtype: The dtype that the module computes in.
        has_own_dtype: Whether that is an explicit dtype of the module.
        output_dtype: None if the layer's kind determines it.
        is_model: Whether the module is the model passed to `with_policy`.
        in_cell: Whether it is a part of a recurrent cell.
        wide: For a model, paths and dtypes of the layers whose explicit dtype is wider than the compute dtype.
    """

    policy: Policy
    path: tuple[Any, ...]
    dtype: np.dtype
    has_own_dtype: bool
    output_dtype: np.dtype | None
    is_model: bool
    in_cell: bool
    wide: tuple[tuple[str, np.dtype], ...] = ()

    def namespace(self, base: Any) -> dict[str, Any]:
        names = () if is_container(base) else method_names(base, nnx.Module)
        accesses = {"__setattr__": _set_attribute(base), "__getattribute__": _get_attribute(base)}
        return {name: _with_rules(base, name, self) for name in names} | accesses


# Types of attributes that are not and don't contain parameters or modules. `isinstance` of a Variable is slower.
_PLAIN = (bool, int, float, str, np.dtype, type, types.FunctionType, types.NoneType)
# The module whose method is running, and the attributes that it has meanwhile.
_running: contextvars.ContextVar[tuple[Any, dict[str, Any]]] = contextvars.ContextVar(
    "mpjax_running", default=(None, {})
)


def with_policy(model: Any, policy: Policy) -> Any:
    model = nnx.clone(model)
    paths = set_policy(model, policy)
    warn_unused_overrides(policy, paths)
    return model


def set_policy(root: Any, policy: Policy, at: tuple[Any, ...] = (), cell: bool = False) -> list[str]:
    """Sets a policy on a module and its submodules, in place. Returns the paths of modules and parameters.

    Args:
        root: A model, or a part that is added to one.
        policy: The model's policy.
        at: Path of the part in the model.
        cell: Whether the part is added to a recurrent cell.
    """
    modules = {(*at, *path): module for path, module in nnx.iter_modules(root)}
    kept = [path for path, module in modules.items() if path != () and _sets_own_policy(module)]
    ours = {p: m for p, m in modules.items() if not any(p[: len(inner)] == inner for inner in kept)}
    paths = [_join(path) for path in modules]
    # Compute all placements first: they depend on the author's classes and attributes.
    for module in ours.values():
        become(module, None)
    placements = {path: _place(path, ours, policy, cell) for path in ours}
    model = placements.get(())
    if model is not None:
        wide = {_join(path): p.dtype for path, p in placements.items() if p and _is_wide(p, ours[path], path)}
        placements[()] = dataclasses.replace(model, wide=tuple(wide.items()))
    for path, module in ours.items():
        paths += _store_parameters(module, path, policy)
        placement = placements[path]
        if placement is not None:
            _cast_caches(module, placement.dtype)
            become(module, placement)
    return sorted(paths)


def _join(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _sets_own_policy(module: Any) -> bool:
    placement = setting_of(module)
    return isinstance(placement, _Placement) and placement.is_model


def _is_wide(placement: _Placement, module: Any, path: tuple[Any, ...]) -> bool:
    own = placement.dtype if placement.has_own_dtype else None
    placed = placement.policy.for_path(_join(path), type(module))
    return stays_wide(kind_of(type(module), "__call__"), own, placed)


def _store_parameters(module: Any, path: tuple[Any, ...], policy: Policy) -> list[str]:
    """Casts the module's own float32 parameters to the policy's param dtype. Returns their paths."""
    paths = []
    # The parameters of a Linen model belong to its layers, whose classes are unknown here.
    owner = None if isinstance(module, nnx.bridge.ToNNX) else type(module)
    for name, value in vars(module).items():
        for below, param in jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_variable_or_module):
            if isinstance(param, nnx.Param):
                paths.append(_join((*path, name, *filter(None, [path_string(below)]))))
                dtype = policy.for_path(paths[-1], owner).param_dtype
                if dtype != np.float32:
                    # The raw value: `get_value` may compute another value from it on each read.
                    param.set_raw_value(cast_parameter(param.get_raw_value(), dtype))
    return paths


def _cast_caches(module: Any, dtype: np.dtype) -> None:
    """Casts the existing decoding caches of a module, whose keys and values have the compute dtype."""
    if isinstance(module, nnx.MultiHeadAttention):
        for cache in vars(module).values():
            if isinstance(cache, nnx.Cache):
                cache.set_raw_value(cast(cache.get_raw_value(), dtype))


def _place(path: tuple[Any, ...], modules: dict[Any, Any], policy: Policy, cell: bool = False) -> _Placement | None:
    """The placement of a module. None for a dtype that policies do not cover."""
    module = modules[path]
    layer_dtype = None if is_container(type(module)) else getattr(module, "dtype", None)
    if not is_real_float(layer_dtype):
        return None
    placed = policy.for_path(_join(path), type(module))
    parents = [modules[path[:n]] for n in range(len(path)) if path[:n] in modules]
    output_dtype = policy.output_dtype
    if path:
        above = policy.for_path(_join(path[:-1]), type(parents[-1]) if parents else None)
        output_dtype = placed.output_dtype if placed is not above else None
    own = own_dtype(layer_dtype, (policy, placed), policy.compute_dtype, *_unset_dtypes([*parents, module]))
    return _Placement(
        policy=policy,
        path=path if any(pattern not in NORM_PATTERNS for pattern, _ in policy.overrides) else (),
        dtype=own or placed.compute_dtype,
        has_own_dtype=own is not None,
        output_dtype=output_dtype,
        is_model=not path,
        in_cell=kind_of(type(parents[-1]), "__call__") is Kind.CELL if parents else cell,
    )


def _unset_dtypes(line: list[Any]) -> Iterator[np.dtype]:
    """The default values of `dtype` for the last module in a chain of parents and children.

    They are the defaults of the model's and of Flax's constructors, which pass them on, and the table's dtype, which
    nnx.Embed uses if it is given none.
    """
    for module in line:
        if module is line[0] or type(module).__module__.startswith("flax."):
            default = inspect.signature(type(module).__init__).parameters.get("dtype")
            if default is not None and default.default is not default.empty and is_real_float(default.default):
                yield from () if default.default is None else (np.dtype(default.default),)
    if isinstance(line[-1], nnx.Embed):
        yield line[-1].embedding.dtype


def _set_attribute(base: Any) -> Callable[[Any, str, Any], None]:
    """Makes a `__setattr__` that sets the module's policy on assigned modules that have none."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        base.__setattr__(self, name, value)
        _adopt(self, name, value)

    return set_attribute


def _adopt(module: Any, name: str, value: Any) -> None:
    placement, cell = setting_of(module), kind_of(type(module), "__call__") is Kind.CELL
    for part in jax.tree.leaves(value, is_leaf=_is_variable_or_module):
        if isinstance(part, nnx.Module) and not isinstance(setting_of(part), _Placement):
            set_policy(part, placement.policy, (*placement.path, name), cell)


def _get_attribute(base: Any) -> Callable[[Any, str], Any]:
    """Makes a `__getattribute__` with which the running code of any module reads parameters."""

    def get_attribute(self: Any, name: str) -> Any:
        module, inside = _running.get()
        if module is self and name in inside:
            return inside[name]
        value = base.__getattribute__(self, name)
        if contexts.layer_reading.value is None or name.startswith("__") or isinstance(value, _PLAIN):
            return value
        if isinstance(value, nnx.Param):
            return _read(self, name, value)
        if isinstance(value, (list, tuple, dict)):
            _adopt(self, name, value)
            copied = functools.partial(_read, self, name)
            return jax.tree.map(copied, value, is_leaf=_is_variable_or_module)
        return value

    return get_attribute


def _read(module: Any, name: str, param: Any) -> Any:
    """A copy of a parameter, as code reads it.

    The raw value is changed, so that the parameter's `get_value` and hooks run only once, when the copy is read.
    """
    if not isinstance(param, nnx.Param):
        return param
    value = param.get_raw_value()
    if getattr(param, "ref", False):  # a variable that holds a mutable array
        value = value[...]
    return param.copy(read(value, contexts.layer_reading.value), on_set_value=_Refusal(type(module).__name__, name))


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Raises on assignment to the copy of a parameter, which would be lost."""

    cls: str
    name: str

    def __call__(self, variable: Any, value: Any) -> Any:
        raise ValueError(
            f"with_policy: a method assigns to {self.cls}'s parameter {self.name!r}, of which methods see only a copy. "
            "Make it an nnx.Variable of another type (as nnx.BatchStat is), assign to it outside the module's "
            "methods, or keep this module in float32 by an override of the policy."
        )


def _with_rules(base: type, name: str, placement: _Placement) -> Callable[..., Any]:
    """A method that follows the rules of its layer."""
    inherited, kind = getattr(base, name), kind_of(base, name)
    own = placement.dtype if placement.has_own_dtype else None
    how = reading_of(placement.policy, kind, placement.dtype, own)

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = _running.get()[0]
        # The module's calls of its own methods are part of its code. Within `nnx.jit`, it is a copy of itself.
        if running is self or (placement.is_model and type(running) is type(self)):
            return inherited(self, *args, **kwargs)
        inside = {} if own else attributes_inside(kind, placement.dtype, vars(self), how, placement.in_cell)
        if isinstance(self, nnx.bridge.ToNNX):
            module = self.to_nnx__module
            inside["to_nnx__module"] = linen.with_policy(module, placement.policy, set_policy, placement.path)
        fun: Callable[..., Any] = functools.partial(inherited, self)
        if how and not own and is_flax_attend(base, name):
            fun = functools.partial(attend, self, placement.dtype)
        if kind is Kind.CELL:
            fun = jax.checkpoint(fun, prevent_cse=False, policy=keeps_matmuls)
        kwargs = default_arguments(base, name, placement.dtype, args, kwargs)
        token = _running.set((self, inside))
        try:
            with module_scope(self):
                called = functools.partial(call, fun, kind, placement.dtype, how, placement.in_cell)
                out = keep_loop_variables(called, args, kwargs, narrow=False)
        finally:
            _running.reset(token)
        if placement.wide:
            repeat = functools.partial(_call_again, self, name, args, kwargs)
            warn_explicit_dtypes(base, placement.policy, dict(placement.wide), repeat, stacklevel=3)
        if placement.output_dtype is None:
            return out
        return cast(out, placement.output_dtype) if placement.is_model else leave(out, kind, placement.output_dtype)

    return method


def _call_again(module: Any, method: str, args: Any, kwargs: Any) -> Any:
    """Repeats a call on a copy of the module."""
    return getattr(nnx.merge(*nnx.split(module), copy=True), method)(*args, **kwargs)


def _is_variable_or_module(x: Any) -> bool:
    return isinstance(x, (nnx.Variable, nnx.Module))
