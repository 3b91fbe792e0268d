"""Traces calls of users' functions: their arguments may hold NNX modules, and values that are not arrays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpjax.program import compat, contexts, derivative_rules, objects
from mpjax.program.graph import present
from mpjax.program.scopes import named_modules, stores_of_models
from mpjax.program.source import traceback_line


@dataclasses.dataclass
class TracedCall:
    """A traced function of arrays: its jaxpr, the arrays it was called with, and how to rebuild its result."""

    jaxpr: Any
    arrays: Sequence[Any]
    names: Sequence[str]
    rebuild: Callable[[Sequence[Any]], Any]
    fun: Callable[..., Sequence[Any]]


def is_array(x: Any) -> bool:
    """Whether an argument is traced. Python scalars, strings and other objects are not."""
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def struct_of(x: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and sharding of an array, with another dtype."""
    aval = jax.typeof(x)
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    types = {} if sharding is None else {"sharding": sharding, "manual_axis_type": aval.manual_axis_type}
    return jax.ShapeDtypeStruct(aval.shape, dtype, **types)


def trace(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], half: np.dtype | None) -> TracedCall:
    """Traces a call. Arguments and results that are not arrays stay outside the program.

    Args:
        fun, args, kwargs: The call.
        half: The half dtype of the plan that will be made of the trace; None if none will be made. That plan leaves the
            operations of autocast functions inside alone.

    Raises:
        TypeError: The function's control flow depends on the value of an array, or it writes to the variables of a
            Linen or Haiku model that is running around it.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    where = [i for i, (_, leaf) in enumerate(leaves) if is_array(leaf)]
    arrays = [leaves[i][1] for i in where]
    out: dict[str, Any] = {}

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, objects.filled((leaf for _, leaf in leaves), where, arrays))
        results, out["rebuild"] = objects.split_arrays(fun(*args, **kwargs))
        for path, x in jax.tree_util.tree_leaves_with_path(stores_of_models()):
            if compat.is_of_current_trace(x):
                raise TypeError(_writes(fun, jax.tree_util.keystr(path[1:], simple=True, separator="/")))
        if half is not None:
            out["rules"] = derivative_rules.trace_live()
        return results

    try:
        with contexts.planning(half.name) if half is not None else contextlib.nullcontext():
            jaxpr = present(compat.trace(flat, *arrays))
    except jax.errors.ConcretizationTypeError as error:
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            raise  # Without autocast, the function would fail here too.
        raise TypeError(_needs_a_value(fun, error)) from error
    if half is not None:
        derivative_rules.remember(jaxpr, out["rules"])
    return TracedCall(jaxpr, arrays, [jax.tree_util.keystr(leaves[i][0]) for i in where], out["rebuild"], flat)


def _needs_a_value(fun: Callable[..., Any], error: Exception) -> str:
    name = getattr(fun, "__name__", "the function")
    return (
        f"autocast traces {name}, as jax.jit does, but {traceback_line(error) or 'a line of it'} needs the value of an "
        "array. Put jax.jit's control flow there (jax.lax.cond, jax.lax.while_loop, jnp.where), or apply autocast to "
        f"the part without it. JAX says: {str(error).splitlines()[0]}"
    )


def _writes(fun: Callable[..., Any], path: str) -> str:
    return (
        f"autocast traces {getattr(fun, '__name__', 'the function')}, as jax.jit does, but it writes {path!r} of the "
        "model that runs around it, where a tracer would stay. Apply autocast to the loss or to model.apply, instead "
        "of a part of the model that creates parameters or changes state; mpjax.with_policy(model, policy) returns a "
        "Flax model."
    )


def functional(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """The call as a call of a pure function, with named scopes by path for the NNX modules among its arguments.

    Modules have scopes while a program is traced to be planned. For one that is not, inspections identify modules by
    the parameters that they read. Equinox modules keep the scopes that Equinox gives them: a class with scopes would be
    another pytree, which `eqx.combine` rejects.
    """
    fun, kwargs = objects.with_module(fun, kwargs)
    if not objects.contains_state((args, kwargs)):
        return fun, args, kwargs, lambda out: out

    def scoped(*args: Any, **kwargs: Any) -> Any:
        with named_modules((args, kwargs)) if contexts.planning.value else contextlib.nullcontext():
            return fun(*args, **kwargs)

    return objects.functional(scoped, args, kwargs)


def traced_call(fun: Callable[..., Any], args: Any, kwargs: Any) -> TracedCall:
    """The traced program of a call as it runs, with the casts of any autocast inside.

    Its names are the tree paths of arrays in `(args, kwargs)`, also of those in NNX objects.
    """
    fun, kwargs = objects.with_module(fun, kwargs)
    call, given, keywords, _ = functional(fun, args, kwargs)
    program = trace(call, given, keywords, None)
    if objects.contains_state((args, kwargs)):
        program.names = objects.names(program.names, args, kwargs)
    return program


# Running operations of code that is being traced in another way.


class _Intercepted:
    """A trace that passes some operations to a function, and is otherwise the trace below it."""

    def __init__(self, below: Any, concerns: Callable[..., bool], bind: Callable[..., Any]) -> None:
        self.below, self.concerns, self.bind = below, concerns, bind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def process_primitive(self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /) -> Any:
        if not self.concerns(primitive, args):
            return self.below.process_primitive(primitive, args, params)
        with compat.set_current_trace(self.below):
            return self.bind(primitive, args, params)


@contextlib.contextmanager
def intercepted(concerns: Callable[..., bool], bind: Callable[..., Any]) -> Iterator[None]:
    """A context in which `bind(primitive, args, params)` runs the operations that `concerns(primitive, args)` names.

    Functions under `jit` and loops arrive as one operation, with their jaxpr. Custom derivative rules do not arrive.
    """
    trace = compat.trace_ctx.trace
    below = trace.below if type(trace) is _Intercepted else trace
    with compat.set_current_trace(_Intercepted(below, concerns, bind)):
        yield
