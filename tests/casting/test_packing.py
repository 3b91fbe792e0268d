"""`Rules(residuals="int8")` and `"float8"`: what the backward pass keeps in eight bits, and what that costs."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from mpjax.kernels.packed import PACKINGS, pack, unpack
from testing import measures
from testing.models.zoo import harness
from testing.random_programs.evaluate import in_numpy

FORMATS = tuple(PACKINGS)
UNPACKED = pytest.mark.filterwarnings("ignore:.*keeps nothing of this program in eight bits")
# Of the norm of normally distributed elements: 5 bits of mantissa; 6 to 7 bits of the largest of 32.
ROUNDING = {"float8": 0.01, "int8": 0.01, "float8_stochastic": 0.016, "int8_stochastic": 0.016}


def normal(*shape, scale=1.0, seed=0):
    return np.float32(scale) * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weights():
    return [normal(64, 256, scale=0.1), normal(256, 64, scale=0.1), normal(64, 64, scale=0.1)]


def layer(w, x):
    """A norm, a GELU and a tanh, with what a derivative keeps in half arithmetic and in float32."""
    mean = x.mean(-1, keepdims=True)
    x = (x - mean) * jax.lax.rsqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + 1e-6)
    h = jax.nn.gelu(x @ w[0])
    return jnp.tanh(h @ w[1]) @ w[2]


def loss(w, x):
    return jnp.mean(layer(w, layer(w, x)) ** 2)


def cast(fun, residuals, policy="mixed_bfloat16", **rules):
    return mpjax.autocast(fun, policy, rules=mpjax.Rules(residuals=residuals, **rules))


@functools.cache
def gradient(fun, residuals=None):
    """The compiled gradient of a function, or of its cast; compiled once for all tests of it."""
    return jax.jit(jax.grad(cast(fun, residuals) if residuals else fun))


packed_and_unpacked = jax.jit(lambda x, name: unpack(pack(x, PACKINGS[name]), x.dtype), static_argnums=1)


# The format.


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(8, 768), (3, 5, 100), (7, 17), (16,)])
@pytest.mark.parametrize("name", FORMATS)
def test_an_array_in_eight_bits_is_as_close_as_its_format(name, shape, dtype):
    x = normal(*shape, seed=3).astype(dtype)
    packed, found = jax.jit(lambda x: (packed := pack(x, PACKINGS[name]), unpack(packed, dtype)))(x)
    assert packed.elements.shape == x.shape
    assert packed.elements.dtype.itemsize == 1
    assert packed.exponents.size <= x.size / 16
    assert found.dtype == dtype
    assert measures.relative_error(found, x) < ROUNDING[name]


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 6e4])
@pytest.mark.parametrize("name", FORMATS)
def test_zeros_signs_ties_and_powers_of_two_are_exact(name, scale):
    row = np.float32([0, -1, 1, 0.5, -0.5, 1, 0, -1] * 8)
    x = (row * 2.0 ** np.floor(np.log2(scale))).astype(np.float16)
    np.testing.assert_array_equal(packed_and_unpacked(x, name), x)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_stays_so(name, number, dtype):
    x = normal(4, 64).astype(dtype)
    x[1, 2] = number
    found = np.asarray(packed_and_unpacked(x, name))
    assert not np.isfinite(found[1, 2])
    assert np.isfinite(np.delete(found, 1, 0)).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_large_and_small_numbers_of_the_dtype_stay_finite_and_apart_from_zero(name, dtype):
    info = jnp.finfo(dtype)
    for number in (float(info.max), 0.9 * float(info.max), float(info.smallest_normal)):
        found = packed_and_unpacked(np.full(32, number, dtype), name)
        np.testing.assert_allclose(np.asarray(found, np.float64), number, rtol=1 / 16)


@pytest.mark.parametrize(("name", "error"), [("float8", 0.04), ("int8", 0.15)])
def test_elements_beside_one_that_is_a_hundred_times_larger(name, error):
    """float8's exponent keeps them."""
    x = normal(64, 256).astype(jnp.bfloat16)
    x[:, 5] = 100
    found = np.asarray(packed_and_unpacked(x, name))
    assert measures.relative_error(np.delete(found, 5, 1), np.delete(x, 5, 1)) < error


