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
from testing.measures import half_share
from testing.random_programs.evaluate import arrays_in_numpy
from tests.modules.flax_models import of_nnx

KEY = cheap_keys.key(0)
F16 = "mixed_float16"
HALVES = ["mixed_float16", "mixed_bfloat16"]


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


def outputs(kind, forward, policy, *args, **kwargs):
    """The results of a model under a policy, those of the float32 model, and the share of matmuls in half."""
    if kind == "linen":
        variables = arrays_in_numpy(lambda args: Linen(forward).init(KEY, *args, **kwargs))(args)
        models = (m.bind(variables) for m in (mpjax.with_policy(Linen(forward), policy), Linen(forward)))
    else:
        plain = of_nnx(lambda: Nnx(forward, 8, nnx.Rngs(KEY)))
        models = (mpjax.with_policy(plain, policy), plain)
    mixed, full = (functools.partial(lambda m, args, kwargs: m(*args, **kwargs), m) for m in models)
    return jax.jit(mixed)(args, kwargs), jax.jit(full)(args, kwargs), half_share(mixed, args, kwargs)


KINDS = ["linen", "nnx"]
X = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", HALVES)
def test_float_arguments_are_those_of_the_caller(kind, policy):
    """Category ids, timesteps, a log-determinant and a mask, as arguments of several forms."""

    def forward(dense, batch, t, *, logdet, mask):
        ids = batch["table"].astype(jnp.int32)
        angle = jnp.sin(t)
        h = dense(jnp.stack([t, angle] * 4, -1))
        return ids, angle, logdet + 0.125, mask, h

    batch = {"table": np.asarray([257.0, 2049.0, 4099.0], np.float32)}
    kwargs = {"logdet": np.asarray([318.8203], np.float32), "mask": np.asarray([0.0, -1e9], np.float32)}
    found, expected, share = outputs(kind, forward, policy, batch, np.asarray([997.0, 999.5], np.float32), **kwargs)
    for value, reference in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_array_equal(value, reference)
    assert share == 1


@pytest.mark.parametrize("kind", KINDS)
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


def test_log_determinants_of_flow_layers_are_summed_in_float32():
    class Flow(nn.Module):
        @nn.compact
        def __call__(self, x, logdet):
            log_scale = self.param("log_scale", nn.initializers.normal(), (8,))
            shift = nn.Dense(8)(x)
            return x * jnp.exp(log_scale) + shift.astype(x.dtype), logdet + 39.8525 + log_scale.sum()

    class Flows(nn.Module):
        @nn.compact
        def __call__(self, x):
            logdet = jnp.zeros(len(x))
            for _ in range(8):
                x, logdet = Flow()(x, logdet)
            return x, logdet

    variables = arrays_in_numpy(Flows().init)(KEY, X)
    found, expected = (m.apply(variables, X)[1] for m in (mpjax.with_policy(Flows(), "mixed_bfloat16"), Flows()))
    np.testing.assert_array_equal(found, expected)


def test_a_mask_of_large_numbers_leaves_no_nan():
    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            q, k, v = (nn.Dense(8)(x) for _ in range(3))
            return nn.softmax(q @ k.T + mask) @ v

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, mask):
            return Attention()(x, mask)

    mask = np.asarray([[0, -1e9], [-1e9, -1e9]], np.float32)
    model = mpjax.with_policy(Model(), F16)
    y, variables = model.init_with_output(KEY, X, mask)
    assert np.isfinite(y).all()
    assert half_share(model.apply, variables, X, mask) == 1


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


class ScannedCounter(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, xs):
        cell = nn.remat(Counter, prevent_cse=False) if self.remat else Counter
        scan = nn.scan(cell, variable_broadcast="params", split_rngs={"params": False})
        return scan()((jnp.zeros(()), jnp.zeros(8)), xs)


class PlainBody(nn.Module):
    """Not a cell by its class: `scan` says that it is one."""

    @nn.compact
    def __call__(self, carry, x):
        count, h = carry
        return (count + 1, nn.Dense(8)(h) + nn.Dense(8)(x)), h


class ScannedBody(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, xs):
        body = nn.remat(PlainBody, prevent_cse=False) if self.remat else PlainBody
        scan = nn.scan(body, variable_broadcast="params", split_rngs={"params": False})
        return scan()((jnp.zeros(()), jnp.zeros(8)), xs)


