"""The loss-scaling transformation: decisions, limits, and what a skipped step leaves unchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpjax
from testing.random_programs.evaluate import arrays_in_numpy, in_numpy
from tests.updates import updated

# Tests of the decisions evaluate the traced program in NumPy, a tenth of the time that XLA takes to compile it; those
# of skipped steps, replicas, shardings and donation run it.
PARAMS = jax.device_put({"w": np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, np.float32)})
GOOD = jax.device_put(jax.tree.map(lambda p: np.full(p.shape, 0.25, np.float32), PARAMS))


def bad_like(value=jnp.nan, tree=GOOD):
    w = np.array(tree["w"])
    w[1, 2] = value
    return {**tree, "w": jax.device_put(w)}


def rich_optimizer():
    """Adam moments, a schedule's count, an EMA of updates, an extra argument."""
    return optax.chain(
        optax.scale_by_adam(),
        optax.scale_by_schedule(optax.linear_schedule(1e-2, 1e-3, 10)),
        optax.ema(0.9),
        optax.scale(-1),
    )


RICH = mpjax.dynamic_loss_scale(rich_optimizer())
rich_update = jax.jit(RICH.update)


def assert_bitwise(tree, reference):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_thousand_bad_steps_change_nothing_and_the_first_good_one_trains_on():
    _, state = rich_update(GOOD, RICH.init(PARAMS), PARAMS)

    def step(carry, _):
        params, state = carry
        updates, state = RICH.update(bad_like(), state, params)
        return (optax.apply_updates(params, updates), state), state.loss_scale

    (params, after), scales = jax.jit(lambda c: jax.lax.scan(step, c, length=1000))((PARAMS, state))
    assert_bitwise(params, PARAMS)
    assert_bitwise(after.inner_state, state.inner_state)
    assert int(after.consecutive_skips) == 1000
    assert np.min(scales) == float(after.loss_scale) == 2.0**-14
    expected, _ = rich_update(GOOD, state, PARAMS)
    updates, after = rich_update(GOOD, after, params)
    assert_bitwise(updates, expected)
    assert int(after.consecutive_skips) == 0


@pytest.mark.parametrize("how", ["update", "apply_gradients"])
def test_steps_outside_of_jit_trace_the_inner_transformation_once(how):
    traced = []

    def update(grads, state, params=None):
        traced.append(1)
        return grads, state

    tx = mpjax.dynamic_loss_scale(optax.GradientTransformation(lambda params: (), update))
    step = tx.update if how == "update" else functools.partial(mpjax.apply_gradients, tx)
    _, state = step(GOOD, tx.init(PARAMS), PARAMS)
    count = len(traced)
    _, state = step(GOOD, state, PARAMS)
    assert (len(traced), int(state.good_steps)) == (count, 2)


def test_apply_gradients_takes_any_transformation():
    scaled = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    tx = optax.GradientTransformationExtraArgs(scaled.init, lambda *args, **extra: scaled.update(*args, **extra))
    first_step = lambda tx, grads: mpjax.apply_gradients(tx, grads, tx.init(PARAMS), PARAMS, value=np.float32(1))[0]
    assert_bitwise(arrays_in_numpy(functools.partial(first_step, tx))(bad_like()), PARAMS)
    params = in_numpy(functools.partial(first_step, optax.sgd(0.5)))(GOOD)
    np.testing.assert_allclose(params["b"], -0.125)


LIMITS = {"init_scale": 4.0, "min_scale": 2.0, "max_scale": 8.0, "growth_interval": 1}


