"""What `find_nonfinite` concludes: which element matters, on which device, and whether float32 fails too."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl

import mpjax
from mpjax import find_nonfinite

HALF = np.float16


def test_a_constant_that_half_rounds_to_zero_is_not_the_datas_fault():
    def normalised(x):
        return jnp.sum(x / (jnp.abs(x) + 1e-8))

    found = find_nonfinite(normalised, np.array([1, 0, 2], HALF))
    assert found.primitive == "div"
    assert "float32 fails too" not in found.diagnosis
    assert "traced with float32 arguments, all results are finite" in found.diagnosis
    # In float32 the argument itself is at fault.
    assert "float32 fails too" in find_nonfinite(lambda x: jnp.sum(1 / x), np.zeros(3, HALF)).diagnosis
    # A constant that stays in half: the text of the line tells.
    closed = jax.device_put(np.zeros(3, HALF))
    assert (
        "1e-08 is zero in float16" in find_nonfinite(lambda w: jnp.sum(w / (closed + 1e-8)), np.ones(3, HALF)).diagnosis
    )


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy's, of the mask
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "masked",
    [
        lambda x, mask, least: x.astype(HALF) + ((1 - mask) * least).astype(HALF),
        lambda x, mask, least: x.astype(HALF) + jnp.where(mask > 0, 0.0, least).astype(HALF),
        lambda x, mask, least: (x + (1 - mask) * least).astype(HALF),
        lambda x, mask, least: jnp.where(mask > 0, x.astype(HALF), least),
    ],
)
def test_a_mask_beyond_the_range_of_half_gets_a_number_that_fits(masked):
    """Of a row that is masked as a whole, a softmax of -inf is NaN."""
    x, mask = np.ones((3, 4), np.float32), np.array([[1.0] * 4, [0.0] * 4, [1.0, 0.0] * 2], np.float32)

    def loss(x, mask, least):
        return jnp.sum(jax.nn.softmax(masked(x, mask, least).astype(np.float32)) * x)

    found = find_nonfinite(functools.partial(loss, least=-1e9), x, mask)
    assert found.kind == "inf"
    assert "jnp.finfo(dtype).min fits" in found.diagnosis
    least = float(jnp.finfo(HALF).min)
    assert find_nonfinite(functools.partial(loss, least=least), x, mask) is None, "the advice does not help"
    squared = find_nonfinite(lambda x: jnp.sum(3e2 * x.astype(HALF) * 300), x)
    assert "finfo" not in squared.diagnosis


@pytest.mark.standard_promotion
def test_constants_that_no_one_rounded_are_no_doubt():
    """Where a sum starts, what JAX pads with, and the one that a derivative divides by a count."""

    def of_neighbours(w, x, source, target):
        h = (x @ w).astype(HALF)
        degree = jax.ops.segment_sum(jnp.ones_like(source, HALF), target, 5)
        return jnp.mean((jax.ops.segment_sum(h[source], target, 5) / degree[:, None]).astype(np.float32))

    edges = np.array([0, 1, 2]), np.array([0, 1, 2])
    isolated = find_nonfinite(jax.value_and_grad(of_neighbours), np.eye(4, dtype=np.float32), np.ones((4, 4)), *edges)

    def of_tokens(w, x, mask):
        losses = ((x @ w).astype(HALF) ** 2).sum(-1)
        return ((losses * mask.astype(HALF)).sum() / mask.sum().astype(HALF)).astype(np.float32)

    x = np.ones((3, 4), np.float32)
    empty = find_nonfinite(jax.grad(of_tokens), np.eye(4, dtype=np.float32), x, np.zeros(3, np.float32))
    for found in (isolated, empty):
        assert found.primitive == "div"
        assert "float32 fails too: check the data or the model" in found.diagnosis


def test_the_inside_of_a_kernel_is_no_proof_against_float32():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * x_ref[...]

    def square(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jnp.sum(pl.pallas_call(kernel, out_shape=out, interpret=True)(x))

    found = find_nonfinite(square, np.full(8, 300, HALF))
    assert "all results are finite" in found.diagnosis
    found = find_nonfinite(lambda x: square(x.astype(HALF)), np.full(8, 300, np.float32))
    assert "cannot tell whether float32 fails too" in found.diagnosis


def test_the_element_is_one_that_reaches_the_result():
    def selected(x):
        return jnp.sum(jnp.where(jnp.arange(4) == 2, jnp.exp(x * 10), 0))

    found = find_nonfinite(selected, np.array([200, 1, 300, 400], np.float32))
    assert (found.primitive, found.element) == ("exp", (2,))

    def masked(scores, mask):
        return jnp.sum(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) ** 2)

    mask = np.array([[True, False, True], [False, False, False], [True, True, True]])
    found = find_nonfinite(masked, np.ones((3, 3), np.float32), mask)
    assert (found.kind, found.element[0]) == ("nan", 1)

    def innocent(x):
        dropped = jnp.where(x > 1e30, jnp.exp(x), 1.0)  # inf, but not where it is read
        return jnp.sum(jnp.where(jnp.arange(3) == 0, dropped, 1.0)) + jnp.sum(jnp.log(x - 5))

    found = find_nonfinite(innocent, np.array([6, 3e38, 5], np.float32))
    assert (found.primitive, found.element) == ("log", (2,))


SMALL = jnp.float16(1e-8)  # zero


@pytest.mark.parametrize("fun", [lambda x: jnp.sum(x / SMALL), lambda x: jnp.sum(x / (x - x + SMALL))])
def test_a_half_constant_from_outside_may_be_to_blame(fun):
    found = find_nonfinite(fun, np.ones(3, HALF))
    assert found.diagnosis.startswith("division by zero; cannot tell whether float32 fails too")


@pytest.mark.parametrize("half", [np.float16, np.float32])
@pytest.mark.standard_promotion
def test_a_zero_that_rounding_a_constant_made_is_named_as_that(half):
    funs = [
        lambda x: jnp.sum(x.astype(HALF) / jnp.float16(1e-8)),
        lambda x: jnp.sum(x.astype(HALF) / (x.astype(HALF) * 0 + 1e-8)),
        lambda x: jnp.sum(jnp.log(x.astype(HALF) * 0 + 1e-8)),
        lambda x: jnp.sum((x.astype(HALF) * 0 + 1e-8) ** -1),  # a pole, and no overflow
    ]
    for fun in funs:
        found = find_nonfinite(fun, np.ones(3, half))
        assert "1e-08 is zero in float16 (its smallest positive number is 6e-08), at test_diag" in found.diagnosis
        assert "check the data" not in found.diagnosis


@pytest.mark.parametrize("solve", [jnp.linalg.cholesky, jnp.linalg.inv])
def test_the_matmul_that_rounded_is_named_at_a_decomposition(solve):
    f = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)

    def gram(f):
        half = f.astype(HALF)
        g = jax.lax.dot(half, half.T)
        return jnp.sum(solve(jnp.astype(g, jnp.float32) + 1e-4 * jnp.eye(32)))

    found = find_nonfinite(gram, f)
    if found is not None:  # an inverse may be wrong, and finite
        assert f"rounded to float16 by dot_general at test_diagnosis.py:{gram.__code__.co_firstlineno + 2}: " in (
            found.diagnosis
        )
        assert found.diagnosis.endswith("keep what it reads in float32")


def test_a_zero_that_half_made_before_is_to_be_kept_in_float32_where_it_is_made():
    """Float32 at the logarithm alone cures nothing."""

    def entropy(x, dtype, later):
        p = jax.nn.sigmoid(x.astype(dtype))
        return -jnp.mean(p.astype(np.float32) * jnp.log(p.astype(later)).astype(np.float32))

    x = np.array([-60, 1], np.float32)
    for later in (HALF, np.float32):
        found = find_nonfinite(lambda x, later=later: entropy(x, HALF, later), x)
        assert (found.primitive, "to zero" in found.diagnosis) == ("log", True)
        assert found.diagnosis.endswith("keep what it reads in float32")
    assert find_nonfinite(lambda x: entropy(x, np.float32, np.float32), x) is None, "the advice does not help"


def test_a_cast_beyond_the_range_of_float8_is_named():
    found = find_nonfinite(
        lambda x: (500 * x).astype(jnp.float8_e4m3fn).astype(jnp.float32).sum(), np.ones(3, np.float32)
    )
    assert found.diagnosis.startswith("overflow of float8_e4m3fn here (500 is beyond its largest number)")


@pytest.mark.parametrize("guard", [lambda y: ~jnp.isnan(y), lambda y: jnp.isfinite(y)])
def test_the_trap_of_a_where_that_checks_its_own_branch(guard):
    def loss(x):
        y = jnp.log(x)
        return jnp.sum(jnp.where(guard(y), y, 0.0))

    x = np.array([1, -1, 2], np.float32)
    assert np.isfinite(loss(x))
    found = find_nonfinite(jax.grad(lambda x: jnp.sum(jnp.where(guard(jnp.sqrt(x)), jnp.sqrt(x), 0.0))), x)
    assert "the gradient of a where" in found.diagnosis
    assert found.direction == "backward"


@pytest.mark.parametrize("fun", [lambda x: jnp.sum(jnp.sqrt(x)), lambda x: jnp.linalg.norm(x)])
def test_the_derivative_of_a_square_root_at_zero_belongs_to_the_backward_pass(fun):
    found = find_nonfinite(jax.grad(fun), np.zeros(3, np.float32))
    assert found.diagnosis.startswith("the derivative of a square root at zero is infinite")
    assert found.direction == "backward"


def test_the_parameter_of_an_optimizers_nan_is_named():
    tx = optax.adam(1e-3, eps=0.0)

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.sum(p["a"] * x) + 0 * jnp.sum(p["b"]))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
    found = find_nonfinite(step, params, tx.init(params), np.ones(3, np.float32))
    assert found.result == "result[0]['b']"
    assert "result[0]['b'] is not finite" in str(found)


@pytest.mark.parametrize(
    ("fun", "x", "primitive"),
    [
        (jnp.arccos, 1.0, "rsqrt"),
        (lambda x: x**0.5, 0.0, "pow"),
        (jnp.cbrt, 0.0, "integer_pow"),
        (lambda x: jnp.linalg.norm(x[None]), 0.0, "div"),
    ],
)
def test_a_derivative_that_the_forward_pass_computes_is_of_the_backward_pass(fun, x, primitive):
    for derivative in (jax.grad, jax.value_and_grad):
        found = find_nonfinite(derivative(fun), np.float32(x))
        assert (found.primitive, found.direction) == (primitive, "backward")
        assert "derivative" in found.diagnosis


@pytest.mark.parametrize("fun", [jnp.exp, jnp.arctanh, lambda x: jnp.sum(jax.nn.softmax(x[None]) / (x - 200))])
def test_a_value_that_overflows_is_of_the_forward_pass(fun):
    for derivative in (jax.value_and_grad, jax.jit, lambda fun: jax.value_and_grad(jax.jit(fun))):
        found = find_nonfinite(derivative(fun), np.float32(200))
        assert found.direction == "forward", str(found)


def test_a_fault_of_the_data_is_told_from_one_of_autocast():
    def loss(w, x):
        return jnp.mean(jax.nn.relu(x @ w) @ w)

    half = mpjax.autocast(loss, "mixed_bfloat16")
    found = find_nonfinite(jax.jit(jax.grad(half)), np.full((4, 4), 3e38, np.float32), np.ones((2, 4), np.float32))
    assert "float32 fails too" in found.diagnosis


def test_an_overflow_that_a_division_makes_zero_is_named_with_its_zero():
    """A norm beyond float16 makes a vector of zeros, whose own norm is zero; float32 there cures nothing."""

    def normalised(x, dtype, later):
        x = x.astype(dtype)
        norm = jnp.sqrt(jnp.sum(x * x))
        x = (x / norm).astype(later)
        return x / jnp.sqrt(jnp.sum(x * x))

    x, first = np.full(16, 300, np.float32), normalised.__code__.co_firstlineno
    for later in (HALF, np.float32):
        found = find_nonfinite(lambda x, later=later: normalised(x, HALF, later), x)
        assert found.source == f"test_diagnosis.py:{first + 4}"
        assert f"it depends on an inf or NaN made by mul at test_diagnosis.py:{first + 2}" in found.diagnosis
        assert found.diagnosis.endswith("keep what it reads in float32")
    assert find_nonfinite(lambda x: normalised(x, np.float32, HALF), x) is None, "the advice does not help"


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # JAX's, where the constant is rounded
def test_an_additive_mask_beyond_half_is_no_fault_of_the_data():
    """It is infinite in half, and 0 * inf is NaN where nothing is masked."""

    def written(scores, mask):
        return jnp.sum(scores.astype(HALF) + (1 - mask).astype(HALF) * -1e5)

    def named(scores, mask, least=-1e5):
        return jnp.sum(scores.astype(HALF) + (1 - mask).astype(HALF) * least)

    args = jnp.ones((4, 4)), jnp.ones((4, 4))
    for fun in (written, jax.value_and_grad(written)):
        found = find_nonfinite(fun, *args).diagnosis
        assert "0 * inf; -100000 is -inf in float16" in found
        assert "keep this part in float32, or write one that it holds, such as -6.55e+04" in found
    line = named.__code__.co_firstlineno + 1
    unknown = find_nonfinite(named, *args).diagnosis
    assert f"cannot tell whether float32 fails too (the inf that mul at test_diagnosis.py:{line} reads" in unknown
    assert find_nonfinite(functools.partial(named, least=-6.55e4), *args) is None


def test_an_overflow_of_float32_is_called_an_overflow():
    for fun in (lambda x: x * x, lambda x: x @ x, lambda x: jnp.sum(x**3)):
        assert find_nonfinite(fun, np.full((2, 2), 1e30, np.float32)).diagnosis.startswith("overflow")


@pytest.mark.parametrize("form", ["autocast of the gradient", "gradient of autocast"])
def test_an_overflow_of_the_forward_pass_is_no_fault_of_the_scale(form):
    def loss(weights, x):
        return jnp.mean((jax.nn.relu(x @ weights[0]) @ weights[1]) ** 2)

    cast = functools.partial(mpjax.autocast, policy="mixed_float16")
    gradient = cast(jax.grad(loss)) if form == "autocast of the gradient" else jax.grad(cast(loss))
    weights = jnp.full((16, 16), 300.0), jnp.ones((16, 16))
    found = mpjax.find_nonfinite(gradient, weights, jnp.full((8, 16), 20.0))
    assert (found.primitive, found.direction) == ("dot_general", "forward")
    assert "loss scale" not in str(found)


@pytest.mark.parametrize("absorb", [jnp.tanh, lambda h: jnp.minimum(h, 1.0), jax.nn.relu])
def test_a_number_of_the_data_beyond_half_is_no_fault_of_the_scale(absorb):
    """Where the forward pass absorbs its infinity, the backward pass casts it again and meets it first."""

    def loss(params, x):
        return jnp.mean((absorb(x @ params["a"]) @ params["b"]) ** 2)

    rng = np.random.default_rng(0)
    params = {"a": np.float32(rng.normal(size=(8, 8))), "b": np.ones((8, 1), np.float32)}
    x = np.float32(rng.normal(size=(16, 8)))
    x[5, 1] = 7e4
    found = find_nonfinite(mpjax.value_and_grad(loss, policy="mixed_float16"), params, x)
    assert (found.primitive, found.direction, found.element) == ("convert_element_type", "forward", (5, 1))
    assert "it is in args[1], so no loss scale changes it" in found.diagnosis
    # The cures that it names.
    assert find_nonfinite(mpjax.value_and_grad(loss, policy="mixed_float16"), params, x / 100) is None
    assert find_nonfinite(mpjax.value_and_grad(loss, policy="mixed_bfloat16"), params, x) is None
    in_float32 = mpjax.autocast(loss, "mixed_float16", rules=mpjax.Rules(deny=[found.source]))
    assert find_nonfinite(jax.grad(mpjax.autocast(loss, "mixed_float16")), params, x) is not None
    with pytest.warns(mpjax.AutocastWarning):  # nothing is left in half
        assert find_nonfinite(jax.grad(in_float32), params, x) is None


def test_an_argument_that_masks_is_not_blamed_for_a_row_that_is_hidden_whole():
    def attention(bias, x):
        return jnp.mean((jax.nn.softmax(x @ x.T + bias) @ x) ** 2)

    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    causal = np.where(np.tri(5, dtype=bool), np.float32(0), -np.float32(np.inf))
    assert find_nonfinite(attention, causal, x) is None
    causal[2] = -np.inf
    found = find_nonfinite(attention, causal, x)
    assert (found.argument, found.primitive, found.element) == (None, "sub", (2, 0))
    assert found.diagnosis.startswith("inf - inf")
    assert found.diagnosis.endswith("(args[0] held -inf before the call)")


def test_the_logarithm_of_a_probability_of_zero_is_not_blamed_for_the_trap_of_a_where():
    def entropy(log_p, logits):
        log_p = log_p + logits
        p = jnp.exp(log_p)
        return -jnp.sum(jnp.where(p > 0, p * log_p, 0.0))

    log_p = np.log(np.full((4, 5), 0.2, np.float32))
    log_p[1, 2] = -np.inf
    found = find_nonfinite(jax.grad(entropy, argnums=1), log_p, np.zeros((4, 5), np.float32))
    assert (found.argument, found.element) == (None, (1, 2))
    assert "the gradient of a where" in found.diagnosis


def test_an_infinite_parameter_is_still_named():
    w = np.ones((3, 2), np.float32)
    w[1, 0] = np.inf
    found = find_nonfinite(lambda w, x: jnp.mean(jax.nn.softmax(x @ w)), w, np.ones((4, 3), np.float32))
    assert found.argument == "args[0]"


def test_a_root_of_what_half_flushed_is_not_called_flushed():
    """Adam's second moments of half parameters: their roots are numbers that float16 has."""
    found = find_nonfinite(lambda g: g / jnp.sqrt(g * g), np.full(3, 1e-6, HALF))
    assert found.primitive == "div"
    assert "because it reads 0 in float16 where float32 has 1.013e-06" in found.diagnosis


