"""Planted causes and the answer that each inspection must give: `python -m benchmarks.planted`.

A cause is planted in the module `planted` of one small model, written in Linen, NNX, Haiku, Equinox, plain JAX, and
under `vmap`; or in a program of its own. Each answer is checked. Rules, overrides and loss scales that a tool advises
are applied, and must reduce the error of the compiled gradient. On the healthy models no tool may recommend anything. A
cell is "as planted", or says what the tool answered instead.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Before JAX starts: one cause lies on one of several devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import mpjax
from benchmarks import commands
from mpjax.inspection import NonFinite
from perf.results import previous
from testing.measures import relative_error

SIZE, BATCH = 16, 8
AS_PLANTED = "as planted"
HALF = "mixed_float16"
Plant = Callable[[Any, Any], Any]  # of the module's input and its weights
Answer = Callable[[], None]  # raises an AssertionError


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss function with its arguments, and the path of the module `planted`."""

    loss: Callable[..., Any]
    args: tuple[Any, ...]
    path: str


def _normal(*shape: int) -> Any:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


X = _normal(BATCH, SIZE)
_WEIGHTS = nn.initializers.normal(SIZE**-0.5)


def plain(plant: Plant, per_example: bool = False) -> Model:
    """Functions under named scopes; `per_example` maps them over the batch."""

    def network(params: Any, x: Any) -> Any:
        with jax.named_scope("body"):
            x = jnp.tanh(x @ params["body"])
        with jax.named_scope("planted"):
            x = plant(x, params["planted"])
        with jax.named_scope("head"):
            return x @ params["head"]

    def loss(params: Any, x: Any) -> Any:
        out = jax.vmap(network, (None, 0))(params, x) if per_example else network(params, x)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    params = {name: _normal(SIZE, SIZE + i)[:, :SIZE] / 4 for i, name in enumerate(("body", "planted", "head"))}
    return Model(loss, (params, X), "planted")


