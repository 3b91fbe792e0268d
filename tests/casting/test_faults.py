"""Faults found in users' programs: each program failed once."""

from __future__ import annotations

import warnings

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpjax
from testing import cheap_keys, measures
from testing.random_programs.evaluate import in_numpy

_rng = np.random.default_rng(0)
W, X = (jnp.asarray(_rng.normal(size=shape) / size, jnp.float32) for shape, size in (((8, 8), 3), ((4, 8), 1)))


def near(found, expected, tolerance=2e-2):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.max(np.abs(expected)))


def agrees(fun, *args, rules=None):
    """Value and gradient under float16 autocast are near those without it; NumPy evaluates the traces."""
    cast, (value, gradient) = mpjax.autocast(fun, rules=rules), in_numpy(jax.value_and_grad(fun))(*args)
    near(in_numpy(cast)(*args), value)
    near(in_numpy(jax.grad(cast))(*args), gradient)


def _refusing_layer():
    @jax.custom_vjp
    def layer(w, x):
        return jnp.tanh(x @ w)

    def fwd(w, x):
        # Like equinox.filter_custom_vjp: the residuals depend on what is perturbed, and some operands must not be.
        assert not x.perturbed, "x is no parameter"
        return layer(w.value, x.value), ((w.value, x.value) if w.perturbed else None)

    def bwd(kept, ct):
        w, x = kept
        return x.T @ (ct * (1 - layer(w, x) ** 2)), None

    layer.defvjp(fwd, bwd, symbolic_zeros=True)
    jitted = jax.jit(lambda w, x: jnp.sum(layer(w, x) ** 2))
    return lambda w, x: jitted(w, x)


@pytest.mark.parametrize("order", ["plain cast", "cast plain cast", "plain explain cast plain", "explain plain cast"])
def test_forward_rule_may_refuse_perturbed_operands_in_any_order_of_traces(order):
    fun = _refusing_layer()  # Under jax.jit, plain and autocast programs share the equation with the rule.
    cast = mpjax.autocast(fun)
    steps = {
        "plain": lambda: jax.make_jaxpr(lambda *args: jax.grad(fun)(*args))(W, X),
        "cast": lambda: jax.make_jaxpr(lambda *args: jax.grad(cast)(*args))(W, X),
        "explain": lambda: mpjax.explain(cast, W, X),
    }
    for step in order.split():
        steps[step]()
    near(in_numpy(jax.grad(cast))(W, X), in_numpy(jax.grad(fun))(W, X))


@pytest.mark.skipif(not hasattr(jax.custom_vjp, "defvjp_with_logs"), reason="rules log since JAX 0.12")
def test_backward_rule_may_log():
    f = jax.custom_vjp(lambda x: jnp.tanh(x @ W))
    f.defvjp_with_logs(lambda x: (f(x), x), lambda x, ct: ((ct @ W.T,), {"f": {"x": x, "square": jnp.sum(ct * ct)}}))

    def logs(x, f):
        cts, logs = jax.vjp(f, x)[1].with_logs(jnp.ones((4, 8)))
        return cts, logs["f"]["x"], logs["f"]["square"]

    found, expected = (jax.tree.leaves(jax.jit(logs, static_argnums=1)(X, g)) for g in (mpjax.autocast(f), f))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)


