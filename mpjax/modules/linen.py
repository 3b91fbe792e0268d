"""`with_policy` for Flax Linen: an interceptor around each method call of each layer.

The model becomes an instance of a subclass whose methods install the interceptor. The policy therefore applies to
every call of the model (by `apply`, `init`, `bind`, as a submodule), and nowhere else. The submodules that a bound
model sets up become instances of such subclasses too, so that they can be called on their own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax

from mpjax.modules.explicit_dtypes import warn_explicit_dtypes
from mpjax.modules.layers import cast
from mpjax.modules.linen_calls import ModelCall, interceptor
from mpjax.policy import Policy, path_string, warn_unused_overrides
from mpjax.program import contexts
from mpjax.program.scopes import become, class_with, original_class, reduce_, setting_of


@dataclasses.dataclass(frozen=True)
class _ClassKey:
    """The policy of a generated class.

    Args:
        policy: The model's policy.
        place_nnx: As in `ModelCall`.
        part_of: Path of the model in the tree of bound modules, for a part of a bound model.
        prefix: As in `ModelCall`.
        casts_output: Whether its results have the policy's output dtype. Not within an NNX model.
    """

    policy: Policy
    place_nnx: Callable[..., list[str]]
    part_of: tuple[str, ...] | None = None
    prefix: tuple[str, ...] = ()
    casts_output: bool = True

    def namespace(self, base: Any) -> dict[str, Any]:
        # Keep the base's dataclass methods, including hand-written ones.
        kept = {name: getattr(base, name) for name in ("__init__", "__eq__", "__hash__")}
        methods = {name: _with_run(name, getattr(base, name)) for name in _methods(base)}
        entries = {name: _with_run_in_method(getattr(base, name)) for name in ("apply", "init_with_output")}
        registration = {"unbind": _unbind(base.unbind), "_register_submodules": _register(base._register_submodules)}
        return kept | methods | entries | registration | {"__reduce__": nn.nowrap(reduce_)}


def with_policy(
    model: Any, policy: Policy, place_nnx: Callable[..., list[str]], path: tuple[Any, ...] | None = None
) -> Any:
    """`mpjax.with_policy` for Linen.

    Args:
        model: The model.
        policy: Its policy.
        place_nnx: Sets a policy on an NNX module in the model: `nnx.set_policy`.
        path: The model's path in the NNX model that contains it, if any.
    """
    setting = _ClassKey(policy, place_nnx, None, tuple(map(str, path or ())), path is None)
    if model.parent is not None:
        # It is registered in its parent: a second instance would be a second submodule.
        become(model, setting)
        return model
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init}
    return class_with(original_class(type(model)), setting)(**{**fields, "parent": None})


def _register(inherited: Callable[..., None]) -> Callable[..., None]:
    """Linen's registration of a submodule, which also gets the policy: a user may call it on its own."""

    @nn.nowrap
    @functools.wraps(inherited)
    def register(self: Any, name: str, value: Any) -> None:
        inherited(self, name, value)
        run = _run_of(self)
        _adopt(self, vars(self).get(name), _ClassKey(run.policy, run.place_nnx, run.root, run.prefix))

    return register


def _adopt(parent: Any, value: Any, setting: _ClassKey) -> None:
    """Sets a policy on the submodules in a parent's attribute, and on the submodules already registered in those."""
    for module in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, nn.Module)):
        if isinstance(module, nn.Module) and module.parent is parent and setting_of(module) is None:
            become(module, setting)
            for name, below in vars(module).items():
                if name != "parent":
                    _adopt(module, below, setting)


def _unbind(inherited: Callable[..., Any]) -> Callable[..., Any]:
    """Linen's `unbind`. The module keeps the policy, whose overrides still match its path in the model."""

    @nn.nowrap
    @functools.wraps(inherited)
    def unbind(self: Any) -> Any:
        module, variables = inherited(self)
        if self._mpjax_setting.part_of is not None:
            run = _run_of(self)
            setting = _ClassKey(run.policy, run.place_nnx, prefix=tuple(run.relative(self.path).split("/")))
            become(module, setting)
        return module, variables

    return unbind


def _run_of(module: Any) -> ModelCall:
    """A run of the model of a bound module, which is the model or a part of it."""
    setting = module._mpjax_setting
    return ModelCall(
        setting.policy, setting.place_nnx, module.path if setting.part_of is None else setting.part_of, setting.prefix
    )


def _methods(base: type) -> Iterator[str]:
    """The names of the methods that Flax binds to a scope: those defined by the author's classes."""
    own_classes = base.__mro__[: base.__mro__.index(nn.Module)]
    fields = {f.name for f in dataclasses.fields(base)}
    for name in sorted({name for cls in own_classes for name in vars(cls)} - fields):
        method = inspect.getattr_static(base, name)
        dunder = name.startswith("__") and name != "__call__"
        if inspect.isfunction(method) and not dunder and not hasattr(method, "nowrap"):
            yield name


def _with_run(name: str, inherited: Callable[..., Any]) -> Callable[..., Any]:
    @nn.nowrap
    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, name, functools.partial(inherited, self), args, kwargs)

    return method


def _with_run_in_method(inherited: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` or `init_with_output`, whose `method` may be any function of the module."""

    @nn.nowrap
    @functools.wraps(inherited)
    def method_with_run(self: Any, variables: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        if isinstance(method, str) and not inspect.isfunction(getattr(type(self), method, None)):
            method = _call_attribute(method)
        if method is not None and not isinstance(method, str):
            method = _in_run(getattr(method, "__func__", method))
        return inherited(self, variables, *args, method=method, **kwargs)

    return method_with_run


def _call_attribute(name: str) -> Callable[..., Any]:
    return lambda module, *args, **kwargs: getattr(module, name)(*args, **kwargs)


def _in_run(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def entered(module: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(module, function, functools.partial(function, module), args, kwargs)

    return entered


def _run(module: Any, method: Any, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a method of a model with a policy, as the entry to the model or from within it."""
    if module.scope is None:  # Flax raises its own error for an unbound module
        return fun(*args, **kwargs)
    run, outer, setting = _run_of(module), contexts.linen_call.value, module._mpjax_setting
    is_part = setting.part_of is not None
    # A lifted transformation may move the part, or the model, to another path than at setup.
    if run == outer or (is_part and outer is not None and outer.policy == run.policy):
        return fun(*args, **kwargs)
    policy, whole = run.policy, method == "__call__" and not (is_part or setting.prefix)
    with contexts.linen_call(run), nn.intercept_methods(interceptor(run)):
        out = fun(*args, **kwargs)
    # A method other than `__call__` may run only some of the model's layers.
    if policy.overrides and (whole or module.is_initializing()):
        params = jax.tree_util.tree_leaves_with_path(module.variables.get("params", {}))
        warn_unused_overrides(policy, sorted(run.paths | {path_string(path) for path, _ in params}))
    if run.wide and method != "setup":
        repeat = functools.partial(_call_again, module, method, args, kwargs)
        warn_explicit_dtypes(original_class(type(module)), policy, run.wide, repeat)
    return cast(out, policy.output_dtype) if setting.casts_output else out


def _call_again(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Repeats a call of a bound module, on a copy of its variables."""
    unbound, variables = module.unbind()
    rngs = {name: rng.as_jax_rng() for name, rng in module.scope.rngs.items()}
    return unbound.apply(variables, *args, **kwargs, rngs=rngs, method=method, mutable=True)
