"""`find_nonfinite` on programs with exactly one known fault, and on programs with none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax import find_nonfinite
from mpjax.inspection.profiling.stepping import Compilations
from testing import cheap_keys
from testing.models.zoo import REGISTRY, harness
from testing.random_programs.evaluate import arrays_in_numpy

HALF = np.float16


def full(shape, value, dtype=np.float32, **others):
    """An array of one value but for some: `full((2, 3), 1, at={(0, 1): 2})`."""
    array = np.full(shape, value, dtype)
    for index, other in others.get("at", {}).items():
        array[index] = other
    return array


def line_of(fun):
    """The first line of a function's body, as `source` says it."""
    return f"test_find_nonfinite.py:{fun.__code__.co_firstlineno + 1}"


def test_an_overflow_of_half_is_found_with_its_float32_value():
    def square(x):
        return jnp.sum(x * x, axis=1)

    x = full((4, 3), 1, HALF, at={(2, 1): 302})
    found = find_nonfinite(jax.jit(square), x)
    assert (found.primitive, found.kind, found.direction, found.source) == ("mul", "inf", "forward", line_of(square))
    assert found.diagnosis == "overflow of float16 here (float32 value 91,204)"
    assert (found.element, found.count, found.iteration) == ((2, 1), 1, None)
    assert found.float32_value == 91204.0
    assert (found.inputs[0].min, found.inputs[0].max, found.inputs[0].dtype) == (1.0, 302.0, "float16")
    assert find_nonfinite(square, x.astype(jnp.bfloat16)) is None
    huge = find_nonfinite(square, full((2, 2), 1e38, jnp.bfloat16))
    overflow = "overflow of the operation's own dtype (9.969e+37 * 9.969e+37)"
    assert huge.diagnosis == f"{overflow}; float32 fails too: check the data or the model"


def test_the_iteration_is_that_of_a_scan_and_of_a_nested_reverse_scan_with_a_branch():
    def running(x):
        def body(carry, t):
            return carry * t, jnp.sqrt(t)

        return jax.lax.scan(body, HALF(1), x)

    found = find_nonfinite(running, np.array([1, 10, 100, 1000, 2], HALF))
    assert (found.primitive, found.iteration, found.diagnosis) == (
        "mul",
        3,
        "overflow of float16 here (float32 value 1,000,000)",
    )

    def nested(x):
        def inner(carry, t):
            return jax.lax.cond(t > 5, lambda c: c * 300, lambda c: c + 1, carry), None

        return jax.lax.scan(lambda c, row: (c, jax.lax.scan(inner, c, row, reverse=True)[0]), HALF(1), x)[1]

    found = find_nonfinite(nested, full((4, 5), 0, HALF, at={(2, 1): 9, (2, 3): 10}))
    assert (found.primitive, found.iteration, found.float32_value) == ("mul", (2, 1), 180300.0)


def test_a_while_loop_counts_its_turns():
    def squares(x):
        return jax.lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 1, s[1] * s[1]), (0, x))[1]

    found = find_nonfinite(squares, HALF(3))
    assert (found.primitive, found.iteration, found.kind) == ("mul", 3, "inf")
    assert find_nonfinite(squares, HALF(1)) is None


def test_a_fault_in_the_backward_pass_alone_is_found_in_a_skipped_train_step():
    params, x = {"w": full((4, 3), 1)}, full((8, 4), 1)
    tx = mpjax.dynamic_loss_scale(optax.adam(1.0), init_scale=2.0**20)

    def loss(params, x):
        with jax.named_scope("head"):
            y = x.astype(HALF) @ params["w"].astype(HALF)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    @jax.jit
    def step(params, opt_state, x):
        value, grads = mpjax.value_and_grad(jax.checkpoint(loss), opt_state)(params, x)
        return *mpjax.apply_gradients(tx, grads, opt_state, params, value=value), value

    state = jax.jit(tx.init)(params)
    new, new_state, value = step(params, state, x)
    assert (bool(new_state.last_finite), bool(np.isfinite(value))) == (False, True)
    assert np.array_equal(new["w"], params["w"])
    found = find_nonfinite(step, params, state, x)
    # 2·y times the scale, where the cotangent goes to float16.
    assert (found.primitive, found.direction, found.float32_value) == ("convert_element_type", "backward", 8 * 2.0**20)
    assert "a smaller loss scale" in found.diagnosis
    small = state._replace(loss_scale=np.float32(2.0))
    assert find_nonfinite(step, params, small, x) is None


