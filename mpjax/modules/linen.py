"""`with_policy` for Flax Linen: an interceptor that stands around each method call of each layer.

The model becomes an instance of a subclass whose methods install the interceptor, so the policy is
there however the model is reached (`apply`, `init`, `bind`, as a submodule), and only there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.core import lift

from mpjax.modules.layers import (
    Kind,
    attributes_inside,
    call,
    cast,
    cast_parameter,
    casts_parameters,
    computes_again,
    half_weight,
    is_real_float,
    keeps_matmuls,
    kind_of,
    own_dtype,
)
from mpjax.policy import Policy, path_string, warn_unused_overrides


@dataclasses.dataclass(frozen=True)
class _Run:
    """A model with a policy that is running: the policy, where the model stands, the paths it met."""

    policy: Policy
    root: tuple[str, ...]
    paths: set[str] = dataclasses.field(default_factory=set, compare=False)

    def relative(self, path: tuple[str, ...]) -> str:
        return "/".join(path[len(self.root) :] if path[: len(self.root)] == self.root else path)


# The innermost model with a policy that runs in this thread. It is part of jit's cache key: the
# trace of an `nn.jit` layer under one policy must not be taken for another's.
_running = jax.make_user_context(None)
# One class per model class and policy, so that equal models with equal policies are equal.
_classes: weakref.WeakValueDictionary[tuple[type, Policy], type] = weakref.WeakValueDictionary()
# Marks a module whose method runs: its calls of its own methods are its own code.
_CALLED = "_mpjax_called"


def with_policy(model: Any, policy: Policy) -> Any:
    cls = _class_with_policy(getattr(type(model), "_mpjax_base", type(model)), policy)
    if model.parent is not None:
        # It is registered with its parent already: a second instance would be a second submodule.
        object.__setattr__(model, "__class__", cls)
        return model
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init}
    return cls(**{**fields, "parent": None})


def _class_with_policy(base: type, policy: Policy) -> type:
    if (base, policy) in _classes:
        return _classes[base, policy]
    # The dataclass methods of the base hold, also where they are the author's own.
    kept = ("__module__", "__qualname__", "__doc__", "__init__", "__eq__", "__hash__")
    namespace = {name: getattr(base, name) for name in kept}
    namespace |= {name: _with_run(name, getattr(base, name)) for name in _methods(base)}
    namespace |= {"_mpjax_base": base, "_mpjax_policy": policy, "__reduce__": nn.nowrap(_reduce)}
    namespace |= {name: _with_run_in_method(getattr(base, name)) for name in ("apply", "init_with_output")}
    cls = type(base)(base.__name__, (base,), namespace)
    _classes[base, policy] = cls
    return cls


def _methods(base: type) -> Iterator[str]:
    """The names of the methods that Flax binds to a scope: those that the author's classes define."""
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
        return _run(self, functools.partial(inherited, self), args, kwargs, whole=name == "__call__")

    return method


def _with_run_in_method(inherited: Callable[..., Any]) -> Callable[..., Any]:
    """`apply` or `init_with_output`, for which a `method` may be any function of the module."""

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
        return _run(module, functools.partial(function, module), args, kwargs, whole=False)

    return entered


def _run(module: Any, fun: Callable[..., Any], args: Any, kwargs: Any, whole: bool) -> Any:
    """Calls a method of a model with a policy, as the entry to the model or from within it."""
    if module.scope is None:  # Flax has an error of its own for a module that is not bound
        return fun(*args, **kwargs)
    policy, outer = type(module)._mpjax_policy, _running.value
    run = _Run(policy, module.path)
    if run == outer:
        return fun(*args, **kwargs)
    with _running(run), nn.intercept_methods(_interceptor(run)):
        out = fun(*args, **kwargs)
    # A method that is a part of the model meets only a part of its paths.
    if policy.overrides and (whole or module.is_initializing()):
        params = jax.tree_util.tree_leaves_with_path(module.variables.get("params", {}))
        warn_unused_overrides(policy, sorted(run.paths | {path_string(path) for path, _ in params}))
    return cast(out, policy.output_dtype)


