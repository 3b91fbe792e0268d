"""`with_policy` for Flax Linen: autocast, lifted over the model's variables as `nn.remat` is.

The model becomes an instance of a subclass whose methods run under autocast, and with an interceptor around each method
call of each layer. So the policy applies to every call of the model (by `apply`, `bind`, as a submodule), and nowhere
else. The submodules that a bound model sets up become instances of such subclasses too, so that they can be called on
their own. `init` runs in float32, as that of the float32 model.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from flax.core import lift
from flax.errors import TransformedMethodReturnValueError

from mpjax.casting.setting import FLOAT32
from mpjax.modules import precision
from mpjax.modules.explicit_dtypes import warn_explicit_dtypes
from mpjax.modules.precision import cast, run_cast, stored_in, widened
from mpjax.policy import HALF_DTYPES, Policy, is_norm_class, path_string, warn_unused_overrides
from mpjax.program import contexts
from mpjax.program.scopes import attributes, become, class_with, method_names, original_class, reduce_, setting_of


@dataclasses.dataclass(frozen=True)
class _ClassKey:
    """The policy of a generated class.

    Args:
        policy: The model's policy.
        part_of: Path of the model in the tree of bound modules, for a part of a bound model.
        prefix: Path of the model in the one from which `unbind` took it, or in the NNX model that contains it.
        in_nnx: Whether it is in an NNX model.
    """

    policy: Policy
    part_of: tuple[str, ...] | None = None
    prefix: tuple[str, ...] = ()
    in_nnx: bool = False

    def namespace(self, base: Any) -> dict[str, Any]:
        # Keep the base's dataclass methods, including hand-written ones.
        kept = {name: getattr(base, name) for name in ("__init__", "__eq__", "__hash__")}
        methods = {name: _entry(name, getattr(base, name)) for name in _methods(base)}
        entries = {name: _with_entry(getattr(base, name)) for name in ("apply", "init_with_output")}
        registration = {"unbind": _unbind(base.unbind), "_register_submodules": _register(base._register_submodules)}
        return kept | methods | entries | registration | {"__reduce__": nn.nowrap(reduce_)}


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """One call of a model with a policy.

    Args:
        setting: The policy, and the model's place in what contains it.
        root: Path of the model in the tree of bound modules.
        paths: Module and parameter paths used in the call.
        wide: Dtypes, by path, of the layers whose explicit dtype is wider than the compute dtype.
    """

    setting: _ClassKey
    root: tuple[str, ...]
    paths: set[str] = dataclasses.field(default_factory=set, compare=False)
    wide: dict[str, np.dtype] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, module: Any) -> ModelCall:
        """A call of the model of a bound module, which is the model or a part of it."""
        setting = module._mpjax_setting
        root = module.path if setting.part_of is None else setting.part_of
        return cls(dataclasses.replace(setting, part_of=None), root)

    @property
    def policy(self) -> Policy:
        return self.setting.policy

    def relative(self, path: tuple[str, ...]) -> str:
        inside = path[: len(self.root)] == self.root
        return "/".join((*self.setting.prefix, *path[len(self.root) :]) if inside else path)


def with_policy(model: Any, policy: Policy, path: tuple[Any, ...] | None = None) -> Any:
    """`mpjax.with_policy` for Linen.

    Args:
        model: The model.
        policy: Its policy.
        path: The model's path in the NNX model that contains it, if any.
    """
    setting = _ClassKey(policy, None, tuple(map(str, path or ())), path is not None)
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
        run = ModelCall.of(self)
        _adopt(self, vars(self).get(name), dataclasses.replace(run.setting, part_of=run.root))

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
            run = ModelCall.of(self)
            become(module, dataclasses.replace(run.setting, prefix=tuple(run.relative(self.path).split("/"))))
        return module, variables

    return unbind


def _methods(base: type) -> list[str]:
    """The names of the methods that Flax binds to a scope."""
    fields = {f.name for f in dataclasses.fields(base)}
    names = [name for name in method_names(base, nn.Module) if name not in fields]
    return [name for name in names if not hasattr(inspect.getattr_static(base, name), "nowrap")]


def _entry(method: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """A method, by its name, or a function of the module, that runs under the module's policy."""

    @nn.nowrap
    @functools.wraps(fun)
    def entered(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, method, fun, args, kwargs)

    return entered


