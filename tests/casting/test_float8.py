"""Float8 matmuls, scaled by tensor or by block: which run, how exact they are, and under which transformations."""

import dataclasses
import functools
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax import Float8, Rules
from mpjax.kernels import scaled_ragged
from mpjax.kernels.scaled_matmul import quantised
from mpjax.program.formats import FLOAT8
from testing import measures
from testing.measures import relative_error as error
from testing.random_programs.evaluate import in_numpy

pytestmark = [
    pytest.mark.filterwarnings("ignore:autocast. cpu is not known to have float8"),
    pytest.mark.filterwarnings("ignore:autocast. cpu is not known to multiply MXFP8"),
]
either = pytest.mark.parametrize("policy", ["mixed_float8", "mixed_mxfp8"])

WIDTH = 32
RULES = Rules(float8=Float8(min_size=(0, 0)))


def options(**changes):
    return Rules(float8=dataclasses.replace(RULES.float8, **changes))


@functools.cache
def params_of(layers=3):
    keys = jax.random.split(jax.random.key(0), layers)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / np.sqrt(WIDTH) for key in keys]


X = jax.random.normal(jax.random.key(9), (4, 32, WIDTH))


def mlp(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean(jnp.sin(x) ** 2)


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(params))
    return jnp.mean(jnp.sin(x) ** 2)


def attention(params, x):
    """A block with shared readers of one activation, two products of activations, and a residual stream."""
    q, k, v, up = params
    for _ in range(2):
        y = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", y @ q, y @ k) / WIDTH**0.5)
        x = x + jnp.einsum("bqk,bkd->bqd", weights, y @ v)
        x = x + jax.nn.gelu(x @ up)
    return jnp.mean((x @ q) ** 2)


def float8(fun, rules=RULES, policy="mixed_float8"):
    return mpjax.autocast(fun, policy, rules=rules)


def rows(fun, *args):
    return [row for row in mpjax.explain(fun, *args).rows if row.op in ("dot_general", "conv_general_dilated")]


@either
@pytest.mark.parametrize(
    ("loss", "rules"),
    [(mlp, RULES), (scanned, RULES), (mlp, options(cotangents="e4m3")), (mlp, options(weight_gradients="half"))],
)
def test_compiled_gradients_are_close_to_float32(policy, loss, rules):
    params = params_of()
    found = jax.jit(jax.grad(float8(loss, rules, policy)))(params, X)
    expected = in_numpy(jax.grad(loss))(params, X)
    assert 1e-4 < error(found, expected) <= 0.15  # The lower bound fails if nothing is in float8.
    assert all(leaf.dtype == jnp.float32 for leaf in found)


@either
def test_half_weight_gradients_leave_their_matmul_in_float32(policy):
    """On a CPU, they were rounded to bfloat16 and widened."""
    loss = float8(mlp, options(weight_gradients="half"), policy)
    program = jax.make_jaxpr(jax.grad(loss))(params_of(), X)
    outs = [e.eqn.outvars[0].aval for e in measures.equations(program) if e.name == "dot_general"]
    assert {out.dtype.name for out in outs if out.shape == (WIDTH, WIDTH)} == {"float32"}


@either
@pytest.mark.filterwarnings("ignore:.*no matmul of this program is eligible.*symbolic")
def test_a_program_is_exported_for_any_batch(policy):
    """Blocks of 32 of an unknown number of rows failed."""
    fun = jax.jit(jax.grad(float8(mlp, policy=policy)))
    shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), WIDTH), jnp.float32)
    exported = jax.export.export(fun)(params_of(), shape)
    assert error(exported.call(params_of(), X[0]), in_numpy(jax.grad(mlp))(params_of(), X[0])) < 0.15


def errors_of_both(loss, x):
    """The errors of the gradient with scales for tensors and for blocks."""
    params = params_of(4)
    exact, policies = in_numpy(jax.grad(loss))(params, x), ("mixed_float8", "mixed_mxfp8")
    return [error(jax.jit(jax.grad(float8(loss, RULES, policy)))(params, x), exact) for policy in policies]


