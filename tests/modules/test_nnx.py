"""`with_policy` on NNX models: dtypes, accuracy and what Flax lets people do with a model."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from testing.measures import equations, half_share, matmuls, relative_error, rounded
from tests.modules.flax_models import NNX, NnxMLP

HALVES = ["float16", "bfloat16"]
# Both dtypes take one path; these show that it is right for bfloat16 too.
IN_BFLOAT16 = ["mlp", "resnet", "transformer"]
F16 = jnp.dtype("float16")


@functools.cache
def built(name):
    return NNX[name].build()


def split_loss(model, shape):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, x, target):
        y = nnx.merge(graphdef, params, rest, copy=True)(x)
        assert y.dtype == jnp.float32
        return jnp.mean((y - target) ** 2)

    return loss, params


def output_shape(model, x):
    graphdef, state = nnx.split(model)
    return jax.eval_shape(lambda state, x: nnx.merge(graphdef, state, copy=True)(x), state, x).shape


@pytest.mark.parametrize(
    ("name", "half"), [*((name, "float16") for name in NNX), *((name, "bfloat16") for name in IN_BFLOAT16)]
)
def test_every_matmul_of_forward_and_backward_is_half(name, half):
    model, x = built(name), NNX[name].inputs()
    shape = output_shape(model, x)
    loss, params = split_loss(mpjax.with_policy(model, f"mixed_{half}"), shape)
    assert half_share(jax.value_and_grad(loss), params, x, jnp.zeros(shape)) == 1.0


@pytest.mark.parametrize("name", ["mlp", "transformer", "lstm", "gru", "raw_matmul"])
def test_gradients_are_float32_and_as_near_as_rounding_allows(name):
    model, x = built(name), NNX[name].inputs()
    shape = output_shape(model, x)
    targets = jax.random.normal(jax.random.key(1), (6, *shape))

    def gradients_of(model):
        loss, params = split_loss(model, shape)
        gradient = jax.jit(jax.grad(loss))
        return lambda params, x: [gradient(params, x, target) for target in targets], params

    full, params = gradients_of(model)
    reference = full(params, x)
    for half in HALVES if name in IN_BFLOAT16 else ["float16"]:
        gradients = gradients_of(mpjax.with_policy(model, f"mixed_{half}"))[0](params, x)
        by_rounding = full(rounded(params, half), rounded(x, half))
        assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
        assert relative_error(gradients, reference) <= 3 * relative_error(by_rounding, reference)


@pytest.mark.parametrize("name", NNX)
def test_the_state_is_that_of_the_float32_model_bitwise(name):
    model = built(name)
    state, mixed = nnx.state(model), nnx.state(mpjax.with_policy(model, "mixed_float16"))
    assert jax.tree.structure(state) == jax.tree.structure(mixed)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(mixed), strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all()


def test_statistics_are_float32_and_kept():
    model = mpjax.with_policy(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), "p=f32,c=f16")
    x = jax.random.normal(jax.random.key(0), (16, 4)) + 1
    graphdef, state = nnx.split(model)
    program = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state, copy=True)(x))(state)
    sums = [e for e in equations(program) if e.name == "reduce_sum"]
    assert sums
    assert all(e.in_dtypes[0] == jnp.float32 for e in sums)
    assert model(x).dtype == F16
    assert model.mean.dtype == jnp.float32
    np.testing.assert_allclose(model.mean[...], 0.01 * x.mean(0), rtol=1e-3)


def test_an_override_holds_and_one_that_matches_nothing_warns():
    policy = mpjax.Policy("float32", "float16", "float32", [("layers/2", "float32"), ("lairs", "float32")])
    with pytest.warns(mpjax.UnusedOverrideWarning, match="lairs"):
        model = mpjax.with_policy(built("mlp"), policy)
    assert [e.in_dtypes[0] for e in matmuls(model, jnp.ones((1, 8)))] == [F16, F16, jnp.float32]


def test_a_dtype_of_a_layers_own_wins():
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 4, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    with pytest.warns(mpjax.ExplicitDtypeWarning, match=r"50% .*layers/1 \(float32\)"):
        found = matmuls(mpjax.with_policy(model, "mixed_float16"), jnp.ones((1, 4)))
    assert [e.in_dtypes[0] for e in found] == [F16, jnp.float32]


@pytest.mark.parametrize(("policy", "norm"), [("O2", "float32"), ("O3", "float16")])
def test_half_parameters_are_the_float32_ones_rounded(policy, norm):
    state = nnx.state(mpjax.with_policy(built("resnet"), policy))
    assert state["stem"]["kernel"].dtype == F16
    assert state["block1"]["norm1"]["scale"].dtype == norm
    assert state["block1"]["norm1"]["mean"].dtype == jnp.float32


def test_the_model_is_of_the_same_kind_and_the_given_one_left_as_it_is():
    given = built("mlp")
    model = mpjax.with_policy(given, "mixed_float16")
    x = jnp.ones((2, 8))
    assert isinstance(model, NnxMLP)
    assert isinstance(model.layers[0], nnx.Linear)
    assert half_share(given, x) == 0.0
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model))(x), model(x))
    again = mpjax.with_policy(mpjax.with_policy(given, "mixed_bfloat16"), "mixed_float16")
    assert nnx.graphdef(again) == nnx.graphdef(model)


def test_a_submodule_with_a_policy_of_its_own_keeps_it():
    inner = mpjax.with_policy(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    model = mpjax.with_policy(nnx.Sequential(inner, nnx.Linear(4, 4, rngs=nnx.Rngs(0))), "mixed_float16")
    assert [e.in_dtypes[0] for e in matmuls(model, jnp.ones((1, 4)))] == [jnp.bfloat16, F16]


def test_an_optimizer_trains_it_under_jit():
    model = mpjax.with_policy(NnxMLP(nnx.Rngs(0)), "mixed_float16")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(1), (16, 8))

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < losses[0] / 4
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}


def test_attributes_that_a_method_sets_are_kept():
    class Counts(nnx.Module):
        def __init__(self):
            self.calls = 0
            self.seen = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls += 1
            self.seen[...] += 1
            return x

    model = mpjax.with_policy(Counts(), "mixed_float16")
    model(jnp.ones(2))
    model(jnp.ones(2))
    assert (model.calls, float(model.seen[...])) == (2, 2.0)


class Counted(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))

    def __call__(self, x):
        self.kernel[...] = self.kernel[...] * 2
        return x @ self.kernel[...]


def test_assigning_to_a_cast_parameter_is_an_error_and_no_lost_state():
    model = Counted(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Counted\.__call__ assigns to its own parameter 'kernel'"):
        mpjax.with_policy(model, "mixed_float16")(jnp.ones((1, 4)))
    kept = mpjax.with_policy(model, "float32")
    kept(jnp.ones((1, 4)))
    np.testing.assert_array_equal(kept.kernel[...], 2 * model.kernel[...])
