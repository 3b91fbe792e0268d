"""Planted roundings that are amplified, alone and beside a second cause; registered as the other causes.

The code stores a value in bfloat16 by hand, and computes in float32. `audit` must name both lines, `layerwise_error`
the line where the total error jumps, and the cure that is printed, float32 between the two lines, must work. A second
cause elsewhere must be named beside it: an epsilon of a half argument, an overflow, a constant that becomes 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from testing.measures import relative_error

Answer = Callable[[], None]  # raises an AssertionError
Store = Callable[[Any], Any]
Term = Callable[[Any, Store], Any]  # of hidden values and how one of them is stored

_rng = np.random.default_rng(0)
W = _rng.normal(size=(16, 16)).astype(np.float32) / 4
X = _rng.normal(size=(32, 16)).astype(np.float32)
IMAGE = np.sin(np.arange(4096, dtype=np.float32) / 3)


def in_half(x: Any) -> Any:
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def as_it_is(x: Any) -> Any:
    return x


def squashed_action(h: Any, store: Store) -> Any:
    y = store(jnp.tanh(2 * h))
    return jnp.mean(jnp.log(1 - y**2 + 1e-6))


def noisy_or(h: Any, store: Store) -> Any:
    p = store(jax.nn.sigmoid(4 * h))
    return -jnp.mean(jnp.log1p(-jnp.minimum(p, 1 - 1e-6)))


def odds(h: Any, store: Store) -> Any:
    p = store(jax.nn.sigmoid(4 * h))
    return jnp.mean(jnp.sqrt(p / (1 - p + 1e-4)))


def wave(h: Any, store: Store) -> Any:
    angle = store(200 * h)
    return jnp.mean(jnp.sin(angle))


def two_moments(h: Any, store: Store) -> Any:
    shifted = h + 20
    mean, square = store(jnp.mean(shifted, -1)), store(jnp.mean(shifted**2, -1))
    return jnp.mean(jax.lax.rsqrt(jnp.maximum(square - mean**2, 0) + 1e-2))


def angle_of_a_cosine(h: Any, store: Store) -> Any:
    cosine = store(jnp.tanh(3 * h))
    return jnp.mean(jnp.arccos(0.9999 * cosine) ** 2)


def index(h: Any, store: Store) -> Any:
    position = store(300 * (h + 5))
    return jnp.mean(jnp.asarray(IMAGE)[jnp.clip(position.astype(jnp.int32), 0, 4095)] * h)


def gram_matrix(h: Any, store: Store) -> Any:
    gram = jax.lax.dot(store(h), store(h.T))
    return jnp.mean(jnp.diagonal(jnp.linalg.cholesky(store(gram) + 3e-1 * jnp.eye(len(h)))))


ROUNDINGS: dict[str, tuple[Term, str]] = {
    "squashed action": (squashed_action, "log"),
    "noisy or": (noisy_or, "log1p"),
    "odds": (odds, "div"),
    "wave": (wave, "sin"),
    "two moments": (two_moments, "rsqrt"),
    "angle of a cosine": (angle_of_a_cosine, "acos"),
    "index": (index, "convert_element_type"),
    "gram matrix": (gram_matrix, "cholesky"),
}


def epsilon(x: Any) -> Any:
    x = x.astype(jnp.float16)
    return jnp.mean(x / (jnp.abs(x) + 1e-8))


def overflow(x: Any) -> Any:
    x = jnp.abs(x.astype(jnp.float16)) + 1
    return jnp.mean((300 * x) * (300 * x) * jnp.float16(1e-5))


def decay(x: Any) -> Any:
    x = x.astype(jnp.bfloat16)
    return jnp.mean(0.999 * x + x[:1])


SECOND: dict[str, tuple[Callable[[Any], Any] | None, str]] = {
    "alone": (None, ""),
    "and an epsilon": (epsilon, "epsilon"),
    "and an overflow": (overflow, "overflow"),
    "and a decay": (decay, "constant"),
}


def planted(term: Term, second: Callable[[Any], Any] | None, store: Store) -> Callable[..., Any]:
    """The loss: a layer, the planted term, and a second cause in another place."""

    def loss(w: Any, x: Any) -> Any:
        h = x @ w
        found = term(h, store) + jnp.mean(jnp.tanh(h @ w) ** 2)
        return found if second is None else found + second(x).astype(jnp.float32)

    return loss


def _lines(function: Any) -> set[str]:
    code = function.__code__
    return {f"roundings.py:{line}" for *_, line in code.co_lines() if line}


def answers(rounding: str, other: str) -> dict[str, Answer]:
    """What each tool must answer."""
    (term, op), (second, kind) = ROUNDINGS[rounding], SECOND[other]
    loss, cured = planted(term, second, in_half), planted(term, second, as_it_is)

    def error(loss: Any) -> float:
        found, exact = (jax.tree.leaves(jax.jit(jax.grad(f))(W, X)) for f in (loss, planted(term, None, as_it_is)))
        return relative_error(found, exact)

    def audit() -> None:
        found = {risk for risk in mpjax.audit(loss, W, X).risks if risk.kind not in ("loss", "sum")}
        amplified = [risk for risk in found if risk.kind == "amplified"]
        assert op in {risk.op for risk in amplified}, str(found)
        assert {risk.source for risk in amplified} <= _lines(term), str(found)
        assert "rounded to bfloat16 by " in amplified[0].why, str(found)
        assert any(line in amplified[0].why for line in _lines(in_half)), str(found)
        others = {risk for risk in found if risk.kind != "amplified"}
        if kind and kind != "overflow":  # of values, which a trace does not show
            assert kind in {risk.kind for risk in others}, str(found)
            assert {risk.source for risk in others} <= _lines(second), str(found)
        cure = [risk for risk in mpjax.audit(cured, W, X).risks if risk.kind == "amplified"]
        assert not cure, str(cure)

    def layerwise_error() -> None:
        found = mpjax.layerwise_error(planted(term, None, in_half), W, X)
        assert error(planted(term, None, as_it_is)) < 1e-6
        if found.gradient_error < 0.1 and found.loss_error < 0.1:  # a rounding that matters little here
            return
        assert found.jump is not None, str(found)
        assert found.jump.source in _lines(term), str(found)

    def find_nonfinite() -> None:
        found = mpjax.find_nonfinite(loss, W, X)
        if kind == "overflow":
            assert found is not None, "finds nothing"
            if rounding == "gram matrix" and found.primitive == "cholesky":
                return
            assert (found.primitive, found.source in _lines(overflow)) == ("mul", True), str(found)
            found = mpjax.find_nonfinite(planted(term, None, as_it_is), W, X)
            assert found is None, str(found)
        elif found is not None:
            assert "rounded to bfloat16 by " in found.diagnosis, str(found)

    return {f.__name__: f for f in (audit, layerwise_error, find_nonfinite)}


def cases() -> dict[str, Callable[[], dict[str, Answer]]]:
    """The cases by name, as `wave, and an overflow`; each makes its answers by tool."""
    return {f"{r}, {s}": functools.partial(answers, r, s) for r in ROUNDINGS for s in SECOND}
