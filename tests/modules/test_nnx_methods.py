"""NNX models under a policy: decorated methods, layers added later, variables that compute their value."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys
from testing.measures import half_share
from tests.modules.flax_models import of_nnx

X = np.ones((2, 8), np.float32)
KEY = cheap_keys.key(0)


def run(model, x=X):
    """The model's output dtype, and the share of its matmul FLOPs in half."""
    graphdef, state = nnx.split(model)

    def call(state, x):
        return nnx.merge(graphdef, state, copy=True)(x)

    return jax.eval_shape(call, state, x).dtype, half_share(call, state, x)


def identity(method):
    return method


@pytest.mark.parametrize(
    ("of_call", "of_helper"),
    [(identity, identity), (nnx.jit, identity), (nnx.remat, identity), (jax.jit, identity), (nnx.jit, nnx.jit)],
)
def test_methods_under_a_transformation_are_methods(of_call, of_helper):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.w = nnx.Linear(8, 8, rngs=rngs), nnx.Param(jnp.ones((8, 8)))

        @of_call
        def __call__(self, x):
            return self.helper(self.linear(x))

        @of_helper
        def helper(self, x):
            return x @ self.w

    model = mpjax.with_policy(of_nnx(lambda: Model(nnx.Rngs(KEY))), "mixed_float16")
    assert run(model) == (jnp.float32, 1)
    gradients = nnx.eval_shape(nnx.grad(lambda m, x: m(x).sum()), model, X)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    assert model(X).dtype == jnp.float32
    assert model.w[...].dtype == jnp.float32


def test_a_method_that_returns_the_module_returns_the_one_with_the_policy():
    class Model(nnx.Module):
        def warmed_up(self):
            return self

    model = mpjax.with_policy(Model(), "mixed_float16")
    assert model.warmed_up() is model


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_layers_added_after_with_policy_get_the_policy():
    model, rngs = mpjax.with_policy(of_nnx(lambda: Stack(nnx.Rngs(KEY))), "O3"), nnx.Rngs(KEY)
    model.head = nnx.LoRA(8, 2, 8, base_module=model.head, rngs=rngs)
    model.layers.append(nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)))
    model.layers[0] = nnx.Linear(8, 8, rngs=rngs)
    assert run(model) == (jnp.float16, 1)
    assert model.head.lora_a[...].dtype == jnp.float16  # O3 stores it in half
    assert half_share(model.head, X) == 1  # on its own, too
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model))]
    assert ("layers", 1, "layers", 0, "kernel") in paths


def test_a_layer_added_later_follows_the_overrides_of_its_path():
    policy = mpjax.Policy("float32", "float16", "float32", [("head", "float32"), ("layers", "bfloat16")])
    model, rngs = mpjax.with_policy(Stack(nnx.Rngs(KEY)), policy), nnx.Rngs(KEY)
    model.head = nnx.Linear(8, 8, rngs=rngs)
    model.layers.append(nnx.Linear(8, 8, rngs=rngs))
    assert run(model)[1] == pytest.approx(2 / 3)


def test_blocks_at_different_places_still_stack():
    model = mpjax.with_policy(nnx.Sequential(*(nnx.Linear(8, 8, rngs=nnx.Rngs(KEY)) for i in range(2))), "O2")
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)
    assert stacked.kernel.shape == (2, 8, 8)


class Doubled(nnx.Param):
    def get_value(self, **kwargs):
        return super().get_value(**kwargs) * 2


def hooked(w):
    return nnx.Param(w, on_get_value=lambda variable, value: value * 2)


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
@pytest.mark.parametrize(
    ("make", "policy"), [(Doubled, "mixed_float16"), (Doubled, "O2"), (Doubled, "O3"), (hooked, "mixed_float16")]
)
def test_a_variable_that_computes_what_it_returns_does_so_once(make, policy):
    class Model(nnx.Module):
        def __init__(self):
            self.w = make(jnp.ones((8, 8)))

        def __call__(self, x):
            return x @ self.w[...]

    model = mpjax.with_policy(Model(), policy)
    np.testing.assert_array_equal(model(X), Model()(X).astype(model(X).dtype))
    np.testing.assert_array_equal(model.w.get_raw_value(), jnp.ones((8, 8)))
    assert run(model)[1] == 1


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.linear = nnx.Embed(11, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.linear(self.embed(tokens)) @ self.embed.embedding.T


class LinenTied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, 8)
        return nn.Dense(8)(embed(tokens)) @ embed.embedding.T


def test_weights_tied_by_hand_are_read_in_the_compute_dtype():
    tokens = np.zeros((2, 3), np.int32)
    model = mpjax.with_policy(of_nnx(lambda: Tied(nnx.Rngs(KEY))), "mixed_float16")
    assert run(model, tokens) == (jnp.float32, 1)
    assert model.embed.embedding[...].dtype == jnp.float32
    linen = mpjax.with_policy(LinenTied(), "mixed_float16")
    variables = jax.eval_shape(linen.init, jax.random.key(0), tokens)
    assert half_share(linen.apply, variables, tokens) == 1
    lookups = [e for e in jax.make_jaxpr(linen.apply)(variables, tokens).eqns if "gather" in str(e.primitive)]
    assert all(e.invars[0].aval.dtype == jnp.float32 for e in lookups)