@pytest.mark.parametrize("how", ["jit", "vmap", "scan", "tree_map"])
def test_limits_survive_every_transformation(how):
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), **LIMITS)

    def run(bad):
        def step(state, _):
            grads = {**GOOD, "b": jnp.where(bad, jnp.nan, GOOD["b"])}
            _, state = tx.update(grads, jax.tree.map(jnp.asarray, state) if how == "tree_map" else state, PARAMS)
            return state, state.loss_scale

        state = tx.init(PARAMS)
        if how == "scan":
            return jax.lax.scan(step, state, length=3)[1][-1]
        for _ in range(3):  # the first reaches the limit
            state, scale = step(state, None)
        return scale

    fun = jax.jit(run) if how == "jit" else in_numpy(jax.vmap(run) if how == "vmap" else run)
    for bad, limit in ((True, 2.0), (False, 8.0)):
        np.testing.assert_array_equal(fun(np.array([bad, bad] if how == "vmap" else bad)), limit)


def test_scale_is_never_zero_inf_or_nan():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), growth_interval=1)
    update = jax.jit(tx.update)  # XLA may flush a subnormal scale
    for start in (0.0, np.inf, np.nan, -1.0, 1e-40):
        state = tx.init(PARAMS)._replace(loss_scale=np.float32(start))
        for grads in (bad_like(), GOOD, bad_like(jnp.inf), GOOD):
            _, state = update(grads, state, PARAMS)
            assert 2.0**-14 <= float(state.loss_scale) <= 2.0**24


def test_check_progress_names_the_cause():
    def after(grads, loss, steps, **kwargs):
        tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), **kwargs)
        state = tx.init(PARAMS)
        update = arrays_in_numpy(lambda state: tx.update(grads, state, PARAMS, value=np.float32(loss))[1])
        for _ in range(steps):
            state = update(state)
        return state

    mpjax.check_progress(after(GOOD, 1.0, 3))
    mpjax.check_progress(after(bad_like(), 1.0, 3), max_consecutive_skips=3)
    for state, cause in (
        (after(bad_like(), jnp.nan, 4), "loss"),
        (after(bad_like(), 1.0, 4, init_scale=1.0), "gradients"),
        (after(bad_like(), 1.0, 4), "scale"),
    ):
        with pytest.raises(mpjax.LossScaleError, match="last 4 steps were skipped") as error:
            mpjax.check_progress(state, max_consecutive_skips=3)
        assert error.value.cause == cause
        assert "mpjax.find_nonfinite(" in str(error.value)


def test_keep_if_finite_keeps_batch_statistics_and_keys_of_a_skipped_step():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    old = {"mean": np.ones(3, np.float32), "count": np.int32(1), "key": jax.random.key(0)}
    new = {"mean": np.full(3, np.nan, np.float32), "count": np.int32(2), "key": jax.random.key(1)}
    keep = jax.jit(lambda grads: mpjax.keep_if_finite(tx.update(grads, tx.init(PARAMS), PARAMS)[1], new, old))
    for grads, expected in ((bad_like(), old), (GOOD, new)):
        kept = keep(grads)
        assert_bitwise(jax.tree.map(jax.random.key_data, kept["key"]), jax.random.key_data(expected["key"]))
        assert_bitwise({k: kept[k] for k in ("mean", "count")}, {k: expected[k] for k in ("mean", "count")})


@pytest.mark.standard_promotion  # the same
@pytest.mark.filterwarnings("ignore:loss scaling. optax.MultiSteps")
def test_the_other_order_of_accumulation_stays_poisoned():
    # Why the docstring names one order; if optax fixes this, the docstring may be relaxed.
    tx = optax.MultiSteps(mpjax.dynamic_loss_scale(optax.sgd(1.0)), 2)
    state, update = tx.init(PARAMS), arrays_in_numpy(tx.update)
    for grads in (bad_like(), GOOD, GOOD, GOOD):
        _, state = update(grads, state, PARAMS)
    assert not np.isfinite(state.acc_grads["w"]).all()
    assert "MultiSteps" in mpjax.dynamic_loss_scale.__doc__