ALMOST = 1 - 1e-8


def cross_entropy(probability):
    p = jnp.clip(probability, 1e-8, 1 - 1e-8)
    return -jnp.mean(jnp.log(1 - p))


ONES = {
    "a clip": (cross_entropy, "0.99999999", 1),
    "a minimum with a name": (lambda p: jnp.sum(1 / (1 - jnp.minimum(p, ALMOST))), "0.99999999", 0),
    "both ends": (lambda p: jnp.sum(jnp.arctanh(jnp.clip(p, -1 + 1e-9, 1 - 1e-9))), "0.999999999", 0),
}


@pytest.mark.parametrize("dtype", [np.float32, HALF])
@pytest.mark.parametrize("form", ONES)
@pytest.mark.standard_promotion
def test_a_constant_that_float32_rounds_to_one_is_named_with_one_that_helps(form, dtype):
    fun, written, below = ONES[form]
    found = find_nonfinite(fun, np.ones(3, dtype))
    where = f"test_diagnosis.py:{fun.__code__.co_firstlineno + below}"
    assert f"{written} is 1 in {np.dtype(dtype)}, at {where}; write one that it holds" in found.diagnosis
    assert "check the data" not in found.diagnosis
    helps = float(re.findall(r"0\.9995\d*|0\.99999994", found.diagnosis)[0])
    assert find_nonfinite(lambda p: jnp.sum(jnp.log(1 - jnp.minimum(p, helps))), np.ones(3, dtype)) is None