def test_an_assignment_to_another_modules_parameter_is_not_lost():
    class Renormalises(Tied):
        def __call__(self, tokens):
            self.embed.embedding[...] = self.embed.embedding[...] / 2
            return super().__call__(tokens)

    model = mpjax.with_policy(Renormalises(nnx.Rngs(KEY)), "mixed_float16")
    before = np.asarray(model.embed.embedding[...])
    model(np.zeros((2, 3), np.int32))
    np.testing.assert_array_equal(model.embed.embedding[...], before / 2)


def test_an_update_of_a_parameter_is_not_lost():
    class Updates(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8)))

        def __call__(self, x):
            nnx.update(self, {"w": jnp.zeros((8, 8))})
            return x

    model = mpjax.with_policy(Updates(), "mixed_float16")
    model(X)
    np.testing.assert_array_equal(model.w[...], jnp.zeros((8, 8)))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=rngs)

    def __call__(self, x):
        return self.attention(x)


def test_decoding_has_a_cache_in_the_compute_dtype():
    plain, with_cache, later = (of_nnx(lambda: Decoder(nnx.Rngs(KEY))) for _ in range(3))
    for decoder in (plain, with_cache):
        decoder.attention.init_cache((2, 3, 8))
    with_cache, later = (mpjax.with_policy(decoder, "mixed_float16") for decoder in (with_cache, later))
    later.attention.init_cache((2, 3, 8))
    step = nnx.jit(lambda models, token: [model(token) for model in models])
    for token in np.random.default_rng(0).normal(size=(3, 2, 1, 8)).astype(np.float32):
        expected, *found = step((plain, with_cache, later), token)
        for y in found:
            np.testing.assert_allclose(y, expected, atol=2e-3)
    for model in (with_cache, later):
        assert model.attention.cached_key[...].dtype == jnp.float16


class Bridged(nnx.Module):
    def __init__(self, features, rngs):
        self.linear, self.norm = nnx.Linear(8, features, rngs=rngs), nnx.BatchNorm(features, rngs=rngs)
        self.w = nnx.Param(jnp.ones((features, 8)))

    def __call__(self, x):
        return self.decode(self.norm(self.linear(x)))

    def decode(self, h):
        return h @ self.w


@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
def test_an_nnx_module_in_a_linen_model_has_the_policy(policy):
    plain = nn.Sequential([nnx.bridge.to_linen(Bridged, 4), nn.Dense(8)])
    model = mpjax.with_policy(plain, policy)
    (y, variables), (plain_y, plain_variables) = (
        jax.eval_shape(m.init_with_output, jax.random.key(0), X) for m in (model, plain)
    )
    assert jax.tree.structure(variables) == jax.tree.structure(plain_variables)
    assert (y.dtype, plain_y.dtype) == (jnp.float32, jnp.float32)
    bridged = variables["params"]["layers_0"]
    assert bridged["norm"]["scale"].dtype == jnp.float32
    assert bridged["linear"]["kernel"].dtype == mpjax.get_policy(policy).param_dtype
    assert half_share(lambda v, x: model.apply(v, x, mutable=True), variables, X) == 1
    alone = mpjax.with_policy(nnx.bridge.to_linen(Bridged, 4), policy)
    variables = jax.eval_shape(alone.init, jax.random.key(0), X)
    assert half_share(lambda v, h: alone.apply(v, h, method="decode"), variables, X[:, :4]) == 1


def test_overrides_match_the_paths_of_an_nnx_module_in_a_linen_model():
    policy = mpjax.Policy("float32", "float16", "float32", [("layers_0/linear", "float32")])
    model = mpjax.with_policy(nn.Sequential([nnx.bridge.to_linen(Bridged, 4), nn.Dense(8)]), policy)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    # In float32 are 8 × 4 of 8 × 4 + 4 × 8 + 8 × 8 multiplications.
    assert half_share(lambda v, x: model.apply(v, x, mutable=True), variables, X) == 3 / 4


@pytest.mark.parametrize("lazy", [False, True])
def test_a_linen_module_in_an_nnx_model_has_the_policy(lazy):
    inner = nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.Dense(4)])

    def build():
        bridge = nnx.bridge.ToNNX(inner, rngs=nnx.Rngs(KEY))
        if lazy:
            return mpjax.with_policy(bridge, "O2").lazy_init(X)
        return mpjax.with_policy(bridge.lazy_init(X), "O2")

    model = of_nnx(build)
    assert run(model) == (jnp.float32, 1)
    if lazy:
        assert model.layers_1["scale"][...].dtype == jnp.float32
    assert model.layers_0["kernel"][...].dtype == jnp.float16
    graphdef, state = nnx.split(model)
    program = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s, copy=True)(x))(state, X)
    assert [e for e in program.eqns if e.primitive.name == "reduce_sum" and e.invars[0].aval.dtype == jnp.float16] == []
