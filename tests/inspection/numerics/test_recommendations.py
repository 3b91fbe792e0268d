"""What `numerics` recommends: one answer without contradictions, and an all-clear only where all is clear."""

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

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
    assert report.keep_float32 == ("linear",)
    assert "no module needs" not in str(report)

    def scoped(w, x):
        with jax.named_scope("dec"):
            return jnp.mean(jnp.log1p(hot(x @ w) @ w))

    report = mpjax.numerics(scoped, w, x)
    assert report.keep_float32 == ("dec",)
    assert report.overrides == (("*/dec", "float32"),)
    before, after = report.errors
    assert after < before

    def at_the_end(w, x):
        return jnp.mean(jnp.log1p(hot(x @ w)))

    report = mpjax.numerics(at_the_end, w, x, verify=False)
    assert "overflow float16 if they run in it (first mul at test_recommendations.py" in str(report)
    assert "no module needs" not in str(report).replace("\n", "")

    def plain(w, x):
        return jnp.mean(jnp.log1p(hot(x) @ w))

    report = mpjax.numerics(plain, w, x, verify=False)
    assert report.keep_float32 == ()
    assert [line.split(" at ")[0] for line in report.keep_lines][:2] == ["mul", "dot_general"]
    assert "test_recommendations.py" in report.keep_lines[0]
    assert "no module needs" not in str(report)


def test_an_all_clear_is_for_what_was_looked_at():
    def outside(x):
        shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
        return jax.pure_callback(lambda x: np.asarray(x), shape, jax.lax.stop_gradient(x), vmap_method="sequential")

    report = mpjax.numerics(lambda w, x: jnp.mean(outside(x) @ w), jnp.eye(4), jnp.ones((4, 4)), verify=False)
    assert report.keep_float32 == report.keep_lines == ()
    assert report.unseen[0].startswith("pure_callback at test_recommendations.py")
    assert "no module needs" not in str(report)


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


def test_a_hot_module_is_kept_and_the_scale_is_that_of_the_others():
    x = jnp.ones((2, 8))
    params = Net().init(jax.random.key(0), x)
    loss = lambda params, x: jnp.sum(Net().apply(params, x)) * 1e-3
    report = mpjax.numerics(loss, params, x)
    assert report.keep_float32 == ("hot",)
    assert any(line.startswith("mul at test_recommendations.py") for line in report.keep_lines)
    assert report.init_scale is not None
    assert report.init_scale >= 1
    assert report.init_scale <= report.largest_safe_scale
    _, after = report.errors
    assert after < 0.01


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
