"""What `audit` says of dot algorithms, 8-bit operands, and of small updates in half."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.lax import DotAlgorithmPreset, Precision

import mpjax
from testing.platforms import tpu

X = jax.ShapeDtypeStruct((256, 256), jnp.float32)


@pytest.mark.parametrize(
    ("precision", "dtype", "half"),
    [
        (None, "float32", 0.0),
        (Precision.HIGHEST, "float32", 0.0),
        (DotAlgorithmPreset.TF32_TF32_F32, "float32 as tfloat32", 0.0),
        (DotAlgorithmPreset.BF16_BF16_F32, "float32 as bfloat16", 1.0),
        (DotAlgorithmPreset.BF16_BF16_F32_X3, "float32 as bfloat16×3", 0.0),
    ],
)
def test_dot_algorithms_are_named(precision, dtype, half):
    report = mpjax.audit(lambda a, b: jnp.dot(a, b, precision=precision), X, X)
    assert (list(report.flops), report.half_share) == ([dtype], half)
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        assert list(mpjax.audit(lambda a, b: a @ b, X, X).flops) == ["float32 as bfloat16×3"]
    assert dtype in str(report)


@pytest.mark.parametrize(
    ("default", "precision", "passes"),
    [
        (None, None, 1),
        (None, "highest", 6),
        ("highest", None, 6),
        ("high", None, 3),
        (None, DotAlgorithmPreset.BF16_BF16_F32_X3, 3),
    ],
)
def test_float32_matmuls_take_passes_on_a_tpu(default, precision, passes):
    def product(a, b):
        return jnp.dot(a, b, precision=precision)

    with jax.default_matmul_precision(default), tpu():
        report = mpjax.audit(product, X, X)
    assert [report.tpu, *[row.passes for row in report.matmuls]] == [True, passes]
    assert [found.kind for found in report.findings] == ["dtype"] * (passes > 1)
    assert f"here {passes} passes on average" in str(report)
    bound = report.speedup_bound("TPU v5e")
    assert bound.least == pytest.approx(passes * 2 * 256**3 / 197e12)


def test_the_chosen_device_decides_what_half_means():
    assert "on a TPU half saves memory" in str(mpjax.audit(lambda a, b: a @ b, X, X, device="TPU v6e"))
    with tpu():
        assert "Tensor Cores" in str(mpjax.audit(lambda a, b: a @ b, X, X, device="H200"))
    half = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    report = mpjax.audit(lambda a, b: jnp.dot(a, b, precision="highest"), half, half, device="TPU v6e")
    assert [row.passes for row in report.matmuls] == [1]


def test_eight_bit_operands_are_counted_by_their_names():
    ints = jax.ShapeDtypeStruct((256, 256), jnp.int8)
    report = mpjax.audit(lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.int32), ints, ints)
    assert (report.flops, report.half_share) == ({"int8": 2 * 256**3}, 1.0)


def test_updates_that_half_rounds_away_are_risks():
    w = jax.ShapeDtypeStruct((8,), jnp.float16)
    mean = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    kinds = lambda fun, *args: [risk.kind for risk in mpjax.audit(fun, *args).risks]
    assert kinds(lambda w, g: w - 1e-4 * g, w, w) == ["update"]
    assert kinds(lambda mean, x: 0.99 * mean + 0.01 * x, mean, mean) == ["update"]
    assert kinds(lambda mean, x: 0.999 * mean + 0.001 * x, mean, mean) == ["constant", "update"]
    assert kinds(lambda mean, x: 0.998 * mean + 0.002 * x * x, w, w) == ["update"]
    assert kinds(lambda mean, x: mean + 0.001 * (1000 * x), w, w) == []
    master = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert kinds(lambda w, g: w - 1e-4 * g.astype(jnp.float32), master, w) == []
    assert kinds(lambda x, y: x + y, w, w) == []  # a residual connection


@pytest.mark.standard_promotion
@pytest.mark.parametrize("peak", [1e-3, 10.0])
def test_the_largest_learning_rate_of_a_warm_up_by_hand_is_known(peak):
    """A count is not negative, which the program doesn't say."""

    def step(w, g, count):
        rate = peak * jnp.minimum(1.0, count / 1000)
        return (w - rate * g).astype(w.dtype)

    w = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    for count in (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)):
        risks = mpjax.audit(step, w, jax.ShapeDtypeStruct((8,), jnp.float32), count).risks
        assert [risk.kind for risk in risks] == ["update"] * (peak < 0.05)