@pytest.mark.parametrize("loss", [mlp, scanned, attention])
def test_without_outliers_scales_for_blocks_are_about_as_accurate(loss):
    by_tensor, by_block = errors_of_both(loss, X)
    assert 0.8 < by_block / by_tensor < 1.1


def test_an_outlier_costs_only_its_block():
    def loss(params, x):
        for w in params:
            x = jax.nn.relu(x @ w)
        return jnp.mean(jax.nn.relu(jnp.tanh(x)))

    by_tensor, by_block = errors_of_both(loss, X.at[0, 0].multiply(1e6))
    assert by_tensor > 0.9  # all other rows are flushed to zero
    assert by_block < 0.2


@either
def test_the_matmuls_of_a_parameter_and_an_activation_run_in_float8(policy):
    first, middle, last = rows(float8(mlp, RULES, policy), params_of(), X)
    assert middle.dtypes_in == ("float8_e4m3fn", "float8_e4m3fn")
    assert middle.dtypes_out == ("bfloat16",)
    assert first.dtypes_in == last.dtypes_in == ("bfloat16", "bfloat16")
    assert "arguments" in first.why
    assert "no matmul follows" in last.why
    assert any(
        "both operands are activations" in row.why for row in rows(float8(attention, RULES, policy), params_of(4), X)
    )


def test_both_matmuls_of_the_gradient_run_in_float8():
    report = mpjax.audit(jax.grad(float8(mlp)), params_of(), X)
    found = {(row.dtypes, row.out_dtype) for row in report.matmuls if row.phase == "backward"}
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    assert ((e5m2, e4m3), "bfloat16") in found
    assert ((e4m3, e5m2), "float32") in found
    assert not any(set(dtypes) == {e5m2} for dtypes, _ in found)


def test_readers_of_one_activation_share_its_quantised_copy():
    text = str(jax.make_jaxpr(float8(attention))(params_of(4), X))
    # Six parameters are read in float8 (q, k, v and up in the second round, up in the first), from three activations.
    assert text.count("= float8_quantise") == text.count("= float8_scale")
    grad = str(jax.make_jaxpr(jax.grad(float8(mlp)))(params_of(), X))
    # One activation and one parameter forward, one cotangent backward: the backward pass quantises nothing again.
    assert grad.count("= float8_quantise") == 3


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (Rules(), "too few to gain"),
        (options(deny=["*layer_1"]), "rule '*layer_1'"),
    ],
)
def test_explain_names_the_reason_of_a_matmul_that_stays(rules, why):
    assert why in rows(float8(mlp, rules), params_of(), X)[1].why


def test_sizes_must_be_multiples_of_16():
    assert "M = 12: not a multiple of 16" in rows(float8(mlp), params_of(), X[:3, :4])[1].why


def test_convolutions_stay():
    def loss(kernels, x):
        for kernel in kernels:
            x = jnp.tanh(jax.lax.conv(x, kernel, (1, 1), "SAME"))
        return jnp.mean(x)

    kernels = [jnp.ones((16, 16, 3, 3))] * 3
    assert "convolutions have no float8" in rows(float8(loss), kernels, jnp.ones((2, 16, 8, 8)))[-1].why


@pytest.mark.parametrize(
    ("policy", "rules", "expected"),
    [
        ("mixed_float8;*/layer_1=>mixed_bfloat16", RULES, []),
        ("mixed_float8;layer_0=>mixed_float8;*layer_2=>mixed_float8", RULES, [0, 1, 2]),
        ("mixed_bfloat16;layer_2=>mixed_float8", None, [2]),
        ("mixed_float8", Rules(float8=Float8(allow=["layer_1"])), [1]),
        ("mixed_float8;layer_1=>float32", RULES, []),
    ],
)
def test_rules_and_overrides_take_matmuls_in_and_out(policy, rules, expected):
    found = rows(float8(mlp, rules, policy), params_of(), X)
    assert [i for i, row in enumerate(found) if "float8" in row.dtypes_in[0]] == expected


