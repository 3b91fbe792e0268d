"""The compared training configurations, and a model's training step under each."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import mpjax
from testing.measures import matmuls
from testing.models.published import Batch, Workload

Carry = dict[str, Any]
LossFn = Callable[..., Any]
Stepped = tuple[Carry, jax.Array]
Tx: TypeAlias = optax.GradientTransformation
AS_WRITTEN = mpjax.Rules(attention="unfused")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way to train.

    Args:
        way: The source of the dtypes: "plain" (float32 throughout), "flax" (the model's author, with `dtype=`),
            "autocast" or "with_policy".
        policy: An mpjax policy by name; its compute dtype is also the hand-written form's.
        scaling: "none", "mpjax" or "flax" (its `DynamicScale`).
        matmul_precision: `jax_default_matmul_precision`; None is JAX's default, TF32 on a GPU.
        rules: The rules of autocast. Attention is as the model writes it, unless they say otherwise.
        state: A lean form of parameters and optimizer state, by its name in `LEAN`.
    """

    way: str
    policy: str = "float32"
    scaling: str = "none"
    matmul_precision: str | None = None
    rules: mpjax.Rules = AS_WRITTEN
    state: str = ""

    @property
    def float8(self) -> bool:
        """Whether matmuls run in float8."""
        return mpjax.get_policy(self.policy).matmul_dtype is not None

    @property
    def half(self) -> Any:
        """The half dtype, or None."""
        return None if self.policy == "float32" else mpjax.get_policy(self.policy).compute_dtype

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The context to trace the step in."""
        if self.matmul_precision is None:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(self.matmul_precision)


CONFIGURATIONS = {
    "float32": Configuration("plain", matmul_precision="highest"),
    "tf32": Configuration("plain"),
    "flax_float16": Configuration("flax", "mixed_float16"),
    "flax_float16_mpjax_scale": Configuration("flax", "mixed_float16", "mpjax"),
    "flax_float16_dynamic_scale": Configuration("flax", "mixed_float16", "flax"),
    "flax_bfloat16": Configuration("flax", "mixed_bfloat16"),
    "autocast_float16": Configuration("autocast", "mixed_float16", "mpjax"),
    "autocast_bfloat16": Configuration("autocast", "mixed_bfloat16"),
    "autocast_float8": Configuration("autocast", "mixed_float8"),
    "with_policy_float16": Configuration("with_policy", "mixed_float16", "mpjax"),
    "with_policy_bfloat16": Configuration("with_policy", "mixed_bfloat16"),
}
# Compiled for devices that are not present (`--dry-run`), and not measured.
PLANNED = {
    # "fused" by its name on the device that it is compiled for: the process that compiles has no such device.
    "autocast_bfloat16_fused": Configuration("autocast", "mixed_bfloat16", rules=mpjax.Rules(attention="cudnn")),
    "autocast_bfloat16_fused_loss": Configuration(
        "autocast", "mixed_bfloat16", rules=mpjax.Rules(attention="cudnn", cross_entropy="fused")
    ),
    "autocast_bfloat16_full": Configuration(
        "autocast", "mixed_bfloat16", rules=mpjax.Rules(attention="unfused", residuals="full")
    ),
    "autocast_bfloat16_master_weights": Configuration("autocast", "mixed_bfloat16", state="master_weights"),
    "autocast_bfloat16_stochastic_rounding": Configuration("autocast", "mixed_bfloat16", state="stochastic_rounding"),
    "autocast_bfloat16_low_bit_state": Configuration("autocast", "mixed_bfloat16", state="low_bit_state"),
}
# Parameters in bfloat16, and the optimizer that updates them.
LEAN: dict[str, Callable[[Tx], Tx]] = {
    "master_weights": lambda tx: mpjax.master_weights(tx, "p=bf16"),
    "stochastic_rounding": mpjax.stochastic_rounding,
    "low_bit_state": lambda tx: mpjax.stochastic_rounding(mpjax.low_bit_state(tx, "float8")),
}


@dataclasses.dataclass(frozen=True)
class Training:
    """A model under a configuration: `init(key)` returns the carry of `step(carry, batch)`."""

    workload: Workload
    init: Callable[[jax.Array], Carry]
    step: Callable[[Carry, Batch], Stepped]

    def abstract(self) -> tuple[Carry, Batch]:
        """Shapes and dtypes of the step's arguments."""
        key = jax.random.key(0)
        return jax.eval_shape(self.init, key), jax.eval_shape(self.workload.batch, key)