def test_params_by_position_or_name_and_extra_arguments_reach_the_inner_transformation():
    seen = {}

    def update(updates, state, params=None, *, temperature, value):
        seen.update(params=params, temperature=temperature, value=value)
        return updates, state

    tx = mpjax.dynamic_loss_scale(optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update))
    state = tx.init(PARAMS)
    jax.eval_shape(lambda: tx.update(GOOD, state, PARAMS, temperature=2.0, value=1.0))
    assert (seen["temperature"], seen["value"]) == (2.0, 1.0)
    jax.eval_shape(lambda: tx.update(GOOD, state, params=PARAMS, temperature=3.0, value=1.0))
    assert seen["params"] is PARAMS
    # An inner transformation that accepts none gets none.
    tx = mpjax.dynamic_loss_scale(optax.adamw(1e-3))
    jax.eval_shape(lambda: tx.update(GOOD, tx.init(PARAMS), params=PARAMS, value=1.0, temperature=1.0))


def test_grads_are_scaled_unscales_by_the_scale_they_carry_also_when_it_changes():
    tx = mpjax.dynamic_loss_scale(optax.sgd(1.0), grads_are_scaled=True, growth_interval=2, init_scale=8.0)

    def step(grads, state):
        scaled = jax.tree.map(lambda g: (g * state.loss_scale).astype(jnp.float16), grads)
        return mpjax.unscale(scaled, state), *tx.update(scaled, state, PARAMS)

    run, state = arrays_in_numpy(step), tx.init(PARAMS)
    for grads in (GOOD, GOOD, bad_like(), GOOD):  # the second grows, the third backs off
        true, updates, state = run(grads, state)
        if bool(state.last_finite):
            assert_bitwise(updates, jax.tree.map(lambda g: -np.asarray(g), grads))
            assert_bitwise(true, grads)
    assert float(state.loss_scale) == 8.0


def test_half_gradients_are_unscaled_in_float32():
    state = mpjax.static_loss_scale(optax.identity(), 2.0**15).init({})
    smallest = np.full(2, 2.0**-14, np.float16)  # The quotient is zero in float16.
    np.testing.assert_array_equal(in_numpy(mpjax.unscale)(smallest, state), np.full(2, 2.0**-29, np.float32))


def test_unscaling_to_infinity_counts_as_overflow():
    tx = mpjax.static_loss_scale(optax.adam(0.1), 2.0**-10, grads_are_scaled=True)
    grads = jax.tree.map(lambda g: np.full(g.shape, 3e38, np.float32), GOOD)
    _, state = in_numpy(tx.update)(grads, tx.init(PARAMS), PARAMS)
    assert not bool(state.last_finite)


@pytest.mark.parametrize(
    ("policy", "scale"),
    [("float32", 1.0), ("mixed_bfloat16", 1.0), ("mixed_float16", 64.0), ("O2", 64.0), ("bfloat16;*/x=>float16", 64.0)],
)
def test_loss_scale_for_a_policy(policy, scale):
    tx = mpjax.loss_scale_for(optax.sgd(0.1), policy, init_scale=64.0, growth_interval=7)
    assert float(tx.init(PARAMS).loss_scale) == scale
    with pytest.raises(TypeError):
        mpjax.loss_scale_for(optax.sgd(0.1), policy, initial_scale=64.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"init_scale": 0.0},
        {"init_scale": jnp.nan},
        {"init_scale": 2.0**30},
        {"init_scale": "1024"},
        {"growth_factor": None},
        {"min_scale": True},
        {"max_scale": np.ones(2)},
        {"min_scale": 0.0},
        {"max_scale": jnp.inf},
        {"min_scale": 4.0, "max_scale": 2.0},
        {"growth_factor": 0.5},
        {"backoff_factor": 0.0},
        {"backoff_factor": 1.5},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
        {"hysteresis": 0},
    ],
)
def test_bad_argument_is_quoted_when_the_transformation_is_built(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        mpjax.dynamic_loss_scale(optax.sgd(0.1), **bad)


def test_wrapping_something_else_is_refused():
    with pytest.raises(TypeError, match="optax"):
        mpjax.dynamic_loss_scale(0.1)
    with pytest.raises(ValueError, match="scale"):
        mpjax.static_loss_scale(optax.sgd(0.1), 0.0)


def test_a_state_without_or_with_two_scales_is_refused():
    with pytest.raises(ValueError, match="dynamic_loss_scale"):
        mpjax.scale_loss(lambda x: x, optax.adam(1e-3).init(PARAMS))
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    with pytest.raises(ValueError, match="2 LossScaleStates"):
        mpjax.keep_if_finite({"a": tx.init(PARAMS), "b": tx.init(PARAMS)}, 1, 2)


def test_ten_steps_with_donated_buffers_take_one_trace():
    tx, traces = mpjax.dynamic_loss_scale(optax.adam(1e-2), growth_interval=3), []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        traces.append(1)
        loss, grads = mpjax.value_and_grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2), state)(params)
        return mpjax.apply_gradients(tx, grads, state, params, value=loss)

    params = jax.tree.map(np.asarray, PARAMS)
    state = tx.init(params)
    for i in range(10):
        params, state = step(params, state, np.full((4, 2), np.nan if i == 4 else 1.0 + i, np.float32))
    assert len(traces) == 1
    assert int(state.skipped_steps) == 1


