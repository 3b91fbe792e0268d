"""Gradients with a loss scale inside: scaled where they are half, true wherever a person sees them.

The scale lives on the cotangents alone. It enters where the backward pass starts, at the loss, and
leaves, in float32, where the backward pass ends, at the arguments. The forward pass never
sees it, so the loss can not overflow by it and needs no unscaling.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._cotangents import is_differentiable, is_overwritten, scale_cotangent, unscale_by
from mpjax._loss_scale_state import loss_scale_of
from mpjax.modules.boundary import InPlaceChanges, contains_nnx_object, map_arrays, with_boundary
from mpjax.policy import is_castable, is_half

T = TypeVar("T")


def scale_loss(fun: Callable[..., T], opt_state: Any, has_aux: bool = False) -> Callable[..., T]:
    """A function with the same value as `fun`, whose backward pass runs on scaled cotangents.

    With S the loss scale of `opt_state` and f = `fun`:

        forward    value = f(args)                       S does not appear
        backward   cotangent of the value × S  →  backward pass of f  →  ÷ S in float32 at the arguments

    So `jax.grad`, `jax.value_and_grad`, `nnx.value_and_grad`, `eqx.filter_grad`, `jax.jacrev`, per-example
    gradients (`vmap` of `grad`) and gradient penalties return true gradients, and an overflow on
    the way shows as inf or NaN in them. `fun` may take NNX modules and change their state.

    Args:
        fun: any differentiable function; all its real or complex outputs are losses to it.
        opt_state: a state that holds one `LossScaleState` (also a `TrainState` or an `nnx.Optimizer`).
        has_aux: `fun` returns `(loss, aux)`; for the signature's sake, `aux` needs no other treatment.

    Returns:
        A function with `fun`'s signature.

    Raises:
        ValueError: no (or more than one) `LossScaleState` in `opt_state`.
        TypeError: when differentiated at a half-precision argument (use `value_and_grad`), or when
            `has_aux` is set and `fun` returns no pair.

    A custom derivative in `fun` that is not linear in its cotangent (a gradient clip written as a
    `custom_vjp`) sees scaled cotangents; wrap that part with `unscaled`.

    Example:
        >>> import optax, mpjax
        >>> opt_state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init({})
        >>> tiny = jnp.float16(2.0**-20)
        >>> loss = lambda w: (w.astype(jnp.float16) * tiny).astype(jnp.float32) * 2.0**-10
        >>> float(jax.grad(loss)(1.0 + jnp.zeros(())))  # 2**-30 underflows in float16
        0.0
        >>> float(jax.grad(mpjax.scale_loss(loss, opt_state))(1.0 + jnp.zeros(()))) == 2.0**-30
        True

    Source: Micikevicius et al. 2018, section 3.2 (https://arxiv.org/abs/1710.03740).
    """
    scale = _one_scale("scale_loss", opt_state)
    inverse = 1.0 / scale

    def enter(path: str, x: Any) -> Any:
        return scale_cotangent(x, inverse, path) if is_differentiable(x) and not is_overwritten(path) else x

    def leave(path: str, x: Any) -> Any:
        return scale_cotangent(x, scale) if is_differentiable(x) else x

    if not has_aux:
        return with_boundary(fun, enter, leave)

    @functools.wraps(fun)
    def with_aux(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                f"scale_loss(has_aux=True): the function must return (loss, aux), got {type(out).__name__}."
            )
        return out

    return with_boundary(with_aux, enter, leave)


def unscaled(fun: Callable[..., T], opt_state: Any) -> Callable[..., T]:
    """Runs a part of a scaled loss function so that its backward pass sees true cotangents.

    For a derivative rule that is not linear in its cotangent, such as a gradient clip or
    gradient noise inside the model: the cotangents are unscaled before it and scaled again behind it.
    True cotangents are what float16 can not hold, so `fun` runs in float32: half arguments are
    widened on the way in, and results rounded to the dtypes `fun` gives for the arguments as they are.

    Args:
        fun: the part, a function of arrays or trees of arrays.
        opt_state: the state that the surrounding `scale_loss` or `value_and_grad` got.

    Example:
        >>> import optax, mpjax
        >>> @jax.custom_vjp
        ... def clip_gradient(x):
        ...     return x
        >>> clip_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1.0, 1.0),))
        >>> opt_state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init({})
        >>> f = lambda x: 0.5 * mpjax.unscaled(clip_gradient, opt_state)(x)
        >>> float(mpjax.grad(f, opt_state)(1.0 + jnp.zeros(())))
        0.5
    """
    scale = _one_scale("unscaled", opt_state)
    inverse = 1.0 / scale

    # On the way back: unscaled where the cotangents enter the part, at its results; scaled again where they leave it.
    def enter(path: str, x: Any) -> Any:
        wide = x.astype(jnp.float32) if is_half(x) else x
        return scale_cotangent(wide, scale) if is_differentiable(wide) else x

    def leave(path: str, x: Any) -> Any:
        return scale_cotangent(x, inverse, path) if is_differentiable(x) and not is_half(x) else x

    @functools.wraps(fun)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        dtypes = jax.eval_shape(fun, *args, **kwargs)
        out = with_boundary(fun, enter, leave)(*args, **kwargs)
        return jax.tree.map(lambda x, like: x.astype(like.dtype) if is_castable(x) else x, out, dtypes)

    return in_float32


def value_and_grad(
    fun: Callable[..., Any],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """The true value and the true float32 gradients of a loss that is differentiated with scaling.

    `jax.value_and_grad(scale_loss(fun, opt_state))`, and one thing more: a half-precision leaf of
    a differentiated argument (policies O2, O3) is differentiated at a float32 copy that `fun` gets
    rounded back, so its gradient is unscaled in float32 and returned in float32.

    Args:
        fun: scalar-valued function, or `(scalar, aux)` with `has_aux`. If a differentiated argument
            is an NNX module, its `nnx.Param`s are differentiated, as by `nnx.value_and_grad`.
        opt_state: where the loss scale is found; `None` for no scaling.
        policy: what `get_policy` accepts: `fun` runs under `mpjax.autocast(fun, policy)`, on float32
            copies of half params. `None` runs it as it is (a model may have its policy by `with_policy`).
        argnums: positions to differentiate, as in `jax.value_and_grad`.
        has_aux: whether `fun` returns `(loss, aux)`.

    Returns:
        A function with `fun`'s signature that returns `(value, gradients)`.

    Raises:
        ValueError: no (or more than one) `LossScaleState` in `opt_state`; `argnums` out of range;
            unknown policy.

    Example:
        >>> import optax, mpjax
        >>> opt_state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init({})
        >>> value, grads = mpjax.value_and_grad(lambda w, x: jnp.sum(w * x), opt_state)(
        ...     jnp.ones(2, jnp.float16), jnp.full(2, 3e-8, jnp.float16))
        >>> grads.dtype, float(grads[0])
        (dtype('float32'), 5.96...e-08)
    """
    cast_fun = fun if policy is None else _autocast(fun, policy)
    if opt_state is not None:
        _one_scale("value_and_grad", opt_state)  # a state without a scale is told here, not at the first step

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        positions = _positions(argnums, len(args))
        half_dtypes: dict[str, np.dtype] = {}

        def widen(path: str, x: Any) -> Any:
            if not is_half(x):
                return x
            half_dtypes[path] = x.dtype
            return x.astype(jnp.float32)

        def narrow(path: str, x: Any) -> Any:
            return x.astype(half_dtypes[path]) if path in half_dtypes else x

        wide = [map_arrays(widen, a, InPlaceChanges(), str(i)) if i in positions else a for i, a in enumerate(args)]
        try:
            # Autocast casts float32 params itself; all else gets the half ones that its author meant.
            narrows = half_dtypes and policy is None
            narrowed = with_boundary(fun, narrow, lambda _, x: x) if narrows else cast_fun
            scaled = narrowed if opt_state is None else scale_loss(narrowed, opt_state, has_aux)
            with_nnx = any(contains_nnx_object(args[i]) for i in positions)
            transform = sys.modules["flax.nnx"].value_and_grad if with_nnx else jax.value_and_grad
            return transform(scaled, argnums=argnums, has_aux=has_aux)(*wide, **kwargs)
        finally:
            # An NNX module was widened in place; whatever the call left in it goes back to half.
            for i in positions if half_dtypes else ():
                map_arrays(narrow, args[i], InPlaceChanges(), str(i))

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """The true float32 gradients alone; `(gradients, aux)` with `has_aux`. See `value_and_grad`.

    Example:
        >>> import mpjax
        >>> mpjax.grad(lambda w: w**2)(jnp.float16(3.0)).dtype
        dtype('float32')
    """
    both = value_and_grad(fun, opt_state, policy=policy, argnums=argnums, has_aux=has_aux)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def unscale(grads: T, opt_state: Any) -> T:
    """Divides gradients of a loss that the caller multiplied by the loss scale, in float32.

    For loops that scale the loss themselves (together with `grads_are_scaled=True`, which expects
    gradients that were *not* yet unscaled) and want true gradients for logging or clipping.

    Args:
        grads: tree of gradients; float16 and bfloat16 leaves become float32, others keep their dtype.
        opt_state: the state whose loss scale was used, *before* `tx.update` changed it. If its scale has mapped
            axes (a state outside of its `vmap` or `pmap`), each member of `grads` is divided by its own.

    Example:
        >>> import optax, mpjax
        >>> opt_state = mpjax.static_loss_scale(optax.sgd(0.1), 8.0).init({})
        >>> float(unscale(jnp.float16(4.0), opt_state))
        0.5
    """
    return unscale_by(grads, loss_scale_of(opt_state))


def _one_scale(name: str, opt_state: Any) -> jax.Array:
    scale = loss_scale_of(opt_state)
    if scale.ndim:
        raise ValueError(
            f"{name}: the loss scale has shape {scale.shape}, one for each member of a vmap or pmap: which one scales "
            f"this loss? Call mpjax.{name} inside of the vmap or pmap, with the member's own state."
        )
    return scale


def _autocast(fun: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    from mpjax.casting import autocast  # here, so that loss scaling stands without it

    return autocast(fun, policy)


def _positions(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    given = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for i in given:
        if not -count <= i < count:
            raise ValueError(
                f"argnums={argnums!r} is out of range: the function was called with {count} positional arguments."
            )
    return tuple(i % count for i in given)
