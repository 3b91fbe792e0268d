"""`with_policy` on Linen models: dtypes, accuracy, and the ways in which Flax uses a model."""

import copy
import functools
import pickle
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from testing import cheap_keys
from testing.measures import equations, half_share, matmuls, residual_bytes
from testing.models.zoo.linen import MLP
from testing.random_programs.evaluate import arrays_in_numpy, in_numpy
from tests.modules.flax_models import LINEN, HandsDtypeOn

F16 = jnp.dtype("float16")
KEY = cheap_keys.key(0)


@functools.cache
def variables_of(name):
    model, x = LINEN[name].build(), LINEN[name].inputs()
    return model, initialised(model, x), x


def initialised(model, x):
    return arrays_in_numpy(model.init)(KEY, x)


@functools.cache
def shapes_of(name):
    model, x = LINEN[name].build(), LINEN[name].inputs()
    shapes = jax.eval_shape(model.init, KEY, x)
    rest = {k: jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), v) for k, v in shapes.items() if k != "params"}
    return model, {"params": shapes["params"], **rest}, x


@pytest.mark.parametrize("name", LINEN)
def test_every_matmul_of_forward_and_backward_is_half(name):
    model, variables, x = shapes_of(name)
    model, rest = mpjax.with_policy(model, "mixed_float16"), {k: v for k, v in variables.items() if k != "params"}

    def total(params):
        y, _ = model.apply({"params": params, **rest}, x, mutable=list(rest))
        assert y.dtype == jnp.float32
        return y.sum()

    assert half_share(jax.grad(total), variables["params"]) == 1.0


def test_parameters_are_those_of_the_float32_model_bitwise():
    model, variables, x = variables_of("resnet")
    mixed = initialised(mpjax.with_policy(model, "mixed_float16"), x)
    assert jax.tree.structure(mixed) == jax.tree.structure(variables)
    jax.tree.map(np.testing.assert_array_equal, mixed["params"], variables["params"])
    jax.tree.map(lambda a, b: a.dtype == b.dtype or pytest.fail(f"{a.dtype} {b.dtype}"), mixed, variables)


def test_statistics_are_float32_and_what_is_stored_is_half():
    model, variables, x = shapes_of("resnet")
    model = mpjax.with_policy(model, "mixed_bfloat16")

    def forward(variables, x):
        return model.apply(variables, x, mutable=["batch_stats"])

    _, updated = jax.eval_shape(forward, variables, x)
    assert {s.dtype for s in jax.tree.leaves(updated["batch_stats"])} == {jnp.dtype("float32")}
    stored, plain_stored = (
        residual_bytes(lambda v, m=m: m.apply(v, x, mutable=["batch_stats"])[0].sum(), variables)
        for m in (model, LINEN["resnet"].build())
    )
    assert stored < 0.55 * plain_stored
    sums = [e for e in equations(jax.make_jaxpr(forward)(variables, x)) if e.name == "reduce_sum"]
    assert sums
    assert all(e.in_dtypes[0] == jnp.float32 for e in sums)


def test_captured_intermediates_are_those_of_the_float32_model_rounded():
    model, variables, x = variables_of("resnet")
    mutable = ["batch_stats", "intermediates"]
    found, expected = (
        arrays_in_numpy(lambda v, x, m=m: m.apply(v, x, mutable=mutable, capture_intermediates=True)[1])(variables, x)
        for m in (mpjax.with_policy(model, "mixed_float16"), model)
    )
    found, expected = found["intermediates"], expected["intermediates"]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=16 * float(jnp.finfo(jnp.float16).eps) * np.abs(b).max())


def test_evaluation_with_running_averages_is_half_too():
    norm = nn.BatchNorm(use_running_average=True)
    model = mpjax.with_policy(nn.Sequential([nn.Conv(4, (3, 3)), norm, nn.Dense(4)]), "mixed_float16")
    x = np.ones((2, 4, 4, 3), np.float32)
    assert half_share(model.apply, jax.eval_shape(model.init, KEY, x), x) == 1.0


class Encoder(nn.Module):
    def setup(self):
        self.layer, self.head = nn.Dense(8), nn.Dense(2)

    def __call__(self, x):
        return self.head(self.encode(x))

    def encode(self, x):
        return self.layer(x)


@pytest.mark.parametrize("method", ["encode", Encoder.encode, lambda m, x: m.encode(x)])
def test_any_method_runs_under_the_policy(method):
    model, x = mpjax.with_policy(Encoder(), "mixed_float16"), np.ones((2, 4), np.float32)
    variables = jax.eval_shape(model.init, KEY, x)

    def encode(variables, x):
        return model.apply(variables, x, method=method)

    assert half_share(encode, variables, x) == 1.0
    assert jax.eval_shape(encode, variables, x).dtype == jnp.float32


def test_a_bound_model_runs_under_the_policy():
    model, variables, x = variables_of("mlp")
    bound = mpjax.with_policy(model, "mixed_float16").bind(variables)
    assert half_share(bound, x) == 1.0