def test_state_has_the_same_types_from_init_on_and_shares_no_buffer():
    state = RICH.init(PARAMS)
    _, new = jax.eval_shape(RICH.update, GOOD, state, PARAMS)
    types = lambda s: [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(s)]
    assert types(state) == types(new)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.filterwarnings("ignore::mpjax.LossScaleWarning")  # of the order, which is right for these gradients
@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.masked(tx, {"w": True, "b": False}),
        lambda tx: optax.multi_transform({"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
        lambda tx: optax.inject_hyperparams(lambda learning_rate: mpjax.dynamic_loss_scale(optax.sgd(learning_rate)))(
            0.1
        ),
        optax.with_extra_args_support,
    ],
)
def test_composes_with_optax_wrappers(wrap):
    tx = wrap(mpjax.dynamic_loss_scale(optax.sgd(0.1)))
    state = tx.init(PARAMS)
    updates, state = in_numpy(tx.update)(bad_like(), state, PARAMS)
    np.testing.assert_array_equal(updates["w"], 0)
    assert int(optax.tree_utils.tree_get(state, "skipped_steps")) == 1


# Each form and each kind of check once: both forms decide by the same function.
@pytest.mark.parametrize(("form", "check_vma"), [("update", False), ("apply", True)])
def test_every_replica_of_a_shard_map_takes_the_same_decision_on_sharded_gradients(form, check_vma):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    tx = mpjax.dynamic_loss_scale(optax.adam(0.1), axis_name="x")
    params = np.arange(8, dtype=np.float32)
    state = tx.init(params)
    spec = state._replace(
        **{k: PartitionSpec() for k in state._fields if k != "inner_state"},
        inner_state=jax.tree.map(lambda s: PartitionSpec("x") if s.ndim else PartitionSpec(), state.inner_state),
    )

    step = functools.partial(updated, tx, form)

    sharded = PartitionSpec("x")
    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(sharded, spec, sharded), out_specs=(sharded, spec), check_vma=check_vma
        )
    )
    good = np.ones(8, np.float32)
    bad = np.where(np.arange(8) == 5, np.inf, good).astype(np.float32)  # only in the third device's shard
    new_params, new_state = run(bad, state, params)
    assert_bitwise(new_params, params)
    assert int(new_state.skipped_steps) == 1
    new_params, new_state = run(good, new_state, new_params)
    assert (np.asarray(new_params) != params).all()
    np.testing.assert_array_equal(new_state.loss_scale, 2.0**14)


