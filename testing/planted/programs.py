"""Programs of their own, each with a cause and the answers: loops, devices, derivative rules, optimizers, pipelines."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import mpjax
from testing.planted.answers import Answer, error, fault_of, numerics_of
from testing.planted.causes import dense
from testing.planted.models import BATCH, HALF, SIZE, X, normal, plain
from testing.planted.reported import REPORTED
from testing.planted.several import SEVERAL

# Programs of their own


def nan_in_an_iteration() -> None:
    """A scan that takes the root of a negative number in its fourth iteration."""
    xs = jnp.array([4.0, 1.0, 9.0, -1.0, 4.0])
    found = fault_of(lambda xs: jax.lax.scan(lambda c, x: (c + jnp.sqrt(x), x), jnp.zeros(()), xs)[0], xs)
    assert (found.primitive, found.iteration) == ("sqrt", 3), str(found)
    assert "negative number (-1)" in found.diagnosis, str(found)


def nan_on_a_device() -> None:
    """A logarithm of zero on the third of four devices."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.ones((len(jax.devices()), 3)).at[-1, 1].set(0)
    spec = PartitionSpec("data")
    found = fault_of(jax.shard_map(lambda x: jnp.log(x), mesh=mesh, in_specs=spec, out_specs=spec), x)
    assert found.device == f"data={len(jax.devices()) - 1}", str(found)
    assert found.element == (0, 1), str(found)


def nan_in_a_custom_rule() -> None:
    """A custom derivative rule that divides by zero."""

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    identity.defvjp(lambda x: (x, x), lambda x, ct: (ct / (x - x),))
    found = fault_of(jax.grad(lambda x: jnp.sum(identity(x))), jnp.ones(3))
    assert (found.primitive, found.direction) == ("div", "backward"), str(found)
    assert "division by zero" in found.diagnosis, str(found)


def nan_in_the_optimizer() -> None:
    """An optimizer whose second moment became NaN in an earlier step."""
    tx = optax.adam(1e-3)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    broken = (state[0]._replace(nu={"w": jnp.array([0, jnp.nan, 0.0])}), *state[1:])
    found = fault_of(lambda p, s, g: tx.update(g, s, p)[0], params, broken, params)
    assert found.argument is not None, str(found)
    assert "nu" in found.argument, str(found)
    assert "'w'" in found.argument, str(found)


def empty_mask() -> None:
    """A mean over the tokens that a mask keeps, which keeps none of one sequence."""
    mask = jnp.array([[1.0, 1.0], [0.0, 0.0]])
    found = fault_of(lambda x, m: jnp.mean(jnp.sum(x * m, -1) / jnp.sum(m, -1)), jnp.ones((2, 2)), mask)
    assert (found.primitive, found.element) == ("div", (1,)), str(found)
    assert "0/0" in found.diagnosis, str(found)


def trap_of_a_where() -> None:
    """The infinite derivative of a branch that is not selected."""

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))

    found = fault_of(jax.grad(loss), jnp.array([4.0, 0.0]))
    assert "gradient of a where" in found.diagnosis, str(found)

    def repaired(x: Any) -> Any:
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0))

    assert mpjax.find_nonfinite(jax.grad(repaired), jnp.array([4.0, 0.0])) is None, "the advice does not help"


def overflow_before_a_mask() -> None:
    """An overflow of the forward pass, with a `where` behind it that is not at fault."""

    def loss(w: Any, x: Any) -> Any:
        y = x @ w
        scores = jnp.where(jnp.tril(jnp.ones((BATCH, BATCH), bool)), y @ y.T, -jnp.inf)
        return jnp.mean(jax.nn.log_softmax(scores) @ y)

    found = fault_of(jax.grad(loss), np.full((SIZE, SIZE), 3e38, np.float32), X)
    assert (found.primitive, found.direction) == ("dot_general", "forward"), str(found)
    assert "where" not in found.diagnosis, str(found)