def test_matmuls_of_a_backward_rule_are_planned_and_shown():
    @jax.custom_vjp
    def quantized(x, w):
        return lax.dot(x.astype(jnp.int8), w.astype(jnp.int8), preferred_element_type=jnp.int32).astype(jnp.float32)

    quantized.defvjp(lambda x, w: (quantized(x, w), (x, w)), lambda r, ct: (ct @ r[1].T, r[0].T @ ct))
    fun = lambda w, x: jnp.sum(quantized(x * 3, w * 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning was "no matmul or convolution of float32 arrays"
        warnings.simplefilter("ignore", mpjax.UnscaledGradientWarning)
        assert measures.half_share(jax.grad(mpjax.autocast(fun)), W, X) > 0
    rules = [row for row in mpjax.explain(fun, W, X).rows if row.rule]
    assert ("float16", "float16") in [row.dtypes_in for row in rules if row.op == "dot_general"]


@pytest.mark.parametrize("precision", [lax.Precision.HIGHEST, "float32", lax.DotAlgorithmPreset.F32_F32_F32])
def test_explicit_precision_keeps_a_matmul_in_float32(precision):
    fun = lambda w, x: jnp.sum(jnp.tanh(jnp.dot(x, w, precision=precision)) @ w)
    dtypes = [row.dtypes_in[0] for row in mpjax.explain(fun, W, X).rows if row.op == "dot_general"]
    assert dtypes == ["float32", "float16"]
    allowed = mpjax.autocast(fun, rules=mpjax.Rules(allow=["dot_general"]))
    assert measures.half_share(allowed, W, X) == 1.0


def test_no_tracer_outlives_the_trace():
    with jax.check_tracer_leaks():
        jax.jit(jax.grad(mpjax.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w)))))(W, X)


def test_control_flow_on_values_raises_an_error_with_solutions():
    def model(w, x):
        return x @ w if x.sum() > 0 else x

    with pytest.raises(TypeError, match=r"(?s)autocast traces model.*test_faults.py:\d+.*apply autocast to the part"):
        mpjax.autocast(model)(W, X)


