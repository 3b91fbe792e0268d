"""Regions that the user marks: functions with a fixed precision, and code without autocast.

A region is a named scope, which stays with the equations through `jit`, `grad` and `vmap`. Without
autocast it has no effect.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import jax
import numpy as np

from mpjax.casting.setting import FLOAT32, Region
from mpjax.policy import HALF_DTYPES
from mpjax.program import contexts
from mpjax.program.objects import contains_state
from mpjax.program.source import MARK

F = TypeVar("F", bound=Callable[..., Any])


def in_region(region: Region) -> contextlib.AbstractContextManager[Any]:
    """The scope of a region, while a program is traced to be planned."""
    return jax.named_scope(MARK + region) if contexts.planning.value else contextlib.nullcontext()


def _region(name: Region, fun: F) -> F:
    @functools.wraps(fun)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(MARK + name):
            return fun(*args, **kwargs)

    return cast(F, marked)


def half_function(fun: F) -> F:
    """Makes a function run in half under `autocast`; elsewhere it is unchanged.

    Its float32 arguments are half while the function is traced, so that it can call kernels that accept half only. A
    function that raises an error with half arguments and not with float32 ones (a loop in it carries float32 values of
    its own) is traced with float32 arguments, and `explain` says so. All of its operations run in half either way,
    including those on the deny list. Its half results are float32 for its caller.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> @mpjax.half_function
        ... def attention_weights(scores):
        ...     return jnp.exp(scores) / jnp.exp(scores).sum(-1, keepdims=True)
        >>> attention_weights(jnp.zeros((1, 2))).dtype
        dtype('float32')

    Source: NVIDIA Apex, `apex.amp.half_function`; `torch.amp.custom_fwd(cast_inputs=...)`.
    """

    as_written = _region(Region.HALF_AS_WRITTEN, fun)

    @functools.wraps(fun)
    def cast_arguments(*args: Any, **kwargs: Any) -> Any:
        half = None if contexts.autocast_disabled.value else _HALVES.get(contexts.planning.value)
        if half is None:
            return fun(*args, **kwargs)
        if contains_state((args, kwargs)):  # State that the function changes must stay the caller's own.
            return as_written(*args, **kwargs)
        halves, named = _cast((args, kwargs), FLOAT32, half)
        try:
            # The function may close over float32 arrays, which the plan then casts.
            with jax.numpy_dtype_promotion("standard"):
                return _cast(fun(*halves, **named), half, FLOAT32)
        except Exception as error:
            try:
                return as_written(*args, **kwargs)
            except Exception:
                raise error from None

    return _region(Region.HALF, cast(F, cast_arguments))


_HALVES = {dtype.name: dtype for dtype in HALF_DTYPES}


def _cast(tree: Any, before: np.dtype, after: np.dtype) -> Any:
    """A tree with its arrays of one dtype in another."""

    def leaf(x: Any) -> Any:
        return x.astype(after) if isinstance(x, (jax.Array, np.ndarray)) and x.dtype == before else x

    return jax.tree.map(leaf, tree)


def float_function(fun: F) -> F:
    """Makes a function run in float32 under `autocast`, matmuls included; elsewhere it is unchanged.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> router = mpjax.float_function(lambda x, w: x @ w)
        >>> x = jnp.ones((8, 8))
        >>> plan = mpjax.explain(lambda x: jnp.sum(router(x, x) @ x), x)
        >>> [row.dtypes_in[0] for row in plan.rows if row.op == "dot_general"]
        ['float32', 'float16']

    Source: NVIDIA Apex, `apex.amp.float_function`.
    """
    return _region(Region.FLOAT, fun)


def promote_function(fun: F) -> F:
    """Makes a function run in the widest dtype among its inputs under `autocast`; elsewhere it is unchanged.

    Parameters count as float32, so a function of half activations and float32 parameters runs in float32.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> scaled = mpjax.promote_function(lambda scale, x: scale * x)
        >>> x = jnp.ones((4, 4))
        >>> plan = mpjax.explain(lambda scale, x: jnp.sum(scaled(scale, x @ x) @ x), x, x)
        >>> [(row.op, row.dtypes_in[0]) for row in plan.rows][:2]
        [('dot_general', 'float16'), ('mul', 'float32')]

    Source: NVIDIA Apex, `apex.amp.promote_function`.
    """
    return _region(Region.PROMOTE, fun)


@contextlib.contextmanager
def autocast_disabled() -> Iterator[None]:
    """A context in which autocast is off: operations traced inside keep the dtypes of the program.

    Autocast functions called inside run without autocast.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     with mpjax.autocast_disabled():
        ...         exact = x @ w
        ...     return jnp.mean(exact @ w)
        >>> x = jnp.ones((4, 4))
        >>> [row.dtypes_in[0] for row in mpjax.explain(loss, x, x).rows if row.op == "dot_general"]
        ['float32', 'float16']

    Source: `torch.autocast(enabled=False)`.
    """
    with contexts.autocast_disabled(True), jax.named_scope(MARK + Region.OFF):
        yield