def linen(plant: Plant) -> Model:
    class Planted(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return plant(x, self.param("w", _WEIGHTS, (SIZE, SIZE)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = Planted(name="planted")(jnp.tanh(nn.Dense(SIZE, name="body")(x)))
            return nn.Dense(SIZE, name="head")(x)

    net: Any = Net()
    params = jax.jit(net.init)(jax.random.key(0), X)
    return Model(lambda params, x: jnp.mean(net.apply(params, x).astype(jnp.float32) ** 2), (params, X), "Net/planted")


def flax_nnx(plant: Plant) -> Model:
    class Planted(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.asarray(_normal(SIZE, SIZE) / 4))

        def __call__(self, x: Any) -> Any:
            return plant(x, self.w[...])

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.body, self.head = (nnx.Linear(SIZE, SIZE, rngs=rngs) for _ in range(2))
            self.planted = Planted()

        def __call__(self, x: Any) -> Any:
            return self.head(self.planted(jnp.tanh(self.body(x))))

    return Model(lambda net, x: jnp.mean(net(x).astype(jnp.float32) ** 2), (Net(nnx.Rngs(0)), X), "planted")


def haiku(plant: Plant) -> Model:
    class Planted(hk.Module):
        def __call__(self, x: Any) -> Any:
            return plant(x, hk.get_parameter("w", (SIZE, SIZE), init=hk.initializers.RandomNormal(SIZE**-0.5)))

    def network(x: Any) -> Any:
        x = Planted(name="planted")(jnp.tanh(hk.Linear(SIZE, name="body")(x)))
        return hk.Linear(SIZE, name="head")(x)

    net: Any = hk.without_apply_rng(hk.transform(network))
    params = net.init(jax.random.key(0), X)
    return Model(lambda params, x: jnp.mean(net.apply(params, x).astype(jnp.float32) ** 2), (params, X), "planted")


def equinox(plant: Plant) -> Model:
    class Planted(eqx.Module):
        w: Any

        def __call__(self, x: Any) -> Any:
            return plant(x, self.w)

    class Net(eqx.Module):
        body: Any
        planted: Any
        head: Any

        def __call__(self, x: Any) -> Any:
            return self.head(self.planted(jnp.tanh(self.body(x))))

    body, head = (eqx.nn.Linear(SIZE, SIZE, key=jax.random.key(i)) for i in range(2))
    net = Net(body, Planted(_normal(SIZE, SIZE) / 4), head)
    return Model(lambda net, x: jnp.mean(jax.vmap(net)(x).astype(jnp.float32) ** 2), (net, X), "planted")


LIBRARIES: dict[str, Callable[[Plant], Model]] = {
    "Linen": linen,
    "NNX": flax_nnx,
    "Haiku": haiku,
    "Equinox": equinox,
    "plain": plain,
    "vmap": functools.partial(plain, per_example=True),
}


def gradient(model: Model, policy: Any = None, rules: Any = None, scale: float = 1.0) -> Any:
    """The compiled gradient, unscaled; in float32 without a policy."""
    loss = model.loss if policy is None else mpjax.autocast(model.loss, policy, rules=rules)
    diff, static = eqx.partition(model.args[0], eqx.is_inexact_array) if not _is_nnx(model) else (None, None)
    if _is_nnx(model):
        graph, diff = nnx.split(model.args[0])

        def whole(diff: Any) -> Any:
            return nnx.merge(graph, diff)
    else:

        def whole(diff: Any) -> Any:
            return eqx.combine(diff, static)

    run = jax.jit(
        jax.grad(lambda diff: scale * loss(whole(diff), *model.args[1:])),
        compiler_options={"xla_allow_excess_precision": False},
    )
    return jax.tree.map(lambda x: np.asarray(x, np.float32) / scale, jax.tree.leaves(run(diff)))


def _is_nnx(model: Model) -> bool:
    return isinstance(model.args[0], nnx.Module)


def error(model: Model, *given: Any, **options: Any) -> float:
    """The relative error of the gradient against float32; inf if it is not finite."""
    found = gradient(model, *given, **options)
    finite = all(np.isfinite(x).all() for x in found)
    return relative_error(found, gradient(model)) if finite else float("inf")


def _fault(fun: Callable[..., Any], *args: Any) -> NonFinite:
    """What `find_nonfinite` finds, which must be something."""
    found = mpjax.find_nonfinite(fun, *args)
    assert found is not None, "finds nothing"
    return found


def _is_at(model: Model, found: str) -> None:
    """The module's path, or the planted function where the library names no scope (Equinox)."""
    named = f"/{found}".endswith(f"/{model.path}") or "planted.py" in found
    assert named, f"names {found!r}, not {model.path!r}"


def _numerics(model: Model, **options: Any) -> Any:
    return mpjax.numerics(model.loss, *model.args, **options)


def says_nothing(model: Model) -> dict[str, Answer]:
    """What each tool answers to a healthy model: no recommendation, and an all-clear."""

    def audit() -> None:
        found = mpjax.audit(mpjax.autocast(model.loss, HALF), *model.args)
        assert found.half_share == 1, f"half {found.half_share}"
        assert not found.risks, str(found.risks)
        assert not [f for f in found.findings if f.kind != "tiny"], str(found.findings)

    def numerics() -> None:
        found = _numerics(model)
        assert found.keep_float32 == found.losing == found.losing_lines == (), str(found)
        assert "no module needs to be kept" in str(found), str(found)
        assert error(model, HALF, scale=found.init_scale) <= 1.05 * error(model, HALF), "its scale is worse"

    def search() -> None:
        found = mpjax.search(model.loss, *model.args, budget=0.01)
        assert not found.added, str(found)

    def layerwise_error() -> None:
        found = mpjax.layerwise_error(mpjax.autocast(model.loss, HALF), *model.args, loss_scale=1024.0)
        assert "needs float32" not in str(found), str(found)
        assert found.gradient_error < 0.01, str(found)

    def find_nonfinite() -> None:
        assert (
            mpjax.find_nonfinite(jax.value_and_grad(mpjax.autocast(_array_loss(model), HALF)), *_arrays(model)) is None
        )

    def explain() -> None:
        found = mpjax.explain(model.loss, *model.args)
        assert (found.half_share, found.opaque, found.unseen) == (1, (), ()), str(found)

    def profile() -> None:
        found = mpjax.profile(jax.jit(functools.partial(_trained, _array_loss(model), 2000)), *_arrays(model), steps=3)
        assert not found.advice, str(found)

    def parity() -> None:
        found = mpjax.parity(functools.partial(_training, model), [HALF], 3)
        assert found[HALF].kind in ("equal", "small"), str(found)

    tools = audit, explain, numerics, search, layerwise_error, find_nonfinite, profile, parity
    return {f.__name__: f for f in tools}


def _trained(loss: Any, steps: int, params: Any, x: Any, *rest: Any) -> Any:
    """The parameters after some steps of gradient descent."""

    def step(_: Any, params: Any) -> Any:
        return jax.tree.map(lambda w, g: w - 1e-2 * g, params, jax.grad(loss)(params, x, *rest))

    return jax.lax.fori_loop(0, steps, step, jax.tree.map(jnp.asarray, params))


def _training(model: Model, policy: str, seed: int) -> mpjax.inspection.Training:
    """A `mpjax.inspection.MakeTraining` of a model, whose batches depend on the seed."""
    params, x, *rest = _arrays(model)
    run = jax.jit(functools.partial(_trained, mpjax.autocast(_array_loss(model), policy), 1))
    measure = jax.jit(_array_loss(model))
    batches = [np.random.default_rng((seed, i)).normal(size=x.shape).astype(np.float32) for i in range(10)]

    def step(params: Any, batch: Any) -> Any:
        return run(params, batch, *rest), 0.0

    return mpjax.inspection.Training(params, step, batches, lambda w: -float(measure(w, batches[0], *rest)))


def _arrays(model: Model) -> tuple[Any, ...]:
    """Arguments that `jax.grad` takes."""
    if _is_nnx(model):
        return (nnx.split(model.args[0])[1], *model.args[1:])
    return model.args


def _array_loss(model: Model) -> Callable[..., Any]:
    if not _is_nnx(model):
        return model.loss
    graph = nnx.split(model.args[0])[0]
    return lambda state, *rest: model.loss(nnx.merge(graph, state), *rest)


def _found_in(model: Model, primitive: str, words: str, half: bool = True) -> Answer:
    """`find_nonfinite` of the loss names the operation, the module and the cause."""

    def find_nonfinite() -> None:
        loss = mpjax.autocast(model.loss, HALF) if half else model.loss
        found = _fault(loss, *model.args)
        assert found.primitive == primitive, str(found)
        if found.module:  # NNX and Equinox have no scopes: the operation reads no parameter
            _is_at(model, found.module)
        assert words in found.diagnosis, found.diagnosis

    return find_nonfinite


def _search_keeps(model: Model, budget: float = 0.01) -> Answer:
    """`search` keeps the planted module in float32, and its rules meet the budget."""

    def search() -> None:
        before = error(model, HALF, scale=64.0)
        found = mpjax.search(model.loss, *model.args, budget=budget)
        assert found.met, str(found)
        (kept,) = found.keep_float32
        _is_at(model, kept)
        after = error(model, HALF, found.rules, scale=64.0)
        assert after <= 1.5 * budget < before, f"error {before} to {after} with its rules"

    return search


def overflow(model: Model) -> dict[str, Answer]:
    """A square that leaves float16's range, and comes back."""

    def numerics() -> None:
        assert error(model, HALF) == float("inf")
        found = _numerics(model)
        if not found.keep_float32:  # Equinox names no scope: the lines are named instead
            assert all("planted.py" in line for line in found.losing_lines or ["nothing"]), str(found)
            return
        assert [path.rpartition("/")[2] for path in found.keep_float32] == ["planted"], str(found)
        kept = mpjax.Policy("float32", "float16", "float32", overrides=found.overrides)
        assert error(model, kept, scale=found.init_scale) < 0.05, "its overrides and scale do not help"

    def layerwise_error() -> None:
        found = mpjax.layerwise_error(mpjax.autocast(model.loss, HALF), *model.args)
        _is_at(model, found.modules[0].name)
        assert found.modules[0].error == float("inf"), str(found)

    return {
        "numerics": numerics,
        "layerwise_error": layerwise_error,
        "search": _search_keeps(model, 0.02),
        "find_nonfinite": _found_in(model, "mul", "overflow of float16"),
    }


def cancellation(model: Model) -> dict[str, Answer]:
    """A small difference of large numbers."""

    def layerwise_error() -> None:
        found = mpjax.layerwise_error(mpjax.autocast(model.loss, HALF), *model.args, loss_scale=64.0)
        _is_at(model, found.modules[0].name)

    def find_nonfinite() -> None:
        assert mpjax.find_nonfinite(mpjax.autocast(model.loss, HALF), *model.args) is None

    answers = {"search": _search_keeps(model, 0.02)}
    return answers | {"layerwise_error": layerwise_error, "find_nonfinite": find_nonfinite}


def log_of_zero(model: Model) -> dict[str, Answer]:
    """A fault of the model, in every precision."""

    def numerics() -> None:
        found = _numerics(model)
        assert found.init_scale is None, str(found)
        assert not found.overrides, str(found)
        assert "find_nonfinite" in str(found), str(found)

    finds = _found_in(model, "log", "log of zero", half=False)
    return {"find_nonfinite": finds, "numerics": numerics}


def lost_epsilon(model: Model) -> dict[str, Answer]:
    """A division by a norm and an epsilon that is zero in float16."""

    def audit() -> None:
        found = mpjax.audit(model.loss, *model.args)
        assert "epsilon" in [risk.kind for risk in found.risks], str(found)

    return {"audit": audit, "find_nonfinite": _found_in(model, "div", "1e-08 is zero in float16", half=False)}


def norm_in_half(model: Model) -> dict[str, Answer]:
    """A norm in bfloat16, whose backward pass sums in it."""

    def audit() -> None:
        found = mpjax.audit(jax.grad(_array_loss(model)), *_arrays(model))
        assert "sum" in [risk.kind for risk in found.risks], str(found)

    def layerwise_error() -> None:
        found = mpjax.layerwise_error(model.loss, *model.args)
        first = found.modules[0]
        _is_at(model, first.name)
        assert "reduce_sum" in first.denied, str(found)

    return {"audit": audit, "layerwise_error": layerwise_error}


def small_gradients(model: Model) -> dict[str, Answer]:
    """A loss so small that float16 flushes its gradients."""
    small = dataclasses.replace(model, loss=lambda *args: 1e-6 * model.loss(*args))

    def numerics() -> None:
        found = _numerics(small)
        assert not found.overrides, str(found)
        assert found.init_scale is not None, str(found)
        assert found.init_scale > 1024, str(found)
        before, after = error(small, HALF), error(small, HALF, scale=found.init_scale)
        assert after < 0.01 < before, f"error {before} to {after} with its scale"

    def find_nonfinite() -> None:
        assert mpjax.find_nonfinite(mpjax.autocast(small.loss, HALF), *small.args) is None

    return {"numerics": numerics, "find_nonfinite": find_nonfinite}


def _dense(x: Any, w: Any) -> Any:
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
    "healthy": (_dense, says_nothing),
    "overflow": (lambda x, w: (x @ w * 300) * (x @ w * 300) / 9e4, overflow),
    "cancellation": (lambda x, w: (x + 1000) @ w - 1000 * jnp.sum(w, 0), cancellation),
    "log of zero": (lambda x, w: jnp.log(jnp.abs(0 * (x @ w))), log_of_zero),
    "epsilon lost": (_lost_epsilon, lost_epsilon),
    "norm in half": (_norm_in_half, norm_in_half),
    "small gradients": (_dense, small_gradients),
}


# Programs of their own


def nan_in_an_iteration() -> None:
    """A scan that takes the root of a negative number in its fourth iteration."""
    xs = jnp.array([4.0, 1.0, 9.0, -1.0, 4.0])
    found = _fault(lambda xs: jax.lax.scan(lambda c, x: (c + jnp.sqrt(x), x), jnp.zeros(()), xs)[0], xs)
    assert (found.primitive, found.iteration) == ("sqrt", 3), str(found)
    assert "negative number (-1)" in found.diagnosis, str(found)


def nan_on_a_device() -> None:
    """A logarithm of zero on the third of four devices."""
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.ones((len(jax.devices()), 3)).at[-1, 1].set(0)
    spec = PartitionSpec("data")
    found = _fault(jax.shard_map(lambda x: jnp.log(x), mesh=mesh, in_specs=spec, out_specs=spec), x)
    assert found.device == f"data={len(jax.devices()) - 1}", str(found)
    assert found.element == (0, 1), str(found)


def nan_in_a_custom_rule() -> None:
    """A custom derivative rule that divides by zero."""

    @jax.custom_vjp
    def identity(x: Any) -> Any:
        return x

    identity.defvjp(lambda x: (x, x), lambda x, ct: (ct / (x - x),))
    found = _fault(jax.grad(lambda x: jnp.sum(identity(x))), jnp.ones(3))
    assert (found.primitive, found.direction) == ("div", "backward"), str(found)
    assert "division by zero" in found.diagnosis, str(found)


def nan_in_the_optimizer() -> None:
    """An optimizer whose second moment became NaN in an earlier step."""
    tx = optax.adam(1e-3)
    params = {"w": jnp.ones(3)}
    state = tx.init(params)
    broken = (state[0]._replace(nu={"w": jnp.array([0, jnp.nan, 0.0])}), *state[1:])
    found = _fault(lambda p, s, g: tx.update(g, s, p)[0], params, broken, params)
    assert found.argument is not None, str(found)
    assert "nu" in found.argument, str(found)
    assert "'w'" in found.argument, str(found)


def empty_mask() -> None:
    """A mean over the tokens that a mask keeps, which keeps none of one sequence."""
    mask = jnp.array([[1.0, 1.0], [0.0, 0.0]])
    found = _fault(lambda x, m: jnp.mean(jnp.sum(x * m, -1) / jnp.sum(m, -1)), jnp.ones((2, 2)), mask)
    assert (found.primitive, found.element) == ("div", (1,)), str(found)
    assert "0/0" in found.diagnosis, str(found)


def trap_of_a_where() -> None:
    """The infinite derivative of a branch that is not selected."""

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))

    found = _fault(jax.grad(loss), jnp.array([4.0, 0.0]))
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

    found = _fault(jax.grad(loss), np.full((SIZE, SIZE), 3e38, np.float32), X)
    assert (found.primitive, found.direction) == ("dot_general", "forward"), str(found)
    assert "where" not in found.diagnosis, str(found)