def test_large_masks_do_not_warn():
    masked = lambda w, x: jnp.sum(jax.nn.softmax(jnp.where(x @ w > 0, x @ w, -1e38)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", mpjax.UnscaledGradientWarning)
        jax.make_jaxpr(jax.grad(mpjax.autocast(masked)))(W, X)


def test_a_checkpoint_may_be_given_a_number():
    layer = jax.checkpoint(lambda w, x, scale: x + scale * jnp.tanh(x @ w))
    loss = lambda w, x: jnp.mean(layer(w, x, np.float32(0.5)) + layer(w, x, 2.0))
    w, x = np.ones((4, 4), np.float32), np.ones((2, 4), np.float32)
    assert measures.relative_error(jax.grad(mpjax.autocast(loss))(w, x), jax.grad(loss)(w, x)) < 0.01


def test_a_complex_constant_does_not_warn():
    loss = lambda w, x: jnp.mean(jnp.abs(lax.complex(x @ w, x @ w) * np.complex64(1 + 2j)))
    w, x = np.ones((4, 4), np.float32), np.ones((2, 4), np.float32)
    assert mpjax.autocast(loss, "mixed_float16")(w, x) == pytest.approx(160**0.5, rel=1e-3)


def test_batch_of_symbolic_size_is_exported():
    batch = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 8"), jnp.float32)
    loss = lambda w, x: jnp.mean(jax.nn.softmax(jax.nn.gelu(x @ w) @ w) ** 2)
    exported = jax.export.export(jax.jit(jax.grad(mpjax.autocast(loss))))(W, batch)
    near(exported.call(W, X), in_numpy(jax.grad(loss))(W, X))


def test_taylor_mode_runs():
    fun = mpjax.autocast(lambda x: jnp.sum(jnp.exp(x @ W) @ W))
    assert np.isfinite(in_numpy(lambda x: jet.jet(fun, (x,), ((x, x),))[0])(X))


def test_an_implicit_solve_runs_as_traced():
    def fun(w, x):
        matvec = lambda v: v + 0.1 * (w.T @ (w @ v))
        return jnp.sum(jax.scipy.sparse.linalg.cg(matvec, x[0] @ w, maxiter=8)[0])

    with pytest.warns(mpjax.AutocastWarning, match="custom_linear_solve runs as traced"):
        agrees(fun, W, X)
    rows = [row for row in mpjax.explain(fun, W, X).rows if row.op == "dot_general"]
    assert {(row.dtypes_in[0], row.why) for row in rows} == {
        ("float32", "exact: an index or a decomposition reads it"),
        ("float32", "opaque: custom_linear_solve runs as traced"),
    }


@pytest.mark.skipif(not hasattr(jax.config, "jax_remat3"), reason="a setting of JAX 0.12")
def test_regions_in_a_derivative_rule_are_transposed_under_remat3():
    f = jax.custom_jvp(jnp.sin)
    tangent = mpjax.autocast(lambda x, t: jax.nn.softmax(jnp.cos(x) @ W) @ W * t)
    f.defjvp(lambda primals, tangents: (f(*primals), tangent(*primals, *tangents)))
    expected = in_numpy(jax.grad(lambda x: f(x).sum()))(X)
    jax.config.update("jax_remat3", True)
    try:
        found = in_numpy(jax.grad(lambda x: f(x).sum()))(X)
    finally:
        jax.config.update("jax_remat3", False)
    near(found, expected, 1e-2)


def test_typed_keys_pass_into_disabled_regions():
    @mpjax.autocast
    def noisy(w, key):
        with mpjax.autocast_disabled():
            noise = jax.random.normal(key, (4, 8))
        return noise @ w

    key = cheap_keys.key(0)
    expected = np.asarray(jax.jit(jax.random.normal, static_argnums=1)(key, (4, 8))) @ np.asarray(W)
    near(jax.jit(noisy)(W, key), expected)
    assert [row.why for row in mpjax.explain(noisy, W, key).rows if row.op == "erf_inv"] == [
        "autocast is disabled here"
    ]


def test_partial_sums_across_devices_keep_their_specs():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    partial = P(unreduced={"i"})

    def contracted(x, w):
        sums = jnp.dot(x, w, out_sharding=partial)
        return jax.shard_map(lambda z: lax.psum(z, "i"), in_specs=partial, out_specs=P())(sums)

    def replicated(w, x):
        w = jax.sharding.reshard(w, P(reduced={"i"}))
        specs = (P("i", None), P(reduced={"i"}))
        return jax.shard_map(jnp.dot, in_specs=specs, out_specs=P("i", None))(x, w).sum()

    with jax.set_mesh(mesh):
        split = jax.device_put(X, P(None, "i")), jax.device_put(W, P("i", None))
        whole = jax.device_put(W, P()), jax.device_put(X, P("i", None))
        near(jax.jit(mpjax.autocast(contracted))(*split), np.asarray(X) @ np.asarray(W))
        found = jax.jit(jax.grad(mpjax.autocast(replicated)))(*whole)
        assert mpjax.explain(contracted, *split).half_share == mpjax.explain(replicated, *whole).half_share == 1
    near(found, np.asarray(X).T @ np.ones((4, 8)))


def test_branches_by_platform_are_entered():
    def copied(ref, out):
        out[...] = ref[...]

    def for_tpu(x):  # has no lowering here
        return pl.pallas_call(copied, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def block(x):
        return jnp.tanh(x @ W) @ W

    def f(x):
        return jnp.sum(lax.platform_dependent(x, tpu=for_tpu, default=block))

    cast, expected = mpjax.autocast(f), in_numpy(f)(X)
    for fun in (cast, jax.vmap(cast, axis_size=1, in_axes=None)):
        np.testing.assert_allclose(np.sum(jax.jit(fun)(X)), expected, rtol=2e-2)
    agrees(lambda x: jnp.sum(lax.platform_dependent(x, cpu=block, cuda=block, default=jnp.sin)), X)
    assert mpjax.explain(f, X).half_share == 1


def test_functions_with_xla_metadata_are_entered_and_keep_it():
    metadata = pytest.importorskip("jax.experimental.xla_metadata")
    if not hasattr(metadata, "xla_metadata_call2"):
        pytest.skip("this JAX has no such call")
    layer = metadata.xla_metadata_call2(lambda x: jnp.tanh(x @ W), {"group": "layer"}, ad_metadata="drop")
    fun = jax.grad(lambda x: jnp.sum(metadata.set_xla_metadata(layer(x), group="out") @ W))
    assert measures.half_share(mpjax.autocast(fun), X) == 1.0
    assert "group" in str(jax.make_jaxpr(mpjax.autocast(layer))(X))
    loss = lambda x: jnp.sum(layer(x))
    near(*(jax.jit(jax.grad(f))(X) for f in (mpjax.autocast(loss), loss)))
    assert mpjax.explain(layer, X).half_share == 1


def test_sequential_vmap_is_entered():
    layer = jax.custom_batching.sequential_vmap(lambda x: jnp.tanh(x @ W))
    fun = lambda w, x: jnp.sum(jax.vmap(lambda x: layer(x[None] @ w))(x))
    assert measures.half_share(mpjax.autocast(fun), W, X) == 1.0
    near(in_numpy(mpjax.autocast(fun))(W, X), in_numpy(fun)(W, X))
    assert measures.half_share(mpjax.autocast(lambda x: jnp.sum(layer(x))), X) == 1.0


@pytest.mark.filterwarnings("ignore:Using 'Module.sow\\(\\)' outside")
def test_nnx_module_may_add_variables():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            h = self.linear(x)
            self.sow(nnx.Intermediate, "hidden", h)
            return jnp.sum(h)

    layer, expected = Layer(nnx.Rngs(0)), Layer(nnx.Rngs(0))
    cast = mpjax.autocast(lambda layer, x: layer(x))
    for _ in range(2):  # The second call appends to the Variable that the first one made.
        cast(layer, X)
        expected(X)
    found, wanted = (jax.tree.leaves(nnx.state(m, nnx.Intermediate)) for m in (layer, expected))
    assert len(found) == len(wanted) == 2
    np.testing.assert_allclose(found[1], wanted[1], atol=1e-2)


def test_rows_have_the_paths_of_nnx_modules():
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1)))
    plan = mpjax.explain(lambda model, x: jnp.sum(model(x)), model, X)
    assert [row.module for row in plan.rows if row.op == "dot_general"] == [
        "Sequential/layers/0",
        "Sequential/layers/1",
    ]
    assert type(model.layers[0]) is nnx.Linear