def test_a_pattern_that_matches_nothing_is_reported():
    with pytest.warns(mpjax.UnusedRuleWarning, match=r"Float8.*layre"):
        float8(mlp, options(deny=["*/layre"]))(params_of(), X)


@either
@pytest.mark.parametrize("fill", [0.0, 1e-30, 1e30])
def test_no_nan_on_extreme_inputs(policy, fill):
    x = jnp.full_like(X, fill).at[0, 0, 0].multiply(3.0)

    def loss(params, x):
        x = x @ params[0]
        return jnp.sum((x @ params[1]) @ params[2]) * (1 / fill if fill else 1.0)

    found = in_numpy(jax.grad(float8(loss, RULES, policy)))(params_of(), x)
    assert all(np.isfinite(leaf).all() for leaf in found)
    if fill:
        assert error(found, in_numpy(jax.grad(loss))(params_of(), x)) < 0.15


@either
def test_outliers_leave_the_gradient_close(policy):
    x = X.at[0, 0, :4].multiply(100)
    assert (
        error(in_numpy(jax.grad(float8(mlp, RULES, policy)))(params_of(), x), in_numpy(jax.grad(mlp))(params_of(), x))
        < 0.15
    )


@either
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_non_finite_values_stay_non_finite(policy, bad):
    w0, *rest = params_of()
    assert not np.isfinite(in_numpy(float8(mlp, RULES, policy))([w0, rest[0].at[0, 0].set(bad), rest[1]], X))


@either
def test_gradients_of_a_scaled_loss_are_bitwise_equal(policy):
    plain = jax.grad(float8(mlp, RULES, policy))(params_of(), X)
    scaled = jax.grad(float8(lambda *args: mlp(*args) * 2.0**12, RULES, policy))(params_of(), X)
    for a, b in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(a * 2.0**12, b)


# Transformations.


def hessian_product(loss, params):
    return jax.grad(lambda p: sum(jnp.vdot(g, w) for g, w in zip(jax.grad(loss)(p, X), params, strict=True)))(params)


# Those that random programs do not draw.
TRANSFORMED = {
    "vmap over parameters": lambda loss, p: jax.vmap(jax.grad(loss), (0, None))([jnp.stack([w, 2 * w]) for w in p], X),
    "vmap over a condition": lambda loss, p: jax.vmap(
        jax.grad(lambda p, x, on: jax.lax.cond(on, lambda: loss(p, x), lambda: loss(p, 2 * x))), (None, 0, 0)
    )(p, X, jnp.arange(4) % 2 == 0),
    "hessian": hessian_product,
    "grad of jvp": lambda loss, p: jax.grad(lambda p: jax.jvp(lambda q: loss(q, X), (p,), (p,))[1])(p),
}


@either
@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_every_transformation(policy, transformed):
    found, expected = (
        in_numpy(lambda p, f=f: transformed(f, p))(params_of()) for f in (float8(mlp, RULES, policy), mlp)
    )
    assert 1e-4 < error(found, expected) < 0.2


def test_vmap_has_one_scale_for_the_batch():
    text = str(jax.make_jaxpr(jax.vmap(float8(mlp), (None, 0)))(params_of(), X))
    assert "f32[4] = float8_scale" not in text
    assert "f32[] = float8_scale" in text


@pytest.mark.parametrize(("check", "axis"), [(True, "data"), (False, ())])
def test_shard_map(check, axis):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = options(axis_name=axis)

    def local(params, x):
        return jax.tree.map(lambda g: jax.lax.pmean(g, "data"), jax.grad(float8(mlp, rules))(params, x))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check)
    x = jnp.concatenate([X] * jax.device_count())
    found, expected = jax.jit(mapped)(params_of(), x), in_numpy(jax.grad(mlp))(params_of(), X)
    if check:  # The gradients of replicated parameters are sums over devices already.
        expected = [g * jax.device_count() for g in expected]
    assert error(found, expected) < 0.15


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_the_largest_number_is_rounded_and_not_clipped(dtype):
    largest = np.linspace(1.0, 2.0, 50, dtype=np.float32)
    copies = [quantised(jnp.full(1, x), np.dtype(dtype)) for x in largest]
    back = np.array([float(copy.q[0]) * float(copy.scale) for copy in copies])
    np.testing.assert_allclose(back, largest, rtol=float(jnp.finfo(dtype).eps) / 2)