def test_faults_that_float32_shares_are_called_by_their_cause():
    cases = {
        "0/0, a division of zero by zero": (lambda x: x / x, HALF(0)),
        "log of a negative number (-1)": (lambda x: jnp.log(x), HALF(-1)),
        "inf - inf: the softmax or logsumexp of a row that holds only -inf, as one that is masked as a whole": (
            lambda x: jax.nn.softmax(jnp.where(x > 9, x, -jnp.inf)),
            full(3, 1, HALF),
        ),
        "log of zero: the softmax or logsumexp of a row that holds only -inf, as one that is masked as a whole": (
            lambda x: jax.nn.logsumexp(jnp.where(x > 9, x, -jnp.inf)),
            full(3, 1, HALF),
        ),
        "index 7 of an axis of 3 is out of bounds, for which jnp.take and x[i] in mode 'fill' return NaN": (
            lambda x: jnp.take(jnp.ones(3, HALF), 7 + x.astype(int)),
            HALF(0),
        ),
    }
    for cause, (fun, x) in cases.items():
        assert find_nonfinite(fun, x).diagnosis == f"{cause}; float32 fails too: check the data or the model"
    # In float32 throughout, the loss's derivative is at fault, not a dtype.
    found = find_nonfinite(jax.grad(lambda x: jnp.sqrt(jnp.sum(x**2))), full(3, 0))
    assert found.diagnosis == (
        "the derivative of a square root at zero is infinite (sqrt(x + epsilon) has a finite one); the program is in "
        "float32 here: check the data or the model"
    )


def test_what_half_flushed_to_zero_is_named_where_it_is_divided_by():
    def normalise(x):
        return jnp.ones_like(x) / (x * HALF(1e-4))

    found = find_nonfinite(normalise, full(2, 2e-4, HALF))
    assert (found.primitive, found.kind) == ("div", "inf")
    assert found.diagnosis == (
        "division by zero in float16 alone (float32 value 49,983,412), because float16 flushed 2.001e-08 to zero: "
        "keep what it reads in float32"
    )


def test_an_argument_that_held_it_is_named_by_its_path():
    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    x = full((4, 3), 1)
    found = find_nonfinite(jax.grad(loss), {"w": full((3, 2), 1, at={(1, 0): np.nan})}, x)
    assert (found.argument, found.kind, found.element, found.count) == ("args[0]['w']", "nan", (1, 0), 1)
    found = find_nonfinite(loss, {"w": full((3, 2), 1)}, kwargs={"x": full((4, 3), 1, at={2: np.inf})})
    assert (found.argument, found.kind, found.count) == ("kwargs['x']", "inf", 3)
    table = full(3, np.nan)
    assert "closes over" in find_nonfinite(lambda x: jnp.sum(x + table), x).argument


def test_infinities_that_a_program_means_are_no_fault():
    def attention(x, bias):
        masked = jnp.where(jnp.arange(4) < 2, x, -jnp.inf)
        first = jax.nn.softmax(masked) + jax.nn.softmax(x + bias)
        best = jax.lax.fori_loop(0, 4, lambda i, m: jnp.maximum(m, x[i]), jnp.full(4, -jnp.inf))
        safe = jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0)
        logs = jax.nn.logsumexp(masked, axis=0)
        return jnp.sum(first) + best.sum() + safe.sum() + logs[:2].sum(), masked

    x = np.eye(4, dtype=np.float32)
    bias = np.where(x > 0, -np.float32(np.inf), np.float32(0))
    assert find_nonfinite(jax.value_and_grad(attention, has_aux=True), x, bias) is None
    # A state that starts at infinity and only goes through.
    assert find_nonfinite(lambda best, x: (jnp.where(x.sum() < 0, x.sum(), best), x), np.inf * x[0, 0], x) is None
    # But a loss that is infinite by it is one.
    found = find_nonfinite(lambda x: -jnp.mean(jnp.where(x > 0, x, -jnp.inf)), x)
    assert found.diagnosis.startswith("an infinite constant of the program")


def test_the_fault_of_a_device_in_a_shard_map_is_found():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def local(x):
        scaled, _ = jax.lax.scan(lambda c, _: (c * HALF(300), None), x, length=2)
        return jax.lax.psum(scaled, "data")

    fun = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P())
    found = find_nonfinite(fun, np.array([0, 1], HALF))
    assert (found.primitive, found.iteration, found.float32_value) == ("mul", 1, 90000.0)
    assert find_nonfinite(fun, full(2, 0, HALF)) is None