def test_a_scaled_branch_of_a_residual_stream_is_no_update():
    half = jnp.bfloat16
    w, x = jax.ShapeDtypeStruct((8, 8), half), jax.ShapeDtypeStruct((4, 8), half)
    kinds = lambda fun, *args: [risk.kind for risk in mpjax.audit(fun, *args).risks]
    layer = lambda w, x: x + half(0.01) * jax.nn.tanh(x @ w)
    assert kinds(layer, w, x) == kinds(jax.vmap(layer, (None, 0)), w, x) == []

    def step(w, x):
        return w - half(0.01) * jax.grad(lambda w: jnp.mean((x @ w).astype(jnp.float32) ** 2))(w)

    assert kinds(step, w, x) == ["update"]

    def layers(ws, x):
        return jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0]

    assert kinds(layers, jax.ShapeDtypeStruct((3, 8, 8), half), x) == []

    def graph(a, w, x):
        return x + half(0.01) * (a @ jnp.tanh(a @ x @ w))

    assert kinds(graph, jax.ShapeDtypeStruct((4, 4), half), w, x) == []

    def tied(w, x):
        centred = x - jnp.mean(x, -1, keepdims=True)
        return x + half(0.01) * (jnp.tanh(centred @ w) @ w.T)

    assert kinds(tied, w, x) == []


def test_an_update_by_a_gradient_from_formulas_is_no_branch():
    half = jnp.bfloat16
    w, x = jax.ShapeDtypeStruct((8, 8), half), jax.ShapeDtypeStruct((4, 8), half)
    kinds = lambda fun, *args: [risk.kind for risk in mpjax.audit(fun, *args).risks]
    step = lambda w, x: w - half(0.01) * (x.T @ (x @ w - x))
    assert kinds(step, w, x) == ["update"]
    assert kinds(lambda w, x: w - half(0.01) * jnp.einsum("bi,bj->ij", x, x @ w - x), w, x) == ["update"]
    assert kinds(lambda w, x: w + half(0.01) * (x.T @ (x - x @ w)), w, x) == ["update"]
    assert kinds(lambda w, x: w - half(0.01) * (x.T @ (x @ w)), w, x) == ["update"]

    def steps(w, xs):
        return jax.lax.scan(lambda w, x: (step(w, x), None), w, xs)[0]

    assert kinds(steps, w, jax.ShapeDtypeStruct((3, 4, 8), half)) == ["update"]

    def of_two_layers(v, w, x):
        h = jnp.tanh(x @ v)
        error = h @ w - x
        return v - half(0.01) * (x.T @ (error @ w.T * (1 - h * h))), w - half(0.01) * (h.T @ error)

    assert kinds(of_two_layers, w, w, x) == ["update"]


@pytest.mark.standard_promotion  # optax's
@pytest.mark.filterwarnings("ignore:loss scaling:UserWarning")
@pytest.mark.parametrize(
    ("transform", "expected"),
    [(lambda tx: tx, ["update"]), (mpjax.master_weights, []), (mpjax.kahan, []), (mpjax.stochastic_rounding, [])],
)
@pytest.mark.parametrize("form", ["update", "apply", "where"])
def test_float32_updates_of_half_params_are_lost_as_well(transform, expected, form):
    """As `optax.apply_updates` and a loss scale make them, and where a step is skipped by hand."""
    tx = mpjax.dynamic_loss_scale(transform(optax.adamw(1e-4)))
    params = jnp.ones(8, jnp.bfloat16)

    def step(params, state, grads):
        if form == "apply":
            return mpjax.apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates)
        return jnp.where(jnp.isfinite(grads).all(), new, params) if form == "where" else new, state

    risks = mpjax.audit(step, params, tx.init(params), jnp.ones(8)).risks
    assert [risk.kind for risk in risks] == expected


@pytest.mark.standard_promotion  # optax's
@pytest.mark.parametrize("peak", [1e-3, 10.0])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda peak: optax.linear_schedule(peak, 0, 1000),
        lambda peak: optax.cosine_decay_schedule(peak, 1000),
        lambda peak: optax.polynomial_schedule(peak, 0, 2, 1000),
    ],
)
def test_the_largest_learning_rate_of_a_schedule_is_known(schedule, peak):
    tx = optax.sgd(schedule(peak))
    params = jnp.ones(8, jnp.bfloat16)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    risks = mpjax.audit(step, params, tx.init(params), jnp.ones(8)).risks
    assert [risk.kind for risk in risks] == ["update"] * (peak < 0.05)


@pytest.mark.parametrize(("dtype", "expected"), [(jnp.bfloat16, ["update"]), (jnp.float32, [])])
def test_updates_in_a_loop_are_lost_as_well(dtype, expected):
    w, x = jnp.full((8, 8), 0.5, dtype), jnp.full((4, 8), 0.25, dtype)

    def trained(w, x):
        gradient = jax.grad(lambda w: jnp.mean((x @ w).astype(jnp.float32) ** 2))
        return jax.lax.scan(lambda w, _: (w - dtype(1e-3) * gradient(w), None), w, length=100)[0]

    def integrated(w, x):
        return jax.lax.fori_loop(0, 100, lambda _, x: x + dtype(1e-3) * jnp.tanh(x @ w), x)

    def residual_stream(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: x + dtype(0.5) * jnp.tanh(x @ w), x)

    for fun in (trained, integrated):
        assert [risk.kind for risk in mpjax.audit(fun, w, x).risks] == expected
        assert jnp.array_equal(fun(w, x), w if fun is trained else x) == bool(expected)
    assert not mpjax.audit(residual_stream, w, x).risks


