"""A layer casts what its matmul reads: ids, timesteps, masks, carries and results of user code keep their dtype."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys
from testing.measures import half_share, residual_bytes
from testing.random_programs.evaluate import arrays_in_numpy
from tests.modules.flax_models import of_nnx

KEY = cheap_keys.key(0)
F16 = "mixed_float16"


class Linen(nn.Module):
    """A model of one function, `forward(dense, x, ...)`."""

    forward: object
    features: int = 8

    @nn.compact
    def __call__(self, *args, **kwargs):
        return self.forward(nn.Dense(self.features, name="dense"), *args, **kwargs)


class Nnx(nnx.Module):
    def __init__(self, forward, features, rngs):
        self.forward, self.dense = forward, nnx.Linear(features, features, rngs=rngs)

    def __call__(self, *args, **kwargs):
        return self.forward(self.dense, *args, **kwargs)


def pure(model):
    """An NNX model as a function of its arguments, in any trace."""
    graphdef, state = nnx.split(model)
    return lambda *args: nnx.merge(graphdef, state, copy=True)(*args)


X = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
@pytest.mark.parametrize("form", ["override", "astype", "nested"])
def test_a_float32_result_is_not_narrowed_whatever_else_is_returned(kind, form):
    """`(y, aux)` looks like a (carry, y) of a scan."""

    def forward(dense, x):
        y = dense(x) * 100
        y = y if form == "override" else y.astype(jnp.float32)
        y = y * y * 100
        return ((y, y.sum()), x.sum()) if form == "nested" else (y, y.sum())

    policy = "mixed_float16;dense=>float32" if form == "override" else F16
    if kind == "linen":

        class Outer(nn.Module):
            @nn.compact
            def __call__(self, x):
                return Linen(forward)(nn.Dense(8)(x))

        model = mpjax.with_policy(Outer(), policy.replace("dense", "*/dense"))
        y = jax.tree.leaves(model.init_with_output(KEY, X)[0])[0]
    else:

        class Outer(nnx.Module):
            def __init__(self, rngs):
                self.dense, self.head = nnx.Linear(8, 8, rngs=rngs), Nnx(forward, 8, rngs)

            def __call__(self, x):
                return self.head(self.dense(x))

        model = mpjax.with_policy(of_nnx(lambda: Outer(nnx.Rngs(KEY))), policy.replace("dense", "head/dense"))
        y = jax.tree.leaves(model(X))[0]
    assert y.dtype == jnp.float32
    assert np.isfinite(y).all()
    assert np.abs(y).max() > 65504


class Counter(nn.RNNCellBase):
    """Counts steps in its carry, beside a state that a matmul reads."""

    @nn.compact
    def __call__(self, carry, x):
        count, h = carry
        u = self.param("u", nn.initializers.orthogonal(), (8, 8))
        return (count + 1, jnp.tanh(h @ u + nn.Dense(8)(x))), h

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros(input_shape[:-1]), jnp.zeros(input_shape)

    @property
    def num_feature_axes(self):
        return 1


def test_a_carry_keeps_its_dtype_in_linen():
    rnn = nn.RNN(Counter(), return_carry=True, time_major=True)
    model, xs = mpjax.with_policy(rnn, "mixed_bfloat16"), np.zeros((3000, 8), np.float32)
    variables = jax.eval_shape(rnn.init, KEY, xs)
    assert half_share(model.apply, variables, xs) == 1
    (count, _), _ = jax.jit(model.apply)(jax.tree.map(lambda s: jnp.zeros(s.shape), variables), xs)
    assert count == 3000


def test_a_parameter_is_float32_and_does_not_widen_what_a_matmul_reads():

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.normal(), (8,))
            self.sow("intermediates", "values", {"wide": x * scale, "alone": jnp.exp(scale)})
            return nn.Dense(8)(jnp.tanh(nn.Dense(8)(x) * scale))

    variables = arrays_in_numpy(Model().init)(KEY, X)
    found, expected = (
        m.apply(variables, X, mutable=["intermediates"])[1]["intermediates"]["values"][0]
        for m in (mpjax.with_policy(Model(), F16), Model())
    )
    stored = residual_bytes(lambda v: mpjax.with_policy(Model(), F16).apply(v, X).sum(), variables)
    assert stored <= 0.5 * residual_bytes(lambda v: Model().apply(v, X).sum(), variables)
    np.testing.assert_array_equal(found["wide"], expected["wide"])
    np.testing.assert_array_equal(found["alone"], expected["alone"])


def test_functions_of_lax_take_a_parameter_and_a_half_value():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.normal(), (3, 3, 8, 8))
            bias = self.param("bias", nn.initializers.normal(), (8,))
            numbers = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, ("NHWC", "HWIO", "NHWC"))
            conv = functools.partial(
                jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=numbers
            )
            y = conv(nn.relu(conv(x, kernel)), kernel)
            return jax.lax.add(y, jnp.broadcast_to(bias, y.shape))

    model, x = mpjax.with_policy(Model(), F16), np.ones((1, 4, 4, 8), np.float32)
    variables = jax.eval_shape(model.init, KEY, x)
    loss = jax.grad(lambda v: model.apply(v, x).sum())
    assert half_share(loss, variables) == 1
    assert {g.dtype for g in jax.tree.leaves(jax.eval_shape(loss, variables))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "of",
    [
        lambda x, w: jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x @ (w + w), x),
        lambda x, w: jax.checkpoint(lambda x: jnp.einsum("ij,jk->ik", x, w))(x),
        lambda x, w: jax.vmap(lambda row: row @ w)(x),
        lambda x, w: jax.jit(lambda x, w: jnp.tanh(x @ w))(x, w),
        lambda x, w: jax.lax.fori_loop(0, 3, lambda i, x: x @ w, x),
        lambda x, w: jax.grad(lambda x: (x @ w).sum())(x),
    ],
)
def test_matmuls_with_a_parameter_are_half_in_any_function_of_jax(of):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return of(x, self.param("w", nn.initializers.normal(), (8, 8)))

    model = mpjax.with_policy(Model(), F16)
    variables = jax.eval_shape(model.init, KEY, X)
    assert half_share(model.apply, variables, X) == 1
    assert (
        half_share(jax.jacfwd(lambda v: model.apply(v, X).sum()), jax.tree.map(lambda s: jnp.ones(s.shape), variables))
        == 1
    )


def test_matmuls_that_read_no_parameter_and_functions_marked_float32_stay():
    """Fourier features: the product of coordinates with constants needs the mantissa of float32."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            features = jnp.sin(x @ (math.pi * jnp.eye(8) * 1000))
            h = nn.Dense(8)(features)
            return features, mpjax.float_function(lambda h: h @ h.T)(h)

    variables = arrays_in_numpy(Model().init)(KEY, X)
    model = mpjax.with_policy(Model(), F16)
    np.testing.assert_array_equal(model.apply(variables, X)[0], Model().apply(variables, X)[0])
    assert half_share(model.apply, variables, X) == pytest.approx(8 / (8 + 8 + 2))


def test_strict_promotion_holds_for_the_float32_model_only():
    """A policy mixes half and float32 on purpose: an input that is added to the output of a layer."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(8)(x) + jnp.ones(8)

    with jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(mpjax.with_policy(Model(), F16).init_with_output, KEY, X)[0].dtype == jnp.float32
