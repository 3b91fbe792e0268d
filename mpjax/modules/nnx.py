"""`with_policy` for Flax NNX: autocast over the split module.

The modules of a cloned model become instances of subclasses. A call of the model, or of a part of it, splits the
module, runs its method on a copy under autocast, and writes the changed state back. Inside, the methods of the parts
open their named scopes and follow their explicit dtypes and overrides.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from mpjax.modules import linen, precision
from mpjax.modules.explicit_dtypes import warn_explicit_dtypes
from mpjax.modules.precision import cast, cast_parameter, run_cast
from mpjax.policy import HALF_DTYPES, NORM_PATTERNS, Policy, path_string, warn_unused_overrides
from mpjax.program import contexts, objects, scopes


@dataclasses.dataclass(frozen=True)
class _Placement:
    """The settings of a policy for a module at its path in a model.

    Args:
        policy: The model's policy.
        path: The module's path in the model if the policy has overrides by path. Otherwise empty, so that modules at
            different paths have the same class and can be stacked.
        own: The module's explicit dtype.
        is_wide: Whether that keeps the module's matmuls wider than the policy's compute dtype.
        override: The policy of an override that starts at this module.
        is_model: Whether the module is the model passed to `with_policy`.
        wide: For a model, paths and dtypes of the layers whose explicit dtype is wider than the compute dtype.
    """

    policy: Policy
    path: tuple[Any, ...]
    own: np.dtype | None
    is_wide: bool
    override: Policy | None
    is_model: bool
    wide: tuple[tuple[str, np.dtype], ...] = ()

    def target(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which the module computes within code that computes in another one."""
        return self.own or (self.override.compute_dtype if self.override else dtype)

    def namespace(self, base: Any) -> dict[str, Any]:
        names = () if scopes.is_container(base) else scopes.method_names(base, nnx.Module)
        return {name: _with_rules(base, name, self) for name in names} | {"__setattr__": _set_attribute(base)}


def with_policy(model: Any, policy: Policy) -> Any:
    model = nnx.clone(model)
    paths = set_policy(model, policy)
    warn_unused_overrides(policy, paths)
    return model


def set_policy(root: Any, policy: Policy, at: tuple[Any, ...] = ()) -> list[str]:
    """Sets a policy on a module and its submodules, in place. Returns the paths of modules and parameters.

    Args:
        root: A model, or a part that is added to one.
        policy: The model's policy.
        at: Path of the part in the model.
    """
    modules = {(*at, *path): module for path, module in nnx.iter_modules(root)}
    settings = {path: scopes.setting_of(module) for path, module in modules.items() if path != ()}
    kept = [path for path, given in settings.items() if isinstance(given, _Placement) and given.is_model]
    ours = {p: m for p, m in modules.items() if not any(p[: len(inner)] == inner for inner in kept)}
    paths = [_join(path) for path in modules]
    # Compute all placements first: they depend on the author's classes and attributes.
    for module in ours.values():
        scopes.become(module, None)
    placements = {path: _place(path, ours, policy) for path in ours}
    model = placements.get(())
    if model is not None:
        wide = [(_join(at), p.own) for at, p in placements.items() if p and p.own and p.is_wide]
        placements[()] = dataclasses.replace(model, wide=tuple(wide))
    for path, module in ours.items():
        paths += _store_parameters(module, path, policy)
        placement = placements[path]
        if placement is not None:
            _cast_caches(module, placement.target(policy.compute_dtype))
            scopes.become(module, placement)
    return sorted(paths)


def _join(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _store_parameters(module: Any, path: tuple[Any, ...], policy: Policy) -> list[str]:
    """Casts the module's own float32 parameters to the policy's param dtype. Returns their paths."""
    paths = []
    for name, value in vars(module).items():
        for inner, param in jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_variable_or_module):
            if isinstance(param, nnx.Param):
                paths.append(path_string((*map(jax.tree_util.GetAttrKey, map(str, (*path, name))), *inner)))
                dtype = policy.for_path(paths[-1], type(module)).param_dtype
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


def _place(path: tuple[Any, ...], modules: dict[Any, Any], policy: Policy) -> _Placement | None:
    """The placement of a module. None for a dtype that policies do not cover."""
    module = modules[path]
    layer_dtype = None if scopes.is_container(type(module)) else getattr(module, "dtype", None)
    if not precision.is_real_float(layer_dtype):
        return None
    placed = policy.for_path(_join(path), type(module))
    parents = [modules[path[:n]] for n in range(len(path)) if path[:n] in modules]
    above = policy.for_path(_join(path[:-1]), type(parents[-1]) if parents else None) if path else policy
    unset = policy.compute_dtype, *_unset_dtypes([*parents, module])
    own = precision.own_dtype(layer_dtype, (policy, placed), *unset)
    return _Placement(
        policy=policy,
        path=path if any(pattern not in NORM_PATTERNS for pattern, _ in policy.overrides) else (),
        own=own,
        is_wide=bool(path) and own is not None and precision.stays_wide(type(module), own, placed),
        override=None if placed is above else placed,
        is_model=not path,
    )