def too_large_a_scale() -> dict[str, Answer]:
    """A loss scale at which the backward pass overflows."""
    model = plain(dense)

    def find_nonfinite() -> None:
        loss = mpjax.autocast(model.loss, HALF)
        state = mpjax.static_loss_scale(optax.identity(), 2.0**24).init({})
        found = fault_of(mpjax.value_and_grad(loss, state), *model.args)
        assert "smaller loss scale" in found.diagnosis, str(found)
        smaller = mpjax.static_loss_scale(optax.identity(), 64.0).init({})
        assert mpjax.find_nonfinite(mpjax.value_and_grad(loss, smaller), *model.args) is None

    def numerics() -> None:
        found = numerics_of(model, loss_scale=2.0**24)
        assert found.init_scale < 2.0**24, str(found)
        assert error(model, HALF, scale=found.init_scale) < 0.01 < error(model, HALF, scale=2.0**24)

    return {"find_nonfinite": find_nonfinite, "numerics": numerics}


def outlier_batch() -> None:
    """One of five batches is 10,000 times as large as the others."""
    model = plain(dense)

    def loss(w: Any, x: Any) -> Any:
        return 1e-6 * jnp.mean((x @ w) ** 2)

    batches = [X] * 5
    batches[3] = 1e4 * X
    found = mpjax.numerics(loss, model.args[0]["body"], batches=batches)
    assert found.outliers == (3,), str(found)
    assert (found.init_scale or 0) > 1024, str(found)
    assert not found.overrides, str(found)


def average_in_half() -> None:
    """A moving average of the weights in bfloat16, to which each step adds too little."""

    def average(old: Any, new: Any) -> Any:
        return old * 0.999 + new.astype(old.dtype) * 0.001

    found = mpjax.audit(average, jnp.ones(8, jnp.bfloat16), jnp.ones(8))
    assert "update" in [risk.kind for risk in found.risks], str(found)
    assert not mpjax.audit(average, jnp.ones(8), jnp.ones(8)).risks, "in float32 too"


def mask_beyond_the_range() -> None:
    """An additive mask of -1e9 in float16."""

    def loss(x: Any, largest: Any) -> Any:
        mask = jnp.where(jnp.tril(jnp.ones((SIZE, SIZE), bool)), 0.0, largest).astype(jnp.float16)
        return jax.nn.softmax((x @ x.T + mask).astype(jnp.float32))

    given = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float16)
    found = mpjax.audit(functools.partial(loss, largest=-1e9), given)
    assert [risk.kind for risk in found.risks] == ["overflow"], str(found)
    fits = float(jnp.finfo(jnp.float16).min)
    assert not mpjax.audit(functools.partial(loss, largest=fits), given).risks, "the advice does not help"


def bad_dimension() -> None:
    """A vocabulary of 1003."""

    def of(n: int) -> Any:
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((512, 512), (512, n))]
        return mpjax.audit(lambda x, w: x @ w, *shapes).findings

    assert [finding.kind for finding in of(1003)] == ["dimension"], str(of(1003))
    assert "pad to 1008" in of(1003)[0].why
    assert not of(1008), "the advice does not help"


def expert_in_float32() -> None:
    """One expert of a mixture, whose matmul is in float32."""
    w = normal(4, SIZE, SIZE)

    def loss(w: Any, x: Any) -> Any:
        total = jnp.float32(0)
        for i in range(4):
            with jax.named_scope(f"expert_{i}"):
                dtype = jnp.float32 if i == 2 else jnp.bfloat16
                total += jnp.sum(jnp.tanh(x.astype(dtype) @ w[i].astype(dtype)).astype(jnp.float32))
        return total

    found = mpjax.audit(jax.grad(loss), w, X)
    assert {finding.module for finding in found.findings if finding.kind == "dtype"} == {"expert_2"}, str(found)
    assert found.half_share == 0.75, str(found)


def callback() -> dict[str, Answer]:
    """A host callback, which no tool sees inside of."""

    def loss(w: Any, x: Any) -> Any:
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jnp.mean((jax.pure_callback(lambda x: x, kind, x, vmap_method="sequential") @ w) ** 2)

    args = normal(SIZE, SIZE), X

    def check(found: Any) -> None:
        assert "pure_callback at programs.py" in str(found), str(found)

    return {
        "audit": lambda: check(mpjax.audit(loss, *args)),
        "numerics": lambda: check(mpjax.numerics(loss, *args)),
        "layerwise_error": lambda: check(mpjax.layerwise_error(mpjax.autocast(loss, HALF), *args)),
        "search": lambda: check(mpjax.search(loss, *args)),
        "explain": lambda: check(mpjax.explain(loss, *args)),
    }