def test_backward_matmuls_accumulate_all_bits():
    for fun in (jax.grad(float8(mlp)), float8(jax.grad(mlp)), jax.grad(float8(experts))):
        found = {}
        for line in jax.jit(fun).lower(params_of(), X).as_text().splitlines():
            if "dot_general" in line and "f8E" in line:
                precise = "precision = [HIGHEST, HIGHEST]" in line
                found.setdefault(precise, set()).add("f8E5M2" in line)
        assert found == {False: {False}, True: {True}}, "only matmuls of a cotangent are precise, and all of them"


@either
def test_jit_rounds_as_without_where_xla_leaves_out_no_rounding(policy):
    layers = float8(lambda params, x: [x := jnp.tanh(x @ w) for w in params], RULES, policy)
    params = params_of()
    compiled = jax.jit(layers).lower(params, X).compile(compiler_options={"xla_allow_excess_precision": False})
    for found, expected in zip(compiled(params, X), layers(params, X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)  # of float32's tanh


@either
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_jit_over_a_mesh(policy, kind):
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.concatenate([X] * count), jax.NamedSharding(mesh, P("data")))
        params = jax.device_put(params_of(), jax.NamedSharding(mesh, P(None)))
        found = jax.jit(jax.grad(float8(mlp, RULES, policy)))(params, x)
    assert error(jax.device_get(found), in_numpy(jax.grad(mlp))(params_of(), X)) < 0.15


@either
def test_autocast_of_a_gradient(policy):
    params = params_of()
    fun = float8(jax.grad(mlp), RULES, policy)
    assert error(in_numpy(fun)(params, X), in_numpy(jax.grad(mlp))(params, X)) < 0.15
    found = {row.dtypes_in for row in rows(fun, params, X)}
    cotangents = {"mixed_float8": "float8_e5m2", "mixed_mxfp8": "float8_e4m3fn"}[policy]
    assert (cotangents, "float8_e4m3fn") in found
    assert any("a weight gradient" in row.why for row in rows(fun, params, X))


@either
@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.vmap(f, (None, 0))], ids=["plain", "vmap"])
def test_the_matmuls_of_a_jvp_rule_are_transposed(policy, transform):
    @jax.custom_jvp
    def matmul(w, x):
        return x @ w

    @matmul.defjvp
    def rule(primals, tangents):
        (w, x), (dw, dx) = primals, tangents
        return x @ w, 0.5 * (x @ dw + dx @ w)  # half of the derivative shows that the rule is used

    def loss(w, x):
        return jnp.sum(jnp.sin(transform(matmul)(w, jnp.tanh(x @ w))))

    w = params_of(1)[0]
    found, expected = (in_numpy(jax.grad(f))(w, X) for f in (float8(loss, options(allow=["*"]), policy), loss))
    assert error(found, expected) < 0.15


# Ragged matmuls: each group of rows has a matrix of its own.


SIZES = np.array([48, 0, 16, 64], np.int32)


