"""Faults of loss scaling that appear in users' training loops, with their models, optimizers and meshes."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax import nnx
from flax.linen import fp8_ops
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import AxisType, PartitionSpec

import mpjax
from benchmarks.loss_scaling_forms import forms
from testing import cheap_keys

from .fault import Fault, Probe, does_not_run
from .scaling import Mpjax, Scaler, over_forms, over_scalers

X = jnp.ones((4, 2))
BAD = X.at[0, 0].set(jnp.inf)


def fp8_values_are_divided(scaler: Scaler) -> bool:
    """The amax history of the inputs, which Flax returns as a gradient."""
    model: Any = nn.Dense(16, dot_general_cls=fp8_ops.Fp8DotGeneralOp)
    x = jnp.ones((16, 16))
    state, loss = scaler.init(2.0**10), lambda v: jnp.mean(model.apply(v, x) ** 2)

    @jax.jit
    def largest(key: jax.Array) -> jax.Array:
        variables = model.init(key, x)
        if isinstance(scaler, Mpjax):
            grads = mpjax.grad(loss, state)(variables)  # its update takes only what is optimized
        else:
            _, grads, _ = scaler.step(state, loss, variables)
        return jnp.max(grads["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"]["input_amax_history"])

    return float(largest(cheap_keys.key(0))) != 1.0


class Normalised(nnx.Module):
    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))


def live_state_is_no_snapshot(select: Callable[[Any, Any, Any], Any]) -> bool:
    """`old = nnx.state(model)`, a step that overflows, and restoring the old state; an error is as good."""
    model, tx = nnx.jit(Normalised)(), mpjax.dynamic_loss_scale(optax.sgd(0.1))
    old = nnx.state(model, nnx.BatchStat)
    opt_state = jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params)[1])(BAD, X)
    nnx.jit(lambda norm: norm(BAD))(model.norm)
    try:
        nnx.update(model, select(opt_state, nnx.state(model, nnx.BatchStat), old))
    except ValueError:
        return False
    return not np.isfinite(model.norm.mean[...]).all()


def members_are_mixed_up(select: Callable[[Any, Any, Any], Any]) -> bool:
    """Two members of an ensemble, as many as features; the second one was skipped."""
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))

    @jax.jit
    def kept(grads: jax.Array, new: jax.Array, old: jax.Array) -> Any:
        _, states = jax.vmap(tx.update)(grads, jax.vmap(tx.init)(old))
        return select(states, new, old)

    grads, ones = np.array([[1.0, 1.0], [np.inf, 1.0]], np.float32), np.ones((2, 2), np.float32)
    return np.asarray(kept(grads, 2 * ones, ones)).tolist() != [[2.0, 2.0], [1.0, 1.0]]


def _where(opt_state: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(opt_state.last_finite, n, o), new, old)


def _jmp_select(opt_state: Any, new: Any, old: Any) -> Any:
    return jmp.select_tree(opt_state.last_finite, new, old)


SELECTORS = {"mpjax": mpjax.keep_if_finite, "Flax": _where, "jmp": _jmp_select}


def over_selectors(probe: Callable[[Callable[[Any, Any, Any], Any]], bool]) -> dict[str, Probe]:
    """The probe for each library's documented way to restore the old state."""
    return {name: functools.partial(probe, select) for name, select in SELECTORS.items()}


def replicas_drift_apart(scaler: Scaler) -> bool:
    """A shard_map in which one of two devices overflows, without axis names given; an error is as good."""
    if jax.device_count() < 2:
        raise RuntimeError("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    state = scaler.init(8.0)

    def step(x: jax.Array) -> jax.Array:
        _, _, new = scaler.step(state, lambda w: jnp.sum(w * x), jnp.float32(1.0))
        return jnp.stack([jnp.asarray(leaf, jnp.float32) for leaf in jax.tree.leaves(new)])[None]

    spec = PartitionSpec("x")
    run = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    try:
        states = jax.jit(run)(jnp.array([1.0, jnp.inf]))
    except ValueError:
        return False
    return bool((states[0] != states[1]).any())


def half_params_fail(form: str) -> bool:
    """Adam on float16 params, three steps in a scan."""
    found = forms(optax.adam(1e-3), lambda w, x, y: jnp.mean((x @ w - y).astype(jnp.float32) ** 2))[form]
    w = jnp.ones((2, 1), jnp.float16)

    def body(carry: Any, x: None) -> Any:
        params, state, _ = found.step(carry[0], carry[1], X.astype(jnp.float16), jnp.ones((4, 1), jnp.float16))
        return (params, state), None

    return does_not_run(lambda: jax.lax.scan(body, (w, found.init(w)), length=3))


def equinox_fails(scaler: Scaler) -> bool:
    """An Equinox model with an activation among its leaves."""
    import equinox as eqx

    model, state = eqx.filter_jit(eqx.nn.MLP)(2, 1, 4, 1, key=cheap_keys.key(0)), scaler.init()
    step = eqx.filter_jit(lambda model: scaler.step(state, lambda m: jnp.mean(jax.vmap(m)(X) ** 2), model)[0])
    return does_not_run(lambda: step(model))


def signature_is_lost(function: Callable[..., Any]) -> bool:
    """Whether a type checker learns nothing of the arguments of the function that it returns."""
    signatures = typing.get_overloads(function) or [function]
    return all("Callable[..., " in str(s.__annotations__.get("return", "Callable[..., ")) for s in signatures)


def _mpx_signature_is_lost() -> bool:
    import mpx

    return signature_is_lost(mpx.filter_value_and_grad)


FAULTS = [
    Fault("new values of Flax's FP8 collection are divided by the loss scale", over_scalers(fp8_values_are_divided)),
    Fault("a live NNX state is taken for a snapshot of the old one", over_selectors(live_state_is_no_snapshot)),
    Fault("members of a vmapped state are chosen along the wrong axis", over_selectors(members_are_mixed_up)),
    Fault("replicas of a shard_map disagree about a skip without a word", over_scalers(replicas_drift_apart)),
    Fault("Adam on half params, without master weights, fails in a scan over steps", over_forms(half_params_fail)),
    Fault(
        "Equinox models with static leaves can not be differentiated",
        {name: probe for name, probe in over_scalers(equinox_fails).items() if name != "jmp"},
    ),
    Fault(
        "type checkers lose the arguments of the function that it returns",
        {
            "mpjax": lambda: signature_is_lost(mpjax.value_and_grad) or signature_is_lost(mpjax.scale_loss),
            "Flax": lambda: signature_is_lost(DynamicScale.value_and_grad),
            "mixed-precision-for-JAX": _mpx_signature_is_lost,
        },
    ),
]