def test_a_one_on_a_line_with_an_epsilon_is_no_rounded_constant():
    loss = lambda x: jnp.sum(jnp.sqrt(x) + jnp.log(x + 1e-8) + 1 / x)
    assert "is 1 in" not in find_nonfinite(jax.grad(loss), np.zeros(3, np.float32)).diagnosis


W, X, ZERO = np.ones((4, 4), np.float32), np.ones(4, np.float32), np.zeros(3, np.float32)
COMPETING = {
    "of one sum": (lambda w, x, c: jnp.sum(x @ w) + jnp.sum(1 / c), "inf in args[1] before the call"),
    "of two results": (lambda w, x, c: (x @ w, jnp.sum(1 / c)), "inf in args[1] before the call"),
    "of a product": (lambda w, x, c: jnp.sum(x @ w) * jnp.sum(1 / c), "inf in args[1] before the call"),
    "of two operations": (lambda w, x, c: jnp.sum(1 / c) + jnp.sum(jnp.log(c)), "inf made by log at {}: log of zero"),
}


@pytest.mark.parametrize("form", COMPETING)
def test_every_cause_of_what_is_not_finite_is_named(form):
    fun, other = COMPETING[form]
    where = f"test_diagnosis.py:{fun.__code__.co_firstlineno}"
    found = find_nonfinite(fun, W, X.copy() + np.array([0, 0, 0, np.inf], np.float32), ZERO)
    assert (found.primitive, found.diagnosis.partition(";")[0], found.source) == ("div", "division by zero", where)
    assert [text.partition(";")[0] for text in found.others] == [other.format(where)]
    assert str(found).splitlines()[2].startswith(f"  another cause: {other.format(where)}")
    # The first result that is not finite has another cause.
    assert found.result == ("result[1]" if form == "of two results" else "result")
    nan = find_nonfinite(fun, W * np.nan, X, ZERO)
    if "args" in other:
        assert (nan.argument, nan.others) == ("args[0]", (f"inf made by div at {where}: {found.diagnosis}",))