def too_large_a_scale() -> dict[str, Answer]:
    """A loss scale at which the backward pass overflows."""
    model = plain(_dense)

    def find_nonfinite() -> None:
        loss = mpjax.autocast(model.loss, HALF)
        state = mpjax.static_loss_scale(optax.identity(), 2.0**24).init({})
        found = _fault(mpjax.value_and_grad(loss, state), *model.args)
        assert "smaller loss scale" in found.diagnosis, str(found)
        smaller = mpjax.static_loss_scale(optax.identity(), 64.0).init({})
        assert mpjax.find_nonfinite(mpjax.value_and_grad(loss, smaller), *model.args) is None

    def numerics() -> None:
        found = _numerics(model, loss_scale=2.0**24)
        assert found.init_scale < 2.0**24, str(found)
        assert error(model, HALF, scale=found.init_scale) < 0.01 < error(model, HALF, scale=2.0**24)

    return {"find_nonfinite": find_nonfinite, "numerics": numerics}


def outlier_batch() -> None:
    """One of five batches is 10,000 times as large as the others."""
    model = plain(_dense)

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
    w = _normal(4, SIZE, SIZE)

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

    args = _normal(SIZE, SIZE), X

    def check(found: Any) -> None:
        assert "pure_callback at planted.py" in str(found), str(found)

    return {
        "audit": lambda: check(mpjax.audit(loss, *args)),
        "numerics": lambda: check(mpjax.numerics(loss, *args)),
        "layerwise_error": lambda: check(mpjax.layerwise_error(mpjax.autocast(loss, HALF), *args)),
        "search": lambda: check(mpjax.search(loss, *args)),
        "explain": lambda: check(mpjax.explain(loss, *args)),
    }