def flushed_while_training() -> None:
    """A training step whose loss is so small that float16 flushes its gradients."""
    model = plain(dense)

    def warned(factor: float) -> bool:
        def loss(params: Any, x: Any) -> Any:
            return factor * model.loss(params, x)

        watched = mpjax.watch(loss, every=1, policy=HALF)
        state = jax.jit(watched.update)(watched.init(*model.args), *model.args)
        return "flushed to zero" in str(state.records()[-1])

    assert warned(1e-8), "does not warn"
    assert not warned(1.0), "warns of a healthy step"
    assert not warned(1e-8 * 2**20), "the advice, a larger scale, does not help"


def updates_lost_in_half() -> None:
    """Weights in bfloat16 that small updates do not change."""

    def make(policy: str, seed: int) -> mpjax.inspection.Training:
        dtype = jnp.float32 if policy == "float32" else jnp.bfloat16 if policy == "half" else None

        def step(w: Any, batch: Any) -> Any:
            return (w - 1e-3 * (w - batch).astype(w.dtype)).astype(w.dtype), jnp.mean((w - batch) ** 2)

        start = jnp.full(8, 1 + seed / 8, dtype or jnp.float32)
        return mpjax.inspection.Training(start, jax.jit(step), [jnp.zeros(8)] * 30, lambda w: float(jnp.mean(w)), None)

    found = mpjax.parity(make, ["half", "masters"], 3)
    kinds = found["half"].kind, found["masters"].kind, found["masters"].identical
    assert kinds[0] != "equal", str(found)
    assert kinds[1:] == ("equal", True), str(found)


def _limit(step: Any, limit: str, *args: Any, **options: Any) -> None:
    found = mpjax.profile(step, *args, steps=6, **options)
    assert found.limit == limit, str(found)


def slow_pipeline() -> None:
    """Batches that take 20 ms each; prefetched, they take none."""
    step = jax.jit(lambda w, x: jnp.sum(x @ w))

    def slow() -> Iterable[Any]:
        while True:
            time.sleep(0.02)
            yield X

    _limit(step, "input pipeline", normal(SIZE, SIZE), batches=slow())


def recompilation() -> None:
    """Batches of another size at each step."""
    step = jax.jit(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    sizes = (jnp.ones((i + 1, SIZE)) for i in range(1000))
    _limit(step, "recompilation", normal(SIZE, SIZE), batches=sizes)
    padded = mpjax.profile(step, normal(SIZE, SIZE), batches=[X] * 4, steps=6)
    assert padded.recompilation is None, "the advice does not help"


def sleep_in_the_step() -> None:
    """A step without jit that waits for something else."""

    def step(w: Any, x: Any) -> Any:
        time.sleep(0.02)
        return jnp.sum(x @ w)

    _limit(step, "code outside of jit", normal(SIZE, SIZE), jnp.asarray(X))


def counter_of_python() -> None:
    """A step that closes over a number that Python counts: a jit of it all would keep the first value."""
    inner, count = jax.jit(lambda w, n: w - 0.1 * n * w, static_argnums=1), [0]

    def step(w: Any) -> Any:
        count[0] += 1
        return inner(w, count[0])

    found = mpjax.profile(step, normal(SIZE, SIZE), steps=3, carry=1)
    assert found.limit == "recompilation", str(found)
    assert "jit what" not in str(found), str(found)
    assert "an array argument" in str(found), str(found)
    given = jax.jit(lambda w, n: w - 0.1 * n * w)
    assert mpjax.profile(given, normal(SIZE, SIZE), jnp.float32(1), steps=3).recompilation is None


def saved_in_each_step() -> None:
    """A step that writes its weights."""
    step = jax.jit(lambda w, x: w - 0.1 * x.T @ jnp.tanh(x @ w))

    def saving(w: Any, x: Any) -> Any:
        w = step(w, x)
        for _ in range(4):
            np.savez(io.BytesIO(), np.asarray(w))
        return w

    found = mpjax.profile(saving, jnp.asarray(normal(256, 256)), jnp.ones((8, 256)), steps=6, carry=1)
    assert found.limit in ("host work in the step", "code outside of jit"), str(found)
    assert "scan" not in str(found.advice), str(found)


def batch_of_numpy() -> None:
    """A batch of 16 MB that each call copies to the device."""
    step, batch = jax.jit(lambda w, x: x[:8].sum() + w.sum()), np.ones((4 << 20,), np.float32)
    found = mpjax.profile(step, normal(SIZE, SIZE), batch, steps=6)
    assert found.limit == "transfer", str(found)
    assert "scan" not in str(found.advice), str(found)
    cured = mpjax.profile(step, normal(SIZE, SIZE), jax.device_put(batch), steps=6)
    assert "transfer" not in {advice.limit for advice in cured.advice}, "the advice does not help"


def pipeline_and_recompilation() -> None:
    """Batches that take 2 ms each, and are of another size at each step, which costs more."""
    step = jax.jit(lambda w, x: jnp.sum(jnp.tanh(x @ w)))

    def batches() -> Iterable[Any]:
        for i in range(1000):
            time.sleep(0.002)
            yield jnp.ones((i + 1, SIZE))

    found = mpjax.profile(step, normal(SIZE, SIZE), batches=batches(), steps=6)
    assert found.limit == "recompilation", str(found)
    assert "args[1]: float32[" in found.advice[0].text, str(found)


def constants_of_an_optimizer() -> None:
    """Zeros that optax writes are no lost epsilons; a norm in float16 that overflows is named."""
    params, grads = {"w": jnp.ones((8, 8))}, {"w": jnp.full((64, 64), 100.0, jnp.float16)}
    for tx in (optax.adam(1e-3), optax.adamw(1e-3), optax.lamb(1e-3), optax.clip_by_global_norm(1.0)):
        assert not mpjax.audit(tx.update, params, tx.init(params), params).risks
    clip = optax.clip_by_global_norm(1.0)
    found = mpjax.audit(clip.update, grads, clip.init(grads))
    assert [risk.kind for risk in found.risks] == ["norm"], str(found)
    assert not np.any(clip.update(grads, clip.init(grads))[0]["w"]), "the updates are all zero"
    wide = jax.tree.map(jnp.float32, grads)
    assert not mpjax.audit(clip.update, wide, clip.init(wide)).risks, "the advice does not help"
    assert np.all(clip.update(wide, clip.init(wide))[0]["w"])


def epsilon_and_a_norm() -> None:
    """Adam in float16 behind a clip: its epsilon is zero, and the norm overflows."""
    tx, params = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), {"w": jnp.ones((8, 8), jnp.float16)}
    found = mpjax.audit(lambda *args: tx.update(*args), params, tx.init(params), params)
    assert {"epsilon", "norm"} <= {risk.kind for risk in found.risks}, str(found)
    assert {risk.source.partition(":")[0] for risk in found.risks} == {"programs.py"}, str(found)
    assert "epsilon at programs.py" in str(found).splitlines()[0], str(found)