def test_a_cause_that_reaches_no_result_is_not_named():
    def loss(x, mask, c):
        dropped = jnp.where(x > 5, 1 / c + jnp.log(x), 0.0)
        return jnp.sum(jax.nn.softmax(x + mask)) + jnp.sum(dropped) + jnp.sum(jnp.log(c))

    mask = np.array([0, -np.inf, 0], np.float32)
    assert find_nonfinite(loss, np.ones(3, np.float32), mask, ZERO).others == ()


@pytest.mark.parametrize("looped", [False, True])
def test_the_value_comes_before_its_derivative(looped):
    def unit(h, w):
        h = h @ w
        return h / jnp.linalg.norm(h), None

    def loss(ws, h):
        h = jax.lax.scan(unit, h, ws)[0] if looped else unit(h, ws[0])[0]
        return jnp.sum(h)

    found = find_nonfinite(jax.value_and_grad(loss), np.zeros((2, 4, 4), np.float32), X)
    assert found.diagnosis.startswith("0/0")
    assert (found.direction, found.source) == ("forward", f"test_diagnosis.py:{unit.__code__.co_firstlineno + 2}")


def test_another_cause_is_measured_at_its_own_first_element():
    loss = lambda x, y: jnp.sum(jnp.exp(x * 300)) + jnp.sum(jnp.log(y)) + jnp.sum(1 / y)
    found = find_nonfinite(jax.value_and_grad(loss), np.array([0, 1, 1], np.float32), np.array([1, 0, 2], np.float32))
    assert [text.partition("; ")[0].partition(": ")[2] for text in found.others] == ["log of zero", "division by zero"]


