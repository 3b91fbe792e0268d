"""`with_policy` for Flax NNX: each module's methods run on a view of it that has cast parameters.

The modules of a cloned model become instances of subclasses. A call makes a view: an instance of the
author's own class with the same submodules and variables, but with cast parameters. The
author's method runs on the view. The model itself keeps its parameters, so the policy does not affect
`nnx.state`, gradients, optimizers and checkpoints.
"""

from __future__ import annotations

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
    casts_parameters,
    default_arguments,
    has_wide_gradients,
    is_flax_attend,
    is_real_float,
    keeps_matmuls,
    kind_of,
    own_dtype,
    recomputes,
    stays_wide,
)
from mpjax.modules.matmuls import attend
from mpjax.modules.scopes import is_container, method_names, module_scope
from mpjax.policy import NORM_PATTERNS, Policy, path_string, warn_unused_overrides


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


# Types of attributes that are not and don't contain parameters or modules. `isinstance` of a Variable is slower.
_PLAIN = (bool, int, float, str, np.dtype, type, types.FunctionType)
# The dtype in which the running method reads the parameters of other modules. It is part of jit's cache key.
_reader = jax.make_user_context(None)


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
        object.__setattr__(module, "__class__", _base(type(module)))
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
            object.__setattr__(module, "__class__", _class_with_policy(type(module), placement))
    return sorted(paths)