def test_models_of_every_library_give_the_module():
    import equinox as eqx
    import flax.linen as nn
    import haiku as hk
    from flax import nnx

    x = full((2, 4), 100)
    model = mpjax.with_policy(nn.Sequential([nn.Dense(8, kernel_init=nn.initializers.ones)]), "mixed_float16")
    key = cheap_keys.key(0)
    params = arrays_in_numpy(model.init)(key, x)
    found = find_nonfinite(model.apply, params, 200 * x)
    assert (found.primitive, found.module) == ("dot_general", "Sequential/layers_0")

    net = hk.transform(lambda x: jnp.mean(hk.nets.MLP([8, 8])(x) ** 2))
    params = jax.tree.map(lambda p: full(p.shape, 100, p.dtype), jax.eval_shape(net.init, key, x))
    found = find_nonfinite(mpjax.autocast(lambda p, x: net.apply(p, None, x)), params, x)
    assert (found.primitive, found.module) == ("dot_general", "mlp/linear_1")

    module = nnx.jit(lambda: nnx.Linear(4, 8, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(key)))()
    found = find_nonfinite(mpjax.with_policy(module, "mixed_float16"), 200 * x)
    assert (found.primitive, found.float32_value) == ("dot_general", 80000.0)
    found = find_nonfinite(lambda m, x: m(x), module, x * np.float32(np.nan))
    assert found.argument == "args[1]"
    module.kernel[...] = jax.device_put(full((4, 8), 1, at={0: np.nan}))
    assert find_nonfinite(lambda m, x: m(x), module, x).argument == "args[0]['kernel']"

    linear = arrays_in_numpy(lambda key: eqx.nn.Linear(4, 8, key=key))(key)
    found = find_nonfinite(mpjax.autocast(lambda m, x: jnp.log(0 * jax.vmap(m)(x)).sum()), linear, x)
    assert (found.primitive, found.kind) == ("log", "inf")


# A scan over layers with remat, several devices with collectives.
@pytest.mark.parametrize("name", ["nnx_scanned_attention", "shard_map_tensor"])
def test_programs_of_the_zoo_have_no_fault(name):
    program, (loss, params, batch) = REGISTRY[name], harness.concrete(name)
    fun = jax.value_and_grad(mpjax.autocast(loss), has_aux=program.has_aux)
    assert find_nonfinite(fun, params, batch) is None


def test_shapes_and_tracers_are_refused():
    with pytest.raises(TypeError, match=r"find_nonfinite: the argument args\[0\]\['w'\] is ShapeDtypeStruct"):
        find_nonfinite(lambda p: p["w"], {"w": jax.ShapeDtypeStruct((2,), HALF)})
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda x: find_nonfinite(jnp.log, x).count)(jnp.zeros(2))


def test_a_nan_read_from_a_reference_is_found():
    def fun(x):
        reference = jax.new_ref(jnp.full(3, jnp.nan))
        return jnp.mean(x) + jnp.sum(reference[...])

    found = mpjax.find_nonfinite(fun, jnp.ones(4))
    assert found.kind == "nan"


def test_a_fault_outside_of_loops_is_measured_without_a_compilation():
    def loss(x, y):
        return jnp.sum(jnp.log(x * x) / y)

    x, y = np.zeros((3, 7), HALF), np.ones((3, 7), HALF)
    assert all(find_nonfinite(loss, one, one) is None for one in (y, y.astype(np.float32)))
    with Compilations() as compilations:
        found = find_nonfinite(loss, x, y)
    assert (found.primitive, found.count, compilations.count) == ("log", 21, 0)


@pytest.mark.parametrize(
    "is_finite", [jnp.isfinite, lambda loss: ~jnp.any(jnp.isnan(0 * loss[None]))], ids=["isfinite", "isnan"]
)
def test_of_a_step_that_a_check_skips_the_element_that_the_check_saw_is_named(is_finite):
    mask = jnp.arange(8) > 0

    def step(w, x):
        loss = w * jnp.sum(jnp.where(mask, jnp.log(x), 0.0))
        return jnp.where(is_finite(loss), w - loss, w)

    found = find_nonfinite(step, jnp.ones(()), jnp.ones(8).at[jnp.array([0, 5])].set(0.0))
    assert (found.primitive, found.element, found.result) == ("log", (5,), None)