def test_an_override_applies_at_its_path_and_below():
    _, variables, x = shapes_of("mlp")
    policy = mpjax.Policy("float32", "float16", "float32", [("Dense_2", "float32")])
    model = mpjax.with_policy(MLP(), policy)
    found = [e.in_dtypes for e in matmuls(model.apply, variables, x)]
    assert found == [(F16, F16), (F16, F16), (jnp.float32, jnp.float32), (F16, F16)]


def test_an_override_that_matches_nothing_warns():
    policy = mpjax.Policy("float32", "float16", "float32", [("*/Dens_2", "float32")])
    with pytest.warns(mpjax.UnusedOverrideWarning, match="Dens_2"):
        jax.eval_shape(mpjax.with_policy(MLP(), policy).init, KEY, np.ones((1, 8), np.float32))


def test_a_layers_own_dtype_takes_precedence():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, dtype=jnp.float32)(nn.Dense(8)(x))

    model, x = mpjax.with_policy(Model(), "mixed_float16"), np.ones((2, 8), np.float32)
    with pytest.warns(mpjax.ExplicitDtypeWarning, match="Dense_0"):
        variables = jax.eval_shape(model.init, KEY, x)
    assert [e.in_dtypes[0] for e in matmuls(model.apply, variables, x)] == [F16, jnp.float32]


def test_a_submodule_keeps_its_own_policy():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = mpjax.with_policy(nn.Dense(8), "mixed_bfloat16")(x)
            return nn.Dense(4)(x)

    model, x = mpjax.with_policy(Model(), "mixed_float16"), np.ones((2, 8), np.float32)
    variables = jax.eval_shape(model.init, KEY, x)
    assert set(variables["params"]) == {"Dense_0", "Dense_1"}
    assert [e.in_dtypes[0] for e in matmuls(model.apply, variables, x)] == [jnp.bfloat16, F16]


def test_the_outer_of_two_policies_replaces_the_inner():
    twice = mpjax.with_policy(mpjax.with_policy(MLP(), "mixed_bfloat16"), "mixed_float16")
    assert twice == mpjax.with_policy(MLP(), "mixed_float16")


@pytest.mark.parametrize(("policy", "norm"), [("O2", "float32"), ("O3", "float16")])
def test_half_parameters_are_the_float32_ones_rounded(policy, norm):
    model, variables, x = variables_of("hands_dtype_on")
    half = initialised(mpjax.with_policy(model, policy), x)
    kernel = half["params"]["Dense_0"]["kernel"]
    np.testing.assert_array_equal(kernel, variables["params"]["Dense_0"]["kernel"].astype("float16"))
    assert half["params"]["BatchNorm_0"]["scale"].dtype == norm
    assert {s.dtype for s in jax.tree.leaves(half["batch_stats"])} == {jnp.dtype("float32")}


def test_a_recurrent_state_stays_float32():
    rnn = mpjax.with_policy(nn.RNN(nn.LSTMCell(4), return_carry=True), "p=f32,c=f16,o=f32")
    x = np.ones((2, 3, 5), np.float32)
    variables = jax.eval_shape(rnn.init, KEY, x)
    scan = next(e for e in equations(jax.make_jaxpr(rnn.apply)(variables, x)) if e.name == "scan")
    assert [v.aval.dtype for v in scan.eqn.outvars[:2]] == [jnp.float32, jnp.float32]
    stacked = nn.Sequential([nn.RNN(nn.LSTMCell(4)), nn.Dense(4)])
    variables = jax.eval_shape(stacked.init, KEY, x)
    traced = jax.make_jaxpr(mpjax.with_policy(stacked, "mixed_float16").apply)(variables, x)
    scan = next(e for e in equations(traced) if e.name == "scan")
    assert scan.eqn.outvars[-1].aval.dtype == F16  # only a matmul reads the outputs


@pytest.mark.standard_promotion  # Flax's cells mix half and float32 gates
@pytest.mark.parametrize("cell", [nn.GRUCell, nn.OptimizedLSTMCell])
def test_a_recurrent_layer_stores_less_than_the_hand_written_one(cell):
    """Its gates are float32 and recomputed; Flax's `dtype=` stores half gates, and float32 ones with the state."""
    x = np.ones((8, 50, 64), np.float32)
    variables = jax.eval_shape(nn.RNN(cell(64)).init, KEY, x)
    policy = mpjax.with_policy(nn.RNN(cell(64)), "mixed_float16")
    policy_bytes, hand_bytes = (
        residual_bytes(lambda v, x, model=model: model.apply(v, x).astype(jnp.float32).sum(), variables, x)
        for model in (policy, nn.RNN(cell(64, dtype=jnp.float16)))
    )
    assert policy_bytes < 0.8 * hand_bytes


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.OptimizedLSTMCell])
def test_weights_of_a_recurrent_layer_are_cast_once_and_not_at_each_step(cell):
    model, x = mpjax.with_policy(nn.RNN(cell(16)), "mixed_float16"), np.ones((2, 3, 16), np.float32)
    variables = jax.eval_shape(model.init, KEY, x)
    loops = [
        e for e in equations(jax.make_jaxpr(jax.grad(lambda v: model.apply(v, x).sum()))(variables)) if e.name == "scan"
    ]
    casts = [
        e.eqn
        for loop in loops
        for e in equations(loop.eqn.params["jaxpr"])
        if e.name == "convert_element_type" and e.eqn.invars[0].aval.shape == (16, 16)
    ]
    assert len(loops) == 2
    assert not [eqn for eqn in casts if eqn.outvars[0].aval.dtype == F16]