def symmetric(x, sign):
    return jnp.diag(x) * sign


CAUSES = {
    "index -100 of an axis of 3 is out of bounds": lambda x: jnp.sum(jnp.take(x, jnp.array([0, -100]))),
    "index 7 of an axis of 3 is out of bounds": lambda x: jnp.sum(jnp.take(x, jnp.array([0, 7]))),
    "its matrix is not positive definite": lambda x: jnp.sum(jnp.linalg.cholesky(symmetric(x, -1))),
    "its matrix is singular": lambda x: jnp.sum(jnp.linalg.solve(symmetric(x, 0), x)),
    "lgamma of 0, a pole": lambda x: jnp.sum(jax.lax.lgamma(x - 1)),
    "acosh of 0.5, outside its domain": lambda x: jnp.sum(jnp.arccosh(x / 2)),
    "overflow of the operation's own dtype (-3.4e+38 + -3.4e+38)": lambda x: jnp.max(x * -3.4e38 + x * -3.4e38),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_in_the_words_of_the_operation(cause):
    found = find_nonfinite(CAUSES[cause], np.ones(3, np.float32))
    assert found.diagnosis.startswith(cause)


def test_a_constant_is_only_blamed_if_it_makes_the_fault():
    """A norm's epsilon that float16 lost, beside a logarithm of a probability that is zero in float32 too."""

    def loss(x):
        h = x.astype(HALF)
        h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-8)
        return jnp.mean(jnp.log(jax.nn.softmax(400 * h.astype(np.float32))))

    x = np.array([[1, 2, -1], [0, 0, 0]], np.float32)
    found = find_nonfinite(loss, x)
    assert (found.primitive, len(found.others)) == ("rsqrt", 1)
    assert "1e-08 is zero in float16" in found.diagnosis
    assert "log of zero" in found.others[0]
    assert "1e-08" not in found.others[0]


