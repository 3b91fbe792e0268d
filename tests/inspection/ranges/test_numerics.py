"""`numerics` against counts in numpy, and the scale and the modules that it recommends."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.kernels.packed import PACKINGS, pack
from testing import cheap_keys
from testing.models.zoo import harness
from testing.random_programs.evaluate import arrays_in_numpy, in_numpy

SCALE = 64.0
KEY = cheap_keys.key(0)


@pytest.fixture(scope="module")
def linear():
    """A loss whose values are known, two batches, and its report at a loss scale."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(16, 4)).astype(np.float32)
    decades = 10.0 ** np.linspace(-7, 5, 16)
    batches = [(rng.normal(size=(8, 16)) * decades).astype(np.float32) for _ in range(2)]

    def loss(params, x):
        return jnp.sum(x @ params["w"]) * 1e-6

    return loss, w, batches, mpjax.numerics(loss, {"w": w}, batches=batches, loss_scale=SCALE)


def in_half(x, half=np.float16):
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(half)


def test_ranges_are_those_of_float64(linear):
    _, w, batches, report = linear
    y = np.concatenate([x.astype(np.float64) @ w.astype(np.float64) for x in batches])
    (row,) = report.activations
    assert (row.phase, row.dtypes, row.count, report.batches) == ("forward", ("float32",), y.size, 2)
    np.testing.assert_allclose([row.max, row.min_nonzero], [np.abs(y).max(), np.abs(y).min()], rtol=1e-3)
    assert row.overflowed == np.mean(np.isinf(in_half(y)))
    assert 0 < row.overflowed < 1


def test_the_share_that_is_flushed_is_exact(linear):
    _, _, batches, report = linear
    # The gradient of the weights is the sum of the rows, the same for each column.
    true = np.stack([x.sum(0, dtype=np.float64) * 1e-6 * SCALE for x in batches])
    (row,) = report.parameters
    half = in_half(true)
    assert (row.name, row.count) == ("w", 2 * 64)
    assert row.flushed == np.mean(half == 0) > 0
    assert row.overflowed == np.mean(np.isinf(half))


def test_the_limits_are_those_of_rounding_to_the_dtype():
    edges = [2.0**-25, 2.0**-25 * (1 + 2.0**-20), 65519.99, 65520.0, 3.3895e38, 3.3961775292304e38, 0.0, np.nan]
    x = np.array(edges, np.float32)
    for dtype, half in (("float16", np.float16), ("bfloat16", jnp.bfloat16)):
        report = mpjax.numerics(lambda w, x: jnp.sum(x * w), np.float32(1), x, dtype=dtype)
        row = next(row for row in report.by_op if row.op == "mul" and row.phase == "forward")
        rounded, finite = in_half(np.asarray(x), half), np.isfinite(np.asarray(x))
        assert (row.count, row.zeros, row.nonfinite) == (8, 1 / 8, 1)
        assert row.flushed == np.sum((rounded == 0) & (np.asarray(x) != 0)) / 6
        assert row.overflowed == np.sum(np.isinf(rounded.astype(np.float32)) & finite) / 7


def test_the_recommended_scale_keeps_the_largest_gradient_in_range(linear):
    loss, w, batches, report = linear
    largest = max(row.max for row in report.parameters) / SCALE
    assert largest * report.largest_safe_scale <= 65504 < largest * report.largest_safe_scale * 2
    assert report.init_scale == min(report.largest_safe_scale / 4, 2.0**24)
    state = mpjax.dynamic_loss_scale(optax.sgd(1.0), init_scale=SCALE).init({})
    again = mpjax.numerics(loss, {"w": w}, batches=batches, loss_scale=state)
    assert (again.loss_scale, again.largest_safe_scale) == (SCALE, report.largest_safe_scale)
    brain = mpjax.numerics(loss, {"w": w}, batches=batches[:1], dtype="bfloat16")
    assert brain.init_scale == 1.0


def test_gradients_of_activations_are_told_from_those_of_parameters():
    def loss(params, x):
        with jax.named_scope("net/first"):
            x = x @ params[0]
        with jax.named_scope("net/second"):
            x = x @ params[1]
        return jnp.sum(x) * 2.0**-30

    params = [np.full((4, 4), size, np.float32) for size in (2.0, 2.0**-4)]
    report = mpjax.numerics(loss, params, np.ones((2, 4), np.float32))
    ranges = {row.name: (row.max, row.flushed) for row in report.gradients}
    # What the matmuls of the backward pass read: the loss's cotangent, and four times 2^-4 times that.
    assert ranges == {"": (2.0**-30, 1.0), "net/second": (2.0**-32, 1.0)}
    assert [(row.name, row.max) for row in report.parameters] == [("0", 2.0**-31), ("1", 2.0**-26)]
    assert report.gradient_exponents == {-32: 8, -30: 1}  # the loss's is one number, broadcast
    assert (report.flushed_at(1.0), report.flushed_at(2.0**6), report.flushed_at(2.0**8)) == (1.0, 8 / 9, 0.0)