def test_the_model_is_of_the_same_kind():
    model = mpjax.with_policy(MLP(name="net"), "mixed_float16")
    assert isinstance(model, MLP)
    assert type(model).__name__ == "MLP"
    assert model.name == "net"
    assert hash(model) == hash(mpjax.with_policy(MLP(name="net"), "mixed_float16"))
    assert model != mpjax.with_policy(MLP(name="net"), "mixed_bfloat16")
    assert pickle.loads(pickle.dumps(model)) == copy.deepcopy(model) == model.copy(name="net") == model
    assert "Dense_1" in model.tabulate(jax.random.key(0), np.ones((1, 8), np.float32))


def test_the_given_model_is_unchanged():
    model, variables, x = variables_of("mlp")
    jax.eval_shape(mpjax.with_policy(model, "mixed_float16").apply, variables, x)
    assert half_share(model.apply, variables, x) == 0.0


def test_a_jitted_layer_is_traced_for_each_policy():
    model, x = nn.jit(nn.Dense)(4), np.ones((2, 8), np.float32)
    variables = jax.eval_shape(model.init, KEY, x)
    mixed = mpjax.with_policy(model, "mixed_float16")
    shares = [half_share(m.apply, variables, x) for m in (model, mixed, model, mixed)]
    assert shares == [0.0, 1.0, 0.0, 1.0]


def test_dropout_and_sown_values_are_those_of_the_float32_model():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(64)(x))
            self.sow("intermediates", "dropped", x == 0)
            return x

    x = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
    variables = arrays_in_numpy(lambda key: Model().init(key, x, False))(KEY)

    def dropped(model, key):
        _, state = model.apply(variables, x, train=True, rngs={"dropout": key}, mutable=["intermediates"])
        return state["intermediates"]["dropped"][0]

    mixed, plain = (
        in_numpy(functools.partial(dropped, m))(KEY) for m in (mpjax.with_policy(Model(), "mixed_float16"), Model())
    )
    assert 0 < np.mean(plain) < 1
    np.testing.assert_array_equal(mixed, plain)


def test_spectral_norm_iterates_in_float32_and_multiplies_in_half():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.SpectralNorm(nn.Dense(4))(x, update_stats=True)

    model, x = mpjax.with_policy(Model(), "mixed_float16"), np.ones((2, 8), np.float32)
    variables = jax.eval_shape(model.init, KEY, x)
    y, updated = jax.eval_shape(lambda v: model.apply(v, x, mutable=["batch_stats"]), variables)
    assert {s.dtype for s in jax.tree.leaves(updated)} == {jnp.dtype("float32")}
    dtypes = {e.in_dtypes[0] for e in matmuls(lambda v: model.apply(v, x, mutable=True)[0], variables)}
    assert dtypes == {jnp.dtype("float32"), F16}
    assert y.dtype == jnp.float32


def test_a_dtype_that_the_model_passes_down_follows_overrides():
    model, x = HandsDtypeOn(), np.ones((4, 8), np.float32)
    policy = mpjax.Policy("float32", "float16", "float32", [("Dense_1", "float32")])
    mixed = mpjax.with_policy(model, policy)
    variables = jax.eval_shape(model.init, KEY, x)
    found = [e.in_dtypes[0] for e in matmuls(lambda v: mixed.apply(v, x, mutable=True)[0], variables)]
    assert found == [F16, jnp.float32]


def test_a_float32_policy_changes_nothing():
    model, variables, x = variables_of("mlp")
    full = mpjax.with_policy(model, "float32")
    np.testing.assert_array_equal(in_numpy(full.apply)(variables, x), in_numpy(model.apply)(variables, x))


def test_no_warning_for_the_patterns_of_a_level():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(mpjax.with_policy(MLP(), "O2").init, KEY, np.ones((1, 8), np.float32))


def test_attention_with_a_float32_softmax_still_multiplies_in_half():
    model = nn.MultiHeadDotProductAttention(num_heads=2, force_fp32_for_softmax=True)
    x = np.random.default_rng(1).normal(size=(2, 8, 16)).astype(np.float32)
    params = initialised(model, x)
    policied = mpjax.with_policy(model, "mixed_float16")
    gradient = jax.value_and_grad(lambda p: jnp.mean(policied.apply(p, x) ** 2))
    assert half_share(gradient, params) == 1.0
    exponentials = [e for e in equations(jax.make_jaxpr(gradient)(params)) if e.name == "exp"]
    assert exponentials
    assert all(e.in_dtypes == (jnp.dtype("float32"),) for e in exponentials)
    found, expected = (in_numpy(m.apply)(params, x) for m in (policied, model))
    np.testing.assert_allclose(found, expected, atol=8 * float(jnp.finfo(jnp.float16).eps))