def flushed_while_training() -> None:
    """A training step whose loss is so small that float16 flushes its gradients."""
    model = plain(_dense)

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

    _limit(step, "input pipeline", _normal(SIZE, SIZE), batches=slow())


def recompilation() -> None:
    """Batches of another size at each step."""
    step = jax.jit(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    sizes = (jnp.ones((i + 1, SIZE)) for i in range(1000))
    _limit(step, "recompilation", _normal(SIZE, SIZE), batches=sizes)
    padded = mpjax.profile(step, _normal(SIZE, SIZE), batches=[X] * 4, steps=6)
    assert padded.recompilation is None, "the advice does not help"


def sleep_in_the_step() -> None:
    """A step without jit that waits for something else."""

    def step(w: Any, x: Any) -> Any:
        time.sleep(0.02)
        return jnp.sum(x @ w)

    _limit(step, "code outside of jit", _normal(SIZE, SIZE), jnp.asarray(X))


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
    ),
    "watch": (flushed_while_training,),
    "parity": (updates_lost_in_half,),
    "profile": (
        slow_pipeline,
        recompilation,
        sleep_in_the_step,
    ),
}
ALONE: dict[str, Callable[[], dict[str, Answer]]] = {
    **{f.__name__: functools.partial(dict, **{tool: f}) for tool, found in OF_ONE_TOOL.items() for f in found},
    **{f.__name__: f for f in (too_large_a_scale, callback)},
}
ALONE = {name.replace("_", " "): answers for name, answers in ALONE.items()}


