"""Evaluates common primitives with NumPy on arrays in host memory: a new shape then needs no compilation.

An inspection runs a program operation by operation, and compiling an operation takes far longer than running it once.
Matmuls and convolutions stay with XLA, whose thread pool they share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # loads `scipy.special` when it is first read: its import takes 0.2 s

from mpjax.program import compat
from mpjax.program.formats import HALF_DTYPES

# By name: each has an implementation in NumPy.


def in_host_memory(x: Any) -> bool:
    """Whether NumPy can read an array in place: it lies in host memory, on one device."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return isinstance(x, np.ndarray)
    return [device.platform for device in x.devices()] == ["cpu"]


_SMALL = 2**20  # elements, up to which NumPy takes less time than compiling a program for the shapes


def on_host_or_compiled(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function of arrays that `fun(numpy, *arrays)` is: by NumPy for small ones in host memory, else compiled."""
    compiled = jax.jit(functools.partial(fun, jnp))

    @functools.wraps(fun)
    def run(*arrays: Any) -> Any:
        if not all(map(in_host_memory, arrays)) or max(map(np.size, arrays)) > _SMALL:
            return compiled(*arrays)
        with np.errstate(all="ignore"):
            return fun(np, *map(np.asarray, arrays))

    return run


def bind_on_host(eqn: Any, arrays: Sequence[Any], wide: bool) -> list[Any] | None:
    """The results of an equation as NumPy arrays; None if it has no rule here, or reads arrays that are elsewhere.

    Args:
        eqn: The equation.
        arrays: Its operands.
        wide: Whether to compute in float32 in place of half. Otherwise half operands are computed in float32 and the
            result is rounded, as XLA does.
    """
    name, params, outvars = eqn.primitive.name, eqn.params, eqn.outvars
    rule = _RULES.get(name) or _OF_FLOATS.get(name)
    if rule is None or any(value is not None for key, value in params.items() if "sharding" in key):
        return None
    operands = [_numbers(x, v) for x, v in zip(arrays, eqn.invars, strict=True)]
    dtypes = [v.aval.dtype for v in outvars]
    if any(x is None or not x.size for x in operands) or not _DTYPES.issuperset(dtypes):
        return None
    # XLA rounds each partial result of these.
    if not wide and name in ("reduce_sum", "integer_pow") and dtypes[0] in HALF_DTYPES:
        return None
    of_floats = name in _OF_FLOATS or (name == "convert_element_type" and dtypes[0].kind in "iu")
    if of_floats and {np.dtype(np.float32)} != {x.dtype for x in operands} | {_widened(dtype) for dtype in dtypes}:
        return None
    with np.errstate(all="ignore"):
        results = rule(params, *operands)
        outs = results if eqn.primitive.multiple_results else [results]
        return [np.asarray(x, _widened(dtype) if wide else dtype) for x, dtype in zip(outs, dtypes, strict=True)]


_DTYPES = {np.dtype(dtype) for dtype in (np.float32, np.int32, np.uint32, np.int8, np.uint8, bool)} | HALF_DTYPES


def _widened(dtype: Any) -> Any:
    return np.dtype(np.float32) if dtype in HALF_DTYPES else dtype


def _numbers(x: Any, v: Any) -> Any:
    """An operand for NumPy, in float32 if it is half; None if NumPy can't take it."""
    aval: Any = v.aval
    if not compat.is_shaped(aval) or aval.dtype not in _DTYPES:
        return None
    if isinstance(v, compat.Literal) and not isinstance(x, jax.Array):
        x = np.asarray(x, aval.dtype)
    # The sharding of an array on a mesh is part of its type, also on a mesh of one device.
    if not in_host_memory(x) or isinstance(getattr(x, "sharding", None), jax.sharding.NamedSharding):
        return None
    return np.asarray(x, _widened(aval.dtype))


def _plain(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an elementwise operation, from a NumPy function."""
    return lambda params, *arrays: fun(*arrays)


def _elementwise(names: str) -> dict[str, Callable[..., Any]]:
    """The rules of elementwise operations, each with the name of NumPy's function if it is another."""
    pairs = (name.partition("=") for name in names.split())
    return {name: _plain(getattr(np, of_numpy or name)) for name, _, of_numpy in pairs}


def _reduction(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, x: fun(x, axis=tuple(params["axes"]))


def _broadcast(params: Any, x: Any, *_: Any) -> Any:
    new = set(range(len(params["shape"]))) - set(params["broadcast_dimensions"])
    return np.broadcast_to(np.expand_dims(x, tuple(new)), params["shape"])


def _cumulative(fun: Callable[..., Any]) -> Callable[..., Any]:
    def rule(params: Any, x: Any) -> Any:
        axis = params["axis"]
        return np.flip(fun(np.flip(x, axis), axis), axis) if params["reverse"] else fun(x, axis)

    return rule


def _iota(params: Any) -> Any:
    places = np.indices(params["shape"], sparse=True)[params["dimension"]]
    return np.broadcast_to(places, params["shape"])


def _slice(params: Any, x: Any) -> Any:
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _select(params: Any, which: Any, *cases: Any) -> Any:
    return np.where(which, *cases[::-1]) if which.dtype == bool else np.choose(which, cases)


_RULES: dict[str, Callable[..., Any]] = {
    **_elementwise("add add_any=add sub=subtract mul=multiply pow=power neg=negative sign abs max=maximum min=minimum"),
    **_elementwise("eq=equal ne=not_equal lt=less le=less_equal gt=greater ge=greater_equal is_finite=isfinite"),
    **_elementwise("and=bitwise_and or=bitwise_or"),
    "clamp": _plain(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "select_n": _select,
    **dict.fromkeys(("convert_element_type", "copy", "stop_gradient"), _plain(lambda x: x)),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_or": _reduction(np.bitwise_or.reduce),
    "reduce_and": _reduction(np.bitwise_and.reduce),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "rev": lambda params, x: np.flip(x, tuple(params["dimensions"])),
    "tile": lambda params, x: np.tile(x, params["reps"]),
    "stack": lambda params, *arrays: np.stack(arrays, params["axis"]),
    "concatenate": lambda params, *arrays: np.concatenate(arrays, params["dimension"]),
    "split": lambda params, x: np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"]),
    "slice": _slice,
}
# These differ from XLA's on other dtypes.
_OF_FLOATS: dict[str, Callable[..., Any]] = {
    "reduce_sum": _reduction(np.sum),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    **_elementwise("div=divide floor ceil square sqrt exp exp2 expm1 log log1p sin cos sinh cosh tanh"),
    "integer_pow": lambda params, x: x ** params["y"],
    "rsqrt": _plain(lambda x: 1 / np.sqrt(x)),
    "logistic": _plain(lambda x: scipy.special.expit(x)),
    "erf": _plain(lambda x: scipy.special.erf(x)),
}