def of_groups(fun, x, *others):
    """A function of each group of rows and of its part of other arrays, in float64."""
    starts = np.cumsum(SIZES)[:-1]
    parts = [np.split(np.asarray(x, np.float64), starts)]
    parts += [np.split(np.asarray(y, np.float64), starts) if len(y) == len(x) else np.float64(y) for y in others]
    return [fun(*each) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize("cotangents", [jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_a_ragged_matmul_and_its_gradients_are_those_of_rounded_operands(cotangents):
    x, w, ct = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(128, 32), (4, 32, 48), (128, 48)]))
    x, ct = x.astype(jnp.bfloat16), ct.astype(jnp.bfloat16)
    params = jax.make_jaxpr(jax.lax.ragged_dot)(x, w.astype(x.dtype), SIZES).eqns[0].params
    e4m3, cotangents = np.dtype(jnp.float8_e4m3fn), np.dtype(cotangents)

    def matmul(x, w):
        copies = quantised(x, e4m3), quantised(w, e4m3)
        return scaled_ragged.multiply(params, copies, x.dtype, SIZES, cotangents=cotangents)

    def rounded(x, dtype):
        copy = quantised(x, dtype)
        return np.float64(copy.q) * np.float64(copy.scale)

    found, vjp = jax.vjp(matmul, x, w)
    results = found, *vjp(ct)
    rx, rw, rct = rounded(x, e4m3), rounded(w, e4m3), rounded(ct, cotangents)
    rw16 = rounded(w.astype(x.dtype), e4m3)  # the backward pass reads parameters in half
    expected = [
        np.concatenate(of_groups(np.matmul, rx, rw)),
        np.concatenate(of_groups(lambda ct, w: ct @ w.T, rct, rw16)),
        np.stack(of_groups(lambda x, ct: x.T @ ct, rx, rct)),
    ]
    assert [each.dtype for each in results] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for result, exact in zip(results, expected, strict=True):
        eps = float(jnp.finfo(result.dtype).eps)
        np.testing.assert_allclose(np.float64(result), exact, rtol=eps, atol=1e-5 * np.abs(exact).max())


def experts(params, x):
    first, up, down = params
    x = jnp.tanh(x.reshape(-1, WIDTH) @ first)
    x = jnp.tanh(jax.lax.ragged_dot(x, jnp.stack([up, 2 * up, up, up.T]), SIZES))
    return jnp.mean(jnp.sin(x @ down) ** 2)


@either
def test_ragged_matmuls_run_in_float8(policy):
    fun = float8(experts, RULES, policy)
    (row,) = [row for row in mpjax.explain(fun, params_of(), X).rows if row.op == "ragged_dot_general"]
    assert row.dtypes_in == ("float8_e4m3fn", "float8_e4m3fn")
    assert row.why == "allow: float8"
    flops = mpjax.audit(jax.grad(fun), params_of(), X).flops
    assert "float8_e4m3fn" not in mpjax.audit(fun, params_of(), X).residuals
    forward = 2 * 128 * WIDTH**2
    assert {dtype: count for dtype, count in flops.items() if "float8" in dtype} == dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2/float8_e4m3fn", "float8_e4m3fn/float8_e5m2"), forward
    )
    kept = mpjax.explain(float8(experts, options(min_size=(64, 64)), policy), params_of(), X).rows
    assert any("too few to gain" in row.why for row in kept if row.op == "ragged_dot_general")


def on_each_device(loss, params):
    mesh = jax.make_mesh((2,), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(params, x):
        return jax.lax.pmean(loss(params, x), "experts")

    return jax.grad(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("experts")), out_specs=P()))(
        params, jnp.concatenate([X, X])
    )


RAGGED = {
    "grad": lambda loss, p: jax.grad(loss)(p, X),
    "of half weight gradients": lambda loss, p: jax.grad(loss)(p, X),
    "jvp": lambda loss, p: jax.jvp(loss, (p, X), (p, X))[1],
    "hessian": lambda loss, p: jax.jvp(jax.grad(lambda x: loss(p, x)), (X,), (X,))[1],
    "checkpoint": lambda loss, p: jax.grad(jax.checkpoint(loss))(p, X),
    "scan": lambda loss, p: jax.grad(
        lambda p: jax.lax.scan(lambda c, x: (c + loss(p, x), None), 0.0, jnp.stack([X, 2 * X]))[0]
    )(p),
    "shard_map": on_each_device,
}


