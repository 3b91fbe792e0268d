"""Programs with causes in several rows, iterations, devices and passes; and what looks like a cause and is none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import mpjax
from testing.planted.answers import Answer, fault_of
from testing.planted.models import BATCH, HALF, SIZE, X, normal

Half = jnp.float16


def line(fun: Any, below: int) -> str:
    """A line of a function."""
    return f"several.py:{fun.__code__.co_firstlineno + below}"


def nan_in_a_row_and_a_label() -> None:
    """A NaN in one example, and a label out of range in another."""

    def loss(w: Any, x: Any, labels: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    x, labels = X.copy(), np.arange(BATCH)
    x[3, 2], labels[5] = np.nan, SIZE
    found = fault_of(jax.value_and_grad(loss), normal(SIZE, SIZE), x, labels)
    assert (found.argument, len(found.others)) == ("args[1]", 1), str(found)
    assert f"at {line(loss, 1)}: index {SIZE} of an axis of {SIZE}" in found.others[0], str(found)
    cured = fault_of(jax.value_and_grad(loss), normal(SIZE, SIZE), X, labels)
    assert (cured.primitive, cured.others) == ("gather", ()), str(cured)


def two_iterations_and_lines() -> None:
    """A root of a negative number in iteration 12 of a loop, and a logarithm of zero in iteration 37."""

    def body(total: Any, x: Any) -> Any:
        a = jnp.log(x[0])
        b = jnp.sqrt(x[1])
        return (total[0] + a, total[1] + b), None

    def loss(xs: Any) -> Any:
        return sum(jax.lax.scan(body, (0.0, 0.0), xs)[0])

    xs = np.abs(normal(50, 2)) + 1
    assert mpjax.find_nonfinite(loss, xs) is None
    xs[37, 0], xs[12, 1] = 0, -1
    found = fault_of(jax.value_and_grad(loss), xs)
    assert (found.primitive, found.source, found.iteration) == ("sqrt", line(body, 2), 12), str(found)
    assert found.others[0].startswith(f"inf made by log at {line(body, 1)}, iteration 37: log of zero"), str(found)


def two_devices_and_lines() -> None:
    """A logarithm of zero on the first device, and a root of a negative number on the last."""
    count = len(jax.devices())
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x: Any) -> Any:
        a = jnp.sum(jnp.log(x[:, 0]))
        b = jnp.sum(jnp.sqrt(x[:, 1]))
        return jax.lax.psum(a + b, "data")

    x = np.ones((2 * count, 2), np.float32)
    x[0, 0], x[-1, 1] = 0, -1
    spec = PartitionSpec("data")
    found = fault_of(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec()), x)
    assert (found.source, found.device) == (line(local, 1), "data=0"), str(found)
    assert found.others[0].startswith(f"NaN made by sqrt at {line(local, 2)}"), str(found)


def overflow_that_one_device_reads() -> None:
    """All devices overflow; the last alone reads it."""
    count = len(jax.devices())
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x: Any) -> Any:
        large = x.astype(Half) * 40000 * 2
        return jax.lax.pmax(jnp.max(jnp.where(jax.lax.axis_index("data") == count - 1, large, 0)), "data")

    spec = PartitionSpec("data")
    found = fault_of(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=PartitionSpec()), np.ones((2 * count, 2)))
    assert (found.primitive, found.device) == ("mul", f"data={count - 1}"), str(found)


def log_in_the_branch_not_taken() -> None:
    """The cotangent of a `where` is zero, and 0/0 is no fault of the data."""

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0))

    x = np.array([4, 0], np.float32)
    found = fault_of(jax.grad(loss), x)
    assert "gradient of a where" in found.diagnosis, str(found)
    assert "check the data" not in found.diagnosis, str(found)

    def cured(x: Any) -> Any:
        return jnp.sum(jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), 0.0))

    assert mpjax.find_nonfinite(jax.grad(cured), x) is None, "the advice does not help"


def rule_that_overflows_at_any_scale() -> None:
    """A custom backward rule that squares its residual in float16."""

    def squares(x: Any, ct: Any) -> Any:
        large = (300 * x).astype(Half)
        return (ct * (large * large).astype(ct.dtype) / 9e4,)

    bad = jax.custom_vjp(lambda x: x)
    bad.defvjp(lambda x: (x, x), squares)
    for scale in (1.0, 2.0**15):
        state = mpjax.static_loss_scale(optax.identity(), scale).init({})
        gradient = mpjax.value_and_grad(lambda w, x: jnp.mean(bad(x @ w) ** 2), state)
        found = fault_of(gradient, normal(SIZE, SIZE), X)
        assert (found.primitive, found.direction) == ("mul", "backward"), str(found)
        assert "loss scale" not in found.diagnosis, str(found)


def overflow_and_too_large_a_scale() -> None:
    """A forward overflow that any scale leaves, and a scale that overflows the backward pass by itself."""

    def loss(w: Any, x: Any) -> Any:
        h = (300 * jnp.tanh(x @ w)) @ (300 * w) / 9e4
        return 100 * jnp.mean(h**2)

    state = mpjax.static_loss_scale(optax.identity(), 2.0**24).init({})
    found = fault_of(mpjax.value_and_grad(loss, state, policy=HALF), normal(SIZE, SIZE), X)
    assert (found.primitive, found.direction, found.source) == ("dot_general", "forward", line(loss, 1)), str(found)
    assert "loss scale" not in found.diagnosis, str(found)
    assert any("a smaller loss scale" in other for other in found.others), str(found)


def count_that_wraps() -> None:
    """The ones of a mask, summed in eight bits, and in 32."""

    def count(ids: Any, dtype: Any) -> Any:
        return jnp.sum((ids == 3).astype(jnp.int8), dtype=dtype)

    found = mpjax.audit(lambda ids: count(ids, jnp.int8), np.arange(300) % 7)
    assert [(risk.kind, risk.source) for risk in found.risks] == [("wraps", line(count, 1))], str(found)
    assert not mpjax.audit(lambda ids: count(ids, jnp.int32), np.arange(300) % 7).risks, "the advice does not help"


def mean_in_half_and_a_decay() -> None:
    """A running mean of calls in bfloat16, beside a decay that is 1 there."""

    def step(mean: Any, x: Any, n: Any) -> Any:
        new = mean + (x - mean) / n.astype(mean.dtype)
        return new, (0.999 * x).astype(jnp.float32)

    def found(dtype: Any) -> list[tuple[str, str]]:
        args = np.ones(SIZE, dtype), np.ones(SIZE, dtype), np.int32(9)
        return [(risk.kind, risk.source) for risk in mpjax.audit(step, *args).risks]

    half = found(jnp.bfloat16)
    assert sorted(half) == [("accumulator", line(step, 1)), ("constant", line(step, 2))], str(half)
    assert not found(np.float32), "the advice does not help"


def division_in_a_branch_and_again() -> None:
    """Gradients that are divided by the loss scale in a `cond`, and once more behind it."""

    def step(w: Any, x: Any, scale: Any, again: bool) -> Any:
        loss = lambda w: scale * jnp.mean((x.astype(Half) @ w.astype(Half)).astype(jnp.float32) ** 2)
        grads = jax.grad(loss)(w)
        grads = jax.lax.cond(jnp.isfinite(grads).all(), lambda g: g / scale, jnp.zeros_like, grads)
        return w - 0.1 * (grads / scale if again else jnp.clip(grads, -1, 1))

    args = normal(SIZE, SIZE), X, np.float32(1024)
    found = mpjax.audit(lambda w, x, scale: step(w, x, scale, True), *args)
    assert [(risk.kind, risk.source) for risk in found.risks] == [("divided", line(step, 4))], str(found)
    assert not mpjax.audit(lambda w, x, scale: step(w, x, scale, False), *args).risks, "risks in a healthy step"


def data_beyond_half() -> None:
    """Inputs that float16 does not hold, such as timestamps."""

    def loss(w: Any, x: Any) -> Any:
        with jax.named_scope("planted"):
            return jnp.mean(jnp.tanh(x @ w) ** 2)

    found = mpjax.numerics(loss, normal(SIZE, SIZE), 1e6 * X)
    assert str(found).startswith("float16 does not hold args[1]"), str(found)
    assert not found.overrides, str(found)
    assert not mpjax.numerics(loss, normal(SIZE, SIZE), X).beyond, "the advice does not help"


SEVERAL: dict[str, tuple[Answer, ...]] = {
    "find_nonfinite": (
        nan_in_a_row_and_a_label,
        two_iterations_and_lines,
        two_devices_and_lines,
        overflow_that_one_device_reads,
        log_in_the_branch_not_taken,
        rule_that_overflows_at_any_scale,
        overflow_and_too_large_a_scale,
    ),
    "audit": (count_that_wraps, mean_in_half_and_a_decay, division_in_a_branch_and_again),
    "numerics": (data_beyond_half,),
}
