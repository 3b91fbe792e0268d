"""Several causes at once: in other elements, iterations, devices, lines and passes; and what is none beside another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax import find_nonfinite

HALF = np.float16
XS = np.linspace(0.1, 2, 200, dtype=np.float32).reshape(50, 4)


def line_of(fun, below=1):
    return f"test_several_causes.py:{fun.__code__.co_firstlineno + below}"


def with_values(x, values):
    x = x.copy()
    for index, value in values.items():
        x[index] = value
    return x


def causes(found):
    """The place and the cause of each, without what follows."""
    return [text.partition(";")[0] for text in (found.line, *found.others)]


def test_causes_in_other_rows_of_one_array_are_named():
    def loss(w, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    x = with_values(np.ones((8, 4), np.float32), {(3, 2): np.nan})
    found = find_nonfinite(jax.value_and_grad(loss), np.ones((4, 10), np.float32), x, np.arange(8) + 3)
    assert (found.argument, len(found.others)) == ("args[1]", 1)
    assert "index 10 of an axis of 10 is out of bounds" in found.others[0]
    assert line_of(loss) in found.others[0]

    def rows(w, x):
        h = (x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32)
        return jnp.sum(jnp.log(h), 1)

    x = with_values(np.ones((8, 4), np.float32), {2: 0, 5: 30000})
    assert causes(find_nonfinite(rows, np.ones((4, 4), np.float32), x)) == [
        f"inf made by dot_general at {line_of(rows)}: overflow of float16 here (float32 value 120,000)",
        f"inf made by log at {line_of(rows, 2)}: log of zero",
    ]


def two_lines(total, x):
    a = jnp.log(x[0])
    b = jnp.sqrt(x[1])
    return (total[0] + a, total[1] + b), None


def test_causes_in_iterations_of_a_loop_are_named_with_theirs():
    def loss(xs, y):
        return sum(jax.lax.scan(two_lines, (0.0, 0.0), xs)[0]) + jnp.log(y)

    xs = with_values(XS, {(37, 0): 0, (41, 0): 0, (12, 1): -1})
    assert causes(find_nonfinite(loss, xs, np.float32(0))) == [
        f"NaN made by sqrt at {line_of(two_lines, 2)}, iteration 12: square root of a negative number (-1)",
        f"inf made by log at {line_of(two_lines)}, iteration 37 and 1 more: log of zero",
        f"inf made by log at {line_of(loss)}: log of zero",
    ]
    one = find_nonfinite(jax.value_and_grad(loss), with_values(XS, {(37, 0): 0}), np.float32(1))
    assert (one.direction, one.iteration, one.iterations, one.others) == ("forward", 37, 1, ())


def test_a_loop_that_ends_at_a_nan_is_not_run_without_it():
    def newton(x):
        done = lambda state: jnp.abs(state[1]) > 1e-3
        return jax.lax.while_loop(done, lambda state: (state[0] + 1, jnp.log(state[1])), (0, x))[1]

    found = find_nonfinite(newton, np.float32(8))
    assert (found.primitive, found.source, found.iteration) == ("log", line_of(newton, 2), 3)
    assert found.others == ()


@pytest.mark.parametrize("bad", [(5, 1), (1, 0)])
def test_the_device_is_the_first_on_which_the_element_matters(bad):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    last = len(jax.devices()[:2]) - 1

    def local(x):
        large = jnp.where(jax.lax.axis_index("data") == last, x.astype(HALF) * 40000 * 2, x.astype(HALF))
        return jax.lax.psum(jnp.max(large), "data")

    found = find_nonfinite(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()), np.ones((8, 4)))
    assert found.device == f"data={last}"
    logs = jax.shard_map(lambda x: jnp.log(x), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = with_values(np.ones((8, 4), np.float32), {(6, 0): 0, bad: 0})
    size = 8 // (last + 1)
    found = find_nonfinite(logs, x)
    assert (found.device, found.element) == (f"data={bad[0] // size}", (bad[0] % size, bad[1]))


def test_an_overflow_that_follows_on_the_same_line_is_no_other_cause():
    def loss(w, x):
        h = x.astype(HALF) @ w.astype(HALF)
        return jnp.sum(jax.nn.relu(h * h)).astype(jnp.float32)

    found = find_nonfinite(loss, np.ones((4, 4), np.float32), np.full((2, 4), 100, np.float32))
    assert (found.primitive, found.direction, found.others) == ("mul", "forward", ())


def of_log(x):
    return jnp.where(x > 0, jnp.log(x), 0.0)


def of_quotient(x):
    return jnp.where(x != 0, jnp.sin(x) / x, 1.0)


@pytest.mark.parametrize("fun", [of_log, of_quotient])
@pytest.mark.parametrize("cast", [lambda fun: fun, mpjax.autocast])
def test_a_zero_cotangent_of_a_where_is_no_fault_of_the_data(fun, cast):
    gradient = cast(jax.grad(lambda w, x, fun: jnp.sum(fun(x @ w)), argnums=(0, 1)))
    args = np.eye(3, dtype=np.float32), np.array([[0, 1, 2]], np.float32)
    found = find_nonfinite(lambda w, x: gradient(w, x, fun), *args)
    assert "the gradient of a where" in found.diagnosis
    assert (found.direction, found.others) == ("backward", ())
    cured = lambda x: fun(jnp.where(x > 0, x, 1.0))  # as it says
    assert find_nonfinite(lambda w, x: gradient(w, x, cured), *args) is None


def test_an_overflow_before_a_where_is_of_the_forward_pass():
    def loss(w, x):
        h = (300 * (x @ w)) @ (300 * w)
        y = jax.nn.softmax(h)
        return jnp.mean(jnp.where(y > 0, jnp.log(y), 0.0)) + jnp.mean(y**2)

    found = find_nonfinite(mpjax.autocast(jax.grad(loss)), np.ones((4, 4), np.float32), np.ones((2, 4), np.float32))
    assert (found.primitive, found.direction) == ("dot_general", "forward")


def test_a_backward_rule_that_overflows_without_its_cotangent_is_not_the_scales_fault():
    def loss_with(backward):
        @jax.custom_vjp
        def identity(x):
            return x

        identity.defvjp(lambda x: (x, x), backward)
        return lambda w, x: jnp.mean(identity(x @ w) ** 2)

    state = mpjax.static_loss_scale(optax.identity(), 2.0**15).init({})
    args = np.ones((4, 4), np.float32), np.ones((2, 4), np.float32)

    def innocent(x, ct):
        return (ct * (x.astype(HALF) * 60000).astype(jnp.float32),)

    def guilty(x, ct):
        return ((ct.astype(HALF) * 100).astype(jnp.float32),)

    for rule, blamed in ((innocent, False), (guilty, True)):
        found = find_nonfinite(mpjax.value_and_grad(loss_with(rule), state), *args)
        assert found.direction == "backward"
        assert ("a smaller loss scale" in found.diagnosis) == blamed, str(found)


def test_half_a_reciprocal_root_is_the_users():
    def loss(x):
        return jnp.sum(0.5 / jnp.sqrt(x))

    for fun in (loss, jax.value_and_grad(loss)):
        found = find_nonfinite(fun, np.array([4, 0], np.float32))
        assert (found.diagnosis.partition(";")[0], found.direction, found.others) == ("division by zero", "forward", ())


def test_a_derivative_in_a_branch_is_of_the_backward_pass():
    fun = lambda x: jax.lax.cond(x < 1, jnp.sqrt, jnp.log, x)
    found = find_nonfinite(jax.grad(fun), np.float32(0))
    assert (found.primitive, found.direction) == ("div", "backward")


@pytest.mark.parametrize("scores", [jax.nn.softmax, jax.nn.log_softmax])
def test_a_row_that_is_masked_as_a_whole_is_called_that(scores):
    mask = np.array([[1, 1, 0], [0, 0, 0]], bool)
    found = find_nonfinite(lambda x: jnp.sum(scores(jnp.where(mask, x, -jnp.inf))[:, 0]), np.ones((2, 3), np.float32))
    assert "the softmax or logsumexp of a row that holds only -inf" in found.diagnosis
    assert found.element[0] == 1
    assert "softmax" not in str(find_nonfinite(lambda x: x - x[::-1], np.array([np.inf, np.inf], np.float32)))


def test_causes_behind_a_loop_that_ends_by_floats_are_named():
    def bisect(x):
        return jax.lax.while_loop(
            lambda s: jnp.abs(s[1] - s[0]) > 1e-3, lambda s: (s[1], (s[0] + s[1]) / 2), (x, 2 * x)
        )

    def loss(x, y):
        a = jnp.sqrt(x[0])
        return a + bisect(x[1])[0] + jnp.log(y)

    assert causes(find_nonfinite(loss, np.array([-1, 1], np.float32), np.float32(0))) == [
        f"NaN made by sqrt at {line_of(loss)}: square root of a negative number (-1)",
        f"inf made by log at {line_of(loss, 2)}: log of zero",
    ]


def test_a_loop_that_ended_at_a_nan_ends_without_it():
    def newton(x, y):
        step = lambda state: (state[0] + 1, jnp.log(state[1]))
        return jax.lax.while_loop(lambda state: jnp.abs(state[1]) > 1e-3, step, (0, x))[1] + jnp.sqrt(y)

    found = find_nonfinite(newton, np.float32(8), np.float32(-2))
    assert (found.primitive, found.iteration, len(found.others)) == ("log", 3, 1)
    assert "square root of a negative number (-2)" in found.others[0]


def test_two_faults_of_one_line_are_told_apart():
    def logs(a, b):
        return jnp.log(a) + jnp.log(b)

    found = find_nonfinite(logs, np.zeros(3, np.float32), np.full(3, -2, np.float32))
    assert causes(found) == [
        f"inf made by log at {line_of(logs)}: log of zero",
        f"NaN made by log at {line_of(logs)}, column 29: log of a negative number (-2)",
    ]

    def twice(a, b):
        first = half(a)
        return jnp.sum(first) + jnp.sum(half(b))

    def half(x):
        return 1 / (x - 1)

    for fun in (twice, jax.value_and_grad(twice), jax.value_and_grad(jax.checkpoint(twice))):
        assert causes(find_nonfinite(fun, np.ones(3, np.float32), np.ones(4, np.float32))) == [
            f"inf made by div at {line_of(half)}: division by zero",
            f"inf made by div at {line_of(half)}, called at {line_of(twice, 2)}: division by zero",
        ]


def test_a_fault_of_repeated_layers_is_one_cause():
    def net(w, x):
        for _ in range(3):
            x = x / (x - x)
        return jnp.sum(x)

    assert find_nonfinite(jax.value_and_grad(net), np.ones(()), np.ones(4, np.float32)).others == ()

    def masked(x, y):
        for _ in range(4):
            x = x + jnp.log(y)
        return jnp.sum(x) + jnp.sum(jnp.sqrt(y - 1))

    (other,) = find_nonfinite(masked, np.ones(4, np.float32), np.zeros(4, np.float32)).others
    assert "sqrt" in other


def test_what_the_numbers_in_place_of_a_fault_would_make_is_no_cause():
    def centred(x):
        h = jnp.log(x)
        return jnp.sum(1 / jnp.std(h) + 1 / jnp.log(h) + jnp.linalg.cholesky(h @ h.T))

    found = find_nonfinite(centred, -np.ones((3, 3), np.float32))
    assert (found.primitive, found.others) == ("log", ())