def _with_entry(inherited: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` or `init_with_output`, whose `method` may be any function of the module."""

    @nn.nowrap
    @functools.wraps(inherited)
    def with_entry(self: Any, variables: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        if isinstance(method, str) and not inspect.isfunction(getattr(type(self), method, None)):
            method = functools.partial(_call_attribute, method)
        if method is not None and not isinstance(method, str):
            method = getattr(method, "__func__", method)
            method = _entry(method, method)
        return inherited(self, variables, *args, method=method, **kwargs)

    return with_entry


def _call_attribute(name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a submodule, or another attribute, by its name."""
    return getattr(module, name)(*args, **kwargs)


def _run(module: Any, method: Any, fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a method of a model with a policy, as the entry to the model or from within it."""
    if module.scope is None:  # Flax raises its own error for an unbound module
        return fun(module, *args, **kwargs)
    run, outer, setting = ModelCall.of(module), contexts.linen_call.value, module._mpjax_setting
    policy, is_part = run.policy, setting.part_of is not None
    # A lifted transformation may move the part, or the model, to another path than at setup.
    if run == outer or (is_part and outer is not None and outer.policy == policy):
        return fun(module, *args, **kwargs)

    def body(module: Any, *args: Any, **kwargs: Any) -> Any:
        with contexts.linen_call(run), nn.intercept_methods(interceptor(run)):
            return fun(module, *args, **kwargs)

    if method == "setup" or module.is_initializing() or (setting.in_nnx and precision.is_running(policy)):
        out = body(module, *args, **kwargs)
    else:
        body.method_handler_wrapped = True  # type: ignore[attr-defined]
        out = _call_cast(body, policy, policy, module, args, kwargs)
    # A method other than `__call__` may run only some of the model's layers.
    whole = method == "__call__" and not (is_part or setting.prefix)
    if policy.overrides and (whole or module.is_initializing()):
        leaves = jax.tree_util.tree_leaves_with_path(module.variables.get("params", {}))
        warn_unused_overrides(policy, sorted(run.paths | {path_string(path) for path, _ in leaves}))
    if run.wide and method != "setup":
        repeat = functools.partial(_call_again, module, method, args, kwargs)
        warn_explicit_dtypes(original_class(type(module)), policy, run.wide, repeat)
    return out if setting.in_nnx else cast(out, policy.output_dtype)


def _call_cast(fun: Any, model: Policy, policy: Policy, module: Any, args: Any, kwargs: Any) -> Any:
    """Calls a method so that its code computes as a policy says, in a model with a policy."""

    def transform(core: Callable[..., Any]) -> Callable[..., Any]:
        def inner(scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            def pure(variables: Any, rest: Any) -> Any:
                rngs, args, kwargs = rest
                scopes = scope_fn(variables, rngs)
                with contexts.precision(precision.Running(model, policy.compute_dtype)):
                    out = core(scopes, *args, **kwargs)
                return out, repack_fn(scopes)

            pure.__name__ = type(module).__name__
            return run_cast(pure, variables, (rngs, args, kwargs), policy)

        return lift.pack(inner, (True,), (True,), (True,), name="with_policy", enable_kwargs=True)

    try:
        return nn.transforms.decorator_lift_transform(transform, fun)(module, *args, **kwargs)
    except TransformedMethodReturnValueError:  # It returns a submodule, so it computes nothing.
        return fun(module, *args, **kwargs)


def _call_again(module: Any, method: Any, args: Any, kwargs: Any) -> Any:
    """Repeats a call of a bound module, on a copy of its variables."""
    unbound, variables = module.unbind()
    rngs = {name: rng.as_jax_rng() for name, rng in module.scope.rngs.items()}
    return unbound.apply(variables, *args, **kwargs, rngs=rngs, method=method, mutable=True)


# Marks a module whose method is running: calls of its own methods are part of its code.
_CALLED = "_mpjax_called"


def interceptor(run: ModelCall) -> Callable[..., Any]:
    """An interceptor of the method calls of a model's layers."""

    def intercept(fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, method = context.module, context.method_name
        # Flax treats an author's `__getattr__` as a method.
        is_dunder = method.startswith("__") and method != "__call__"
        if contexts.linen_call.value != run or module.scope is None or is_dunder:
            return fun(*args, **kwargs)
        if _CALLED in vars(module):
            # A norm's statistics may be matmuls: the power iteration of `nn.SpectralNorm`.
            fun = precision.in_precision(fun, FLOAT32, False) if is_norm_class(type(module)) else fun
            return fun(*args, **kwargs)
        layer_dtype = getattr(module, "dtype", None)
        if not precision.is_real_float(layer_dtype):
            return fun(*args, **kwargs)
        path = run.relative(module.path)
        run.paths.add(path)
        placed = run.policy.for_path(path, type(module))
        above = run.policy
        if module.path != run.root:
            above = run.policy.for_path(path.rpartition("/")[0], type(module.parent))
        running = contexts.precision.value or precision.Running(run.policy, run.policy.compute_dtype)
        # A dtype equal to the compute dtype is that of the policy.
        own = precision.own_dtype(
            layer_dtype, (run.policy, placed), run.policy.compute_dtype, *_unset_dtype(run, module)
        )
        target = own or (running.dtype if placed is above else placed.compute_dtype)
        if own and precision.stays_wide(type(module), own, placed):
            run.wide[path] = own
        inside = {"param": _param(module, run, path), "variable": _variable(module, target)}
        if own is None and layer_dtype is not None:
            inside["dtype"] = precision.FROM_POLICY
        if isinstance(module, nnx.bridge.ToLinen):
            inside["nnx_class"] = functools.partial(_made_by_nnx, module.nnx_class, run, path)
            kwargs = _with_method_by_name(module.nnx_class, kwargs)
        with attributes(module, inside):
            # A function that is lifted over the module (the body of a scan) also arrives here as if it were a method.
            if method == "setup" or not hasattr(type(module), method):
                return fun(*args, **kwargs)
            if own is None and target in HALF_DTYPES and target != running.dtype and not module.is_initializing():
                return _call_cast(getattr(type(module), method), run.policy, placed, module, args, kwargs)
            with attributes(module, {_CALLED: True}):
                return precision.in_precision(fun, target, own is not None)(*args, **kwargs)

    return intercept


def _unset_dtype(run: ModelCall, module: Any) -> tuple[np.dtype, ...]:
    """The default of the model's own `dtype` field: not a value chosen for this model."""
    if module.path != run.root:
        return ()
    defaults: list[Any] = [f.default for f in dataclasses.fields(module) if f.name == "dtype"]
    return tuple(np.dtype(d) for d in defaults if d is not None and precision.is_real_float(d))


def _made_by_nnx(nnx_class: Callable[..., Any], run: ModelCall, path: str, *args: Any, **kwargs: Any) -> Any:
    """The NNX module of `nnx.bridge.to_linen`, with the policy."""
    from mpjax.modules.nnx import set_policy  # which imports this file

    module = nnx_class(*args, **kwargs)
    run.paths.update(set_policy(module, run.policy, tuple(path.split("/")) if path else ()))
    return module


def _with_method_by_name(nnx_class: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a `to_linen` module's call, whose method is looked up by name on the class with the policy."""
    method = kwargs.get("nnx_method")
    name = getattr(method, "__name__", "")
    return {**kwargs, "nnx_method": name} if name and getattr(nnx_class, name, None) is method else kwargs


def _param(module: Any, run: ModelCall, path: str) -> Callable[..., Any]:
    """`module.param`, which stores the parameter in the policy's param dtype."""
    make_parameter = module.param

    def param(name: str, init_fn: Any, *args: Any, **kwargs: Any) -> Any:
        param_path = f"{path}/{name}".lstrip("/")
        run.paths.add(param_path)
        dtype = run.policy.for_path(param_path, type(module)).param_dtype
        return widened(make_parameter(name, stored_in(init_fn, dtype), *args, **kwargs))

    return param


def _variable(module: Any, dtype: np.dtype) -> Callable[..., Any]:
    """`module.variable`, which stores decoding caches in the compute dtype."""
    make_variable = module.variable

    def variable(collection: str, name: str, init_fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        if collection == "cache":
            init_fn = stored_in(init_fn, dtype)
        return make_variable(collection, name, init_fn, *args, **kwargs)

    return variable