def _interceptor(run: _Run) -> Callable[..., Any]:
    def intercept(fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module, method = context.module, context.method_name
        # Not ours: a submodule with a policy of its own runs, or the module calls itself.
        if _running.value != run or module.scope is None or _CALLED in vars(module):
            return fun(*args, **kwargs)
        path = run.relative(module.path)
        run.paths.add(path)
        placed = run.policy.for_path(path)
        given = getattr(module, "dtype", None)
        if not is_real_float(given):
            return fun(*args, **kwargs)
        # The compute dtype is what a module got from this policy and handed on to its layers.
        own = own_dtype(given, run.policy.compute_dtype, *_unset_dtype(run, module))
        kind, dtype = kind_of(type(module), method), own or placed.compute_dtype
        fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.name != "parent"}
        in_cell = _in_cell(module)
        inside = {} if own else attributes_inside(kind, dtype, fields, in_cell)
        inside["param"] = _param(module, run, path, dtype if casts_parameters(kind) else None, in_cell)
        # A function that is lifted over the module (the body of a scan) also comes here as if it
        # were a method: its code sees the module as configured, but a call of the module it is not.
        if method == "setup" or not hasattr(type(module), method):
            with _attributes(module, inside):
                return fun(*args, **kwargs)
        if computes_again(kind, getattr(type(module), method)):
            fun = _recomputed(module, fun)
        with _attributes(module, {**inside, _CALLED: True}):
            out = call(fun, kind, dtype, args, kwargs, in_cell)
        above = run.policy if module.path == run.root else run.policy.for_path(path.rpartition("/")[0])
        return out if placed is above else cast(out, placed.output_dtype)

    return intercept


def _recomputed(module: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """A method under `jax.checkpoint`, lifted over the module's scope as `nn.remat` does."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        def body(scope: Any, args: Any, kwargs: Any) -> Any:
            with _attributes(module, {"scope": scope}):
                return fun(*args, **kwargs)

        # Where the cell runs in a loop, the loop keeps the compiler from sharing values with the forward pass.
        return lift.checkpoint(body, prevent_cse=False, policy=keeps_matmuls)(module.scope, args, kwargs)

    return recomputed


def _unset_dtype(run: _Run, module: Any) -> tuple[np.dtype, ...]:
    """The default of the model's own `dtype` field: a value that nobody chose for this model."""
    if module.path != run.root:
        return ()
    defaults: list[Any] = [f.default for f in dataclasses.fields(module) if f.name == "dtype"]
    return tuple(np.dtype(d) for d in defaults if d is not None and is_real_float(d))


def _in_cell(module: Any) -> bool:
    return kind_of(type(module.parent), "__call__") is Kind.CELL


def _param(module: Any, run: _Run, path: str, dtype: np.dtype | None, in_cell: bool) -> Callable[..., Any]:
    """`module.param`, which stores what the policy says and returns it cast to `dtype`."""
    make_parameter = module.param

    def param(name: str, init_fn: Any, *args: Any, **kwargs: Any) -> Any:
        param_path = f"{path}/{name}".lstrip("/")
        run.paths.add(param_path)
        init_fn = _stored_in(init_fn, run.policy.for_path(param_path).param_dtype)
        value = make_parameter(name, init_fn, *args, **kwargs)
        if dtype is None:
            return value
        return jax.tree.map(half_weight, cast(value, dtype)) if in_cell else cast(value, dtype)

    return param


@contextlib.contextmanager
def _attributes(module: Any, values: dict[str, Any]) -> Iterator[None]:
    """Sets attributes for the time of a call.

    Not for longer, and past Flax's guard: modules are frozen, and this one may be somebody else's.
    """
    given = {name: vars(module)[name] for name in values if name in vars(module)}
    for name, value in values.items():
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in given:
                object.__setattr__(module, name, given[name])
            else:
                object.__delattr__(module, name)


def _stored_in(init_fn: Any, param_dtype: np.dtype) -> Any:
    """An initialiser whose float32 values are cast: drawn as for the float32 model, then rounded."""
    if not callable(init_fn) or param_dtype == np.float32:
        return init_fn
    return lambda *args, **kwargs: cast_parameter(init_fn(*args, **kwargs), param_dtype)


def _reduce(self: Any) -> Any:
    """Pickles by the author's class and the policy, as the class with both is made on the fly."""
    return _blank, (self._mpjax_base, self._mpjax_policy), dict(vars(self))


def _blank(base: type, policy: Policy) -> Any:
    return object.__new__(_class_with_policy(base, policy))
