"""What mpjax's names mean without a loss scale: the plain JAX program that a scaled one must equal bitwise.

A program's source is executed twice, once with mpjax and once with this namespace in its place. Everything here is
written the obvious way: no boundary, no `lax.cond`, no fused update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

import mpjax
from testing.random_training.half_state import is_half, kahan, low_bit_state, stochastic_rounding, toward, wide

Function = Callable[..., Any]


def _like(tree: Any, original: Any) -> Any:
    return jax.tree.map(lambda x, old: x.astype(old.dtype), tree, original)


def _has_nnx(tree: Any) -> bool:
    return any(isinstance(x, nnx.Module) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Module)))


# Gradients.


def node(x: Any) -> Any:
    """The identity, as an operation: the cotangents of all uses of its result are added before those of other uses."""
    return x * np.asarray(1, x.dtype) if eqx.is_inexact_array(x) else x


def value_and_grad(
    fun: Function, opt_state: Any = None, *, policy: Any = None, argnums: Any = 0, has_aux: bool = False
) -> Function:
    """The gradients at float32 copies of half leaves."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _has_nnx(args):
            return nnx.value_and_grad(fun, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
        which = (argnums,) if isinstance(argnums, int) else argnums
        parts = [eqx.partition(args[i], eqx.is_inexact_array) for i in which]

        def at(chosen: Any) -> Any:
            own = list(args)
            for i, part, (old, static) in zip(which, chosen, parts, strict=True):
                own[i] = eqx.combine(_like(jax.tree.map(node, part), old), static)
            return fun(*own, **kwargs)

        found, grads = jax.value_and_grad(at, has_aux=has_aux)([wide(part) for part, _ in parts])
        return found, grads[0] if isinstance(argnums, int) else tuple(grads)

    return call


def grad(fun: Function, opt_state: Any = None, *, argnums: Any = 0, has_aux: bool = False) -> Function:
    """The gradients, or the gradients and the auxiliary results."""

    def call(*args: Any, **kwargs: Any) -> Any:
        found, grads = value_and_grad(fun, argnums=argnums, has_aux=has_aux)(*args, **kwargs)
        return (grads, found[1]) if has_aux else grads

    return call


def scale_loss(fun: Function, opt_state: Any, has_aux: bool = False) -> Function:
    """The function itself."""
    return lambda *args, **kwargs: fun(*jax.tree.map(node, args), **kwargs) if not _has_nnx(args) else fun(*args)


# The optimizer.


def _select(taken: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(taken, n, o), new, old)


def _all_finite(tree: Any) -> jax.Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in leaves]).all()


def _scaled(inner: Any, init_scale: float, kwargs: dict[str, Any]) -> Any:
    inner = inner.gradient_transformation() if isinstance(inner, optax.MultiSteps) else inner
    inner = optax.with_extra_args_support(inner)
    interval, hysteresis = kwargs.get("growth_interval", 2000), kwargs.get("hysteresis", 1)
    low, high = kwargs.get("min_scale", 2.0**-14), kwargs.get("max_scale", 2.0**24)
    growth, backoff = kwargs.get("growth_factor", 2.0), kwargs.get("backoff_factor", 0.5)
    axis = kwargs.get("axis_name")
    i32 = lambda x: jnp.asarray(x, jnp.int32)

    def init(params: Any) -> Any:
        return mpjax.LossScaleState(
            loss_scale=jnp.float32(init_scale),
            good_steps=i32(0),
            skipped_steps=i32(0),
            consecutive_skips=i32(0),
            last_finite=jnp.asarray(True),
            inner_state=inner.init(eqx.filter(params, eqx.is_inexact_array)),
            nonfinite_losses=i32(0),
            consecutive_nonfinite_losses=i32(0),
        )

    def update(grads: Any, state: Any, params: Any = None, value: Any = None, **extra: Any) -> Any:
        # Overflow is defined by float32's range: the scaled gradients leave it.
        scaled = jax.tree.map(lambda g: g.astype(jnp.float32) * state.loss_scale, grads)
        loss_ok = _all_finite(value) if value is not None else jnp.asarray(True)
        grads_ok = _all_finite(scaled)
        if axis is not None:
            loss_ok, grads_ok = (lax.pmin(ok.astype(jnp.int32), axis) > 0 for ok in (loss_ok, grads_ok))
        taken = loss_ok & grads_ok
        extra = extra if value is None else {**extra, "value": value}
        updates, inner_state = inner.update(grads, state.inner_state, params, **extra)
        skips = jnp.where(taken, 0, state.consecutive_skips + 1)
        good = jnp.where(taken, state.good_steps + 1, 0)
        grow, back_off = good >= interval, ~taken & loss_ok & (skips >= hysteresis)
        scale = jnp.where(grow, state.loss_scale * growth, state.loss_scale)
        scale = jnp.where(back_off, scale * backoff, scale)
        return _select(taken, updates, jax.tree.map(jnp.zeros_like, updates)), mpjax.LossScaleState(
            loss_scale=jnp.clip(scale, low, high),
            good_steps=jnp.where(grow, 0, good),
            skipped_steps=state.skipped_steps + jnp.where(taken, 0, 1),
            consecutive_skips=skips,
            last_finite=taken,
            inner_state=_select(taken, inner_state, state.inner_state),
            nonfinite_losses=state.nonfinite_losses + jnp.where(loss_ok, 0, 1),
            consecutive_nonfinite_losses=jnp.where(loss_ok, 0, state.consecutive_nonfinite_losses + 1),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def dynamic_loss_scale(inner: Any, *, init_scale: float = 2.0**15, **kwargs: Any) -> Any:
    """Skips as loss scaling does, and counts what the scale would be."""
    return _scaled(inner, init_scale, kwargs)


def static_loss_scale(inner: Any, scale: float, **kwargs: Any) -> Any:
    """The same with a fixed scale."""
    return _scaled(inner, scale, {**kwargs, "min_scale": scale, "max_scale": scale})


def loss_scale_for(inner: Any, policy: Any, **kwargs: Any) -> Any:
    """By the policy's compute dtype."""
    half = mpjax.get_policy(policy).compute_dtype == jnp.float16
    return dynamic_loss_scale(inner, **kwargs) if half else static_loss_scale(inner, 1.0)


def _state(opt_state: Any) -> mpjax.LossScaleState:
    is_state = lambda x: isinstance(x, mpjax.LossScaleState)
    (found,) = (x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x))
    return found