def training(workload: Workload, configuration: Configuration) -> Training:
    """Applies a configuration to a model."""
    optimizer = workload.optimizer()
    loss_fn = loss_function(workload, configuration)
    if configuration.state:
        optimizer = LEAN[configuration.state](optimizer)
    if configuration.scaling == "mpjax":
        optimizer = mpjax.dynamic_loss_scale(optimizer)

    def init(key: jax.Array) -> Carry:
        variables = workload.module().init(key, *workload.inputs(workload.batch(key)))
        params = variables.pop("params")
        if configuration.state:
            params = mpjax.get_policy("p=bf16").cast_to_param(params)
        carry = {"params": params, "state": variables, "opt_state": optimizer.init(params)}
        if configuration.scaling == "flax":
            carry["scale"] = DynamicScale(fin_steps=cast(Any, jnp.int32(0)), scale=cast(Any, jnp.float32(2**15)))
        return carry

    take_step = _STEPS["lean" if configuration.state else configuration.scaling]

    def step(carry: Carry, batch: Batch) -> Stepped:
        return take_step(loss_fn, optimizer, carry, batch)

    return Training(workload, init, step)


def loss_function(workload: Workload, configuration: Configuration) -> Callable[..., Any]:
    """A function `(params, state, batch) -> (loss, new batch statistics)`."""
    module = workload.module(configuration.half if configuration.way == "flax" else None)
    if configuration.way == "with_policy":
        module = mpjax.with_policy(module, configuration.policy)

    def loss_fn(params: Any, state: Any, batch: Batch) -> tuple[jax.Array, Any]:
        outputs, state = module.apply({"params": params, **state}, *workload.inputs(batch), mutable=list(state))
        return workload.loss(outputs, batch), state

    if configuration.way == "autocast":
        return mpjax.autocast(loss_fn, configuration.policy, rules=configuration.rules)
    return loss_fn


def _plain_step(loss_fn: LossFn, optimizer: Tx, carry: Carry, batch: Batch) -> Stepped:
    params = carry["params"]
    (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, carry["state"], batch)
    updates, opt_state = optimizer.update(grads, carry["opt_state"], params)
    return {"params": optax.apply_updates(params, updates), "state": state, "opt_state": opt_state}, loss


def _mpjax_step(loss_fn: LossFn, optimizer: Tx, carry: Carry, batch: Batch) -> Stepped:
    params, old = carry["params"], carry["opt_state"]
    (loss, state), grads = mpjax.value_and_grad(loss_fn, old, has_aux=True)(params, carry["state"], batch)
    params, opt_state = mpjax.apply_gradients(optimizer, grads, old, params, value=loss)
    state = mpjax.keep_if_finite(opt_state, state, carry["state"])
    return {"params": params, "state": state, "opt_state": opt_state}, loss


def _lean_step(loss_fn: LossFn, optimizer: Tx, carry: Carry, batch: Batch) -> Stepped:
    params = carry["params"]
    (loss, state), grads = mpjax.value_and_grad(loss_fn, has_aux=True)(params, carry["state"], batch)
    params, opt_state = mpjax.apply_gradients(optimizer, grads, carry["opt_state"], params)
    return {"params": params, "state": state, "opt_state": opt_state}, loss


def _flax_step(loss_fn: LossFn, optimizer: Tx, carry: Carry, batch: Batch) -> Stepped:
    """As in Flax's own examples: computes everything, then keeps or drops it by `where`."""
    params, old = carry["params"], carry["opt_state"]
    gradient = carry["scale"].value_and_grad(loss_fn, has_aux=True)
    scale, finite, (loss, state), grads = gradient(params, carry["state"], batch)
    updates, opt_state = optimizer.update(grads, old, params)
    new = {"params": optax.apply_updates(params, updates), "opt_state": opt_state}
    kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, {key: carry[key] for key in new})
    return {**kept, "state": state, "scale": scale}, loss


_STEPS: dict[str, Callable[..., Stepped]] = {
    "none": _plain_step,
    "lean": _lean_step,
    "mpjax": _mpjax_step,
    "flax": _flax_step,
}


def flops_per_example(workload: Workload) -> float:
    """FLOPs of a step per example, without recomputation and dead code; a multiply-add counts as two."""
    made = training(workload, CONFIGURATIONS["tf32"])
    flops = sum(found.flops for found in matmuls(made.step, *made.abstract()))
    jax.clear_caches()
    return flops / workload.batch_size