def test_pmap_replicas_agree():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), axis_name="i")
    n = jax.local_device_count()
    grads = np.ones((n, 3), np.float32)
    grads[1, 0] = np.nan
    replicate = lambda tree: jax.tree.map(lambda x: np.stack([x] * n), tree)
    params = np.zeros(3, np.float32)
    updates, state = jax.pmap(tx.update, axis_name="i")(grads, replicate(tx.init(params)), replicate(params))
    np.testing.assert_array_equal(updates, 0)
    assert state.loss_scale.tolist() == [2.0**14] * n
    with pytest.raises(mpjax.LossScaleError):
        mpjax.check_progress(state, max_consecutive_skips=0)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_params_under_jit_keep_their_sharding(axis_type):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    tx = mpjax.dynamic_loss_scale(optax.adam(0.1))

    def step(grads, params):
        state = tx.init(params)
        updates, _ = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), mpjax.apply_gradients(tx, grads, state, params)[0]

    args = np.ones(8, np.float32), np.arange(8, dtype=np.float32)
    expected, _ = in_numpy(step)(*args)
    with jax.set_mesh(mesh):
        found = jax.jit(step)(*jax.device_put(args, sharding))
    for new in found:
        assert new.sharding.is_equivalent_to(sharding, 1)
        np.testing.assert_allclose(new, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param("lookahead", marks=pytest.mark.standard_promotion),  # optax mixes float and bool
        "differentially_private",
        "adam of a list",
    ],
)
def test_explicit_sharding_where_the_tree_of_updates_differs_from_the_gradients(inner):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    params, grads = jax.device_put((np.arange(8, dtype=np.float32), np.ones(8, np.float32)), sharding)
    if inner == "lookahead":
        tx = optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)
        params = optax.LookaheadParams(params, params)
    elif inner == "differentially_private":
        tx = optax.contrib.differentially_private_aggregate(1.0, 0.1, 0)
        grads = jax.device_put(np.ones((2, 8), np.float32), NamedSharding(mesh, PartitionSpec(None, "x")))
    else:
        tx, params, grads = optax.adam(0.1), [params], [grads]
    scaled = mpjax.dynamic_loss_scale(tx)

    @jax.jit
    def run(grads, params):
        state = scaled.init(params)
        bad = jax.tree.map(lambda g: g * jnp.nan, grads)
        good, bad = (scaled.update(g, state, params)[0] for g in (grads, bad))
        return good, bad, tx.update(grads, tx.init(params), params)[0]

    with jax.set_mesh(mesh):
        good, bad, expected = map(jax.tree.leaves, run(grads, params))
    for found, skipped, reference in zip(good, bad, expected, strict=True):
        assert found.sharding.is_equivalent_to(reference.sharding, 1)
        np.testing.assert_allclose(found, reference, rtol=1e-6)
        np.testing.assert_array_equal(skipped, 0)


def test_update_is_differentiable_through_the_decision():
    # Meta-learning differentiates through the optimizer; the skip must not prevent that.
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))

    def after_step(params):
        grads = jax.grad(lambda p: jnp.sum(p**3))(params)
        new, _ = mpjax.apply_gradients(tx, grads, tx.init(params), params)
        return new.sum()

    def after_step_at(learning_rate):
        tx = mpjax.dynamic_loss_scale(optax.sgd(learning_rate))
        return mpjax.apply_gradients(tx, GOOD, tx.init(PARAMS), PARAMS)[0]["b"].sum()

    params = np.array([1.0, 2.0], np.float32)
    np.testing.assert_allclose(in_numpy(jax.grad(after_step))(params), 1 - 0.1 * 6 * params, rtol=1e-6)
    np.testing.assert_allclose(in_numpy(jax.grad(after_step_at))(0.1), -0.75, rtol=1e-6)


def test_empty_and_masked_trees_are_finite():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    updates, state = in_numpy(tx.update)({}, tx.init({}), {})
    assert updates == {}
    assert bool(state.last_finite)
