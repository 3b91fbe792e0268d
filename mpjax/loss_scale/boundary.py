"""Loss scaling of cotangents: scaled inside the backward pass, true gradients outside of it.

Only cotangents are scaled. They are multiplied at the loss, where the backward pass starts, and divided in
float32 at the arguments and at the values that the function closes over, where it ends. The forward pass is not
scaled, so scaling can't make the loss overflow, and the loss needs no unscaling. Tangents (forward mode) are not
scaled either.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from mpjax.loss_scale import cotangents
from mpjax.loss_scale.closures import Call, closed
from mpjax.loss_scale.cotangents import crossed, is_differentiable, is_overwritten, level, levels, unscale_by, widened
from mpjax.loss_scale.state import loss_scale_of
from mpjax.loss_scale.usage import warn_of_gradients_divided_twice, warn_of_rules_outside
from mpjax.policy import is_half
from mpjax.program import compat, contexts
from mpjax.program.objects import filled
from mpjax.program.source import OUTSIDE, SCALED

P = ParamSpec("P")
T = TypeVar("T")


def scale_loss(fun: Callable[P, T], opt_state: Any, has_aux: bool = False) -> Callable[P, T]:
    """Wraps a function so that its backward pass runs on scaled cotangents. Its value is unchanged.

    With S the loss scale of `opt_state` and f = `fun`:

        forward    value = f(args)                       S does not appear
        backward   cotangent of the value × S  →  backward pass of f  →  ÷ S in float32 at the arguments

    Therefore `jax.grad`, `jax.value_and_grad`, `nnx.value_and_grad`, `eqx.filter_grad`, `jax.jacrev`, per-example
    gradients (`vmap` of `grad`) and gradient penalties return true gradients. An overflow in
    the backward pass shows as inf or NaN in them. `fun` may take NNX modules and change their state.

    Args:
        fun: Any differentiable function. All of its real or complex outputs are treated as losses.
        opt_state: A state that holds one `LossScaleState` (also a `TrainState` or an `nnx.Optimizer`).
        has_aux: Whether `fun` returns `(loss, aux)`. `aux` is treated like any other result.

    Returns:
        A function with `fun`'s signature.

    Raises:
        ValueError: No (or more than one) `LossScaleState` in `opt_state`.
        TypeError: The function is differentiated at a half-precision argument (use `value_and_grad`), or
            `has_aux` is set and `fun` does not return a pair.

    A custom derivative in `fun` that is not linear in its cotangent (a gradient clip written as a `custom_vjp`, or one
    that returns a stored gradient) sees scaled cotangents, and a `NonlinearRuleWarning` names it; wrap that part with
    `true_cotangents`.

    Example:
        >>> import jax, jax.numpy as jnp, optax, mpjax
        >>> opt_state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init({})
        >>> tiny = jnp.float16(2.0**-20)
        >>> loss = lambda w: (w.astype(jnp.float16) * tiny).astype(jnp.float32) * 2.0**-10
        >>> float(jax.grad(loss)(1.0 + jnp.zeros(())))  # 2**-30 underflows in float16
        0.0
        >>> float(jax.grad(mpjax.scale_loss(loss, opt_state))(1.0 + jnp.zeros(()))) == 2.0**-30
        True

    Source: Micikevicius et al. 2018, section 3.2 (https://arxiv.org/abs/1710.03740).
    """
    scale = one_scale("scale_loss", opt_state)
    run = checked_aux("scale_loss", fun) if has_aux else fun

    @functools.wraps(fun)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        if not compat.is_tracing():
            return run(*args, **kwargs)  # nothing is differentiated
        call, inverse = Call(run, args, kwargs), 1.0 / scale

        def results(mark: jax.Array, *arrays: Any) -> list[Any]:
            with level(scale, mark, contexts.scaled_losses.value):
                return call.results(*arrays)

        inside, hoisted = closed("scale_loss", results, [np.float32(0), *call.arrays])
        names = [*call.names, *("a value that the function closes over" for _ in hoisted)]
        arrays = [*call.arrays, *hoisted]
        # Values of Flax's FP8 collection are unchanged.
        where = [i for i, x in enumerate(arrays) if is_differentiable(x) and not is_overwritten(names[i])]
        with jax.named_scope(SCALED):
            entered, mark = cotangents.enter([arrays[i] for i in where], inverse, tuple(names[i] for i in where))
        with level(scale, mark, contexts.scaled_losses.value):  # for derivative rules, which run now
            outs = inside([mark, *filled(arrays, where, entered)])
        return call.finish(crossed(outs, scale, inverse, mark))

    return scaled


def checked_aux(caller: str, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, which must return a pair."""

    @functools.wraps(fun)
    def with_aux(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"{caller}(has_aux=True): the function must return (loss, aux), got {type(out).__name__}.")
        return out

    return with_aux


def true_cotangents(fun: Callable[P, T], opt_state: Any) -> Callable[P, T]:
    """Wraps a part of a scaled loss function so that its backward pass sees true cotangents.

    Use it for a derivative rule that is not linear in its cotangent, such as a gradient clip or gradient noise
    inside the model. In the backward pass the cotangents are unscaled before the rule and rescaled after it.
    float16 can't represent true cotangents, so `fun` runs in float32: half arguments are widened,
    and results are rounded to the dtypes that `fun` returns for the original arguments.

    It may be part of a function with a derivative rule of its own, whose backward pass computes it again: the
    derivatives that the rules of a `custom_vjp` take receive its cotangents, and so are unscaled too.

    Only the cotangents of the scaled losses that the call belongs to are unscaled. All other derivatives, taken within
    such a loss, of its gradient, or outside, see the function itself. In a loss that is multiplied by the scale by hand
    the rule therefore sees scaled cotangents, and `unscale` or the update warns; use `scale_loss` there.

    Args:
        fun: A function of arrays or trees of arrays.
        opt_state: The state given to the surrounding `scale_loss` or `value_and_grad`.

    Example:
        >>> import jax, jax.numpy as jnp, optax, mpjax
        >>> @jax.custom_vjp
        ... def clip_gradient(x):
        ...     return x
        >>> clip_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1.0, 1.0),))
        >>> opt_state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init({})
        >>> f = lambda x: 0.5 * mpjax.true_cotangents(clip_gradient, opt_state)(x)
        >>> float(mpjax.grad(f, opt_state)(1.0 + jnp.zeros(())))
        0.5
    """
    of_rules = one_scale("true_cotangents", opt_state)

    @functools.wraps(fun)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        if _is_initializing(fun):
            return fun(*args, **kwargs)
        call = Call(fun, args, kwargs)
        wide = widened(call.arrays)
        if compat.is_tracing():
            with contexts.scaled_losses(()):
                inside, hoisted = closed("true_cotangents", call.results, wide)
            entered, scaled = [*wide, *widened(hoisted)], levels(of_rules)
            for scale, mark in scaled or ():
                entered = crossed(entered, scale, 1.0 / scale, mark)
            back = [x.astype(like.dtype) for x, like in zip(entered[len(wide) :], hoisted, strict=True)]
            with jax.named_scope(OUTSIDE) if scaled is None else contextlib.nullcontext():
                found = inside([*entered[: len(wide)], *back])
            outs = widened(found)
            for scale, mark in scaled or ():
                outs = crossed(outs, 1.0 / scale, scale, mark)
        else:
            outs = found = call.results(*wide)
        like = jax.eval_shape(call.results, *call.arrays) if any(map(is_half, call.arrays)) else found
        return call.finish([x.astype(to.dtype) for x, to in zip(outs, like, strict=True)])

    return in_float32


def _is_initializing(fun: Any) -> bool:
    """Whether `fun` is a Linen module, or its method, that creates its params, which Flax allows in no inner trace."""
    linen = sys.modules.get("flax.linen")
    module = getattr(fun, "__self__", fun)
    return (
        linen is not None and isinstance(module, linen.Module) and module.scope is not None and module.is_initializing()
    )


def unscale(grads: T, opt_state: Any) -> T:
    """Divides gradients by the loss scale, in float32.

    Use it in loops that multiply the loss by the scale themselves and need true gradients for logging or
    clipping. Pass the *scaled* gradients to a `tx` with `grads_are_scaled=True`.

    Args:
        grads: Tree of gradients. float16 and bfloat16 leaves become float32, others keep their dtype.
        opt_state: The state whose loss scale was used, *before* `tx.update` changed it. If its scale has mapped
            axes (a state outside its `vmap` or `pmap`), each member of `grads` is divided by its own scale.

    Example:
        >>> import jax.numpy as jnp, optax, mpjax
        >>> opt_state = mpjax.static_loss_scale(optax.sgd(0.1), 8.0).init({})
        >>> float(mpjax.unscale(jnp.float16(4.0), opt_state))
        0.5
    """
    warn_of_rules_outside()
    warn_of_gradients_divided_twice(grads, "mpjax.unscale", "Leave it out.")
    return unscale_by(grads, loss_scale_of(opt_state))


def one_scale(name: str, opt_state: Any) -> jax.Array:
    """The loss scale of a state, shape (). Raises if the state has one for each member of a `vmap`."""
    scale = loss_scale_of(opt_state)
    if scale.ndim:
        raise ValueError(
            f"{name}: the loss scale has shape {scale.shape}, one for each member of a vmap or pmap, so it is "
            f"unclear which one scales this loss. Call mpjax.{name} inside the vmap or pmap, with the member's state."
        )
    return scale
