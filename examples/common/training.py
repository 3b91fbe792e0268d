"""The training state and the training step; everything about precision is in the `mpjax.` calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import mpjax
from examples.common.devices import DataParallel
from examples.common.optimizers import (
    Hyperparameters,
    create_optimizer,
    is_update,
    learning_rate_schedule,
    update_ema,
)

Sums = dict[str, jax.Array]  # each shape=(), dtype=float32; "count" is what the others are divided by


class Variables(NamedTuple):
    """A model's numbers."""

    params: Any
    stats: Any  # of normalisation, float32


class TrainState(NamedTuple):
    """Everything that a step changes, and so everything that a checkpoint holds."""

    step: jax.Array  # shape=(), dtype=int32
    seed: jax.Array  # shape=(), dtype=uint32; here and not in the program, which is the same for every seed
    params: Any
    stats: Any
    opt_state: Any
    totals: Sums  # of the epoch so far
    ema: Any  # the variables' moving average, float32; empty without --ema
    extra: Any  # what a script counts over the whole run


class Loss(NamedTuple):
    """What a model makes of a batch."""

    mean: jax.Array  # shape=(), dtype=float32: differentiated
    sums: Sums
    stats: Any
    extra: Any = ()


class Model(NamedTuple):
    """A network and its loss as pure functions, in their precision."""

    init: Callable[[jax.Array], Variables]  # of a key; params float32, or as a module's policy has them
    loss: Callable[[Variables, Any, jax.Array, Any], Loss]  # of variables, batch, key and `TrainState.extra`
    extra: Callable[[], Any] = tuple  # what `TrainState.extra` starts from
    sums: tuple[str, ...] = ("loss", "count")


class Training(NamedTuple):
    """A training set-up: pure functions, jitted."""

    policy: mpjax.Policy
    init: jax.stages.Wrapped  # (seed) -> TrainState
    train_step: jax.stages.Wrapped  # (TrainState, batch) -> (TrainState, shown); donates the state
    learning_rate: optax.Schedule
    hyper: Hyperparameters
    zero: Callable[[], Sums]
    model: Model

    def weights(self, state: TrainState) -> Variables:
        """What the model is tested and used with."""
        if not state.ema:
            return Variables(state.params, state.stats)
        return Variables(self.policy.cast_to_param(state.ema["params"]), state.ema["stats"])


def create_training(
    model: Model,
    hyper: Hyperparameters,
    policy: mpjax.Policy,
    loss_scale: str | None = None,
    parallel: DataParallel | None = None,
) -> Training:
    """Builds optimizer and step around a model.

    Args:
        model: already in its precision.
        hyper: the recipe with all flags applied.
        policy: the precision.
        loss_scale: "dynamic", a number, or None for what the policy needs.
        parallel: where the state is to live; by default where JAX puts it.
    """
    schedule = learning_rate_schedule(hyper)
    tx = create_optimizer(hyper, schedule, policy, loss_scale)

    def zero() -> Sums:
        # An array each: one zero in all places would be one buffer, which can't be donated twice.
        return {name: jnp.zeros(()) for name in model.sums}

    def init(seed: Any) -> TrainState:
        variables = model.init(jax.random.key(seed))
        # Float32 whatever the parameters are, for it moves by less than half precision can hold.
        ema = jax.tree.map(lambda x: x.astype(jnp.float32), variables._asdict()) if hyper.ema else {}
        params = policy.cast_to_param(variables.params)
        with warnings.catch_warnings():
            if policy.param_dtype == policy.output_dtype:
                # A policy that is half throughout asks for no masters: that they are missing is no news.
                warnings.simplefilter("ignore", mpjax.LossScaleWarning)
            opt_state = tx.init(params)
        step = jnp.zeros((), jnp.int32)
        return TrainState(
            step, jnp.uint32(seed), params, variables.stats, opt_state, zero(), ema, model.extra()
        )  # fmt: skip

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)

        def loss_fn(params: Any) -> tuple[jax.Array, Loss]:
            found = model.loss(Variables(params, state.stats), batch, key, state.extra)
            return found.mean, found

        value_and_grad = mpjax.value_and_grad(loss_fn, state.opt_state, has_aux=True)
        (loss, found), grads = value_and_grad(state.params)
        params, opt_state = mpjax.apply_gradients(tx, grads, state.opt_state, state.params, value=loss)
        stats = mpjax.keep_if_finite(opt_state, found.stats, state.stats)
        ema = state.ema
        if hyper.ema:
            changed = is_update(opt_state, hyper.accumulate)
            ema = update_ema(ema, {"params": params, "stats": stats}, state.step, hyper.ema, changed)
        totals = jax.tree.map(jnp.add, state.totals, found.sums)
        shown = {
            "totals": totals,
            "loss_scale": opt_state.loss_scale,
            "skipped_steps": opt_state.skipped_steps,
            "consecutive_skips": opt_state.consecutive_skips,
        }
        return TrainState(state.step + 1, state.seed, params, stats, opt_state, totals, ema, found.extra), shown

    # A step returns the state where it got it, or the next step would not take it.
    places = None if parallel is None else parallel.replicated
    returned = None
    if parallel is not None and parallel.fsdp:
        places = jax.tree.map(parallel.of_state, jax.eval_shape(init, 0))
        returned = (places, None)
    return Training(
        policy,
        # Runs once, and optimising its random numbers would take longer than all the rest of the start.
        jax.jit(
            init,
            out_shardings=places,
            compiler_options={"xla_backend_optimization_level": 0},
        ),
        jax.jit(train_step, donate_argnums=0, out_shardings=returned),
        schedule,
        hyper,
        zero,
        model,
    )


def masked_sums(counted: jax.Array, **values: jax.Array) -> Sums:
    """Sums over the entries of a batch that count and whose `loss` is finite: one overflow must not hide an epoch.

    Args:
        counted: [batch], bool or float: which entries count.
        values: [batch] each; one of them is `loss`.
    """
    counted = jnp.where(jnp.isfinite(values["loss"]), counted, 0).astype(jnp.float32)
    sums = {name: jnp.sum(jnp.where(counted > 0, value, 0)) for name, value in values.items()}
    return {**sums, "count": jnp.sum(counted)}


def means(sums: Mapping[str, Any]) -> dict[str, float]:
    """Means of sums, on the host; NaN where nothing counted."""
    found = {name: float(x) for name, x in jax.device_get(dict(sums)).items()}
    count = found.pop("count")
    return {name: value / count if count else float("nan") for name, value in found.items()}