def test_a_module_that_overflows_is_to_be_kept_in_float32_and_the_overrides_do_it():
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="body")(x)
            return nn.Dense(8, name="head", kernel_init=nn.initializers.constant(1e4))(x**2)

    model, x = Net(), np.full((2, 8), 3, np.float32)
    params = arrays_in_numpy(model.init)(KEY, x)

    def loss_of(model):
        return lambda params, x: jnp.mean(jnp.log1p(jnp.abs(model.apply(params, x).astype(jnp.float32))))

    report = mpjax.numerics(loss_of(model), params, x)
    assert (report.keep_float32, report.overrides) == (("head",), (("*/head", "float32"),))
    assert 'overrides=(("*/head", "float32"),)' in str(report)
    kept = mpjax.Policy(jnp.float32, jnp.float16, jnp.float32, overrides=report.overrides)
    for half, safe in (
        (loss_of(mpjax.with_policy(model, "mixed_float16")), loss_of(mpjax.with_policy(model, kept))),
        (mpjax.autocast(loss_of(model)), mpjax.autocast(loss_of(model), kept)),
    ):
        assert not np.isfinite(in_numpy(half)(params, x))
        assert np.isfinite(in_numpy(safe)(params, x))
        mended = mpjax.numerics(safe, params, x)
        rows = {row.name: row for row in mended.activations}
        assert "float16" in rows["Net/body"].dtypes
        assert rows["Net/head"].dtypes == ("float32",)
        assert mended.losing == ()


def test_the_table_by_operation_shows_what_half_would_lose():
    def loss(w, x):
        def turn(total, t):
            return total + t * w, None

        total, _ = jax.lax.scan(turn, jnp.float32(0), x)
        return jnp.log(total) + jnp.exp(12 * w) + jnp.sum(jax.lax.stop_gradient(x))

    report = mpjax.numerics(loss, np.float32(1), np.ones(4096, np.float32))
    ops = {row.op: row for row in sorted(report.by_op, key=lambda row: row.count) if row.phase == "forward"}
    assert ops["exp"].overflowed == 1.0
    running = ops["add"]
    assert (running.source.partition(":")[0], running.count) == ("test_numerics.py", 4096)
    assert "exp" in str(report)


def test_other_libraries_and_auxiliary_outputs():
    import equinox as eqx
    import haiku as hk
    from flax import nnx

    x = np.ones((2, 4), np.float32)
    mlp = eqx.filter_jit(eqx.nn.MLP)(4, 2, 8, 1, key=KEY)  # a tree of arrays and functions
    report = mpjax.numerics(lambda m, x: (jnp.mean(jax.vmap(m)(x) ** 2), x), mlp, x, has_aux=True)
    assert [row.name for row in report.parameters][:2] == ["layers/0/weight", "layers/0/bias"]
    net = hk.transform(lambda x: jnp.mean(hk.nets.MLP([8, 2])(x) ** 2))
    params = arrays_in_numpy(net.init)(KEY, x)
    report = mpjax.numerics(lambda x, p: net.apply(p, None, x), x, params, argnums=1)
    assert [row.name for row in report.activations] == ["mlp/linear_0", "mlp", "mlp/linear_1"]
    module = nnx.jit(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(KEY)))()
    report = mpjax.numerics(lambda m, x: jnp.mean(m(x) ** 2), mpjax.with_policy(module, "mixed_bfloat16"), x)
    assert sorted(row.name for row in report.parameters) == ["bias", "kernel"]
    assert "bfloat16" in report.activations[0].dtypes


@pytest.mark.slow
def test_a_program_of_the_zoo_over_several_devices_is_measured_under_autocast():
    loss, params, batch = harness.concrete("shard_map_data")
    half = mpjax.numerics(mpjax.autocast(loss), params, batches=[batch], loss_scale=SCALE)
    total = sum(row.count for row in half.activations), sum(row.count for row in half.gradients)
    assert min(total) > 0
    assert half.losing == ()
    assert 0 < sum(half.gradient_exponents.values()) <= sum(row.count for row in half.gradients)
    true = max(np.max(np.abs(grad)) for grad in jax.tree.leaves(in_numpy(jax.grad(loss))(params, batch)))
    assert math.isclose(max(row.max for row in half.parameters) / SCALE, true, rel_tol=1e-3)


def test_the_report_is_written_as_json_html_and_plot(linear, tmp_path):
    *_, report = linear
    assert json.loads(report.to_json())["init_scale"] == report.init_scale
    assert "data:image/png;base64" in report.to_html()
    report.plot(tmp_path / "ranges.svg")
    assert "<!-- size of the gradients, at loss scale 64 -->" in (tmp_path / "ranges.svg").read_text()


def test_a_share_below_a_hundredth_of_a_percent_is_in_percent_as_the_others(linear):
    *_, report = linear
    rows = [dataclasses.replace(report.activations[0], flushed=share) for share in (0.25, 0.00005, 0.0)]
    shown = [dataclasses.replace(report, activations=(row,)).text() for row in rows]
    assert ["25.00%" in shown[0], "5e-03%" in shown[1], "5e-05" in shown[1]] == [True, True, False]


