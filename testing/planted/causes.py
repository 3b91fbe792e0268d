"""Causes that are planted in a module of each library's model, and the answers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from testing.planted.answers import (
    HEALTHY,
    Answers,
    array_loss,
    arrays_of,
    error,
    found_in,
    is_at,
    numerics_of,
    search_keeps,
)
from testing.planted.models import HALF, SIZE, Model, Plant


def keeps_the_module(model: Model) -> None:
    assert error(model, HALF) == float("inf")
    found = numerics_of(model)
    if not found.keep_float32:  # Equinox names no scope: the lines are named instead
        assert all("causes.py" in line for line in found.losing_lines or ["nothing"]), str(found)
        return
    assert [path.rpartition("/")[2] for path in found.keep_float32] == ["planted"], str(found)
    kept = mpjax.Policy("float32", "float16", "float32", overrides=found.overrides)
    assert error(model, kept, scale=found.init_scale) < 0.05, "its overrides and scale do not help"


def ranks_the_overflow(model: Model) -> None:
    found = mpjax.layerwise_error(mpjax.autocast(model.loss, HALF), *model.args)
    is_at(model, found.modules[0].name)
    assert found.modules[0].error == float("inf"), str(found)


def ranks_the_cancellation(model: Model) -> None:
    found = mpjax.layerwise_error(mpjax.autocast(model.loss, HALF), *model.args, loss_scale=64.0)
    is_at(model, found.modules[0].name)


def finds_nothing(model: Model) -> None:
    assert mpjax.find_nonfinite(mpjax.autocast(model.loss, HALF), *model.args) is None


def advises_nothing(model: Model) -> None:
    found = numerics_of(model)
    assert found.init_scale is None, str(found)
    assert not found.overrides, str(found)
    assert "find_nonfinite" in str(found), str(found)


def lists_the_epsilon(model: Model) -> None:
    found = mpjax.audit(model.loss, *model.args)
    assert "epsilon" in [risk.kind for risk in found.risks], str(found)


def lists_the_sums(model: Model) -> None:
    found = mpjax.audit(jax.grad(array_loss(model)), *arrays_of(model))
    assert "sum" in [risk.kind for risk in found.risks], str(found)


def ranks_the_norm(model: Model) -> None:
    found = mpjax.layerwise_error(model.loss, *model.args)
    first = found.modules[0]
    is_at(model, first.name)
    assert "reduce_sum" in first.denied, str(found)


def flushed(model: Model) -> Model:
    """The model with a loss so small that float16 flushes its gradients."""
    return dataclasses.replace(model, loss=lambda *args: 1e-6 * model.loss(*args))


def advises_a_scale(model: Model) -> None:
    small = flushed(model)
    found = numerics_of(small)
    assert not found.overrides, str(found)
    assert found.init_scale is not None, str(found)
    assert found.init_scale > 1024, str(found)
    before, after = error(small, HALF), error(small, HALF, scale=found.init_scale)
    assert after < 0.01 < before, f"error {before} to {after} with its scale"


def dense(x: Any, w: Any) -> Any:
    return x @ w


def _lost_epsilon(x: Any, w: Any) -> Any:
    y = (x @ w).astype(jnp.float16)
    return (y / (0 * jnp.abs(y) + jnp.float16(1e-8))).astype(jnp.float32)


def _norm_in_half(x: Any, w: Any) -> Any:
    y = (x @ w).astype(jnp.bfloat16)
    y = y - jnp.sum(y, -1, keepdims=True) / SIZE
    return (y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True))).astype(jnp.float32)


# Each cause: what is planted in the module, and the answers by tool.
CAUSES: dict[str, tuple[Plant, Answers]] = {
    "healthy": (dense, HEALTHY),
    # A product that leaves float16's range, and comes back.
    "overflow": (
        lambda x, w: (300 * x) @ (300 * w) / 9e4,
        {
            "numerics": keeps_the_module,
            "layerwise_error": ranks_the_overflow,
            "search": search_keeps,
            "find_nonfinite": found_in("dot_general", "overflow of float16"),
        },
    ),
    # A small difference of large numbers.
    "cancellation": (
        lambda x, w: (x + 1000) @ w - 1000 * jnp.sum(w, 0),
        {"search": search_keeps, "layerwise_error": ranks_the_cancellation, "find_nonfinite": finds_nothing},
    ),
    # A fault of the model, in every precision.
    "log of zero": (
        lambda x, w: jnp.log(jnp.abs(0 * (x @ w))),
        {"find_nonfinite": found_in("log", "log of zero", half=False), "numerics": advises_nothing},
    ),
    # A division by a norm and an epsilon that is zero in float16.
    "epsilon lost": (
        _lost_epsilon,
        {"audit": lists_the_epsilon, "find_nonfinite": found_in("div", "1e-08 is zero in float16", half=False)},
    ),
    # A norm in bfloat16, whose backward pass sums in it.
    "norm in half": (_norm_in_half, {"audit": lists_the_sums, "layerwise_error": ranks_the_norm}),
    "small gradients": (
        dense,
        {"numerics": advises_a_scale, "find_nonfinite": lambda model: finds_nothing(flushed(model))},
    ),
}