@pytest.mark.parametrize("name", ["int8_stochastic", "float8_stochastic"])
def test_stochastic_rounding_has_no_bias_and_repeats(name):
    step = 1 / 64 if name == "int8_stochastic" else 1 / 32
    x = np.full((1024, 64), 1 + step / 4, np.float16)
    x[:, 0] = 1.98
    packed = [unpack(pack(x, PACKINGS[each]), jnp.float32) for each in (name, name, name.removesuffix("_stochastic"))]
    np.testing.assert_array_equal(packed[0], packed[1])
    errors, nearest = (np.asarray(found - x.astype(np.float32))[:, 1:] for found in packed[1:])
    assert np.abs(errors).max() < step
    assert abs(errors.mean()) < 4 * np.std(errors) / np.sqrt(errors.size)
    np.testing.assert_allclose(nearest, -step / 4, rtol=1e-6)


@pytest.mark.parametrize("name", ["int8_stochastic", "float8_stochastic"])
def test_stochastic_rounding_keeps_exact_numbers(name):
    """Four in a million were rounded up: float32 does not hold the sum of 64 and almost 1."""
    x = np.full((1 << 15, 64), 1.0, jnp.bfloat16)
    assert (np.asarray(packed_and_unpacked(x, name)) == x).all()


def test_float8_has_more_bits_of_mantissa_for_large_elements():
    """Each of its numbers stays as it is, beside one that sets the scale of its block."""
    bits = [5, 5, 4, 4, 3, 3, 3]
    numbers = [2.0**-k * (1 + i / 2**n) for k, n in enumerate(bits) for i in range(2**n)] + [i / 512 for i in range(8)]
    blocks = np.concatenate([np.full((len(numbers), 1), 1.0), np.repeat(np.array(numbers)[:, None], 31, 1)], 1)
    x = (blocks * [[-1, 1] * 16]).astype(np.float16)
    np.testing.assert_array_equal(packed_and_unpacked(x, "float8"), x)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", ["int8_stochastic", "float8_stochastic"])
def test_stochastic_rounding_has_no_bias_at_any_element(name, dtype):
    """The largest element of a block was rounded down where int8 has no larger number."""
    largest = np.float32([1.992, -1.992, 0, 1, *np.linspace(-1.992, 1.992, 12)])
    rows = [np.concatenate([number * largest, number * largest / 7]) for number in (1.0, 0.996, 0.75)]
    x = np.tile(np.float32(rows), (4096, 1)).astype(dtype)
    found = np.asarray(packed_and_unpacked(x, name), np.float64) - np.asarray(x, np.float64)
    errors = found.reshape(4096, -1)
    assert (np.abs(errors.mean(0)) <= 4 * errors.std(0) / 64).all()
    assert (errors.std(0) > 0).mean() > 0.7


# Programs.


@functools.cache
def value_and_gradient(residuals=None, policy=None):
    """Of the loss. Compiled, the same operations may differ in the last bit, by what is fused."""
    return in_numpy(jax.value_and_grad(cast(loss, residuals, policy) if policy else loss))(
        weights(), normal(32, 64, seed=1)
    )


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_forward_pass_is_that_of_half_and_the_gradient_is_close(name, policy):
    _, exact = value_and_gradient()
    (value_in_half, in_half), (value, packed) = (value_and_gradient(each, policy) for each in ("half", name))
    assert value == value_in_half
    error_in_half, error = (measures.relative_error(found, exact) for found in (in_half, packed))
    assert error_in_half < error < error_in_half + 2 * ROUNDING[name]


