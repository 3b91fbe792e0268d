"""`with_policy` for Flax NNX: each module's methods run on a view of it that has cast parameters.

The modules of a cloned model become instances of subclasses. A call makes a view, an instance of the
author's own class with the same submodules and variables but for its parameters, which are cast, and
runs the author's method on it. The model itself holds the parameters as they were: `nnx.state`,
gradients, optimizers and checkpoints see nothing of the policy.
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

from mpjax.modules.layers import (
    Kind,
    attributes_inside,
    call,
    cast,
    cast_parameter,
    casts_parameters,
    computes_again,
    is_real_float,
    keeps_matmuls,
    kind_of,
    own_dtype,
)
from mpjax.policy import Policy, warn_unused_overrides


@dataclasses.dataclass(frozen=True)
class _Placement:
    """What a policy asks of a module at its place in a model."""

    dtype: np.dtype
    has_own_dtype: bool
    output_dtype: np.dtype | None  # None: as the layer's kind says
    is_model: bool
    in_cell: bool


def with_policy(model: Any, policy: Policy) -> Any:
    model = nnx.clone(model)
    modules = dict(nnx.iter_modules(model))
    kept = [path for path, module in modules.items() if path and _has_policy_of_its_own(module)]
    ours = {p: m for p, m in modules.items() if not any(p[: len(inner)] == inner for inner in kept)}
    paths = [_join(path) for path in modules]
    # All placements first: they are read off the author's classes and attributes.
    for module in ours.values():
        object.__setattr__(module, "__class__", _base(type(module)))
    placements = {path: _place(path, ours, policy) for path in ours}
    for path, module in ours.items():
        paths += _store_parameters(module, path, policy)
        if placements[path] is not None:
            object.__setattr__(module, "__class__", _class_with_policy(type(module), placements[path]))
    warn_unused_overrides(policy, sorted(paths))
    return model


def _join(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _base(cls: type) -> type:
    return getattr(cls, "_mpjax_base", cls)


def _has_policy_of_its_own(module: Any) -> bool:
    placement = getattr(type(module), "_mpjax_placement", None)
    return placement is not None and placement.is_model


def _store_parameters(module: Any, path: tuple[Any, ...], policy: Policy) -> list[str]:
    """Casts the module's own float32 parameters to the policy's param dtype; returns their paths."""
    paths = []
    for name, value in vars(module).items():
        for param in jax.tree.leaves(value, is_leaf=_is_variable_or_module):
            if isinstance(param, nnx.Param):
                paths.append("/".join(map(str, (*path, name))))
                dtype = policy.for_path(paths[-1]).param_dtype
                if dtype != np.float32:
                    param.set_value(cast_parameter(param.get_value(), dtype))
    return paths


def _place(path: tuple[Any, ...], modules: dict[Any, Any], policy: Policy) -> _Placement | None:
    """The placement of a module; None for a container, and where the dtype is not one of a policy's."""
    module = modules[path]
    given = getattr(module, "dtype", None)
    if not is_real_float(given) or isinstance(module, (nnx.List, nnx.Dict)):
        return None
    placed = policy.for_path(_join(path))
    output_dtype = policy.output_dtype
    if path:
        output_dtype = placed.output_dtype if placed is not policy.for_path(_join(path[:-1])) else None
    parents = [modules[path[:n]] for n in range(len(path)) if path[:n] in modules]
    own = own_dtype(given, policy.compute_dtype, *_unset_dtypes([*parents, module]))
    return _Placement(
        dtype=own or placed.compute_dtype,
        has_own_dtype=own is not None,
        output_dtype=output_dtype,
        is_model=not path,
        in_cell=bool(parents) and kind_of(type(parents[-1]), "__call__") is Kind.CELL,
    )


def _unset_dtypes(line: list[Any]) -> Iterator[np.dtype]:
    """The values of `dtype` that nobody chose, for the last module of a line of descent.

    They are the defaults of the model's and of Flax's constructors, which hand them on, and what
    nnx.Embed notes of its table where it is given none.
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
    namespace |= {name: _on_view(base, name, placement) for name in _methods(base)}
    namespace |= {"_mpjax_base": base, "_mpjax_placement": placement, "__reduce__": _reduce}
    keywords = {"pytree": base._pytree__is_pytree}
    return types.new_class(base.__name__, (base,), keywords, lambda body: body.update(namespace))


def _methods(base: type) -> Iterator[str]:
    """The names of the methods that the author's classes define, constructors and other dunders aside."""
    own_classes = base.__mro__[: base.__mro__.index(nnx.Module)]
    for name in sorted({name for cls in own_classes for name in vars(cls)}):
        if inspect.isfunction(inspect.getattr_static(base, name)) and (name == "__call__" or not name.startswith("__")):
            yield name


