"""Programs with two faults that users report together: a loss and its model, a schedule, a clip, a fixed point."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import mpjax
from testing.planted.answers import Answer, fault_of
from testing.planted.models import BATCH, SIZE, X, normal

Half = jnp.float16
WEIGHTS = normal(SIZE, SIZE)


def line(fun: Any, below: int) -> str:
    """A line of a function."""
    return f"reported.py:{fun.__code__.co_firstlineno + below}"


def norm_of_padding_and_a_probability_of_zero() -> None:
    """An epsilon that float16 loses, and a logarithm that is infinite in float32 too."""

    def loss(w: Any, x: Any, cured: bool = False) -> Any:
        h = (x @ w).astype(Half)
        h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + (6.1e-5 if cured else 1e-8))
        return -jnp.mean(jnp.log(jax.nn.softmax(400 * h.astype(jnp.float32))))

    x = X.copy()
    x[3] = 0
    found = fault_of(loss, WEIGHTS, x)
    assert (found.primitive, found.source, found.element) == ("rsqrt", line(loss, 2), (3, 0)), str(found)
    assert "1e-08 is zero in float16" in found.diagnosis, str(found)
    assert f"log at {line(loss, 3)}" in found.others[0], str(found)
    assert "1e-08" not in found.others[0], str(found)
    cured = fault_of(functools.partial(loss, cured=True), WEIGHTS, x)
    assert (cured.primitive, cured.others) == ("log", ()), "the advice does not help"


def temperature_and_a_vector_of_zeros() -> None:
    """A learned temperature beyond the range of float16, and a similarity with a vector of zeros."""

    def loss(temperature: Any, a: Any, b: Any) -> Any:
        scores = jnp.exp(temperature.astype(Half)) * (a.astype(Half) @ b.astype(Half).T)
        cosine = jnp.sum(a * b, -1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1))
        return jnp.mean(jax.nn.logsumexp(scores.astype(jnp.float32), -1)) - jnp.mean(cosine)

    b = X.copy()
    b[2] = 0
    found = fault_of(loss, np.float32(12), X, b)
    assert (found.primitive, found.source) == ("exp", line(loss, 1)), str(found)
    assert f"div at {line(loss, 2)}: 0/0" in found.others[0], str(found)
    assert mpjax.find_nonfinite(loss, np.float32(3), X, X) is None


def divergence_of_two_rounded_distributions() -> None:
    """Two logarithms on a line, each of a probability that float16 flushes."""

    def loss(a: Any, b: Any, dtype: Any) -> Any:
        p, q = (jax.nn.softmax(9 * x).astype(dtype) for x in (a, b))
        return jnp.sum((p * (jnp.log(p) - jnp.log(q))).astype(jnp.float32))

    a, b = normal(BATCH, SIZE), normal(BATCH, SIZE + 1)[:, :SIZE]
    found = fault_of(functools.partial(loss, dtype=Half), a, b)
    assert (found.primitive, found.source, len(found.others)) == ("log", line(loss, 2), 1), str(found)
    assert f"log at {line(loss, 2)}, column " in found.others[0], str(found)
    assert all("flushed" in text for text in (found.diagnosis, *found.others)), str(found)
    assert mpjax.find_nonfinite(functools.partial(loss, dtype=jnp.float32), a, b) is None, "the advice does not help"


def ratio_and_an_entropy() -> None:
    """A ratio of probabilities beyond the range of float16, and an entropy of one that it flushes."""

    def loss(w: Any, x: Any, old: Any, dtype: Any) -> Any:
        scores = (x @ w).astype(dtype)
        chosen = jax.nn.log_softmax(scores)[:, 0]
        ratio = jnp.exp(chosen - old.astype(dtype))
        p = jax.nn.softmax(scores)
        entropy = -jnp.sum(p * jnp.log(p), -1)
        return jnp.mean((ratio - entropy).astype(jnp.float32))

    args = WEIGHTS, 9 * X, np.full(BATCH, -80, np.float32)
    found = fault_of(functools.partial(loss, dtype=Half), *args)
    assert (found.primitive, found.source) == ("exp", line(loss, 3)), str(found)
    assert f"log at {line(loss, 5)}" in found.others[0], str(found)
    assert mpjax.find_nonfinite(functools.partial(loss, dtype=Half), WEIGHTS, X / 9, -np.ones(BATCH)) is None


def schedule_and_an_overflow() -> None:
    """Noise of a diffusion, 1 - the product of numbers near 1 in bfloat16; and an overflow of float16."""

    def loss(x: Any, steps: Any, dtype: Any) -> Any:
        kept = jnp.cumprod(1 - jnp.linspace(1e-4, 2e-2, 1000).astype(dtype))
        noise = x / jnp.sqrt(1 - kept[steps])[:, None].astype(jnp.float32)
        return jnp.mean(noise) + jnp.sum((300 * x.astype(Half)) ** 2).astype(jnp.float32)

    args = X + 9, np.arange(BATCH)
    half = functools.partial(loss, dtype=jnp.bfloat16)
    found = fault_of(half, *args)
    assert (found.primitive, found.source) == ("div", line(loss, 2)), str(found)
    assert f"by cumprod at {line(loss, 1)}" in found.diagnosis, str(found)
    assert "overflow of float16" in found.others[0], str(found)
    risks = {(risk.kind, risk.source) for risk in mpjax.audit(half, *args).risks}
    assert ("amplified", line(loss, 2)) in risks, str(risks)
    cured = fault_of(functools.partial(loss, dtype=jnp.float32), *args)
    assert (cured.source, cured.others) == (line(loss, 3), ()), "the advice does not help"


def clip_over_devices_and_an_empty_part() -> None:
    """A norm that overflows and makes all updates zero; and a count of zero on one of the devices."""
    devices = len(jax.devices())
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")

    def local(gradient: Any, mask: Any, dtype: Any) -> Any:
        norm = jnp.sqrt(jax.lax.psum(jnp.sum(gradient.astype(dtype) ** 2), "data"))
        clipped = gradient / jnp.maximum(norm, 1).astype(jnp.float32)
        return clipped / jnp.sum(mask)

    def clip(dtype: Any) -> Any:
        return jax.shard_map(lambda g, m: local(g, m, dtype), mesh=mesh, in_specs=(spec, spec), out_specs=spec)

    gradient, mask = np.full((devices, 4096), 5, np.float32), np.ones((devices, 2), np.float32)
    mask[-1] = 0
    found = fault_of(clip(Half), gradient, mask)
    assert (found.primitive, found.source, found.device) == ("div", line(local, 3), f"data={devices - 1}"), str(found)
    risks = {(risk.kind, risk.source) for risk in mpjax.audit(clip(Half), gradient, mask).risks}
    assert ("norm", line(local, 1)) in risks, str(risks)
    assert not mpjax.audit(clip(jnp.float32), gradient, mask).risks, "the advice does not help"


def fixed_point_and_a_metric() -> None:
    """Scalings of a transport plan to a tolerance, whose kernel float16 flushes; and a logarithm behind the loop."""

    def loss(cost: Any, weight: Any, dtype: Any) -> Any:
        kernel = jnp.exp(-cost.astype(dtype) / 0.04)
        scaled = lambda state: (1 / (kernel @ (1 / (kernel.T @ state[0]))), state[0])
        moves = lambda state: jnp.max(jnp.abs(state[0] / state[1] - 1)) > 1e-3
        u, _ = jax.lax.while_loop(moves, scaled, (jnp.ones(SIZE, dtype), jnp.full(SIZE, 2, dtype)))
        return jnp.sum(u.astype(jnp.float32)) + jnp.log(weight)

    cost = np.abs(WEIGHTS) / 4 + 0.3
    cost[2] += 1
    found = fault_of(functools.partial(loss, dtype=Half), cost, np.float32(0))
    assert (found.primitive, found.source, found.iteration) == ("div", line(loss, 2), 0), str(found)
    assert "in float16 alone" in found.diagnosis, str(found)
    assert any(f"log at {line(loss, 5)}" in other for other in found.others), str(found)
    assert mpjax.find_nonfinite(functools.partial(loss, dtype=jnp.float32), cost, np.float32(1)) is None, (
        "does not help"
    )


def gates_and_a_sum() -> None:
    """The state of a gated unit in bfloat16, which forgets what was rounded; and a sum, which does not."""

    def states(w: Any, xs: Any, dtype: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            h, total = carry
            h = (h + jax.nn.sigmoid(x @ w) * (jnp.tanh(x) - h)).astype(dtype)
            total = (total + x).astype(dtype)
            return (h, total), None

        start = jnp.zeros(SIZE, dtype)
        return jax.lax.scan(step, (start, start), xs)[0], step

    def places(dtype: Any) -> list[str]:
        found = mpjax.audit(lambda w, xs: states(w, xs, dtype)[0], WEIGHTS, X)
        return [risk.source for risk in found.risks if risk.kind == "accumulator"]

    assert places(jnp.bfloat16) == [line(states, 4)], places(jnp.bfloat16)
    assert not places(jnp.float32), "the advice does not help"


REPORTED: dict[str, tuple[Answer, ...]] = {
    "find_nonfinite": (
        norm_of_padding_and_a_probability_of_zero,
        temperature_and_a_vector_of_zeros,
        divergence_of_two_rounded_distributions,
        ratio_and_an_entropy,
        schedule_and_an_overflow,
        clip_over_devices_and_an_empty_part,
        fixed_point_and_a_metric,
    ),
    "audit": (gates_and_a_sum,),
}