@pytest.mark.parametrize("name", FORMATS[:2])
def test_only_what_xla_fuses_changes_the_forward_pass(name):
    """Compiled, XLA leaves out roundings between operations that it fuses; packing changes what it fuses."""
    fun, params, batch = harness.concrete("conv_pooling")
    half, packed = (cast(fun, residuals) for residuals in ("half", name))
    assert jax.vjp(packed, params, batch)[0] == jax.vjp(half, params, batch)[0]
    compiled = [jax.jit(jax.value_and_grad(each))(params, batch)[0] for each in (packed, half)]
    np.testing.assert_allclose(*compiled, rtol=3e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_residuals_take_little_more_than_a_byte_an_element(name):
    w, x = weights(), normal(32, 64)
    half, packed = (measures.residual_bytes(cast(loss, residuals), w, x) for residuals in ("half", name))
    assert packed < 0.6 * half
    assert PACKINGS[name].dtype.name in mpjax.audit(cast(loss, name), w, x).residuals


def test_what_follows_from_what_a_region_keeps_is_not_kept():
    """The results of GELUs were kept beside their arguments."""

    def layers(w, x):
        for _ in range(3):
            x = jax.nn.gelu(x @ w[0]) @ w[1]
        return jnp.mean(x**2)

    w, x = weights(), normal(256, 64)
    half, packed = (measures.residual_bytes(cast(layers, residuals), w, x) for residuals in ("half", "int8"))
    copies = 2 * sum(each.size for each in w[:2])
    assert packed - copies < 0.36 * (half - copies)
    exact, found = in_numpy(jax.grad(layers))(w, x), in_numpy(jax.grad(cast(layers, "int8")))(w, x)
    assert measures.relative_error(found, exact) < 2 * ROUNDING["int8"]


@pytest.mark.parametrize("moved", [lambda w: w[0], lambda w: w[1].T, lambda w: w.reshape(128, 64)[64:]])
def test_audit_counts_the_half_copies_of_moved_parameters(moved):
    """The backward pass read the parameter, and cast it a second time."""

    def layers(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ moved(w)) @ moved(w)) ** 2)

    w, x = normal(2, 64, 64, scale=0.1), normal(32, 64)
    fun = cast(layers, "int8")
    assert "float32" not in mpjax.audit(cast(layers, "half"), w, x).residuals
    found = [mpjax.audit(each, w, x).residuals for each in (fun, jax.grad(fun))]
    assert found[0] == found[1]
    assert "float32" not in found[0]


def scanned(w, x):
    return jnp.mean(jax.lax.scan(lambda h, _: (h + layer(w, h), None), x, None, length=3)[0] ** 2)


def checkpointed(w, x):
    return jnp.mean(jax.checkpoint(layer)(w, jax.checkpoint(layer)(w, layer(w, x))) ** 2)


def checkpointed_scan(w, x):
    body = jax.checkpoint(lambda h, _: (h + layer(w, h), None), prevent_cse=False)
    return jnp.mean(jax.lax.scan(body, layer(w, x), None, length=3)[0] ** 2)


def branched(w, x):
    return jnp.mean(jax.lax.cond(x[0, 0] < 9, lambda: layer(w, x @ w[2]), lambda: x @ w[2]) ** 2)


def mapped(w, x):
    return jnp.mean(jax.vmap(lambda x: layer(w, layer(w, x)))(x) ** 2)


