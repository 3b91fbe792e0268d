"""The error of a foreign function under autocast, against that of careful casts by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.program.tracing import functional, is_array
from testing import by_hand

# Keeps gradients in float16's range, as in training; a power of two rounds nothing.
LOSS_SCALE = 2.0**10


def is_from_outside(args: Any, kwargs: Any) -> bool:
    """Whether a call is made by a test, and not while another function is traced."""
    leaves = jax.tree.leaves((args, kwargs))
    return jax._src.core.trace_state_clean() and not any(isinstance(x, jax.core.Tracer) for x in leaves)


def compare(plain: Any, cast: Any, args: Any, kwargs: Any, half: str) -> dict[str, Any]:
    """The ratios of the errors of the values and of the gradient, or why they can't be had."""
    found: dict[str, Any] = {}
    for name, of in (("values", _values), ("gradient", _gradient)):
        try:
            arrays = _arrays(args, kwargs)
            trace = lambda fun, of=of, arrays=arrays: jax.make_jaxpr(of(fun, args, kwargs))(arrays)
            first, rewritten = trace(plain), trace(cast)
            ratio = by_hand.ratio(first, rewritten, arrays, half) if first.out_avals else None
            if ratio is not None and ratio > 1:
                jax.clear_caches()
                if by_hand.differ(first, trace(plain), arrays):
                    continue  # Linen counts the random numbers that a trace draws, for one.
            found[name] = ratio
        except Exception as error:  # a limitation of JAX, NumPy or autocast; the other modes judge it
            found[f"{name} not compared"] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def _arrays(args: Any, kwargs: Any) -> list[Any]:
    _, args, kwargs, _ = functional(lambda: None, args, kwargs)
    return [jnp.asarray(x) for x in jax.tree.leaves((args, kwargs)) if is_array(x)]


def _values(fun: Any, args: Any, kwargs: Any) -> Any:
    """The call as a function of its arrays; returns the results that are real floats."""
    call, args, kwargs, _ = functional(fun, args, kwargs)
    leaves, tree = jax.tree.flatten((args, kwargs))

    def values(arrays: Any) -> list[Any]:
        rest = iter(arrays)
        args, kwargs = jax.tree.unflatten(tree, [next(rest) if is_array(x) else x for x in leaves])
        outs = jax.tree.leaves(call(*args, **kwargs))
        return [x for x in outs if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)]

    return values


def _gradient(fun: Any, args: Any, kwargs: Any) -> Any:
    """The gradient of a random sum of the call's results."""
    values = _values(fun, args, kwargs)

    def gradient(arrays: Any) -> Any:
        where = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def total(floats: Any) -> Any:
            filled = list(arrays)
            for i, x in zip(where, floats, strict=True):
                filled[i] = x
            rng = np.random.default_rng(0)
            outs = values(filled)
            weighted = (jnp.sum(x.astype(jnp.float32) * rng.normal(size=x.shape).astype(np.float32)) for x in outs)
            return LOSS_SCALE * sum(weighted)

        return [g / LOSS_SCALE for g in jax.grad(total)([arrays[i] for i in where])]

    return gradient
