"""What the inspections must answer about a model with a planted cause, or without one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax
from mpjax.inspection import NonFinite
from testing.measures import relative_error
from testing.planted.models import HALF, Model

Answer = Callable[[], None]  # raises an AssertionError
Answers = Mapping[str, Callable[[Model], None]]  # of each tool, about a model


def gradient(model: Model, policy: Any = None, rules: Any = None, scale: float = 1.0) -> Any:
    """The compiled gradient, unscaled; in float32 without a policy."""
    loss = model.loss if policy is None else mpjax.autocast(model.loss, policy, rules=rules)
    if is_nnx(model):
        graph, diff = nnx.split(model.args[0])
        whole = functools.partial(nnx.merge, graph)
    else:
        diff, static = eqx.partition(model.args[0], eqx.is_inexact_array)
        whole = functools.partial(eqx.combine, static)

    run = jax.jit(
        jax.grad(lambda diff: scale * loss(whole(diff), *model.args[1:])),
        compiler_options={"xla_allow_excess_precision": False},
    )
    return jax.tree.map(lambda x: np.asarray(x, np.float32) / scale, jax.tree.leaves(run(diff)))


def is_nnx(model: Model) -> bool:
    return isinstance(model.args[0], nnx.Module)


def error(model: Model, *given: Any, **options: Any) -> float:
    """The relative error of the gradient against float32; inf if it is not finite."""
    found = gradient(model, *given, **options)
    finite = all(np.isfinite(x).all() for x in found)
    return relative_error(found, gradient(model)) if finite else float("inf")


def fault_of(fun: Callable[..., Any], *args: Any) -> NonFinite:
    """What `find_nonfinite` finds, which must be something."""
    found = mpjax.find_nonfinite(fun, *args)
    assert found is not None, "finds nothing"
    return found


def is_at(model: Model, found: str) -> None:
    """The module's path, or the planted function where the library names no scope (Equinox)."""
    named = f"/{found}".endswith(f"/{model.path}") or "causes.py" in found
    assert named, f"names {found!r}, not {model.path!r}"


def numerics_of(model: Model, **options: Any) -> Any:
    return mpjax.numerics(model.loss, *model.args, **options)


def _healthy_audit(model: Model) -> None:
    found = mpjax.audit(mpjax.autocast(model.loss, HALF), *model.args)
    assert found.half_share == 1, f"half {found.half_share}"
    assert not found.risks, str(found.risks)
    assert not [f for f in found.findings if f.kind != "tiny"], str(found.findings)


def _healthy_numerics(model: Model) -> None:
    found = numerics_of(model)
    assert found.keep_float32 == found.losing == found.losing_lines == (), str(found)
    assert "no module needs to be kept" in str(found), str(found)
    assert error(model, HALF, scale=found.init_scale) <= 1.05 * error(model, HALF), "its scale is worse"


def _healthy_search(model: Model) -> None:
    found = mpjax.search(model.loss, *model.args, budget=0.01)
    assert not found.added, str(found)


def _healthy_layerwise_error(model: Model) -> None:
    found = mpjax.layerwise_error(mpjax.autocast(model.loss, HALF), *model.args, loss_scale=1024.0)
    assert "needs float32" not in str(found), str(found)
    assert found.gradient_error < 0.01, str(found)


def _healthy_find_nonfinite(model: Model) -> None:
    assert mpjax.find_nonfinite(jax.value_and_grad(mpjax.autocast(array_loss(model), HALF)), *arrays_of(model)) is None


def _healthy_explain(model: Model) -> None:
    found = mpjax.explain(model.loss, *model.args)
    assert (found.half_share, found.opaque, found.unseen) == (1, (), ()), str(found)


def _healthy_profile(model: Model) -> None:
    found = mpjax.profile(jax.jit(functools.partial(trained, array_loss(model), 2000)), *arrays_of(model), steps=3)
    assert not found.advice, str(found)


def _healthy_parity(model: Model) -> None:
    found = mpjax.parity(functools.partial(training_of, model), [HALF], 3)
    assert found[HALF].kind in ("equal", "small"), str(found)


def trained(loss: Any, steps: int, params: Any, x: Any, *rest: Any) -> Any:
    """The parameters after some steps of gradient descent."""

    def step(_: Any, params: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 1e-2 * g, params, jax.grad(loss)(params, x, *rest))

    return jax.lax.fori_loop(0, steps, step, jax.tree.map(jnp.asarray, params))


def training_of(model: Model, policy: str, seed: int) -> mpjax.inspection.Training:
    """A `mpjax.inspection.MakeTraining` of a model, whose batches depend on the seed."""
    params, x, *rest = arrays_of(model)
    run = jax.jit(functools.partial(trained, mpjax.autocast(array_loss(model), policy), 1))
    measure = jax.jit(array_loss(model))
    batches = [np.random.default_rng((seed, i)).normal(size=x.shape).astype(np.float32) for i in range(10)]

    def step(params: Any, batch: Any) -> Any:
        return run(params, batch, *rest), 0.0

    return mpjax.inspection.Training(params, step, batches, lambda w: -float(measure(w, batches[0], *rest)))


def arrays_of(model: Model) -> tuple[Any, ...]:
    """Arguments that `jax.grad` takes."""
    if is_nnx(model):
        return (nnx.split(model.args[0])[1], *model.args[1:])
    return model.args


def array_loss(model: Model) -> Callable[..., Any]:
    if not is_nnx(model):
        return model.loss
    graph = nnx.split(model.args[0])[0]
    return lambda state, *rest: model.loss(nnx.merge(graph, state), *rest)


def found_in(primitive: str, words: str, half: bool = True) -> Callable[[Model], None]:
    """`find_nonfinite` of the loss names the operation, the module and the cause."""

    def find_nonfinite(model: Model) -> None:
        loss = mpjax.autocast(model.loss, HALF) if half else model.loss
        found = fault_of(loss, *model.args)
        assert found.primitive == primitive, str(found)
        if found.module:  # NNX and Equinox have no scopes: the operation reads no parameter
            is_at(model, found.module)
        assert words in found.diagnosis, found.diagnosis

    return find_nonfinite


def search_keeps(model: Model, budget: float = 0.02) -> None:
    """`search` keeps the planted module in float32, and its rules meet the budget."""
    before = error(model, HALF, scale=64.0)
    found = mpjax.search(model.loss, *model.args, budget=budget)
    assert found.met, str(found)
    (kept,) = found.keep_float32
    is_at(model, kept)
    after = error(model, HALF, found.rules, scale=64.0)
    assert after <= 1.5 * budget < before, f"error {before} to {after} with its rules"


# What each tool answers to a healthy model: no recommendation, and an all-clear.
HEALTHY: Answers = {
    "audit": _healthy_audit,
    "numerics": _healthy_numerics,
    "search": _healthy_search,
    "layerwise_error": _healthy_layerwise_error,
    "find_nonfinite": _healthy_find_nonfinite,
    "explain": _healthy_explain,
    "profile": _healthy_profile,
    "parity": _healthy_parity,
}