@pytest.mark.parametrize("name", RAGGED)
def test_transformations_of_ragged_matmuls(name):
    rules = options(weight_gradients="half") if "half" in name else RULES
    found, expected = (
        in_numpy(lambda p, f=f: RAGGED[name](f, p))(params_of()) for f in (float8(experts, rules), experts)
    )
    assert 1e-4 < error(found, expected) < 0.15


# Errors and warnings.


def test_options_without_a_float8_policy_are_an_error():
    with pytest.raises(ValueError, match="has no float8 matmuls"):
        mpjax.autocast(mlp, "mixed_bfloat16", rules=RULES)(params_of(), X)


@pytest.mark.parametrize(
    "option", [{"cotangents": "e3m4"}, {"min_size": 5}, {"weight_gradients": "x"}, {"allow": "*/a"}, {"axis_name": [1]}]
)
def test_a_bad_option_is_an_error_that_quotes_it(option):
    with pytest.raises(ValueError, match=f"Float8.{next(iter(option))}"):
        Float8(**option)


@pytest.mark.filterwarnings("default")
def test_a_device_without_float8_units_is_named():
    with pytest.warns(mpjax.AutocastWarning, match="cpu is not known to have float8"):
        float8(mlp)(params_of(), X)


@pytest.mark.parametrize(
    ("capability", "fast"),
    [
        ("8.0", False),
        ("8.9", True),
        ("10.0", True),
        ("gfx90a", False),
        ("gfx942", False),
        ("gfx950", True),
        ("", False),
    ],
)
def test_only_gpus_known_to_have_float8_units_are_taken_for_fast(capability, fast):
    device = types.SimpleNamespace(platform="gpu", device_kind="a GPU", compute_capability=capability)
    assert fast == (not FLOAT8.slow_on(device))


def test_a_gpu_known_by_its_kind_alone_is_not_called_slow():
    assert not FLOAT8.slow_on(types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200"))


@pytest.mark.parametrize(("kind", "fast"), [("TPU v5p", False), ("TPU v6 lite", False), ("TPU7x", True)])
def test_of_tpus_the_seventh_generation_has_float8_units(kind, fast):
    assert fast == (not FLOAT8.slow_on(types.SimpleNamespace(platform="tpu", device_kind=kind)))


def test_with_policy_names_autocast():
    nn = pytest.importorskip("flax.linen")
    with pytest.raises(ValueError, match=r"mpjax\.autocast"):
        mpjax.with_policy(nn.Dense(4), "mixed_float8")


def test_the_backward_pass_keeps_float8_activations():
    kept = [
        mpjax.audit(jax.grad(mpjax.autocast(mlp, policy, rules=rules)), params_of(6), X).residuals
        for policy, rules in (("mixed_bfloat16", None), ("mixed_float8", RULES))
    ]
    # Four of six matmuls read a float8 activation; the parameters are kept anyway, in float32.
    assert kept[1]["float8_e4m3fn"] >= 4 * X.size
    assert kept[1]["bfloat16"] < kept[0]["bfloat16"]


@pytest.mark.parametrize("policy", ["everything_saveable", "save_anything_except_these_names"])
def test_a_checkpoint_that_saves_float8_copies_has_finite_gradients(policy):
    """JAX rounds what it saves as if float8_e4m3fn had infinities: from 256 on, numbers became NaN."""
    saves = getattr(jax.checkpoint_policies, policy)
    loss = mpjax.autocast(lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) @ w), "mixed_float8", rules=RULES)
    w, x = np.float32(np.random.default_rng(0).normal(size=(2, 32, 32)))
    around = jax.checkpoint(loss, policy=saves() if policy.startswith("save_") else saves)
    found, expected = (jax.jit(jax.grad(fun))(w, x) for fun in (around, loss))
    np.testing.assert_allclose(found, expected, atol=0.1 * np.abs(expected).max())


