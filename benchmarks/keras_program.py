"""A program for Keras 3, which accepts only its own models: a residual MLP in float32 and under `mixed_float16`.

(Not attention: XLA's CPU backend lacks its float16 matmul.) If Keras is installed, the program joins the zoo, and
the other tools also run on it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from testing.zoo import Program
from testing.zoo.linen import cross_entropy
from testing.zoo.program import program

NAME = "keras_mlp"
FEATURES, CLASSES, BATCH = 32, 16, 256


@functools.cache
def _model(policy: str) -> Any:
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    # Keras layers create their variables eagerly; under a trace they would be tracers.
    with jax.ensure_compile_time_eval():
        layers = keras.layers
        inputs = keras.Input((FEATURES,))
        x = inputs
        for _ in range(2):
            y = layers.Dense(4 * FEATURES, activation="gelu", dtype=policy)(x)
            x = layers.LayerNormalization(dtype=policy)(x + layers.Dense(FEATURES, dtype=policy)(y))
        return keras.Model(inputs, layers.Dense(CLASSES, dtype=policy)(x))


def _loss(policy: str) -> Callable[..., jax.Array]:
    model = _model(policy)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        outputs, _ = model.stateless_call(params, [], batch[0])
        return cross_entropy(outputs, batch[1])

    return loss_fn


def under_keras_policy(fun: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Keras as a caster: builds the same model with its dtype policy."""
    return _loss(policy)


def register() -> Program | None:
    """Adds the program to the zoo; returns None if Keras is not installed."""
    if importlib.util.find_spec("keras") is None:
        return None

    def keras_mlp(key: jax.Array) -> Any:
        inputs, labels = jax.random.split(key)
        params = [jnp.asarray(v.value) for v in _model("float32").trainable_variables]
        batch = (
            jax.random.normal(inputs, (BATCH, FEATURES)),
            jax.random.randint(labels, (BATCH,), 0, CLASSES),
        )
        return _loss("float32"), params, batch

    program()(keras_mlp)
    from testing.zoo import REGISTRY

    return REGISTRY[NAME]