def on_devices(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = PartitionSpec("data"), PartitionSpec()
    each = jax.shard_map(lambda w, x: layer(w, layer(w, x)), mesh=mesh, in_specs=(everywhere, rows), out_specs=rows)
    return jnp.mean(each(w, x) ** 2)


LOSSES = [loss, scanned, checkpointed, checkpointed_scan, branched, mapped, on_devices, jax.jit(loss)]


@pytest.mark.parametrize("fun", LOSSES, ids=lambda fun: fun.__name__)
def test_every_transformation_inside(fun):
    w, x = weights(), normal(32, 64, seed=2)
    exact, half = (in_numpy(jax.grad(each))(w, x) for each in (fun, cast(fun, "half")))
    packed = gradient(fun, "int8")(w, x)
    limit = measures.relative_error(half, exact) + 3 * ROUNDING["int8"]
    assert measures.relative_error(packed, exact) < limit
    bytes_of = [measures.residual_bytes(cast(fun, residuals), w, x) for residuals in ("half", "int8")]
    # A checkpointed scan has a float32 carry; each device keeps its copy of the weights, as do branches of JAX 0.10.
    assert bytes_of[1] < {checkpointed_scan: 0.8, on_devices: 0.95, branched: 0.95}.get(fun, 0.65) * bytes_of[0]


@pytest.mark.parametrize("fun", LOSSES, ids=lambda fun: fun.__name__)
@pytest.mark.parametrize("how", ["returned by jit", "of a jit", "of jax.linearize"])
def test_what_is_kept_between_compiled_functions_takes_eight_bits(how, fun):
    """The half arrays were results of the `jit` too, for derivatives of derivatives."""
    w, x = weights(), normal(32, 64, seed=2)

    def kept_bytes(residuals):
        of = cast(fun, residuals)
        pullback = {
            "returned by jit": jax.jit(lambda w, x: jax.vjp(of, w, x)[1]),
            "of a jit": lambda w, x: jax.vjp(jax.jit(of), w, x)[1],
            "of jax.linearize": lambda w, x: jax.linearize(jax.jit(of), w, x)[1],
        }[how]
        if how == "returned by jit" and residuals == "int8":  # The types of the others are those of their trace.
            return sum(each.nbytes for each in jax.tree.leaves(pullback(w, x)) if each.dtype != jnp.float32)
        kept = jax.tree.leaves(jax.eval_shape(pullback, w, x))
        return sum(each.size * each.dtype.itemsize for each in kept if each.dtype != jnp.float32)

    most = 0.65 if fun is checkpointed_scan else 0.6  # A half copy of what the loop adds to is kept under any rules.
    assert 0 < kept_bytes("int8") < most * kept_bytes("half")


def test_what_is_kept_may_be_an_argument_or_a_constant_of_a_compiled_function():
    w, x = weights(), normal(32, 64, seed=2)
    fun = jax.jit(cast(loss, "int8"))
    kept = jax.jit(lambda w: jax.vjp(lambda w: fun(w, x), w)[1])(w)
    (expected,) = kept(1.0)
    calls = {
        "a constant": lambda: jax.jit(lambda: kept(1.0))(),
        "an argument": lambda: jax.jit(lambda kept: kept(1.0))(kept),
        "of vmap": lambda: [[dw[1] for dw in jax.vmap(kept)(np.float32([2, 1]))[0]]],
    }
    for how, call in calls.items():
        assert measures.relative_error(call()[0], expected) < ROUNDING["int8"], how


def test_numerics_enters_branches_that_keep_different_arrays():
    report = mpjax.numerics(cast(branched, "int8"), weights(), normal(32, 64, seed=2))
    assert report.gradients
    assert "not inspected" not in str(report)


def penalty(fun):
    return lambda w, x: jnp.sum(jax.grad(fun, 1)(w, x) ** 2)


OUTSIDE = {
    "jvp": lambda fun, w, x: jax.jvp(lambda x: fun(w, x), (x,), (x**2,))[1],
    "jacobian": lambda fun, w, x: jax.jacrev(lambda x: fun(w, x))(x),
    "of a penalty": lambda fun, w, x: jax.grad(penalty(fun))(w, x),
    "hvp": lambda fun, w, x: jax.jvp(jax.grad(lambda x: fun(w, x)), (x,), (x,))[1],
    "hvp of jit": lambda fun, w, x: jax.jvp(jax.jit(jax.grad(lambda x: fun(w, x))), (x,), (x,))[1],
    "for each example": lambda fun, w, x: jax.vmap(jax.grad(lambda x: fun(w, x[None])))(x),
    "linear transpose": lambda fun, w, x: jax.vjp(jax.linearize(lambda x: fun(w, x), x)[1], x)[1](1.0)[0],
}


@pytest.mark.parametrize("how", OUTSIDE)
def test_every_transformation_outside(how):
    w, x = weights(), normal(8, 64, seed=3)
    exact, half = (in_numpy(functools.partial(OUTSIDE[how], fun))(w, x) for fun in (loss, cast(loss, "half")))
    packed = jax.jit(OUTSIDE[how], static_argnums=0)(cast(loss, "int8"), w, x)
    limit = measures.relative_error(half, exact) + 4 * ROUNDING["int8"]
    assert measures.relative_error(packed, exact) < limit


# Training: resumed, donated, offloaded and split over devices.


def repeated(w, x):
    return checkpointed(w, x) + checkpointed_scan(w, x)


TX = mpjax.dynamic_loss_scale(optax.sgd(0.1, momentum=0.9))


@jax.jit
def step(w, opt_state, x):
    fun = cast(repeated, "float8_stochastic", "mixed_float16")
    _, gradients = mpjax.value_and_grad(fun, opt_state)(w, x)
    return mpjax.apply_gradients(TX, gradients, opt_state, w)


def trained(state, steps):
    """Parameters and optimizer state after some steps of training, from the start if the state is None."""
    w, opt_state = state or (weights(), TX.init(weights()))
    for number in steps:
        w, opt_state = step(w, opt_state, normal(32, 64, seed=number))
    return jax.device_get((w, opt_state))


def test_a_run_that_another_process_resumes_is_bitwise_the_same(monkeypatch):
    """It loads the step if it traces the same program, and otherwise compiles its own."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.values["jax_compilation_cache_dir"])
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1000")  # only this process writes
    saved, whole = trained(None, range(2)), trained(None, range(4))
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        resumed = process.submit(trained, saved, range(2, 4)).result()
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def named(w, x):
    for _ in range(2):
        x = layer(w, jnp.tanh(checkpoint_name(x @ w[2], "kept")))
    return jnp.mean(x**2)


ONLY = jax.checkpoint_policies
POLICIES = {
    "nothing": None,
    "everything": ONLY.everything_saveable,
    "all but a name": ONLY.save_anything_except_these_names("kept"),
    "a name": ONLY.save_only_these_names("kept"),
    "matmuls in the host's memory": ONLY.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "a name in the host's memory": ONLY.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device",
        offload_dst="pinned_host",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "residuals"),
    [("nothing", "float8_stochastic"), *((name, each) for name in POLICIES for each in ("half", "int8"))],
)
def test_a_checkpoint_around_changes_no_gradient(name, residuals):
    w, x = weights(), normal(32, 64, seed=5)
    around, without = jax.checkpoint(cast(named, residuals), policy=POLICIES[name]), cast(named, residuals)
    traced = jax.jit(jax.grad(around)).trace(w, x)
    unseen = getattr(jax.config, "jax_remat3", False) and name.startswith("a name")  # It finds its own names alone.
    assert ("<host>" in str(traced.jaxpr)) == ("host" in name and not unseen)
    if residuals == "half" and name != "nothing":  # NumPy rounds alike; "int8" is compiled under each policy.
        found, plain = (in_numpy(jax.grad(fun))(w, x) for fun in (around, without))
    else:
        found, plain = traced.lower().compile()(w, x), gradient(named, residuals)(w, x)
    if name == "nothing" or residuals == "half":
        jax.tree.map(np.testing.assert_array_equal, found, plain)
    else:  # XLA may round other intermediate values where it reads saved ones.
        exact = gradient(named)(w, x)
        assert measures.relative_error(found, exact) < 1.5 * measures.relative_error(plain, exact)


def test_a_checkpoint_that_says_that_it_saves_nothing_is_packed_as_one_that_does_not():
    def layers(policy):
        def fun(w, x):
            for _ in range(3):
                x = jax.checkpoint(layer, policy=policy)(w, x)
            return jnp.mean(x**2)

        return mpjax.audit(jax.grad(cast(fun, "int8")), weights(), normal(32, 64)).residuals

    assert layers(ONLY.nothing_saveable) == layers(None)
    assert "int8" in layers(None)


@pytest.mark.parametrize(("name", "spec"), [("int8", ("data",)), ("float8", ("data",)), ("int8", (None, "data"))])
def test_a_donated_step_over_devices_stores_eight_bits(name, spec):
    """Parameters are split by rows, as in FSDP, or by columns, so that packed rows are split."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w, x = weights(), normal(32, 64, seed=6)
    rows, parts = (NamedSharding(mesh, PartitionSpec(*each)) for each in (("data",), spec))
    expected = gradient(loss, name)(w, x)
    given = jax.device_put(w, parts)
    fun = jax.jit(gradient(loss, name), donate_argnums=0, out_shardings=parts)
    compiled = fun.lower(given, jax.device_put(x, rows)).compile()
    dtype, shape = {"int8": "s8", "float8": "u8"}[name], "[8,256]" if spec == ("data",) else "[32,64]"
    assert dtype + shape in compiled.as_text()
    found = compiled(given, jax.device_put(x, rows))
    assert measures.relative_error(jax.device_get(found), expected) < 5e-3
    assert all(each.is_deleted() for each in given)


# What is not packed.


def attention(w, x):
    scores = (x @ w[2]) @ x.T
    return jnp.mean((jax.nn.softmax(8 * scores) @ (x @ w[2])) ** 2)


def pooled(w, x):
    images = (x @ w[0]).reshape(8, 16, 16, 4).swapaxes(1, 3).reshape(8, 4, 16, 16)
    largest = jax.lax.reduce_window(images + 1.0, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return jnp.mean((largest.reshape(32, 64) @ w[2]) ** 2)


def logarithm(w, x):
    return jnp.mean((jnp.log(1e-3 + (x @ w[2]) ** 2) @ w[2]) ** 2)


def threshold(w, x):
    h = x @ w[2]
    return jnp.mean((jnp.where(h > 0.5, 3.0 * h, h**2) @ w[2]) ** 2)


def through_a_carry(w, x):
    """From the second iteration on, the logarithm reads what the first one put into the carry."""
    step = lambda c, _: ((c[0], c[0]), jnp.log(1e-3 + c[1] ** 2))
    second = jax.checkpoint(lambda h: jax.lax.scan(step, (h, jnp.ones_like(h)), None, length=2)[1][1])
    return jnp.mean((second(layer(w, x) @ w[2]) @ w[2]) ** 2)


@UNPACKED
@pytest.mark.parametrize(
    "fun", [attention, pooled, logarithm, threshold, through_a_carry], ids=lambda fun: fun.__name__
)
def test_what_would_amplify_the_rounding_is_recomputed_from_half(fun):
    w, x = weights(), normal(32, 64, seed=4)
    exact = in_numpy(jax.grad(fun))(w, x)
    half, packed = (
        in_numpy(jax.grad(cast(fun, residuals, attention="unfused")))(w, x) for residuals in ("half", "int8")
    )
    assert measures.relative_error(packed, exact) < measures.relative_error(half, exact) + 2 * ROUNDING["int8"]


@UNPACKED
def test_the_last_region_keeps_its_input_in_half():
    w, x = weights(), normal(32, 64)

    def head(w, x):
        return -jnp.mean(jax.nn.log_softmax(x @ w[2])[:, 0])

    half, packed = (jax.jit(jax.grad(cast(head, residuals)))(w, x) for residuals in ("half", "int8"))
    jax.tree.map(np.testing.assert_array_equal, packed, half)


def test_explain_names_the_format():
    rows = mpjax.explain(cast(loss, "int8"), weights(), normal(32, 64)).rows
    matmuls = [row for row in rows if row.op == "dot_general"]
    assert any("int8 for the backward pass" in row.why for row in matmuls)
    assert not any("int8" in row.why for row in mpjax.explain(cast(loss, "half"), weights(), normal(32, 64)).rows)


def test_explain_names_no_format_where_a_matmul_reads_what_follows_from_half():
    """The argument of an ELU stays in half. The result that follows from it was said to be kept in eight bits."""
    fun = cast(lambda w, x: jnp.mean((jax.nn.elu(jax.nn.elu(x @ w[0]) @ w[1]) @ w[2]) ** 2), "int8")
    with pytest.warns(mpjax.UnusedRuleWarning, match=r"residuals='int8'\) keeps nothing of this program in eight bits"):
        found = mpjax.audit(fun, weights(), normal(32, 64)).residuals
    assert "int8" not in found
    assert not any("backward pass" in row.why for row in mpjax.explain(fun, weights(), normal(32, 64)).rows)


def test_explain_names_the_format_of_what_a_checkpoint_keeps():
    """It has no row of its own: the first rows inside say it."""
    fun = cast(lambda w, x: jnp.mean(jax.checkpoint(layer)(w, x @ w[2]) ** 2), "int8")
    kept = {row.op for row in mpjax.explain(fun, weights(), normal(32, 64)).rows if "int8 for the back" in row.why}
    assert kept == {"reduce_sum", "sub"}


def recurrent(w, x):
    """A state that gates multiply, in float32."""

    def step(carry, _):
        cell, x = carry
        gates = x @ w[0]
        forget, candidate = jax.nn.sigmoid(1 + gates[:, :64]), jnp.tanh(gates[:, 64:128])
        cell = forget * cell + (1 - forget) * candidate
        return (cell, jnp.tanh(cell) @ w[2]), None

    return jnp.sum(jax.lax.scan(step, (jnp.zeros_like(x), jnp.tanh(x @ w[2])), None, length=4)[0][1] ** 2)


def highway(w, x):
    """The same without a loop."""
    for _ in range(3):
        gates = x @ w[2]
        forget = jax.nn.sigmoid(gates)
        x = forget * jnp.tanh(gates) + (1 - forget) * x
    return jnp.mean((x @ w[2]) ** 2)


@pytest.mark.parametrize("fun", [recurrent, highway])
def test_gated_states_take_eight_bits(fun):
    """Their half copies stayed."""
    w, x = weights(), normal(32, 64, seed=2)
    exact, half, packed = (in_numpy(jax.grad(each))(w, x) for each in (fun, cast(fun, "half"), cast(fun, "int8")))
    limit = measures.relative_error(half, exact) + 2 * ROUNDING["int8"]
    assert measures.relative_error(packed, exact) < limit
    bytes_of = [measures.residual_bytes(cast(fun, residuals), w, x) for residuals in ("half", "int8")]
    assert bytes_of[1] < 0.6 * bytes_of[0]


def test_the_table_of_explain_says_what_the_rows_of_a_line_keep():
    """The line of an LSTM's gates said nothing: its rows only follow their operands."""
    table = " ".join(str(mpjax.explain(cast(recurrent, "int8"), weights(), normal(32, 64))).split())
    assert table.count("infer: follows its operands; int8 for the backward pass") >= 2


def test_an_overflow_of_float16_is_seen_in_the_gradients():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), init_scale=2.0**24)
    w, x = weights(), 1e4 * normal(32, 64)
    state = tx.init(w)
    fun = cast(lambda w, x: jnp.mean((x @ w[0] @ w[1]) ** 2), "int8", "mixed_float16")
    _, gradients = mpjax.value_and_grad(fun, state)(w, x)
    _, state = tx.update(gradients, state, w)
    assert state.skipped_steps == 1