def cases() -> dict[str, Callable[[], dict[str, Answer]]]:
    """The cases by name, as `overflow, Linen`; each makes its answers by tool."""

    def of(cause: str, library: str) -> dict[str, Answer]:
        plant, answers = CAUSES[cause]
        return answers(LIBRARIES[library](plant))

    in_models = {f"{c}, {name}": functools.partial(of, c, name) for c in CAUSES for name in LIBRARIES}
    return in_models | ALONE


def outcome(answer: Answer) -> str:
    """The cell of an answer."""
    try:
        answer()
    except AssertionError as found:
        return f"answers otherwise: {' '.join(str(found).split())[:300]}"
    except Exception as found:  # a crash is a result
        return f"fails: {type(found).__name__}: {' '.join(str(found).split())[:300]}"
    return AS_PLANTED


def run(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The cells of cases, by tool."""
    with jax.numpy_dtype_promotion("standard"):
        return {name: {tool: outcome(answer) for tool, answer in cases()[name]().items()} for name in names}


def table(results: dict[str, dict[str, str]]) -> str:
    """A Markdown table with a row for each case, and the number of answers that are as planted."""
    cells = [cell for row in results.values() for cell in row.values()]
    rows = []
    for name, row in results.items():
        right = ", ".join(tool for tool, cell in row.items() if cell == AS_PLANTED)
        wrong = "; ".join(f"{tool} {cell}" for tool, cell in row.items() if cell != AS_PLANTED)
        rows.append((name, right, wrong.replace("|", "/")))
    count = f"{cells.count(AS_PLANTED)} of {len(cells)} answers as planted, {len(results)} programs.\n\n"
    return count + commands.markdown(("planted", "answers as planted", "other answers"), rows)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--only", default="", help="only the cases whose name contains this text")
    parser.add_argument("--missing", action="store_true", help="only the cases that are not in the results")
    args = parser.parse_args()
    before = previous("planted", args.out) if args.missing or args.only else {}
    names = [name for name in cases() if args.only in name and not (args.missing and name in before)]
    results: dict[str, dict[str, str]] = dict(before)
    for name in names:
        start = time.process_time()
        results |= run([name])
        print(f"{name}, {time.process_time() - start:.0f} s of CPU: {results[name]}", flush=True)
        ordered = {name: results[name] for name in cases() if name in results}
        commands.publish("planted", ordered, table(ordered), args.out)
    print(table({name: results[name] for name in names}))


if __name__ == "__main__":
    main()
