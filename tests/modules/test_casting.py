"""A model with a policy is a model under autocast: overrides and explicit dtypes of every kind, lifted classes."""

import contextlib
import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys
from testing.measures import equations, half_share, matmuls, relative_error
from testing.random_programs.evaluate import arrays_in_numpy
from tests.modules.flax_models import of_nnx

KEY = cheap_keys.key(0)
F16, BF16, F32 = (jnp.dtype(name) for name in ("float16", "bfloat16", "float32"))
X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


class Part(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(nn.Dense(8, dtype=self.dtype, name="inner")(x))
        return x @ self.param("w", nn.initializers.normal(0.5), (8, 8)).astype(x.dtype)


class Whole(nn.Module):
    dtype_of_part: object = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(Part(self.dtype_of_part, name="part")(nn.Dense(8)(x)))


class NnxPart(nnx.Module):
    def __init__(self, rngs, dtype=None):
        self.inner, self.norm = (
            nnx.Linear(8, 8, dtype=dtype, rngs=rngs),
            nnx.BatchNorm(8, use_running_average=False, dtype=dtype, rngs=rngs),
        )
        self.w = nnx.Param(0.5 * jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        x = self.norm(self.inner(x))
        return x @ self.w[...].astype(x.dtype)


class NnxWhole(nnx.Module):
    def __init__(self, rngs, dtype_of_part=None):
        self.first, self.last = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.part = NnxPart(rngs, dtype_of_part)

    def __call__(self, x):
        return self.last(self.part(self.first(x)))


def pure(library, policy, dtype_of_part=None):
    """A model as a function (variables, x) → (output, changed variables), and its variables."""
    if library == "linen":
        model = Whole(dtype_of_part)
        variables = arrays_in_numpy(Whole().init)(KEY, X)
        model = model if policy is None else mpjax.with_policy(model, policy)
        return lambda variables, x: model.apply(variables, x, mutable=["batch_stats"]), variables
    model = of_nnx(lambda: NnxWhole(nnx.Rngs(KEY), dtype_of_part))
    graph, variables = nnx.split(model if policy is None else mpjax.with_policy(model, policy))

    def call(variables, x):
        merged = nnx.merge(graph, variables, copy=True)
        return merged(x), nnx.state(merged, nnx.BatchStat)

    return call, variables


def operands(fun, *args):
    return [e.in_dtypes[0] for e in matmuls(fun, *args)]


LIBRARIES = pytest.mark.parametrize("library", ["linen", "nnx"])


@LIBRARIES
@pytest.mark.parametrize(
    ("policy", "inner"),
    [
        ("mixed_float16;part=>p=f32,c=bf16,o=f32", (BF16, BF16)),
        ("float32;part=>mixed_float16", (F16, F16)),
        ("mixed_float16;part/inner=>mixed_float16;part=>float32", (F16, F32)),
        ("mixed_float16;part/inner=>p=f32,c=bf16,o=f32;part=>float32", (BF16, F32)),
        ("mixed_float16;part/inner=>float32", (F32, F16)),
    ],
)
def test_an_override_may_compute_in_any_dtype(library, policy, inner):
    call, variables = pure(library, policy)
    plain, _ = pure(library, None)
    rest = F32 if policy.startswith("float32") else F16
    assert operands(call, variables, X) == [rest, *inner, rest]
    (found, found_stats), (expected, stats) = (arrays_in_numpy(each)(variables, X) for each in (call, plain))
    assert found.dtype == F32
    assert relative_error(found, expected) <= 16 * float(jnp.finfo(jnp.bfloat16).eps)
    assert [x.dtype for x in jax.tree.leaves(found_stats)] == [F32] * 2
    assert relative_error(found_stats, stats) <= 4 * float(jnp.finfo(jnp.bfloat16).eps)


@LIBRARIES
@pytest.mark.parametrize("own", ["float32", "bfloat16", "float16"])
def test_a_part_with_a_dtype_of_its_own_does_not_change_what_follows(library, own):
    call, variables = pure(library, "mixed_float16", jnp.dtype(own))
    with pytest.warns(mpjax.ExplicitDtypeWarning) if own == "float32" else contextlib.nullcontext():
        found = operands(call, variables, X)
    # The NNX part keeps no dtype of its own, so that the matmul of its own code is the policy's.
    assert found == [F16, jnp.dtype(own), jnp.dtype(own) if library == "linen" else F16, F16]


def test_modules_that_share_a_scope_or_their_parameters():
    class Inner(nn.Module):
        def setup(self):
            self.dense = nn.Dense(8)

        def __call__(self, x):
            return self.dense(x)

    class Outer(nn.Module):
        def setup(self):
            self.inner = Inner()
            nn.share_scope(self, self.inner)
            self.again = nn.Dense(8)

        def __call__(self, x):
            return self.again(jnp.tanh(self.again(self.inner(x))))

    model = mpjax.with_policy(Outer(), "mixed_float16")
    plain, mixed = (arrays_in_numpy(m.init)(KEY, X) for m in (Outer(), model))
    assert set(plain["params"]) == {"dense", "again"}
    jax.tree.map(np.testing.assert_array_equal, plain, mixed)
    assert half_share(jax.grad(lambda v: model.apply(v, X).sum()), plain) == 1


@pytest.mark.parametrize(
    "lifted",
    [
        nn.remat,
        nn.jit,
        lambda cls: nn.vmap(cls, variable_axes={"params": None}, split_rngs={"params": False}),
        lambda cls: nn.map_variables(cls, "params", mutable=True, init=True),
        lambda cls: nn.scan(cls, variable_broadcast="params", split_rngs={"params": False}, length=3),
    ],
)
def test_a_lifted_class_has_the_parameters_and_the_name_of_the_float32_model(lifted):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, *rest):
            x = nn.LayerNorm()(nn.Dense(8)(x))
            return (x, None) if rest else x

    cls = lifted(Body)
    is_scan = "Scan" in cls.__name__
    args = (X, jnp.zeros(3)) if is_scan else (X,)
    model = mpjax.with_policy(cls(), "mixed_float16")
    assert type(model).__name__ == cls.__name__
    plain, mixed = (arrays_in_numpy(m.init)(KEY, *args) for m in (cls(), model))
    jax.tree.map(np.testing.assert_array_equal, plain, mixed)
    first = lambda m: lambda v: jax.tree.leaves(m.apply(v, *args))[0]
    assert half_share(jax.grad(lambda v: first(model)(v).sum()), plain) == 1
    assert relative_error(first(model)(plain), first(cls())(plain)) <= 8 * float(jnp.finfo(F16).eps)


def test_a_method_that_returns_a_submodule_runs_as_written():
    class Model(nn.Module):
        def setup(self):
            self.dense = nn.Dense(8)

        def part(self):
            return self.dense

        def __call__(self, x):
            return self.part()(x)

    model = mpjax.with_policy(Model(), "mixed_float16")
    variables = jax.eval_shape(model.init, KEY, X)
    assert half_share(model.apply, variables, X) == 1
    assert isinstance(model.bind({}).part(), nn.Dense)
    assert half_share(lambda v, x: model.bind(v).part()(x), variables, X) == 1


@pytest.mark.standard_promotion  # Flax's layers promote float32 inputs to complex
@LIBRARIES
def test_complex_modules_are_left_alone(library):
    if library == "linen":
        layer = nn.Dense(8, param_dtype=jnp.complex64)
        variables = jax.jit(layer.init)(jax.random.key(0), X)
        calls = [lambda v, m=m: m.apply(v, X) for m in (mpjax.with_policy(layer, "O2"), layer)]
    else:
        layer = nnx.Linear(8, 8, param_dtype=jnp.complex64, rngs=nnx.Rngs(0))
        variables = nnx.state(layer)
        graphs = [nnx.graphdef(m) for m in (mpjax.with_policy(layer, "O2"), layer)]
        calls = [lambda v, g=g: nnx.merge(g, v, copy=True)(X) for g in graphs]
    found, expected = (jax.jit(call)(variables) for call in calls)
    assert found.dtype == jnp.complex64
    assert np.abs(expected.imag).max() > 0
    np.testing.assert_array_equal(found, expected)


def test_code_between_layers_follows_the_rules_of_autocast():
    """The norm of large values: its squares overflow float16."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8)(x) * 1000
            return nn.Dense(8)(h / jnp.linalg.norm(h, axis=-1, keepdims=True))

    variables = arrays_in_numpy(Model().init)(KEY, X)
    models = mpjax.with_policy(Model(), "mixed_float16"), Model()
    losses = [lambda v, m=m: jnp.mean(m.apply(v, X) ** 2) for m in models]
    found, expected = (arrays_in_numpy(jax.value_and_grad(loss))(variables) for loss in losses)
    assert relative_error(found, expected) <= 16 * float(jnp.finfo(F16).eps)


def test_what_turns_autocast_off_turns_a_policy_off(monkeypatch):
    model = mpjax.with_policy(Whole(), "mixed_float16")
    variables = arrays_in_numpy(Whole().init)(KEY, X)

    def found():
        return operands(lambda v, x: model.apply(v, x, mutable=True)[0], variables, X)

    with mpjax.autocast_disabled():
        assert found() == [F32] * 4
    monkeypatch.setenv("MPJAX_AUTOCAST", "0")
    assert found() == [F32] * 4
    monkeypatch.delenv("MPJAX_AUTOCAST")
    assert found() == [F16] * 4


@LIBRARIES
def test_control_flow_on_values_is_an_error_that_names_the_model(library):
    def branch(x):
        return x if float(x.sum()) > 0 else -x

    if library == "linen":
        model = mpjax.with_policy(nn.Sequential([nn.Dense(8), branch]), "mixed_float16")
        call = functools.partial(model.apply, model.init(jax.random.key(0), X))
    else:
        call = mpjax.with_policy(nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), branch), "mixed_float16")
    with pytest.raises(TypeError, match=r"autocast traces Sequential, as jax\.jit does, but test_casting\.py"):
        call(X)


def test_a_policy_in_an_autocast_function_is_kept():
    model = mpjax.with_policy(Whole(), "mixed_bfloat16;part=>float32")
    variables = arrays_in_numpy(Whole().init)(KEY, X)
    loss = mpjax.autocast(lambda v, w: model.apply(v, X @ w, mutable=True)[0].sum(), "mixed_float16")
    assert operands(loss, variables, np.eye(8, dtype=np.float32)) == [F16, BF16, F32, F32, BF16]


@LIBRARIES
def test_rows_of_a_half_table_are_looked_up_in_half_and_their_gradients_summed_in_float32(library):
    if library == "linen":
        model = mpjax.with_policy(nn.Sequential([nn.Embed(100, 8), nn.LayerNorm(), nn.Dense(8)]), "O2")
        variables = jax.eval_shape(model.init, KEY, np.zeros((2, 3), np.int32))
        call = model.apply
    else:
        rngs = nnx.Rngs(KEY)
        layers = nnx.Embed(100, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        graph, variables = nnx.split(mpjax.with_policy(nnx.Sequential(*layers), "O2"))
        call = lambda variables, tokens: nnx.merge(graph, variables, copy=True)(tokens)
    gradient = jax.make_jaxpr(jax.grad(lambda v, tokens: call(v, tokens).sum()))(variables, np.zeros((2, 3), np.int32))
    found = {e.name: e.in_dtypes[0] for e in equations(gradient) if e.name in ("gather", "scatter-add")}
    assert found == {"gather": F16, "scatter-add": F32}


@LIBRARIES
@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
def test_a_step_of_training_under_a_loss_scale(library, policy):
    call, _ = pure(library, policy)
    plain, variables = pure(library, None)
    if library == "linen":
        params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}
        merge = lambda params: {"params": params, **rest}
    else:
        params, rest = nnx.split_state(variables, nnx.Param, ...)
        merge = lambda params: nnx.merge_state(params, rest)
    tx = mpjax.loss_scale_for(mpjax.master_weights(optax.sgd(0.1), policy), policy, init_scale=2.0**8)
    opt_state = tx.init(params)
    low = mpjax.get_policy("O2" if policy == "O2" else "float32").cast_to_param(params)
    loss = lambda run: lambda params: jnp.mean(run(merge(params), X)[0] ** 2)
    value, grads = jax.jit(lambda p, s: mpjax.value_and_grad(loss(call), s)(p))(low, opt_state)
    expected = arrays_in_numpy(jax.value_and_grad(loss(plain)))(params)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {F32}
    assert relative_error((value, grads), expected) <= 16 * float(jnp.finfo(F16).eps)


@LIBRARIES
@pytest.mark.parametrize(("policy", "warned"), [("mixed_float16", 1), ("mixed_bfloat16", 0)])
def test_float16_that_is_differentiated_without_a_loss_scale_warns(library, policy, warned):
    call, variables = pure(library, policy)
    loss = lambda variables: jnp.mean(call(variables, X)[0] ** 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(loss, variables)
        opt_state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init(variables)
        jax.eval_shape(lambda v: mpjax.value_and_grad(loss, opt_state)(v), variables)
        assert not caught
        jax.eval_shape(jax.grad(loss), variables)
    assert [w.category for w in caught] == [mpjax.UnscaledGradientWarning] * warned