def test_what_can_not_be_measured_is_refused():
    x = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="dtype='float32' is not a half dtype"):
        mpjax.numerics(jnp.sum, x, dtype="float32")
    with pytest.raises(ValueError, match="batches is empty"):
        mpjax.numerics(jnp.sum, batches=[])
    with pytest.raises(ValueError, match="scale=-1"):
        mpjax.numerics(jnp.sum, x, loss_scale=-1)
    with pytest.raises(ValueError, match="found no LossScaleState"):
        mpjax.numerics(jnp.sum, x, loss_scale=optax.sgd(1.0).init(x))
    nothing = mpjax.numerics(lambda w: jnp.sum(0 * w), x)
    assert (nothing.largest_safe_scale, nothing.init_scale) == (None, None)
    assert "The gradients are all zero" in str(nothing)


@pytest.mark.filterwarnings("ignore:autocast. cpu is not known to have float8")
@pytest.mark.parametrize("outlier", [1.0, 1e6])
def test_operands_of_float8_matmuls_are_measured_against_their_scale(outlier):
    def loss_fn(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = x @ w
        return jnp.mean(x**2) / outlier**2

    keys = jax.random.split(jax.random.key(0), 4)
    *params, x = [jax.random.normal(key, (32, 32)) / 6 for key in keys]
    x = x.at[0].multiply(outlier)
    options = mpjax.Rules(float8=mpjax.Float8(min_size=(0, 0)))
    found = mpjax.numerics(mpjax.autocast(loss_fn, "mixed_float8", rules=options), params, x, dtype="bfloat16")
    (row,) = [row for row in found.float8 if row.phase == "forward"]
    values = np.abs(np.asarray(x @ params[0]))
    assert row.name == "layer_1"
    assert row.max == pytest.approx(max(values.max(), float(jnp.max(abs(params[1])))), rel=0.02)
    # Two rows, the activation and the parameter, are one module: the larger ratio is the activation's.
    assert row.outliers == pytest.approx(values.max() / np.median(values), rel=0.05)
    assert (row.flushed > 0.3) == (outlier > 1)
    assert max(r.max for r in found.activations) < 2 * float(jnp.max(abs(x @ params[0] @ params[1])))
    assert "Operands of float8 matmuls" in str(found)
    assert not found.losing


@pytest.mark.parametrize(("residuals", "loop"), [("int8", False), ("float8_stochastic", True), ("float8", False)])
def test_what_blocks_flush_is_shown_by_numerics_and_watch(residuals, loop):
    def layers(params, x):
        with jax.named_scope("wide"):
            x = x @ params[0]
        with jax.named_scope("reads"):
            x = x @ params[1]
        with jax.named_scope("last"):
            return jax.nn.gelu(x) @ params[2]

    def loss_fn(params, x):
        if loop:
            return jnp.mean(jax.lax.scan(lambda _, x: (None, layers(params, x)), None, jnp.stack([x, x]))[1] ** 2)
        return jnp.mean(layers(params, x) ** 2)

    *params, x = [jax.random.normal(key, (32, 32)) / 6 for key in jax.random.split(jax.random.key(0), 4)]
    params[0] = params[0].at[:, 5].multiply(3e5)  # one large element in each block
    half, fun = (
        mpjax.autocast(loss_fn, "mixed_bfloat16", rules=mpjax.Rules(residuals=each)) for each in ("half", residuals)
    )
    in_half, found = (mpjax.numerics(each, params, x, dtype="bfloat16") for each in (half, fun))
    largest = max(found.packed, key=lambda row: row.flushed)
    assert (largest.name, largest.phase) == ("reads", "forward")
    assert largest.count == x.size * (1 + loop)
    kept = pack(x @ params[0], PACKINGS[residuals])
    flushed = float(jnp.mean(kept.elements.astype(jnp.float32) == 0))
    assert flushed > 0.15
    assert largest.flushed == pytest.approx(flushed, abs=0.02)
    assert largest.dtypes == (kept.elements.dtype.name,)
    assert "Kept for the backward pass in eight bits" in str(found)
    assert {row.name for row in found.gradients} == {row.name for row in in_half.gradients}
    assert found.activations == in_half.activations  # not the elements of copies
    watched = mpjax.watch(fun)
    (record,) = jax.jit(lambda *args: watched.update(watched.init(*args), *args))(params, x).records()
    assert record.scalars()["kept/reads/flushed"] == pytest.approx(flushed, abs=0.02)


def test_a_loop_may_compute_its_condition():
    """As a line search, which evaluates the objective there."""

    def loss(w, x):
        objective = lambda size: jnp.mean((x @ (size * jax.lax.stop_gradient(w))) ** 2)
        size = jax.lax.while_loop(lambda size: objective(size) > 0.1, lambda size: size / 2, jnp.float32(1))
        return jnp.mean((x @ w * size) ** 2)

    report = mpjax.numerics(loss, jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert str(report).splitlines()[0] == "no module needs to be kept in float32 for its range"
