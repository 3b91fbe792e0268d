"""Master weights: half params follow a float32 copy exactly, and training equals float32 training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

HALVES = ["float16", "bfloat16"]


def policy_of(half):
    return mpjax.Policy(half, half, "float32")


def assert_params_are_rounded_masters(params, state):
    for p, m in zip(jax.tree.leaves(params), jax.tree.leaves(state.master), strict=True):
        np.testing.assert_array_equal(np.asarray(p), np.asarray(m.astype(p.dtype)))


@pytest.mark.standard_promotion  # optax.apply_updates adds float32 updates to half params
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("form", ["update", "apply"])
@pytest.mark.parametrize("jit", [False, True])
def test_params_equal_the_cast_master_after_updates_of_every_size(half, form, jit):
    tx = mpjax.master_weights(optax.sgd(1.0), policy_of(half))
    params = {"w": (jax.random.normal(jax.random.key(0), (4096,)) * 10).astype(half)}
    state = tx.init(params)

    def step(grads, state, params):
        if form == "apply":
            return mpjax.apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for i in range(8):
        # From far below half's spacing to steps that shrink a param by 2**20 or change its sign.
        size = 2.0 ** jax.random.uniform(jax.random.key(i), (4096,), minval=-30, maxval=6)
        grads = {"w": jnp.where(i % 4 == 3, state.master["w"] * (1 - 2.0**-20), size)}
        previous = state.master["w"]
        params, state = step(grads, state, params)
        assert params["w"].dtype == jnp.dtype(half)
        assert_params_are_rounded_masters(params, state)
        # The master is the float32 sum, but for float32's own rounding at the size of the step.
        expected = np.asarray(previous, np.float64) - np.asarray(grads["w"], np.float64)
        largest = np.abs(np.asarray(previous)) + np.abs(np.asarray(grads["w"]))
        assert np.all(np.abs(state.master["w"] - expected) <= 2 * np.finfo(np.float32).eps * largest)


@pytest.mark.parametrize("half", HALVES)
def test_small_updates_add_up_as_in_float32(half):
    tx = mpjax.master_weights(optax.adam(1e-4), policy_of(half))
    plain = optax.adam(1e-4)
    params, reference = {"w": jnp.ones(5, half)}, {"w": jnp.ones(5)}
    state, plain_state = tx.init(params), plain.init(reference)
    grads = {"w": jnp.full(5, 0.5)}
    for _ in range(20):
        params, state = mpjax.apply_gradients(tx, grads, state, params)
        reference, plain_state = mpjax.apply_gradients(plain, grads, plain_state, reference)
    np.testing.assert_array_equal(state.master["w"], reference["w"])
    np.testing.assert_array_equal(params["w"], reference["w"].astype(half))


def test_float32_leaves_are_their_own_masters():
    params = mpjax.get_policy("O2").cast_to_param({"Dense_0": jnp.ones(3), "BatchNorm_0": jnp.ones(3)})
    tx = mpjax.master_weights(optax.adam(1e-2), "O2")
    state = tx.init(params)
    assert isinstance(state.master["BatchNorm_0"], optax.MaskedNode)
    grads = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    params, state = mpjax.apply_gradients(tx, grads, state, params)
    np.testing.assert_array_equal(params["BatchNorm_0"], state.master["Dense_0"])
    assert params["BatchNorm_0"].dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(state.inner_state) if x.ndim} == {jnp.dtype("float32")}


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "O1"])
def test_policy_without_half_params_leaves_the_optimizer_alone(policy):
    inner = optax.adam(1e-3)
    assert mpjax.master_weights(inner, policy) is inner


@pytest.mark.standard_promotion  # the same
@pytest.mark.parametrize("half", HALVES)
def test_with_loss_scaling_a_skipped_step_changes_nothing(half):
    policy = policy_of(half)
    tx = mpjax.loss_scale_for(policy, mpjax.master_weights(optax.adam(1e-2), policy))
    params = {"w": jnp.ones(3, half)}
    state = tx.init(params)
    step = jax.jit(lambda p, s, x: mpjax.apply_gradients(tx, mpjax.grad(lambda p: (p["w"] * x).sum(), s)(p), s, p))
    params, state = step(params, state, 1.0)
    new, skipped = step(params, state, jnp.nan)
    np.testing.assert_array_equal(new["w"], params["w"])
    jax.tree.map(np.testing.assert_array_equal, skipped.inner_state, state.inner_state)
    updates, _ = tx.update({"w": jnp.full(3, jnp.inf)}, state, params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["w"], params["w"])


def test_params_cast_after_init_and_missing_params_are_told():
    tx = mpjax.master_weights(optax.sgd(0.1), "O3")
    state = tx.init({"w": jnp.ones(3)})
    half = {"w": jnp.ones(3, jnp.float16)}
    with pytest.raises(ValueError, match=r"w is float16.*tx\.init"):
        tx.update(half, state, half)
    with pytest.raises(ValueError, match="params"):
        tx.update(half, tx.init(half))
    with pytest.raises(ValueError, match="mixed_float16"):
        mpjax.master_weights(optax.sgd(0.1), "O7")


def test_works_through_scan_vmap_and_sharded_params():
    tx = mpjax.master_weights(optax.sgd(2.0**-13), "O3")
    params = jnp.ones((2, 4), jnp.float16)

    def train(p):
        body = lambda carry, _: (mpjax.apply_gradients(tx, -jnp.ones(4), carry[1], carry[0]), None)
        return jax.lax.scan(body, (p, tx.init(p)), length=8)[0][0]

    # Eight steps of 2**-13, each lost in float16, are 2**-10 together.
    np.testing.assert_array_equal(jax.jit(jax.vmap(train))(params), jnp.full((2, 4), 1 + 2.0**-10))


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="with several devices, XLA would gather what this saves")
@pytest.mark.standard_promotion  # optax.apply_updates adds float32 updates to half params
@pytest.mark.parametrize("donate", [True, False])
def test_a_scaled_update_stores_no_updates_beside_the_masters(donate):
    tx = mpjax.dynamic_loss_scale(mpjax.master_weights(optax.adam(1e-3), "O3"))
    layers, width = 8, 256
    unit = 4 * layers * width**2  # bytes of the float32 parameters

    def loss(params, x):
        for w in params:
            x = jax.nn.relu(x.astype(jnp.float16) @ w)
        return jnp.mean(x.astype(jnp.float32))

    def step(params, state, x):
        grads = mpjax.grad(loss, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = [jax.ShapeDtypeStruct((width, width), jnp.float16)] * layers
    args = params, jax.eval_shape(tx.init, params), jnp.ones((2, width))
    compiled = jax.jit(step, donate_argnums=(0, 1) if donate else ()).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2.05 * unit


def test_a_skipped_update_is_zero_though_the_params_were_changed_by_hand():
    tx = mpjax.dynamic_loss_scale(mpjax.master_weights(optax.sgd(0.1), "O3"))
    params = {"w": jnp.ones(3, jnp.float16)}
    state = tx.init(params)
    changed = {"w": jnp.full(3, 2.0, jnp.float16)}
    updates, after = tx.update({"w": jnp.full(3, jnp.nan)}, state, changed)
    np.testing.assert_array_equal(updates["w"], jnp.zeros(3))
    np.testing.assert_array_equal(after.inner_state.master["w"], state.inner_state.master["w"])