@pytest.mark.parametrize(("step", "times", "exact"), [(1, 256, True), (1, 257, False), (2, 128, True), (0.1, 9, False)])
def test_a_count_in_half_is_a_risk_beyond_the_integers_that_it_holds(step, times, exact):
    add = lambda i, time: time + jnp.asarray(step, time.dtype)
    count = lambda x: jax.lax.fori_loop(0, times, add, jnp.zeros(3, x.dtype))
    risks = mpjax.audit(count, jnp.ones(3, jnp.bfloat16)).risks
    assert [risk.kind for risk in risks] == ([] if exact else ["accumulator"])
    assert (float(count(jnp.ones(3, jnp.bfloat16))[0]) == step * times) == exact


def test_sums_over_iterations_that_are_stored_in_half_are_risks():
    half, xs = jnp.bfloat16, jnp.ones((64, 4, 8))

    def accumulated(w, xs, dtype=half, mean=False):
        def body(total, x):
            gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w).astype(dtype)
            return total + ((gradient - total) / dtype(8) if mean else gradient), None

        return jax.lax.scan(body, jnp.zeros((8, 8), dtype), xs)[0]

    def layers(ws, h):
        return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h, ws)[0]

    def risks(fun, *args):
        return [risk for risk in mpjax.audit(fun, *args).risks if risk.kind == "accumulator"]

    (risk,) = risks(accumulated, jnp.eye(8), xs)
    assert "summed over 64 iterations in bfloat16" in risk.why
    assert risk.source.startswith("test_precisions.py:")
    assert risks(lambda w, xs: accumulated(w, xs, mean=True), jnp.eye(8), xs)
    assert not risks(lambda w, xs: accumulated(w, xs, jnp.float32), jnp.eye(8), xs)
    assert not risks(layers, jnp.ones((3, 8, 8), half), jnp.ones((4, 8), half)), "a residual stream"

    def gated(w, xs, form):
        gate = jax.nn.sigmoid(xs @ w).astype(half)
        return jax.lax.scan(lambda h, z: (form(h, z, jnp.tanh(z)), None), jnp.zeros((4, 8), half), gate)[0]

    def beam(w, xs):
        best = lambda c, x: jax.lax.top_k((c[:, None] + (x @ w).astype(half)).ravel(), 4)
        return jax.lax.scan(best, jnp.zeros(4, half), xs)[0]

    assert risks(beam, jnp.eye(8), xs), "the scores of the best"
    for form in (lambda h, z, n: z * h + (1 - z) * n, lambda h, z, n: h + z * (n - h)):
        assert not risks(lambda w, xs, form=form: gated(w, xs, form), jnp.eye(8), xs), "the gates of a GRU"
    assert risks(lambda w, xs: gated(w, xs, lambda h, z, n: h + z * n), jnp.eye(8), xs)


@pytest.mark.parametrize(
    ("dtype", "decay"), [("bfloat16", 0.9), ("bfloat16", 0.99), ("float16", 0.99), ("float16", 0.999)]
)
@pytest.mark.parametrize("rounds", ["the sum", "all"])
def test_a_slowly_decayed_sum_in_half_is_a_risk(dtype, decay, rounds):
    """Such as the return of an episode, where the error is beyond 5%."""

    def last(rewards, dtype, rounds):
        def add(total, reward):
            if rounds == "all":
                return total * jnp.asarray(decay, dtype) + reward.astype(dtype), None
            return (total.astype(jnp.float32) * decay + reward).astype(dtype), None

        return jax.lax.scan(add, jnp.zeros((), dtype), rewards)[0]

    rewards = np.ones(9999, np.float32)
    error = abs(float(last(rewards, dtype, rounds)) / float(last(rewards, "float32", rounds)) - 1)
    risks = {risk.kind for risk in mpjax.audit(lambda x: last(x, dtype, rounds), rewards).risks}
    assert ("accumulator" in risks) == (error > 0.05), error


@pytest.mark.parametrize(
    "new", [lambda y: jax.nn.one_hot(y, 4, dtype=jnp.bfloat16).sum(0), lambda y: jax.nn.one_hot(y, 4).mean(0)]
)
def test_a_count_or_a_metric_that_calls_sum_up_in_half_is_a_risk(new):
    """It stalls: 1,000 batches of 8 in each class count 2,048."""

    def count(total, y):
        return total + new(y).astype(total.dtype)

    y = jnp.arange(32) % 4
    for dtype, expected in ((jnp.bfloat16, ["accumulator"]), (jnp.float32, [])):
        found = mpjax.audit(count, jnp.zeros(4, dtype), y).risks
        assert [risk.kind for risk in found if risk.kind == "accumulator"] == expected
    assert not mpjax.audit(lambda a, b: a + b, jnp.zeros(4, jnp.bfloat16), jnp.zeros(4, jnp.bfloat16)).risks