def keep_if_finite(opt_state: Any, new: Any, old: Any) -> Any:
    """`new`, or `old` after a skipped step."""
    return _select(_state(opt_state).last_finite, new, old)


@contextlib.contextmanager
def restore_if_skipped(module: Any, optimizer: Any) -> Iterator[None]:
    """Restores the variables that are not parameters after a skipped step."""
    skipped = _state(nnx.as_pure(optimizer.opt_state)).skipped_steps
    old = nnx.as_pure(nnx.state(module, nnx.Not(nnx.Param)))
    yield
    taken = _state(nnx.as_pure(optimizer.opt_state)).skipped_steps == skipped
    nnx.update(module, _select(taken, nnx.as_pure(nnx.state(module, nnx.Not(nnx.Param))), old))


def apply_gradients(tx: Any, grads: Any, opt_state: Any = None, params: Any = None, **extra: Any) -> Any:
    """The update, then its application."""
    if isinstance(tx, TrainState):
        new, opt_state = apply_gradients(tx.tx, grads, tx.opt_state, tx.params, **extra)
        return tx.replace(step=tx.step + 1, params=new, opt_state=opt_state)
    if isinstance(opt_state, nnx.Optimizer):
        return opt_state.update(params, grads, **extra)
    arrays, static = eqx.partition(params, eqx.is_inexact_array)
    updates, opt_state = optax.with_extra_args_support(tx).update(grads, opt_state, arrays, **extra)
    return eqx.combine(optax.apply_updates(arrays, updates), static), opt_state


def master_weights(inner: Any, policy: Any = "O2") -> Any:
    """Float32 masters in the state; the params are the rounded masters."""
    if not jnp.finfo(mpjax.get_policy(policy).param_dtype).bits < 32:
        return inner
    inner = optax.with_extra_args_support(inner)
    masked = lambda params, full: jax.tree.map(lambda p, f: f if is_half(p) else optax.MaskedNode(), params, full)
    is_masked = lambda x: isinstance(x, optax.MaskedNode)

    def full_of(params: Any, master: Any) -> Any:
        return jax.tree.map(lambda p, m: p if is_masked(m) else m, params, master)

    def init(params: Any) -> Any:
        return mpjax.MasterWeightsState(masked(params, wide(params)), inner.init(wide(params)))

    def update(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
        full = full_of(params, state.master)
        updates, inner_state = inner.update(wide(grads), state.inner_state, full, **extra)
        target = optax.apply_updates(full, updates)
        return toward(params, target, updates), mpjax.MasterWeightsState(masked(params, target), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _same(fun: Any, *args: Any, **kwargs: Any) -> Any:
    return fun


PLAIN: dict[str, Any] = {
    "value_and_grad": value_and_grad,
    "grad": grad,
    "scale_loss": scale_loss,
    "true_cotangents": _same,
    "unscale": _same,
    "autocast": _same,
    "Rules": mpjax.Rules,
    "Float8": mpjax.Float8,
    "with_policy": _same,
    "dynamic_loss_scale": dynamic_loss_scale,
    "static_loss_scale": static_loss_scale,
    "loss_scale_for": loss_scale_for,
    "keep_if_finite": keep_if_finite,
    "restore_if_skipped": restore_if_skipped,
    "apply_gradients": apply_gradients,
    "master_weights": master_weights,
    "stochastic_rounding": stochastic_rounding,
    "kahan": kahan,
    "low_bit_state": low_bit_state,
}

# With `jax.jit` where mpjax traces a function to find what it closes over.
JITTED = {
    **PLAIN,
    "scale_loss": lambda fun, opt_state, has_aux=False: jax.jit(fun),
    "true_cotangents": lambda fun, opt_state: jax.jit(fun),
}