def test_arrays_are_packed_once_for_all_who_read_them():
    def heads(w, x):
        h = layer(w, x)
        return jnp.mean((h @ w[2]) ** 2 + (h @ w[2] @ w[2]) ** 2 + jnp.sin(1e-2 * (h @ w[0] @ w[1])) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(cast(heads, "int8")))(weights(), normal(32, 64))
    packed = [e.eqn.invars[0] for e in measures.equations(jaxpr) if e.name == "packed_elements"]
    assert len(packed) == len(set(packed)) > 0


@pytest.mark.standard_promotion
def test_64_bit_integers_change_nothing():
    w, x = weights(), normal(32, 64)
    before = gradient(loss, "int8")(w, x)
    with jax.enable_x64(True):
        after = gradient(loss, "int8")(w, x)
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_a_function_that_returns_its_own_gradient_warns_that_nothing_is_stored_in_eight_bits():
    """`explain` said that its matmuls were, and the gradients were bitwise those of half."""
    gradient = cast(jax.grad(loss), "int8")
    with pytest.warns(mpjax.UnusedRuleWarning, match=r"residuals='int8'.*takes its gradient itself.*jax.grad.mpjax"):
        jax.eval_shape(gradient, weights(), normal(32, 64))
    assert not any("backward pass" in row.why for row in mpjax.explain(gradient, weights(), normal(32, 64)).rows)
    assert any(
        "int8 for the backward pass" in row.why
        for row in mpjax.explain(cast(loss, "int8"), weights(), normal(32, 64)).rows
    )