def sum_of_calls_in_half() -> None:
    """Gradients of microbatches that a step adds to an argument in bfloat16."""
    args = normal(SIZE, SIZE), X

    def accumulate(total: Any, w: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return total + grads.astype(total.dtype)

    found = mpjax.audit(accumulate, jnp.zeros((SIZE, SIZE), jnp.bfloat16), *args)
    assert [risk.kind for risk in found.risks] == ["accumulator"], str(found)
    assert not mpjax.audit(accumulate, jnp.zeros((SIZE, SIZE)), *args).risks, "the advice does not help"


# Those that one tool answers.
OF_ONE_TOOL: dict[str, tuple[Answer, ...]] = {
    "find_nonfinite": (
        nan_in_an_iteration,
        nan_on_a_device,
        nan_in_a_custom_rule,
        nan_in_the_optimizer,
        empty_mask,
        trap_of_a_where,
        overflow_before_a_mask,
    ),
    "numerics": (outlier_batch,),
    "audit": (
        average_in_half,
        mask_beyond_the_range,
        bad_dimension,
        expert_in_float32,
        constants_of_an_optimizer,
        epsilon_and_a_norm,
        sum_of_calls_in_half,
    ),
    "watch": (flushed_while_training,),
    "parity": (updates_lost_in_half,),
    "profile": (
        slow_pipeline,
        recompilation,
        sleep_in_the_step,
        counter_of_python,
        saved_in_each_step,
        batch_of_numpy,
        pipeline_and_recompilation,
    ),
}
ALONE: dict[str, Callable[[], dict[str, Answer]]] = {
    **{
        f.__name__: functools.partial(dict, **{tool: f})
        for tools in (OF_ONE_TOOL, SEVERAL, REPORTED)
        for tool, found in tools.items()
        for f in found
    },
    **{f.__name__: f for f in (too_large_a_scale, callback)},
}
ALONE = {name.replace("_", " "): answers for name, answers in ALONE.items()}