def test_the_rounding_is_named_whose_difference_is_divided_by():
    def loss(x, steps):
        kept = jnp.cumprod(1 - jnp.linspace(1e-4, 1e-2, 8, dtype=jnp.bfloat16))
        return jnp.mean(x / jnp.sqrt(1 - kept[steps]))

    found = find_nonfinite(loss, np.ones(2, jnp.bfloat16), np.array([0, 1]))
    where = f"test_diagnosis.py:{loss.__code__.co_firstlineno + 1}"
    assert found.primitive == "div"
    assert f"rounded to bfloat16 by cumprod at {where}" in found.diagnosis


def test_the_rounding_of_an_index_out_of_bounds_is_named():
    def loss(x, labels):
        rounded = labels.astype(HALF).astype(jnp.int32)
        return -jnp.mean(jnp.take_along_axis(x, rounded[:, None], 1))

    found = find_nonfinite(loss, np.ones((2, 4096), np.float32), np.array([3, 4095]))
    where = f"test_diagnosis.py:{loss.__code__.co_firstlineno + 1}"
    assert found.primitive == "gather"
    assert f"whole numbers beyond 2048, rounded to float16 by convert_element_type at {where}" in found.diagnosis


def test_the_infinity_that_starts_a_maximum_was_not_rounded():
    """A probability that float32 makes zero as well, of a softmax that casts by hand."""

    def loss(x):
        return -jnp.mean(jnp.log(jax.nn.softmax(x.astype(HALF))))

    found = find_nonfinite(loss, np.array([0, 300], np.float32))
    assert found.primitive == "log"
    assert "log of zero; float32 fails too" in found.diagnosis