@jax.custom_vjp
def by_hand(w, x):
    return loss(w, x)


by_hand.defvjp(lambda w, x: jax.vjp(loss, w, x), lambda pullback, ct: pullback(ct))
IN_HALF = {
    "rows of 8": lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x[:, :8] @ w[2][:8, :8]) @ w[2][:8, :8]) ** 2),
    "a checkpoint with a policy": jax.checkpoint(loss, policy=ONLY.dots_saveable),
    "a derivative rule": by_hand,
}


@pytest.mark.parametrize("how", IN_HALF)
def test_a_program_that_keeps_nothing_in_eight_bits_warns(how):
    """It ran as with "half", without a word."""
    w, x = weights(), normal(32, 64)
    with pytest.warns(mpjax.UnusedRuleWarning, match=r"residuals='int8'\) keeps nothing of this program in eight bits"):
        packed = mpjax.audit(cast(IN_HALF[how], "int8"), w, x).residuals
    assert packed == mpjax.audit(cast(IN_HALF[how], "half"), w, x).residuals


def test_rules_that_are_none_are_refused_where_they_are_given():
    with pytest.raises(TypeError, match=r"autocast\(rules='int8'\): give a mpjax.Rules"):
        mpjax.autocast(loss, rules="int8")


@UNPACKED
@pytest.mark.parametrize("residuals", FORMATS[:2])
def test_rows_that_explicit_axes_split_stay_half(residuals):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))

    def split(w, x):
        h = jax.nn.gelu(x @ w[0])
        return jnp.mean(jnp.sin(jnp.matmul(h, w[1], out_sharding=PartitionSpec(None, None))))

    with jax.set_mesh(mesh):
        x = jax.sharding.reshard(np.ones((32, 64), np.float32), PartitionSpec())
        specs = PartitionSpec(None, "d"), PartitionSpec("d", None)
        w = [jax.sharding.reshard(np.eye(64, dtype=np.float32), spec) for spec in specs]
        found = jax.jit(jax.grad(cast(split, residuals)))(w, x)
    assert [g.sharding.spec for g in found] == [*specs]
