"""Faults of loss scaling: the same programs over every library's scaler."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

import mpjax
from benchmarks.loss_scaling_forms import forms
from benchmarks.training.configurations import CONFIGURATIONS, training
from testing import cheap_keys
from testing.models.published import WORKLOADS
from testing.random_programs.evaluate import arrays_in_numpy

from .fault import Fault, Probe

Loss = Callable[[Any], jax.Array]
MIN_SCALE = 4.0


class Scaler(abc.ABC):
    """One library's dynamic loss scaling, without an optimizer."""

    has_minimum: ClassVar[bool] = True
    field: ClassVar[str] = "loss_scale"  # of the state, which holds the scale

    @abc.abstractmethod
    def init(self, scale: float | None = None, interval: int = 2000) -> Any:
        """The state as in the library's documentation, by default with its initial scale."""

    @abc.abstractmethod
    def step(self, state: Any, loss_fn: Loss, params: Any) -> tuple[jax.Array, Any, Any]:
        """The loss, the gradients and the new state."""

    def scale(self, state: Any) -> float:
        """The loss scale of a state."""
        return float(getattr(state, self.field))


class Mpjax(Scaler):
    def init(self, scale: float | None = None, interval: int = 2000) -> Any:
        options: dict[str, Any] = {} if scale is None else {"init_scale": scale}
        self.tx = mpjax.dynamic_loss_scale(optax.identity(), growth_interval=interval, min_scale=MIN_SCALE, **options)
        return self.tx.init(jnp.float32(0))

    def step(self, state: Any, loss_fn: Loss, params: Any) -> tuple[jax.Array, Any, Any]:
        loss, grads = mpjax.value_and_grad(loss_fn, state)(params)
        return loss, grads, self.tx.update(grads, state, params, value=loss)[1]


class Flax(Scaler):
    field = "scale"

    def init(self, scale: float | None = None, interval: int = 2000) -> Any:
        options: dict[str, Any] = {} if scale is None else {"scale": scale}
        return DynamicScale(growth_interval=interval, minimum_scale=MIN_SCALE, **options)

    def step(self, state: Any, loss_fn: Loss, params: Any) -> tuple[jax.Array, Any, Any]:
        state, _, loss, grads = state.value_and_grad(loss_fn)(params)
        return loss, grads, state


class Jmp(Scaler):
    def init(self, scale: float | None = None, interval: int = 2000) -> Any:
        return jmp.DynamicLossScale(
            jnp.asarray(scale or 2.0**15), period=interval, min_loss_scale=jnp.asarray(MIN_SCALE)
        )

    def step(self, state: Any, loss_fn: Loss, params: Any) -> tuple[jax.Array, Any, Any]:
        scaled, grads = jax.value_and_grad(lambda p: state.scale(loss_fn(p)))(params)
        grads = state.unscale(grads)
        return state.unscale(scaled), grads, state.adjust(jmp.all_finite(grads))


class Mpx(Scaler):
    field = "loss_scaling"

    def init(self, scale: float | None = None, interval: int = 2000) -> Any:
        import mpx

        return mpx.DynamicLossScaling(jnp.float32(scale or 2.0**15), jnp.float32(MIN_SCALE), period=interval)

    def step(self, state: Any, loss_fn: Loss, params: Any) -> tuple[jax.Array, Any, Any]:
        import mpx

        loss, state, _, grads = mpx.filter_value_and_grad(loss_fn, state)(params)
        return loss, grads, state


class Jaxamp(Scaler):
    has_minimum, field = False, "scaler"

    def init(self, scale: float | None = None, interval: int = 2000) -> Any:
        import jaxamp

        options = {} if scale is None else {"scaler": jnp.float32(scale)}
        return jaxamp.DynamicScalerState(patience=jnp.int32(interval), **options)

    def step(self, state: Any, loss_fn: Loss, params: Any) -> tuple[jax.Array, Any, Any]:
        import jaxamp

        state, (loss, grads) = jaxamp.dynamic_scale_value_and_grad(loss_fn)(params, dynamic_scaler_state=state)
        return loss, grads, state


SCALERS: dict[str, Scaler] = {
    "mpjax": Mpjax(),
    "Flax": Flax(),
    "jmp": Jmp(),
    "mixed-precision-for-JAX": Mpx(),
    "jaxamp": Jaxamp(),
}


def over_scalers(probe: Callable[[Scaler], bool]) -> dict[str, Probe]:
    """The probe for every library's scaler."""
    return {name: functools.partial(probe, scaler) for name, scaler in SCALERS.items()}


FORMS = {
    "mpjax": "mpjax: apply_gradients",
    "Flax": "Flax DynamicScale",
    "jmp": "jmp",
    "mixed-precision-for-JAX": "mixed-precision-for-JAX",
}


def over_forms(probe: Callable[[str], bool]) -> dict[str, Probe]:
    """The probe for every library's training step."""
    return {name: functools.partial(probe, form) for name, form in FORMS.items()}


def wrong_when_the_scale_grows(scaler: Scaler) -> bool:
    step = jax.jit(lambda state, w: scaler.step(state, lambda w: w * w, w))
    state, found = scaler.init(8.0, interval=2), []
    for _ in range(4):
        _, grads, state = step(state, np.float32(2.0))
        found.append(float(grads))
    return found != [4.0] * 4