def test_a_loss_that_picks_values_by_an_inner_product_stays_in_range():
    # optax.ctc_loss ends in einsum("bn,bn->b", log_alpha, one_hot), with -1e5 for states that no path reaches.
    def loss(w, x):
        paths = jnp.concatenate([jax.nn.log_softmax(x @ w), jnp.full((4, 1), -1e5)], -1)
        return -jnp.einsum("bn,bn->b", paths, jax.nn.one_hot(jnp.arange(4), 9)).mean()

    w, x = W[:, :8], X[:4]
    mixed = mpjax.autocast(loss)
    np.testing.assert_allclose(in_numpy(mixed)(w, x), in_numpy(loss)(w, x), rtol=2e-3)
    dtypes = {row.dtypes_in[0]: row.why for row in mpjax.explain(mixed, w, x).rows if row.op == "dot_general"}
    assert "float16" in dtypes
    assert "inner product" in dtypes["float32"]


def test_a_composite_keeps_its_name_and_attributes_and_computes_in_half():
    def decomposed(x, *, power, weights):
        return jnp.exp(x @ x) ** power * weights

    composite = jax.lax.composite(decomposed, "my.block", version=3)
    fun = lambda x: composite(x, power=2.0, weights=np.ones(8, np.float32))
    (eqn,) = [e for e in jax.make_jaxpr(mpjax.autocast(fun))(W).eqns if e.primitive.name == "composite"]
    (before,) = jax.make_jaxpr(fun)(W).eqns
    assert {name: eqn.params[name] for name in ("name", "version")} == {"name": "my.block", "version": 3}
    assert str(eqn.params["attributes"]) == str(before.params["attributes"])
    assert mpjax.explain(fun, W).half_share == 1
    np.testing.assert_allclose(jax.jit(mpjax.autocast(fun))(W), fun(W), rtol=1e-2)
