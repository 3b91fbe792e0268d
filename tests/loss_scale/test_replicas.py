"""All replicas take the same decision about a step, or tracing raises an error."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import mpjax
from testing.random_programs.evaluate import in_numpy
from tests.updates import updated

MESH = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
X, XY = PartitionSpec("x"), PartitionSpec(("x", "y"))
ONE = np.ones(1, np.float32)
BAD = np.array([1, np.inf, 1, 1], np.float32)  # only the second of four devices sees it


def state_spec(state, shared):
    return jax.tree.map(lambda s: shared if s.ndim == 0 else XY, state)


@pytest.mark.parametrize("axis_name", [None, "x"])  # "x" alone is not enough, and is completed
def test_axes_are_found_from_the_varying_types(axis_name):
    tx = mpjax.dynamic_loss_scale(optax.adam(0.1), axis_name=axis_name)
    params = np.arange(4, dtype=np.float32)
    state = tx.init(params)
    spec = state_spec(state, PartitionSpec())
    both = lambda *args: (updated(tx, "update", *args), updated(tx, "apply", *args))
    run = jax.shard_map(both, mesh=MESH, in_specs=(XY, spec, XY), out_specs=((XY, spec), (XY, spec)))
    for new, after in jax.jit(run)(BAD, state, params):
        np.testing.assert_array_equal(new, params)
        assert int(after.skipped_steps) == 1


def test_gradients_that_are_equal_already_need_no_reduction():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), axis_name=("x", "y"))

    def step(grads, state):
        return tx.update(jax.lax.pmean(grads, ("x", "y")), state)[1].last_finite

    run = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=(XY, PartitionSpec()), out_specs=PartitionSpec()))
    assert str(jax.make_jaxpr(run)(BAD, tx.init(ONE))).count("pmin") == 0
    assert not run(BAD, tx.init(ONE))


def test_an_ensemble_with_separate_states_decides_for_each_member():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    states = jax.tree.map(lambda x: np.stack([x] * 4), tx.init(ONE))

    def step(grads, states):
        state = jax.tree.map(lambda s: s[0], states)
        return jax.tree.map(lambda s: s[None], tx.update(grads, state)[1].last_finite)

    run = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=(XY, XY), out_specs=XY))
    assert run(BAD, states).tolist() == [True, False, True, True]


@pytest.mark.parametrize("around", [lambda step: step, lambda step: jax.vmap(step, axis_name="batch")])
def test_an_axis_that_is_not_around_the_step_is_an_error_with_both_ways_out(around):
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), axis_name="data")
    step = lambda grads: tx.update(grads, tx.init(ONE))[0]
    with pytest.raises(NameError, match=r"axis_name='data'\. Give the name of its axis. Under jit alone"):
        jax.eval_shape(around(step), ONE[None])


def shard_map_without_checks(step, grads, state):
    specs = XY, PartitionSpec()
    return jax.jit(jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=specs, check_vma=False))(grads, state)


def pmap(step, grads, state):
    return jax.pmap(step, axis_name="i", in_axes=(0, None), out_axes=(0, None))(grads.reshape(4, 1), state)


@pytest.mark.parametrize(
    ("run", "axes"), [(shard_map_without_checks, r"axis_name=\('x', 'y'\)"), (pmap, r"axis_name='i'")]
)
def test_unknown_axes_are_refused_at_trace_time_with_the_axes_to_give(run, axes):
    state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init(ONE)
    with pytest.raises(ValueError, match=axes):
        run(mpjax.dynamic_loss_scale(optax.sgd(0.1)).update, BAD, state)
    for axis_name, skipped in ((("x", "y") if run is shard_map_without_checks else "i", 1), ((), 0)):
        updates, _ = run(mpjax.dynamic_loss_scale(optax.sgd(0.1), axis_name=axis_name).update, BAD, state)
        np.testing.assert_array_equal(updates.ravel()[1], 0.0)
        assert bool(updates.ravel()[0] == 0) == bool(skipped)


def test_an_unnamed_pmap_raises_an_error_that_requests_a_name():
    tx = mpjax.static_loss_scale(optax.sgd(0.1), 8.0)
    with pytest.raises(ValueError, match="pmap\\(\\.\\.\\., axis_name='batch'\\)"):
        jax.pmap(tx.update, in_axes=(0, None))(BAD.reshape(4, 1), tx.init(ONE))


def test_a_named_vmap_is_not_a_replica():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    update = in_numpy(jax.vmap(tx.update, in_axes=(0, None), axis_name="member"))
    assert update(BAD, tx.init(ONE[0]))[1].last_finite.tolist() == [True, False, True, True]
