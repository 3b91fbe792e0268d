"""Causes that are planted in a module of each library's model, and the answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from testing.planted.answers import (
    Answer,
    array_loss,
    arrays_of,
    error,
    found_in,
    is_at,
    numerics_of,
    says_nothing,
    search_keeps,
)
from testing.planted.models import HALF, SIZE, Model, Plant


def overflow(model: Model) -> dict[str, Answer]:
    """A square that leaves float16's range, and comes back."""

    def numerics() -> None:
        assert error(model, HALF) == float("inf")
        found = numerics_of(model)
        if not found.keep_float32:  # Equinox names no scope: the lines are named instead
            assert all("causes.py" in line for line in found.losing_lines or ["nothing"]), str(found)
            return
        assert [path.rpartition("/")[2] for path in found.keep_float32] == ["planted"], str(found)
        kept = mpjax.Policy("float32", "float16", "float32", overrides=found.overrides)
        assert error(model, kept, scale=found.init_scale) < 0.05, "its overrides and scale do not help"

    def layerwise_error() -> None:
        found = mpjax.layerwise_error(mpjax.autocast(model.loss, HALF), *model.args)
        is_at(model, found.modules[0].name)
        assert found.modules[0].error == float("inf"), str(found)

    return {
        "numerics": numerics,
        "layerwise_error": layerwise_error,
        "search": search_keeps(model, 0.02),
        "find_nonfinite": found_in(model, "mul", "overflow of float16"),
    }


def cancellation(model: Model) -> dict[str, Answer]:
    """A small difference of large numbers."""

    def layerwise_error() -> None:
        found = mpjax.layerwise_error(mpjax.autocast(model.loss, HALF), *model.args, loss_scale=64.0)
        is_at(model, found.modules[0].name)

    def find_nonfinite() -> None:
        assert mpjax.find_nonfinite(mpjax.autocast(model.loss, HALF), *model.args) is None

    answers = {"search": search_keeps(model, 0.02)}
    return answers | {"layerwise_error": layerwise_error, "find_nonfinite": find_nonfinite}


def log_of_zero(model: Model) -> dict[str, Answer]:
    """A fault of the model, in every precision."""

    def numerics() -> None:
        found = numerics_of(model)
        assert found.init_scale is None, str(found)
        assert not found.overrides, str(found)
        assert "find_nonfinite" in str(found), str(found)

    finds = found_in(model, "log", "log of zero", half=False)
    return {"find_nonfinite": finds, "numerics": numerics}


def lost_epsilon(model: Model) -> dict[str, Answer]:
    """A division by a norm and an epsilon that is zero in float16."""

    def audit() -> None:
        found = mpjax.audit(model.loss, *model.args)
        assert "epsilon" in [risk.kind for risk in found.risks], str(found)

    return {"audit": audit, "find_nonfinite": found_in(model, "div", "1e-08 is zero in float16", half=False)}


def norm_in_half(model: Model) -> dict[str, Answer]:
    """A norm in bfloat16, whose backward pass sums in it."""

    def audit() -> None:
        found = mpjax.audit(jax.grad(array_loss(model)), *arrays_of(model))
        assert "sum" in [risk.kind for risk in found.risks], str(found)

    def layerwise_error() -> None:
        found = mpjax.layerwise_error(model.loss, *model.args)
        first = found.modules[0]
        is_at(model, first.name)
        assert "reduce_sum" in first.denied, str(found)

    return {"audit": audit, "layerwise_error": layerwise_error}


def small_gradients(model: Model) -> dict[str, Answer]:
    """A loss so small that float16 flushes its gradients."""
    small = dataclasses.replace(model, loss=lambda *args: 1e-6 * model.loss(*args))

    def numerics() -> None:
        found = numerics_of(small)
        assert not found.overrides, str(found)
        assert found.init_scale is not None, str(found)
        assert found.init_scale > 1024, str(found)
        before, after = error(small, HALF), error(small, HALF, scale=found.init_scale)
        assert after < 0.01 < before, f"error {before} to {after} with its scale"

    def find_nonfinite() -> None:
        assert mpjax.find_nonfinite(mpjax.autocast(small.loss, HALF), *small.args) is None

    return {"numerics": numerics, "find_nonfinite": find_nonfinite}


def dense(x: Any, w: Any) -> Any:
    return x @ w


def _lost_epsilon(x: Any, w: Any) -> Any:
    y = (x @ w).astype(jnp.float16)
    return (y / (0 * jnp.abs(y) + jnp.float16(1e-8))).astype(jnp.float32)


def _norm_in_half(x: Any, w: Any) -> Any:
    y = (x @ w).astype(jnp.bfloat16)
    y = y - jnp.sum(y, -1, keepdims=True) / SIZE
    return (y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True))).astype(jnp.float32)


# Each cause: what is planted in the module, and the answers.
CAUSES: dict[str, tuple[Plant, Callable[[Model], dict[str, Answer]]]] = {
    "healthy": (dense, says_nothing),
    "overflow": (lambda x, w: (x @ w * 300) * (x @ w * 300) / 9e4, overflow),
    "cancellation": (lambda x, w: (x + 1000) @ w - 1000 * jnp.sum(w, 0), cancellation),
    "log of zero": (lambda x, w: jnp.log(jnp.abs(0 * (x @ w))), log_of_zero),
    "epsilon lost": (_lost_epsilon, lost_epsilon),
    "norm in half": (_norm_in_half, norm_in_half),
    "small gradients": (dense, small_gradients),
}
