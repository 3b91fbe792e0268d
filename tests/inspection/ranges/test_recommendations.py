"""What `numerics` recommends: one answer without contradictions, and an all-clear only where all is clear."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mpjax


def hot(x):
    return x * 1e6  # overflows float16 and nothing else


def test_what_overflows_outside_of_modules_with_a_slash_is_named():
    x, w = jnp.ones((4, 4)), jnp.eye(4)

    def haiku(x):
        return jnp.mean(jnp.log(hk.Linear(4, w_init=hk.initializers.Constant(1e6))(x) ** 2 + 1))

    transformed = hk.without_apply_rng(hk.transform(haiku))
    params = transformed.init(None, x)
    report = mpjax.numerics(transformed.apply, params, x, verify=False)
    assert report.losing == ("linear",)
    assert report.keep_float32 == report.overrides == (), "nothing was tried"
    assert "no module needs" not in str(report)

    def scoped(w, x):
        with jax.named_scope("dec"):
            return jnp.mean(jnp.log1p(hot(x @ w) @ w))

    report = mpjax.numerics(scoped, w, x)
    assert report.keep_float32 == ("dec",)
    assert report.overrides == (("*/dec", "float32"),)
    assert report.trials[-1].error < report.trials[0].error == np.inf
    assert report.trials[-1].half_share < report.trials[0].half_share

    def at_the_end(w, x):
        return jnp.mean(jnp.log1p(hot(x @ w)))

    report = mpjax.numerics(at_the_end, w, x)
    assert report.trials[-1].error < 0.01, "autocast runs it in float32"
    assert "no module needs" in str(report)
    assert report.losing == report.losing_lines == ()

    def plain(w, x):
        return jnp.mean(jnp.log1p(hot(x) @ w))

    report = mpjax.numerics(plain, w, x)
    assert report.keep_float32 == ()
    assert report.trials[-1].error == np.inf
    assert [line.split(" at ")[0] for line in report.losing_lines][:2] == ["mul", "dot_general"]
    assert "test_recommendations.py" in report.losing_lines[0]
    assert "no module needs" not in str(report)


def test_a_module_that_loses_what_does_not_count_may_stay_in_half():
    def loss(w, x):
        with jax.named_scope("tiny"):
            small = jnp.tanh((x * 1e-9) @ w) @ w
        with jax.named_scope("dec"):
            return jnp.mean(jnp.log1p(hot(x) @ w @ w)) + jnp.mean(small)

    report = mpjax.numerics(loss, jnp.eye(4), jnp.ones((4, 4)))
    assert report.overrides == (("*/dec", "float32"),)
    assert report.trials[-1].error < 0.01


def attention(params, x):
    with jax.named_scope("attention"):
        query, key, value = (x @ params[name] for name in ("query", "key", "value"))
        scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), 3 * query @ key.T, -1e30)
        y = jax.nn.softmax(scores) @ value
    with jax.named_scope("out"):
        return jnp.mean((y @ params["value"]) ** 2)


def test_a_healthy_masked_attention_gets_no_advice():
    rng = np.random.default_rng(0)
    params = {name: rng.normal(0, 0.25, (16, 16)).astype(np.float32) for name in ("query", "key", "value")}
    report = mpjax.numerics(attention, params, rng.normal(size=(16, 16)).astype(np.float32))
    assert any(row.flushed > 0.05 for row in report.by_op), "small probabilities, which do not matter"
    assert report.keep_float32 == report.losing == report.losing_lines == ()
    assert str(report).splitlines()[0] == "no module needs to be kept in float32 for its range"
    assert report.trials[-1].half_share == 1


def test_an_all_clear_is_for_what_was_looked_at():
    def outside(x):
        shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        return jax.pure_callback(lambda x: np.asarray(x), shape, jax.lax.stop_gradient(x), vmap_method="sequential")

    report = mpjax.numerics(lambda w, x: jnp.mean(outside(x) @ w), jnp.eye(4), jnp.ones((4, 4)), verify=False)
    assert report.losing == report.losing_lines == ()
    assert report.unseen[0].startswith("pure_callback at test_recommendations.py")
    assert "no module needs" not in str(report)


def test_a_scale_that_was_tried_without_a_gain_is_not_the_answer():
    def verdict(small):
        gradients = np.where(np.arange(4096) % 2, small, 1).astype(np.float32)
        loss = lambda w, g: jnp.sum(jnp.tanh(w)[:, None] @ jnp.ones((1, 1)) * g[:, None])
        report = mpjax.numerics(loss, jnp.zeros(4096), jnp.asarray(gradients))
        assert report.flushed_at(1.0) > 0.3
        return str(report).splitlines()[0]

    assert verdict(1e-9) == "no module needs to be kept in float32 for its range"

    def tiny(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2) * 1e-7

    rng = np.random.default_rng(0)
    report = mpjax.numerics(tiny, rng.normal(size=(8, 8)).astype(np.float32), np.ones((4, 8), np.float32))
    assert "use a loss scale" in str(report)


def test_the_share_that_a_scale_flushes_is_that_of_a_cast():
    rng = np.random.default_rng(0)
    gradients = (rng.uniform(1, 2, 4096) * 2.0 ** rng.uniform(-28, -22, 4096)).astype(np.float32)
    report = mpjax.numerics(
        lambda w, g: jnp.sum(jnp.tanh(w * 1.0)[:, None] @ jnp.ones((1, 1)) * g[:, None]),
        jnp.zeros(4096),
        jnp.asarray(gradients),
        verify=False,
    )
    for scale in (1.0, 2.0**3):
        true = np.mean((gradients * scale).astype(np.float16) == 0)
        assert abs(report.flushed_at(scale) - true) < 0.02, scale


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="body")(x)
        # Its cotangent is a million times that of the rest.
        hot = nn.Dense(8, name="hot", kernel_init=nn.initializers.constant(1e-6))(x)
        return x + hot * 1e9


def test_a_hot_module_needs_no_override_if_a_scale_fits_all():
    x = jnp.ones((2, 8))
    params = Net().init(jax.random.key(0), x)
    loss = lambda params, x: jnp.sum(Net().apply(params, x)) * 1e-3
    assert "hot" in mpjax.numerics(loss, params, x, verify=False).losing
    report = mpjax.numerics(loss, params, x)
    assert report.keep_float32 == ()
    assert report.init_scale == report.largest_safe_scale / 4 < 1
    assert [row.error < 0.01 for row in report.trials] == [False, True]


def test_modules_that_an_override_keeps_do_not_count_as_flushed():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(8, name="half")(x)
            return jnp.sum(nn.Dense(8, name="kept")(y) * 1e-12) + jnp.sum(y)

    model, x = Model(), jnp.ones((2, 8))
    params = model.init(jax.random.key(0), x)
    overrides = [("*/kept", "float32")]
    run = mpjax.autocast(
        lambda p, x: model.apply(p, x), mpjax.Policy("float32", "float16", "float32", overrides=overrides)
    )
    assert mpjax.numerics(run, params, x, verify=False).flushed_at(1.0) == 0
    assert mpjax.numerics(lambda p, x: model.apply(p, x), params, x, verify=False).flushed_at(1.0) > 0


def test_an_overflow_in_a_custom_derivative_rule_is_not_clear():
    @jax.custom_vjp
    def twice(y):
        return 2 * y

    twice.defvjp(lambda y: (2 * y, y), lambda y, ct: (2 * ct + ((300 * y) * (300 * y)) @ jnp.zeros((8, 8)),))

    def loss(w, x):
        with jax.named_scope("ruled"):
            y = twice(x @ w)
        with jax.named_scope("head"):
            return jnp.mean((y @ w) ** 2)

    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=(8, 8)).astype(np.float32) for _ in range(2))
    report = mpjax.numerics(loss, w, x)
    assert report.keep_float32 == ("ruled",), str(report)
    assert np.isfinite(report.trials[-1].error)
    assert "no module needs" not in str(report)


def test_an_error_by_rounding_is_no_plain_all_clear():
    def loss(w, x):
        with jax.named_scope("cancels"):
            y = (x + 1000) @ w - 1000 * jnp.sum(w, 0)
        with jax.named_scope("head"):
            return jnp.mean((y @ w) ** 2)

    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=(8, 8)).astype(np.float32) for _ in range(2))
    first, second, *_ = str(mpjax.numerics(loss, w, x)).splitlines()
    assert first == "no module needs to be kept in float32 for its range"
    assert "by rounding, not by range: mpjax.search" in second


def test_gradients_that_are_not_finite_are_no_all_clear():
    report = mpjax.numerics(lambda w, x: jnp.sum(jnp.sqrt(x @ w)), -np.ones((2, 2), np.float32), np.ones((2, 2)))
    assert str(report).startswith("The gradients are not finite in float32 either: mpjax.find_nonfinite shows where.")
    report = mpjax.numerics(lambda w, x: 0 * jnp.sum(x @ w), np.ones((2, 2), np.float32), np.ones((2, 2)))
    assert str(report).startswith("The gradients are all zero: mul at test_recommendations.py:")

    def dead(w, x):
        hidden = jax.nn.relu(x @ w - 100)
        return jnp.mean(hidden @ w)

    where = f"test_recommendations.py:{dead.__code__.co_firstlineno + 1}"
    assert f"all zero: max at {where} gives only zeros" in str(mpjax.numerics(dead, np.ones((2, 2)), np.ones((2, 2))))


def test_gradients_that_no_precision_makes_finite_are_said_first():
    def explodes(w, x):
        total, _ = jax.lax.scan(lambda h, _: (h @ w + x, None), x, length=40)
        return jnp.mean(jnp.sqrt(-jnp.abs(total)))

    report = mpjax.numerics(explodes, np.full((8, 8), 0.5, np.float32), np.ones((2, 8), np.float32))
    assert report.losing_lines
    assert str(report).startswith("The gradients are not finite in float32 either")


def test_modules_of_nnx_are_named_by_their_path():
    class Hot(nnx.Module):
        def __call__(self, x):
            return (3e3 * x) @ jnp.full((8, 8), 3e3) / 9e6

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs), Hot(), nnx.Linear(8, 8, rngs=rngs)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    x = 3 * np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    report = mpjax.numerics(lambda net, x: jnp.mean(net(x) ** 2), Net(nnx.Rngs(0)), x)
    assert report.keep_float32 == ("blocks/1",), str(report)


def test_a_batch_that_is_nan_in_float32_is_no_outlier():
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) @ w)
    good = jnp.ones((8, 16))
    report = mpjax.numerics(loss, jnp.eye(16) * 0.3, batches=[good, good.at[0, 0].set(jnp.nan), good, good])
    assert (report.nonfinite, report.outliers) == ((1,), ())
    assert report.headline.startswith("the gradients of batch 1 are not finite in float32 either")
    assert "skips" not in str(report)
    assert "no module needs" not in str(report)
    assert report.init_scale == mpjax.numerics(loss, jnp.eye(16) * 0.3, batches=[good] * 3).init_scale


def test_gradients_that_all_flush_are_the_first_thing_said():
    report = mpjax.numerics(lambda w, x: 1e-9 * jnp.mean(jnp.tanh(x @ w) @ w), jnp.eye(16) * 0.3, jnp.ones((8, 16)))
    assert "flushes 100% of the activation gradients to zero at loss scale 1" in report.headline


def test_a_rule_that_ignores_its_cotangent_is_named_and_rounding_is_not_blamed():
    @jax.custom_vjp
    def distilled(x, gradient):
        return jnp.sum(x) * 0

    distilled.defvjp(lambda x, gradient: (jnp.sum(x) * 0, gradient), lambda g, ct: (g, jnp.zeros_like(g)))
    loss = lambda w, x: distilled(x @ w, jnp.ones((8, 4)))
    report = mpjax.numerics(loss, jnp.ones((4, 4)), jnp.full((8, 4), 0.25))
    assert "distilled" in report.headline
    assert "true_cotangents" in report.headline
    assert "by rounding" not in str(report)


def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def test_data_beyond_half_is_the_cause_and_no_module_is():
    def loss(w, x):
        with jax.named_scope("layer"):
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    w, x = normal(8, 8), normal(4, 8)
    large = 1e6 * x
    first = f"float16 does not hold args[1], up to {np.abs(large).max():.3g}, which a matmul reads: scale it down"
    for found in (mpjax.numerics(loss, w, batches=[x, large]), mpjax.numerics(loss, w, large)):
        assert found.beyond == (("args[1]", np.abs(large).max()),)
        assert first in str(found).splitlines()[0]
        assert found.overrides == ()
    assert mpjax.numerics(loss, w, x).beyond == ()  # as it says
    standardized = lambda w, x: loss(w, (x - x.mean()) / x.std())
    assert mpjax.numerics(standardized, w, large).beyond == ()
    assert mpjax.numerics(loss, w, large, dtype="bfloat16").beyond == ()


def test_a_module_that_is_kept_covers_those_in_it():
    def loss(w, x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            x = (300 * (x @ w)) * (300 * (x @ w)) / 9e4
        with jax.named_scope("head"):
            return jnp.mean((x @ w) ** 2)

    found = mpjax.numerics(loss, normal(8, 8), 10 * normal(4, 8))
    assert not any(a.startswith(f"{b}/") for a in found.keep_float32 for b in found.keep_float32)


def test_a_scale_for_a_loss_that_casts_by_hand_is_tried():
    def loss(w, x, factor=1e-6):
        h = jnp.tanh(x.astype(np.float16) @ w.astype(np.float16))
        return jnp.mean(h.astype(np.float32) ** 2) * factor

    args = normal(8, 8), normal(4, 8)
    found = mpjax.numerics(loss, *args)
    before, after = found.trials
    assert (before.loss_scale, after.loss_scale) == (1.0, found.init_scale)
    assert after.error < 0.01 < before.error
    assert "recommended: init_scale=2.0**" in str(found)

    exact = jax.grad(lambda w: jnp.mean(jnp.tanh(args[1] @ w) ** 2) * 1e-6)(args[0])
    for scale, expected in ((1.0, before.error), (found.init_scale, after.error)):
        gradient = jax.grad(lambda w, scale=scale: loss(w, args[1]) * scale)(args[0]) / scale
        error = float(jnp.linalg.norm(gradient - exact) / jnp.linalg.norm(exact))
        assert abs(error - expected) < 0.1 * expected, (scale, error, expected)