def test_the_rounding_of_the_second_logarithm_of_a_line_is_named():
    def loss(x):
        p = jax.nn.sigmoid(x.astype(jnp.bfloat16)).astype(np.float32)
        return -jnp.mean(jnp.log(p) + jnp.log(1 - p))

    found = find_nonfinite(loss, np.array([0, 8], np.float32))
    assert found.primitive == "log"
    assert f"rounded to bfloat16 by logistic at test_diagnosis.py:{loss.__code__.co_firstlineno + 1}" in found.diagnosis
    assert "keep what it reads in float32" in found.diagnosis


def test_a_nan_that_becomes_an_integer_is_found_if_the_integer_matters():
    rows = jnp.arange(12.0).reshape(6, 2)

    def looked_up(x, bound=False):
        index = (2 * jnp.log(x)).astype(np.int32)
        return jnp.sum(rows[jnp.clip(index, 0, 0) if bound else index])

    x = np.array([1, -1, 2], np.float32)
    found = find_nonfinite(jax.value_and_grad(looked_up), x)
    where = f"test_diagnosis.py:{looked_up.__code__.co_firstlineno + 1}"
    assert (found.primitive, found.source, found.element) == ("log", where, (1,))
    assert f"the conversion to int32 at {where} hides it" in found.diagnosis
    assert find_nonfinite(looked_up, np.abs(x)) is None
    assert find_nonfinite(lambda x: looked_up(x, bound=True), x) is None
    x[0] = np.nan
    assert find_nonfinite(lambda x: rows[x.astype(np.int32)], x).argument == "args[0]"

    def counted(xs):
        return jax.lax.scan(lambda n, x: (n + jnp.sqrt(x).astype(np.int32), None), 0, xs)[0]

    found = find_nonfinite(counted, np.array([1, 4, -1, 9], np.float32))
    assert (found.primitive, found.iteration) == ("sqrt", 2)


def test_buckets_of_distances_are_chosen_before_the_logarithm_of_zero_matters():
    """Relative positions: near ones have a bucket each, and the logarithm of 0 belongs to a far one."""

    def bias(table):
        distance = jnp.abs(jnp.arange(8) - jnp.arange(8)[:, None])
        far = 2 + (2 * jnp.log(distance / 2)).astype(np.int32)
        return jnp.sum(table[jnp.where(distance < 2, distance, jnp.minimum(far, 5))])

    assert find_nonfinite(bias, jnp.ones((6, 2))) is None


def test_a_lost_epsilon_comes_before_the_where_that_hides_its_nan():
    def loss(w, cured=False):
        w = w.astype(HALF)
        w = (w - w.mean()) / jnp.sqrt(w.var() + (6.2e-5 if cured else 1e-10))
        return jnp.sum(jnp.where(w > 0, w, 0).astype(np.float32))

    found = find_nonfinite(jax.grad(loss), np.ones(4, np.float32))
    assert "1e-10 is zero in float16" in found.diagnosis
    assert "gradient of a where" not in found.diagnosis
    assert find_nonfinite(jax.grad(lambda w: loss(w, cured=True)), np.ones(4, np.float32)) is None