def _on_view(base: type, name: str, placement: _Placement) -> Callable[..., Any]:
    inherited, kind = getattr(base, name), kind_of(base, name)

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        view = _view(self, base, kind, placement)
        before = dict(vars(view))
        cast_params = _cast_params_of(self, view)
        fun: Callable[..., Any] = functools.partial(inherited, view)
        if computes_again(kind, inherited):
            fun = jax.checkpoint(fun, prevent_cse=False, policy=keeps_matmuls)
        out = call(fun, kind, placement.dtype, args, kwargs, placement.in_cell)
        _check_not_assigned(cast_params, type(self).__name__, name)
        _write_back(self, view, before)
        return out if placement.output_dtype is None else cast(out, placement.output_dtype)

    return method


def _view(module: Any, base: type, kind: Kind, placement: _Placement) -> Any:
    """The module as its author's code sees it during a call."""
    attributes = dict(vars(module))
    if casts_parameters(kind):
        attributes |= {name: _cast_params(value, placement.dtype) for name, value in attributes.items()}
    if not placement.has_own_dtype:
        attributes |= attributes_inside(kind, placement.dtype, attributes, placement.in_cell)
    view: Any = object.__new__(base)
    vars(view).update(attributes)
    return view


def _cast_params(value: Any, dtype: np.dtype) -> Any:
    """An attribute with the parameters that it is or contains cast; submodules cast theirs themselves."""
    if isinstance(value, nnx.Param):
        return _cast_param(value, dtype)
    if not isinstance(value, (nnx.List, nnx.Dict, list, tuple, dict)):
        return value
    # A container's parameters are this module's; those of a module in it are that module's.
    leaves, tree = jax.tree.flatten(value, is_leaf=lambda x: x is not value and _is_variable_or_module(x))
    if not any(isinstance(leaf, nnx.Param) for leaf in leaves):
        return value
    return jax.tree.unflatten(tree, [_cast_param(leaf, dtype) for leaf in leaves])


def _cast_param(leaf: Any, dtype: np.dtype) -> Any:
    if not isinstance(leaf, nnx.Param):
        return leaf
    value = leaf.get_value()
    cast_value = cast(value, dtype)
    return leaf if cast_value is value else leaf.copy(cast_value)


def _cast_params_of(module: Any, view: Any) -> list[tuple[str, Any, Any]]:
    """(name, parameter, value) of each parameter that the view holds a cast copy of."""
    return [
        (name, param, param.get_raw_value())
        for name, value in vars(view).items()
        if value is not vars(module)[name]
        for param in jax.tree.leaves(value, is_leaf=_is_variable_or_module)
        if isinstance(param, nnx.Param)
    ]


def _check_not_assigned(cast_params: list[tuple[str, Any, Any]], class_name: str, method: str) -> None:
    """Refuses an assignment to a cast copy, which would be lost, or round the float32 parameter to half."""
    for name, param, value in cast_params:
        if param.get_raw_value() is not value:
            raise ValueError(
                f"with_policy: {class_name}.{method} assigns to its own parameter {name!r}, of which it sees a copy "
                "in the compute dtype. Make it an nnx.Variable of another type (as nnx.BatchStat is), assign to it "
                "outside of the module's methods, or keep this module in float32 by an override of the policy."
            )


def _is_variable_or_module(x: Any) -> bool:
    return isinstance(x, (nnx.Variable, nnx.Module))


def _write_back(module: Any, view: Any, before: dict[str, Any]) -> None:
    """Carries attributes that the method set (a cache, what it sowed) over to the module."""
    after = vars(view)
    for name in before.keys() - after.keys():
        delattr(module, name)
    for name, value in after.items():
        if not name.startswith("_pytree__") and (name not in before or before[name] is not value):
            setattr(module, name, value)


def _reduce(self: Any) -> Any:
    """Pickles by the author's class and the placement, as the class with both is made on the fly."""
    return _blank, (self._mpjax_base, self._mpjax_placement), self.__getstate__()


def _blank(base: type, placement: _Placement) -> Any:
    return object.__new__(_class_with_policy(base, placement))
