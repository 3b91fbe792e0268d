"""The identity on the results of float16 code outside of any scaled loss, which warns where they are differentiated.

Cotangents enter float16 code at its results. If no loss scale is around it, those below float16's smallest number
become zero there. So the warning is a transpose rule: every way to take a gradient calls it (`jax.grad`, `jax.vjp`,
`nnx.grad`, in `jit`, `scan` or `shard_map`), and evaluation and forward mode do not. XLA never sees the primitive.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad

from mpjax.kernels import staging
from mpjax.kernels.derivatives import set_identity, set_linear
from mpjax.program import compat, contexts
from mpjax.program.source import user_stacklevel


class UnscaledGradientWarning(UserWarning):
    """float16 code was differentiated, and no loss scale was around it.

    Example:
        >>> import warnings, jax, jax.numpy as jnp, mpjax
        >>> loss = mpjax.autocast(lambda w: jnp.mean((w @ w) ** 2), "mixed_float16")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = jax.grad(loss)(jnp.ones((8, 8)))
        >>> str(caught[0].message)
        "float16 is differentiated without loss scaling, so small gradients become zero. Use mpjax.value_and_grad..."
    """


_MESSAGE = (
    "float16 is differentiated without loss scaling, so small gradients become zero. Use "
    "mpjax.value_and_grad(loss_fn, opt_state) with tx = mpjax.dynamic_loss_scale(tx), or the policy 'mixed_bfloat16'. "
    "(Does the loop multiply the loss itself? Then give dynamic_loss_scale(tx, grads_are_scaled=True).)"
)
unscaled = Primitive("unscaled")
# What the living optimizers hold whose training loops multiply the loss by the scale themselves.
_scaling_loops: weakref.WeakSet[Any] = weakref.WeakSet()


def note_scaling_loop(owner: Any) -> None:
    """Keeps the warning quiet as long as `owner` lives: its training loop multiplies the loss by the scale itself."""
    _scaling_loops.add(owner)


def marked(x: Any, backward: bool) -> Any:
    """A result of float16 code, which warns where it is differentiated.

    Args:
        x: The result.
        backward: Whether the code contains an unscaled backward pass itself, for `audit`.
    """
    if not isinstance(x, jax.core.Tracer) or not compat.is_inexact(jax.typeof(x)) or compat.under_jet():
        return x
    return staging.bind(unscaled, [x], {"backward": backward}, [jax.typeof(x)])


def is_outside_scaled_losses() -> bool:
    """Whether code runs neither in a scaled loss nor in the planning of an autocast around it."""
    return contexts.scaled_losses.value is None and not contexts.planning.value


def warn() -> bool:
    """Warns about the user's line, unless its training loop scales by itself. Returns whether it does not."""
    if _scaling_loops:
        return False
    warnings.warn(_MESSAGE, UnscaledGradientWarning, stacklevel=user_stacklevel())
    return True


def _transpose(ct: Any, x: Any, *, backward: bool) -> list[Any]:
    if type(ct) is ad.Zero or not is_outside_scaled_losses() or not warn():
        return [ct]
    return [unscaled.bind(ct, backward=True)]


set_identity(unscaled)
set_linear(unscaled, _transpose)
