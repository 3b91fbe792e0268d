"""One call of a layer in a Linen model with a policy: the interceptor that casts its inputs and outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import lift

from mpjax.modules.layers import (
    Kind,
    attributes_inside,
    call,
    cast,
    cast_parameter,
    half_weight,
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
from mpjax.modules.matmuls import Reading, attend, read, reads
from mpjax.policy import Policy
from mpjax.program import contexts


@dataclasses.dataclass(frozen=True)
class ModelCall:
    """One call of a model with a policy.

    Args:
        policy: The model's policy.
        place_nnx: `nnx.set_policy`, for the NNX modules in the model.
        root: Path of the model in the tree of bound modules.
        prefix: Path of the model in the one from which `unbind` took it.
        paths: Module and parameter paths used in the call.
        wide: Dtypes, by path, of the layers whose explicit dtype is wider than the compute dtype.
    """

    policy: Policy
    place_nnx: Callable[..., list[str]]
    root: tuple[str, ...]
    prefix: tuple[str, ...] = ()
    paths: set[str] = dataclasses.field(default_factory=set, compare=False)
    wide: dict[str, np.dtype] = dataclasses.field(default_factory=dict, compare=False)

    def relative(self, path: tuple[str, ...]) -> str:
        inside = path[: len(self.root)] == self.root
        return "/".join((*self.prefix, *path[len(self.root) :]) if inside else path)


# Marks a module whose method is running: calls of its own methods are part of its code.
_CALLED = "_mpjax_called"


def interceptor(run: ModelCall) -> Callable[..., Any]:
    def intercept(fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if contexts.linen_call.value != run:
            return fun(*args, **kwargs)
        return keep_loop_variables(functools.partial(follow_rules, fun, context), args, kwargs, narrow=True)

    def follow_rules(fun: Callable[..., Any], context: Any, /, *args: Any, **kwargs: Any) -> Any:
        module, method = context.module, context.method_name
        # Skip the module's calls of its own methods. Flax treats an author's `__getattr__` as a method.
        is_dunder = method.startswith("__") and method != "__call__"
        if module.scope is None or _CALLED in vars(module) or is_dunder:
            return fun(*args, **kwargs)
        path = run.relative(module.path)
        run.paths.add(path)
        placed = run.policy.for_path(path, type(module))
        layer_dtype = getattr(module, "dtype", None)
        if not is_real_float(layer_dtype):
            return fun(*args, **kwargs)
        # A dtype equal to the compute dtype was set by this policy and passed on by the parent module.
        own = own_dtype(layer_dtype, (run.policy, placed), run.policy.compute_dtype, *_unset_dtype(run, module))
        kind, dtype = kind_of(type(module), method), own or placed.compute_dtype
        if stays_wide(kind, own, placed):
            run.wide[path] = np.dtype(layer_dtype)
        fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.name != "parent"}
        # Other modules may read what `setup` makes, as the table of an embedding.
        read_by = Kind.PLAIN if method == "setup" else kind
        in_cell, how = _in_cell(module), reading_of(run.policy, read_by, dtype, own)
        inside = {} if own else attributes_inside(kind, dtype, fields, how, in_cell)
        inside["param"] = _param(module, run, path, how, in_cell)
        if isinstance(module, nnx.bridge.ToLinen):
            inside["nnx_class"] = functools.partial(_made_by_nnx, module.nnx_class, run, path)
            kwargs = _with_method_by_name(module.nnx_class, kwargs)
        # A function that is lifted over the module (the body of a scan) also arrives here as if it
        # were a method. Its code sees the module as configured, but it is not a call of the module.
        if method == "setup" or not hasattr(type(module), method):
            with _attributes(module, inside), reads(contexts.layer_reading.value):
                out = fun(*args, **kwargs)
            return out
        if how and not own and is_flax_attend(type(module), method):
            fun = functools.partial(attend, module, dtype)
        if kind is Kind.CELL:
            fun = _recomputed(module, fun)
        with _attributes(module, {**inside, _CALLED: True}):
            out = call(fun, kind, dtype, how, in_cell, *args, **kwargs)
        above = run.policy
        if module.path != run.root:
            above = run.policy.for_path(path.rpartition("/")[0], type(module.parent))
        return out if placed is above else leave(out, kind, placed.output_dtype)

    return intercept


def _recomputed(module: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """A method under `jax.checkpoint`, lifted over the module's scope as `nn.remat` does."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        def body(scope: Any, args: Any, kwargs: Any) -> Any:
            with _attributes(module, {"scope": scope}):
                return fun(*args, **kwargs)

        # In a loop, XLA can't share values with the forward pass anyway.
        return lift.checkpoint(body, prevent_cse=False, policy=keeps_matmuls)(module.scope, args, kwargs)

    return recomputed


def _unset_dtype(run: ModelCall, module: Any) -> tuple[np.dtype, ...]:
    """The default of the model's own `dtype` field: not a value chosen for this model."""
    if module.path != run.root:
        return ()
    defaults: list[Any] = [f.default for f in dataclasses.fields(module) if f.name == "dtype"]
    return tuple(np.dtype(d) for d in defaults if d is not None and is_real_float(d))


def _in_cell(module: Any) -> bool:
    return kind_of(type(module.parent), "__call__") is Kind.CELL


def _made_by_nnx(nnx_class: Callable[..., Any], run: ModelCall, path: str, *args: Any, **kwargs: Any) -> Any:
    """The NNX module of `nnx.bridge.to_linen`, with the policy."""
    module = nnx_class(*args, **kwargs)
    run.paths.update(run.place_nnx(module, run.policy, tuple(path.split("/")) if path else ()))
    return module


def _with_method_by_name(nnx_class: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a `to_linen` module's call, whose method is looked up by name on the class with the policy."""
    method = kwargs.get("nnx_method")
    name = getattr(method, "__name__", "")
    return {**kwargs, "nnx_method": name} if name and getattr(nnx_class, name, None) is method else kwargs


def _param(module: Any, run: ModelCall, path: str, how: Reading | None, in_cell: bool) -> Callable[..., Any]:
    """`module.param`, which stores the parameter in the policy's param dtype and returns it as code reads it."""
    make_parameter = module.param

    def param(name: str, init_fn: Any, *args: Any, **kwargs: Any) -> Any:
        param_path = f"{path}/{name}".lstrip("/")
        run.paths.add(param_path)
        init_fn = _stored_in(init_fn, run.policy.for_path(param_path, type(module)).param_dtype)
        value = make_parameter(name, init_fn, *args, **kwargs)
        # A cell's weights are cast before its loop, not at each step. Its linear layers do so themselves.
        if how and in_cell and kind_of(type(module), "__call__") is Kind.PLAIN:
            return jax.tree.map(half_weight, cast(value, how.dtype))
        return read(value, how)

    return param


@contextlib.contextmanager
def _attributes(module: Any, values: dict[str, Any]) -> Iterator[None]:
    """Sets attributes during a call.

    It bypasses Flax's check, because modules are frozen, and restores them, because the module may be shared.
    """
    previous = {name: vars(module)[name] for name in values if name in vars(module)}
    for name, value in values.items():
        object.__setattr__(module, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in previous:
                object.__setattr__(module, name, previous[name])
            else:
                object.__delattr__(module, name)


def _stored_in(init_fn: Any, param_dtype: np.dtype) -> Any:
    """An initialiser whose float32 values, those of the float32 model, are cast to the param dtype."""
    if not callable(init_fn) or param_dtype == np.float32:
        return init_fn
    return lambda *args, **kwargs: cast_parameter(init_fn(*args, **kwargs), param_dtype)