def test_a_checkpoint_quantises_its_parameters_once():
    def blocks(params, x):
        for w in params:
            x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x)
        return jnp.mean(jnp.sin(x) ** 2)

    params = params_of(4)
    text = str(jax.make_jaxpr(jax.grad(float8(blocks)))(params, X))
    # The two middle layers are in float8. The backward pass computes their activations again, but not these copies.
    assert text.count(f"f8_e4m3fn[{WIDTH},{WIDTH}] = float8_quantise") == 2
    found, expected = (in_numpy(jax.grad(f))(params, X) for f in (float8(blocks), blocks))
    assert 1e-4 < error(found, expected) < 0.15


@pytest.mark.parametrize("loop", [False, True])
def test_nested_checkpoints_share_the_copy_of_a_parameter(loop):
    def twice(w, x):
        return jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, jnp.tanh(x @ w))

    def nested(params, x):
        if loop:
            x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(twice)(w, x), None), x, jnp.stack(params))
        for w in () if loop else params:
            x = jax.checkpoint(twice)(w, x)
        return jnp.mean(jnp.sin(x) ** 2)

    params = params_of(3)
    for transform in (jax.grad, lambda f: jax.grad(jax.checkpoint(f))):
        found, expected = (in_numpy(transform(f))(params, X) for f in (float8(nested), nested))
        assert 1e-4 < error(found, expected) < 0.15
    text = str(jax.make_jaxpr(jax.grad(float8(nested)))(params, X))
    assert text.count(f"f8_e4m3fn[{WIDTH},{WIDTH}] = float8_quantise") == (1 if loop else 3)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA gathered arrays with a layout constraint")
def test_a_layout_keeps_the_copy_of_a_parameter_in_rows_for_cuda():
    step = jax.jit(jax.grad(float8(mlp)))
    traced = step.trace(params_of(4), X)
    for platform, count in (("cuda", 2), ("cpu", 0)):
        assert traced.lower(lowering_platforms=(platform,)).as_text().count("LayoutConstraint") == count
    exported = jax.export.export(step, platforms=("cuda",))(params_of(4), X)  # It has no stable form there.
    assert "LayoutConstraint" not in exported.mlir_module()


SHAPES = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)


def three_layers(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)


@pytest.mark.filterwarnings("ignore:.*is not known to have float8")
def test_a_policy_without_an_eligible_matmul_is_reported_with_the_reasons():
    small = mpjax.autocast(three_layers, "mixed_float8")
    with pytest.warns(mpjax.UnusedRuleWarning, match=r"no matmul of this program is eligible.*too few to gain"):
        report = mpjax.audit(jax.grad(small), *SHAPES)
    assert report.float8_share == 0
    sizes = mpjax.Rules(float8=mpjax.Float8(min_size=(0, 0)))
    eligible = mpjax.audit(jax.grad(mpjax.autocast(three_layers, "mixed_float8", rules=sizes)), *SHAPES)
    # The middle layer's product, and its two gradients.
    assert eligible.float8_share == 3 / 8
    assert "37.5% in float8" in str(eligible)
    assert eligible.half_share == 1
    assert mpjax.audit(jax.grad(mpjax.autocast(three_layers, "mixed_bfloat16")), *SHAPES).float8_share == 0


@pytest.mark.filterwarnings("ignore:.*no matmul of this program is eligible")
@pytest.mark.parametrize("policy", ["mixed_float8", "mixed_mxfp8"])
def test_an_empty_batch_runs_as_in_half(policy):
    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    fun = mpjax.autocast(loss, policy, rules=mpjax.Rules(float8=mpjax.Float8(min_size=(0, 0))))
    args = [np.eye(64, dtype=np.float32)] * 3, np.zeros((0, 64), np.float32)
    assert not any(jnp.any(g) for g in jax.jit(jax.grad(fun))(*args))
    assert any("an operand is empty" in row.why for row in mpjax.explain(fun, *args).rows)


@pytest.mark.parametrize("axis_name", [3, [3], "", None])
def test_axis_names_that_are_none_are_refused(axis_name):
    with pytest.raises(ValueError, match=r"axis_name=.*give strings"):
        mpjax.Float8(axis_name=axis_name)