class ScannedFunction(nn.Module):
    @nn.compact
    def __call__(self, xs):
        def body(dense, carry, x):
            return (carry[0] + 1, dense(carry[1])), x

        scan = nn.scan(body, variable_broadcast="params", split_rngs={"params": False})
        return scan(nn.Dense(8), (jnp.zeros(()), jnp.zeros(8)), xs)


COUNTERS = {
    "cell": ScannedCounter,
    "remat": lambda: ScannedCounter(remat=True),
    "rnn": lambda: nn.RNN(Counter(), return_carry=True, time_major=True),
    "body": ScannedBody,
    "remat body": lambda: ScannedBody(remat=True),
    "function": ScannedFunction,
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_carry_keeps_its_dtype_in_linen(name):
    model = mpjax.with_policy(COUNTERS[name](), "mixed_bfloat16")
    xs = np.zeros((3000, 8), np.float32)
    variables = jax.eval_shape(COUNTERS[name]().init, KEY, xs)
    assert half_share(model.apply, variables, xs) == 1
    (count, _), _ = jax.jit(model.apply)(jax.tree.map(lambda s: jnp.zeros(s.shape), variables), xs)
    assert count == 3000


class NnxCounter(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.u = nnx.Linear(8, 8, rngs=rngs), nnx.Param(jnp.eye(8))

    def __call__(self, carry, x):
        count, h = carry
        return (count + 1, jnp.tanh(h @ self.u + self.dense(x))), h


class NnxLoop(nnx.Module):
    """A cell in a loop that the model writes itself."""

    def __init__(self, loop, rngs):
        self.cell, self.loop = NnxCounter(rngs), loop

    def __call__(self, xs):
        return self.loop(self.cell, (jnp.zeros(()), jnp.zeros(8)), xs)


def lax_scan(cell, carry, xs):
    return jax.lax.scan(cell, carry, xs)


def inlined(cell, carry, xs):
    """The matmul is in the code of the loop, with a parameter from outside of it."""
    u = cell.u[...]

    def step(carry, x):
        return (carry[0] + 1, jnp.tanh(carry[1] @ u + cell.dense(x).astype(jnp.float32))), x

    return jax.lax.scan(step, carry, xs)


def nnx_scan(cell, carry, xs):
    return nnx.scan(lambda cell, carry, x: cell(carry, x), in_axes=(None, nnx.Carry, 0))(cell, carry, xs)


@pytest.mark.parametrize("loop", [lax_scan, inlined, nnx_scan])
def test_a_carry_keeps_its_dtype_in_nnx(loop):
    model = mpjax.with_policy(of_nnx(lambda: NnxLoop(loop, nnx.Rngs(KEY))), "mixed_bfloat16")
    xs = np.zeros((3000, 8), np.float32)
    assert half_share(pure(model), xs) == 1
    (count, _), _ = jax.jit(pure(model))(xs)
    assert count == 3000


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.linear(x)))


def test_a_stack_of_layers_scans_over_a_float32_input():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.vmap(Block, in_axes=0)(rngs.split(3))

        def __call__(self, x):
            return nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)

    model = mpjax.with_policy(of_nnx(lambda: Model(nnx.Rngs(KEY))), F16)
    assert half_share(pure(model), X) == 1
    assert model(X).dtype == jnp.float32


def test_a_parameter_yields_to_what_it_meets():
    """It is float32 beside float32 values, and does not widen half ones."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.normal(), (8,))
            values = {"wide": x * scale, "half": nn.Dense(8)(x) * scale, "alone": jnp.exp(scale)}
            self.sow("intermediates", "values", values)
            return x

    variables = arrays_in_numpy(Model().init)(KEY, X)
    found, expected = (
        m.apply(variables, X, mutable=["intermediates"])[1]["intermediates"]["values"][0]
        for m in (mpjax.with_policy(Model(), F16), Model())
    )
    assert {name: x.dtype.name for name, x in found.items()} == {
        "wide": "float32",
        "half": "float16",
        "alone": "float32",
    }
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


def test_a_matmul_of_explicit_float32_values_stays():
    """Fourier features: the product of coordinates with constants needs the mantissa of float32."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            features = jnp.sin(x @ (math.pi * jnp.eye(8) * 1000))
            h = nn.Dense(8)(features)
            return features, h.astype(jnp.float32) @ h.astype(jnp.float32).T

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
