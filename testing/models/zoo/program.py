"""The type of a program of the zoo, and the decorator that registers one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Programs run once, for milliseconds; without optimisation they compile twice as fast.
COMPILE_FAST: dict[str, bool | int | str] = {"xla_backend_optimization_level": 0}
Loss = Callable[[Any, Any], Any]
REGISTRY: dict[str, Program] = {}


@dataclasses.dataclass(frozen=True)
class Program:
    """A float32 training program without any mixed precision.

    Args:
        name: Its name, unique in the registry.
        build: `build(key)` returns `(loss_fn, params, batch)`, where `loss_fn(params, batch)` is a
            float32 scalar, or `(scalar, aux)`. If `has_half`, a dtype as second argument selects the
            hand-written form for that dtype: the same model with the same params.
        has_aux: Whether the loss function returns an auxiliary output.
        has_half: Whether `build` takes a dtype.
        flax: Whether `build` also takes a function that adapts the Flax model.
        refuses: Transformations that JAX does not support for this program, even in float32.
        differentiable: False if JAX has no reverse rule (a `while` of unknown length).
        context: A context in which the program is built and run (x64).
    """

    name: str
    build: Callable[..., tuple[Loss, Any, Any]]
    has_aux: bool = False
    has_half: bool = False
    flax: bool = False
    refuses: frozenset[str] = frozenset()
    differentiable: bool = True
    context: Callable[[], Any] = contextlib.nullcontext

    def handwritten(self, dtype: Any) -> Loss:
        """The loss function of the hand-written form for `dtype`, with the same params."""
        assert self.has_half, f"{self.name} has no hand-written half-precision form"
        with standard_promotion():  # Flax's own `dtype=` code promotes implicitly.
            loss_fn = self._loss(dtype)

        def promoting(params: Any, batch: Any) -> Any:
            with standard_promotion():
                return loss_fn(params, batch)

        return promoting

    def adapted(self, adapt: Callable[[Any], Any]) -> Loss:
        """The loss function with the Flax model replaced by `adapt(model)`; the same params."""
        assert self.flax, f"{self.name} is not a Flax model"
        return self._loss(None, adapt)

    def _loss(self, *options: Any) -> Loss:
        losses = []
        jax.eval_shape(lambda key: losses.append(self.build(key, *options)[0]), jax.random.key(0))
        return losses[0]


def standard_promotion() -> Any:
    """The context of a program that promotes dtypes implicitly: tests run under strict promotion."""
    return jax.numpy_dtype_promotion("standard")


def as_is(model: Any) -> Any:
    """The adaptation that returns a model unchanged."""
    return model


def program(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a `build` function under its own name; the options are `Program`'s."""

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        name = build.__name__
        assert name not in REGISTRY, f"two programs of the zoo are named {name}"
        if "refuses" in options:
            options["refuses"] = frozenset(options["refuses"])
        REGISTRY[name] = Program(name, build, **options)
        return build

    return register


def dense_params(key: jax.Array, *widths: int) -> list[dict[str, jax.Array]]:
    """Weights and biases of a chain of dense layers of these widths, as plain arrays."""
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) / m**0.5, "b": jnp.full(n, 0.1, jnp.float32)}
        for k, m, n in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def labelled(key: jax.Array, shape: tuple[int, ...], classes: int = 16) -> tuple[jax.Array, jax.Array]:
    """Normal inputs of a shape, and an integer label for each of the first axis.

    Batches are several times the width, as in training, so that activations take most of the memory, not copies of
    weights.
    """
    inputs, labels = jax.random.split(key)
    return jax.random.normal(inputs, shape), jax.random.randint(labels, shape[:1], 0, classes)