def _join(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _base(cls: type) -> type:
    return getattr(cls, "_mpjax_base", cls)


def _placement_of(module: Any) -> _Placement | None:
    return getattr(type(module), "_mpjax_placement", None)


def _sets_own_policy(module: Any) -> bool:
    placement = _placement_of(module)
    return placement is not None and placement.is_model


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
    """The placement of a module. None for a container, and for a dtype that policies do not cover."""
    module = modules[path]
    layer_dtype = getattr(module, "dtype", None)
    if not is_real_float(layer_dtype) or is_container(module):
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


@functools.cache
def _class_with_policy(base: Any, placement: _Placement) -> type:
    """One class per class and placement: NNX compares modules by class, and registers each class."""
    namespace = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace |= {name: _on_view(base, name, placement) for name in method_names(base, nnx.Module)}
    namespace |= {"_mpjax_base": base, "_mpjax_placement": placement, "__reduce__": _reduce}
    namespace |= {"__setattr__": _set_attribute(base), "__getattribute__": _get_attribute(base)}
    keywords = {"pytree": base._pytree__is_pytree}
    return types.new_class(base.__name__, (base,), keywords, lambda body: body.update(namespace))


def _set_attribute(base: Any) -> Callable[[Any, str, Any], None]:
    """Makes a `__setattr__` that sets the module's policy on assigned modules that have none."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        base.__setattr__(self, name, value)
        placement = type(self)._mpjax_placement
        for part in jax.tree.leaves(value, is_leaf=_is_variable_or_module):
            if isinstance(part, nnx.Module) and _placement_of(part) is None:
                cell = kind_of(base, "__call__") is Kind.CELL
                set_policy(part, placement.policy, (*placement.path, name), cell)

    return set_attribute


def _get_attribute(base: Any) -> Callable[[Any, str], Any]:
    """Makes a `__getattribute__` that casts parameters for methods of other modules (tied weights)."""

    def get_attribute(self: Any, name: str) -> Any:
        value = base.__getattribute__(self, name)
        if not isinstance(value, nnx.Param) or _reader.value is None:
            return value
        return _cast_param(value, _reader.value, _Refusal(type(self).__name__, name))

    return get_attribute


def _on_view(base: type, name: str, placement: _Placement) -> Callable[..., Any]:
    inherited, kind = getattr(base, name), kind_of(base, name)

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        view = _view(self, base, name, kind, placement)
        before = dict(vars(view))
        cast_params = _cast_params_of(self, view)
        fun: Callable[..., Any] = functools.partial(inherited, view)
        wide = not placement.has_own_dtype and has_wide_gradients(placement.policy, placement.dtype, base)
        if wide and is_flax_attend(base, name):
            fun = functools.partial(attend, view.embedding[...], placement.dtype)
        if recomputes(kind, inherited):
            fun = jax.checkpoint(fun, prevent_cse=False, policy=keeps_matmuls)
        kwargs = default_arguments(base, name, placement.dtype, args, kwargs)
        with module_scope(self, view), _reader(placement.dtype if casts_parameters(kind) else None):
            out = call(fun, kind, placement.dtype, args, kwargs, placement.in_cell)
        for refusal, param, dtype in cast_params:
            if _dtype(param) != dtype:  # set by nnx.update: NNX's transformations write back the state that they read
                raise refusal.error()
        _write_back(self, view, before)
        if placement.wide:
            repeat = functools.partial(_call_again, self, name, args, kwargs)
            warn_explicit_dtypes(base, placement.policy, dict(placement.wide), repeat, stacklevel=3)
        if out is view:  # `return self`, as `ToNNX.lazy_init` does
            return self
        return out if placement.output_dtype is None else cast(out, placement.output_dtype)

    return method


def _call_again(module: Any, method: str, args: Any, kwargs: Any) -> Any:
    """Repeats a call on a copy of the module."""
    return getattr(nnx.merge(*nnx.split(module), copy=True), method)(*args, **kwargs)


def _view(module: Any, base: type, method: str, kind: Kind, placement: _Placement) -> Any:
    """The module as its author's code sees it during a call."""
    attributes, bridges = dict(vars(module)), isinstance(module, nnx.bridge.ToNNX)
    for name, value in attributes.items():
        refusal = _Refusal(base.__name__, name, method)
        attributes[name] = _as_seen(value, placement, name, refusal, casts_parameters(kind) and not bridges)
    if bridges:
        # The Linen model casts the parameters of its layers itself.
        inner = linen.with_policy(
            module.to_nnx__module, placement.policy.with_output_dtype(placement.dtype), placement.path
        )
        attributes["to_nnx__module"] = inner
    if not placement.has_own_dtype:
        wide = has_wide_gradients(placement.policy, placement.dtype, base)
        attributes |= attributes_inside(kind, placement.dtype, attributes, placement.in_cell, wide)
    view: Any = object.__new__(base)
    vars(view).update(attributes)
    return view


def _as_seen(value: Any, placement: _Placement, name: str, refusal: _Refusal, casts: bool) -> Any:
    """An attribute as the view holds it: its parameters are cast, and its modules without a policy get one.

    The parameters of modules in it are not cast: those modules cast them.
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, nnx.Param):
        return _cast_param(value, placement.dtype, refusal) if casts else value
    if not isinstance(value, (nnx.Module, nnx.List, nnx.Dict, list, tuple, dict)):
        return value
    if isinstance(value, nnx.Module) and not is_container(value):
        return _with_placement(value, placement, name)
    leaves, tree = jax.tree.flatten(value, is_leaf=lambda x: x is not value and _is_variable_or_module(x))
    seen = [_as_seen(x, placement, name, refusal, casts) if _is_variable_or_module(x) else x for x in leaves]
    return value if all(a is b for a, b in zip(leaves, seen, strict=True)) else jax.tree.unflatten(tree, seen)


def _with_placement(module: Any, above: _Placement, name: str) -> Any:
    """A module that was added after `with_policy` (to an `nnx.List`, say), with the policy of the one above it."""
    if _placement_of(module) is not None:
        return module
    path = (*above.path, name)
    placement = _place(path, {path: module}, above.policy)
    if placement is None:
        return module
    base: Any = type(module)
    shadow: Any = object.__new__(_class_with_policy(base, placement))
    object.__setattr__(shadow, "__dict__", vars(module))  # shared: both have the same attributes
    return shadow


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Raises on assignment to a cast copy, which would be lost or would round the float32 parameter to half."""

    cls: str
    name: str
    method: str = ""

    def __call__(self, variable: Any, value: Any) -> Any:
        raise self.error()

    def error(self) -> ValueError:
        where = f"{self.cls}.{self.method} assigns to its own" if self.method else f"a method assigns to {self.cls}'s"
        return ValueError(
            f"with_policy: {where} parameter {self.name!r}, but methods see only a copy in the compute dtype. Make it "
            "an nnx.Variable of another type (as nnx.BatchStat is), assign to it outside the module's methods, or "
            "keep this module in float32 by an override of the policy."
        )


def _cast_param(param: Any, dtype: np.dtype, refusal: _Refusal) -> Any:
    """A parameter with its raw value cast, so that its `get_value` and hooks run only once, when it is read."""
    value = param.get_raw_value()
    if getattr(param, "ref", False):  # a variable that holds a mutable array
        value = value[...]
    cast_value = cast(value, dtype)
    return param if cast_value is value else param.copy(cast_value, on_set_value=refusal)


def _dtype(param: Any) -> Any:
    return getattr(param.get_raw_value(), "dtype", None)


def _cast_params_of(module: Any, view: Any) -> list[tuple[_Refusal, Any, np.dtype]]:
    """(refusal, parameter, dtype) of each cast copy of a parameter in the view."""
    return [
        (param.get_metadata("on_set_value"), param, _dtype(param))
        for name, value in vars(view).items()
        if value is not vars(module)[name] and not isinstance(value, _PLAIN)
        for param in jax.tree.leaves(value, is_leaf=_is_variable_or_module)
        if isinstance(param, nnx.Param) and isinstance(param.get_metadata("on_set_value", None), _Refusal)
    ]


def _is_variable_or_module(x: Any) -> bool:
    return isinstance(x, (nnx.Variable, nnx.Module))


def _write_back(module: Any, view: Any, before: dict[str, Any]) -> None:
    """Copies the attributes that the method set (a cache, sown values) to the module."""
    after = vars(view)
    for name in before.keys() - after.keys():
        delattr(module, name)
    for name, value in after.items():
        if not name.startswith("_pytree__") and (name not in before or before[name] is not value):
            setattr(module, name, value)


def _reduce(self: Any) -> Any:
    """Pickles the author's class and the placement, because the class itself is generated."""
    return _blank, (self._mpjax_base, self._mpjax_placement), self.__getstate__()


def _blank(base: type, placement: _Placement) -> Any:
    return object.__new__(_class_with_policy(base, placement))