def grows_a_step_late(scaler: Scaler) -> bool:
    step = jax.jit(lambda state, w: scaler.step(state, lambda w: w * w, w)[2])
    state = scaler.init(8.0, interval=3)
    for _ in range(3):
        state = step(state, np.float32(2.0))
    return scaler.scale(state) == 8.0


def retraces(scaler: Scaler) -> bool:
    traces = []

    @jax.jit
    def step(state: Any, w: jax.Array) -> Any:
        traces.append(1)
        return scaler.step(state, lambda w: w * w, w)[2]

    state = scaler.init()
    for _ in range(3):
        state = step(state, jnp.float32(2.0))
    return len(traces) > 1


def half_loss_overflows(scaler: Scaler) -> bool:
    # The gradient is 1. float16 represents the loss, 4, and every initial scale except 65536.
    step = jax.jit(lambda state, w: scaler.step(state, lambda w: w + 3, w)[:2])
    loss, grads = step(scaler.init(), np.float16(1.0))
    return not (np.isfinite(float(loss)) and np.isfinite(float(grads)))


def minimum_is_lost(scaler: Scaler) -> bool:
    step = jax.jit(lambda state, w: scaler.step(state, lambda w: w * jnp.inf, w)[2])
    state = scaler.init(2 * MIN_SCALE)
    for _ in range(4):
        state = step(state, jnp.float32(1.0))
    return scaler.scale(state) < MIN_SCALE


def accumulation_is_poisoned(form: str) -> bool:
    """An overflow in one of the micro-batches of `optax.MultiSteps`."""
    found = forms(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), lambda w, x, y: jnp.sum(w * x * y))[
        form
    ]
    ones, step = np.ones(2, np.float32), jax.jit(found.step)
    params: Any = ones
    state = jax.jit(found.init)(params)
    for x in (np.array([np.inf, 1.0], np.float32), ones, ones, ones, ones):
        params, state, _ = step(params, state, x, ones)
    return not np.isfinite(params).all()


def statistics_are_poisoned(configuration: str) -> bool:
    """An overflow in a model with BatchNorm, in the library's own training loop."""
    small: Any = {"stages": (), "side": 16}  # a convolution with its norm, and the head
    model = training(dataclasses.replace(WORKLOADS["resnet50"].toy(), **small), CONFIGURATIONS[configuration])
    carry, batch = (arrays_in_numpy(make)(cheap_keys.key(0)) for make in (model.init, model.workload.batch))
    batch["images"] = np.array(batch["images"])
    batch["images"][0, 0, 0, 0] = np.inf
    carry, _ = jax.jit(model.step)(carry, batch)
    assert all(np.isfinite(p).all() for p in jax.tree.leaves(carry["params"])), "the step was not skipped"
    return not all(np.isfinite(s).all() for s in jax.tree.leaves(carry["state"]))


@functools.cache
def _keras_after_overflow() -> tuple[float, bool]:
    """Keras: the loss scale after three finite steps of an interval of three from 8, and, after an overflow, whether
    its BatchNorm's statistics are finite."""
    import os

    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), initial_scale=8.0, dynamic_growth_steps=3
    )
    model.compile(optimizer=optimizer, loss="mse")
    x, y = np.random.default_rng(0).normal(size=(8, 4)).astype("float32"), np.ones((8, 1), "float32")
    for _ in range(3):
        model.train_on_batch(x, y)
    scale = float(optimizer.dynamic_scale)
    x[0, 0] = np.inf
    model.train_on_batch(x, y)
    assert all(np.isfinite(w).all() for w in map(np.asarray, model.trainable_variables)), "the step was not skipped"
    return scale, all(np.isfinite(np.asarray(w)).all() for w in model.non_trainable_variables)


FAULTS = [
    Fault("the gradients are wrong at a step where the scale grows", over_scalers(wrong_when_the_scale_grows)),
    Fault(
        "the scale grows only after N + 1 finite steps",
        over_scalers(grows_a_step_late) | {"Keras 3": lambda: _keras_after_overflow()[0] == 8.0},
    ),
    Fault("the second step is traced again", over_scalers(retraces)),
    Fault("a float16 loss overflows by its scale", over_scalers(half_loss_overflows)),
    Fault(
        "the smallest scale is forgotten under jit",
        {name: probe for name, probe in over_scalers(minimum_is_lost).items() if SCALERS[name].has_minimum},
    ),
    Fault(
        "after one overflow the accumulated gradients stay NaN",
        over_forms(accumulation_is_poisoned) | {"optax alone": lambda: accumulation_is_poisoned("no loss scaling")},
    ),
    Fault(
        "batch statistics of a skipped step are kept (in the training loop that its documentation or examples have)",
        {
            "mpjax": lambda: statistics_are_poisoned("flax_float16_mpjax_scale"),
            "Flax": lambda: statistics_are_poisoned("flax_float16_dynamic_scale"),
            "Keras 3": lambda: not _keras_after_overflow()[1],
        },
    ),
]