def _unset_dtypes(line: list[Any]) -> Iterator[np.dtype]:
    """The default values of `dtype` for the last module in a chain of parents and children.

    They are the defaults of the model's and of Flax's constructors, which pass them on, and the table's dtype, which
    nnx.Embed uses if it is given none.
    """
    for module in line:
        if module is line[0] or type(module).__module__.startswith("flax."):
            parameter = inspect.signature(type(module).__init__).parameters.get("dtype")
            default = None if parameter is None or parameter.default is parameter.empty else parameter.default
            if default is not None and precision.is_real_float(default):
                yield np.dtype(default)
    if isinstance(line[-1], nnx.Embed):
        yield line[-1].embedding.dtype


def _set_attribute(base: Any) -> Callable[[Any, str, Any], None]:
    """Makes a `__setattr__` that sets the module's policy on assigned modules that have none."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        base.__setattr__(self, name, value)
        placement = scopes.setting_of(self)
        for part in jax.tree.leaves(value, is_leaf=_is_variable_or_module):
            if isinstance(part, nnx.Module) and not isinstance(scopes.setting_of(part), _Placement):
                set_policy(part, placement.policy, (*placement.path, name))

    return set_attribute


def _with_rules(base: type, name: str, placement: _Placement) -> Callable[..., Any]:
    """A method that follows the rules of its layer."""
    inherited, policy = getattr(base, name), placement.policy

    def inside(self: Any, args: Any, kwargs: Any) -> Any:
        dtype = contexts.precision.value.dtype
        target = placement.target(dtype)
        if placement.own is None and target in HALF_DTYPES and target != dtype:
            return _run(inherited, policy, placement.override or policy, (self, *args), kwargs)
        if name == "init_cache" and issubclass(base, nnx.MultiHeadAttention) and len(args) < 2:
            # The keys and values of a decoding cache have the compute dtype, in place of Flax's default of float32.
            kwargs = {"dtype": target, **kwargs}
        with scopes.attributes(self, _attributes_inside(self, placement)):
            return precision.in_precision(inherited, target, placement.own is not None)(self, *args, **kwargs)

    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = scopes.running_module()
        if precision.is_running(policy):
            # The module's calls of its own methods are part of its code. Within `nnx.jit`, it is a copy of itself.
            if running is self or (placement.is_model and type(running) is type(self)):
                return inherited(self, *args, **kwargs)
            with scopes.module_scope(self):
                return inside(self, args, kwargs)
        scope = scopes.scope_name(self)

        def entered(module: Any, *args: Any, **kwargs: Any) -> Any:
            with scopes.module_scope(module, scope):
                return inside(module, args, kwargs)

        out = _run(entered, policy, policy, (self, *args), kwargs)
        if placement.wide:
            repeat = functools.partial(_call_again, self, name, args, kwargs)
            warn_explicit_dtypes(base, policy, dict(placement.wide), repeat, stacklevel=3)
        return cast(out, policy.output_dtype) if placement.is_model else out

    return method


def _run(fun: Callable[..., Any], model: Policy, policy: Policy, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Calls a function of NNX modules whose code computes as a policy says, in a model with a policy."""

    def body(*args: Any, **kwargs: Any) -> Any:
        with contexts.precision(precision.Running(model, policy.compute_dtype)):
            return fun(*args, **kwargs)

    call, (state, rest), _, finish = objects.functional(body, args, kwargs)

    def pure(state: Any, rest: Any) -> Any:
        outs, new, changed = call(state, rest)
        return (outs, new), changed

    pure.__name__ = type(args[0]).__name__
    (outs, new), changed = run_cast(pure, state, rest, policy)
    return finish((outs, new, changed))


def _attributes_inside(module: Any, placement: _Placement) -> dict[str, Any]:
    """The attributes of a module that change during a call, with their new values."""
    if isinstance(module, nnx.bridge.ToNNX):
        inner = module.to_nnx__module
        return {"to_nnx__module": linen.with_policy(inner, placement.policy, placement.path)}
    is_half = placement.own is None and getattr(module, "dtype", None) in HALF_DTYPES
    return {"dtype": precision.FROM_POLICY} if is_half else {}


def _call_again(module: Any, method: str, args: Any, kwargs: Any) -> Any:
    """Repeats a call on a copy of the module."""
    return getattr(nnx.merge(*nnx.split(module), copy=True), method)(*args, **kwargs)


def _is_variable_or_module(x: Any) -> bool:
    return isinstance(x, (nnx.Variable, nnx.Module))
