"""State other than the optimizer's on a skipped step: chosen per member; no variable is compared with itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from testing.random_programs.evaluate import arrays_in_numpy, in_numpy

TX = mpjax.dynamic_loss_scale(optax.sgd(0.1))
PARAMS = {"w": np.zeros(3, np.float32)}
# The second of three members overflows; as many members as there are features, so that a wrong axis would broadcast.
GRADS = {"w": np.ones((3, 3), np.float32)}
GRADS["w"][1, 0] = np.inf


@pytest.fixture(scope="module")
def members():
    """The states of three members of a vmap after a step that the second one skipped."""
    return arrays_in_numpy(jax.vmap(lambda grads: TX.update(grads, TX.init(PARAMS), PARAMS)[1]))(GRADS)


@pytest.mark.parametrize("outside", [True, False])
def test_each_member_of_a_vmap_keeps_its_own_state(outside, members):
    mean, data = np.ones((3, 3), np.float32), np.arange(6, dtype=np.uint32).reshape(3, 2)
    new = {"mean": 2 * mean, "key": jax.random.wrap_key_data(data + 10)}
    old = {"mean": mean, "key": jax.random.wrap_key_data(data)}
    keep = mpjax.keep_if_finite if outside else jax.vmap(mpjax.keep_if_finite)
    kept = jax.jit(keep)(members, new, old)
    np.testing.assert_array_equal(kept["mean"], [[2.0] * 3, [1.0] * 3, [2.0] * 3])
    np.testing.assert_array_equal(jax.random.key_data(kept["key"]), data + np.array([[10], [0], [10]]))


def test_replicas_of_a_pmap_are_chosen_outside_of_it():
    n = jax.local_device_count()
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), axis_name=())
    replicate = lambda tree: jax.tree.map(lambda x: np.stack([x] * n), tree)
    old, grads, params = np.ones((n, n), np.float32), np.ones((n, n), np.float32), np.zeros((n, n), np.float32)
    grads[0, 1] = np.nan
    _, state = jax.pmap(tx.update, axis_name="i")(grads, replicate(tx.init(params[0])), params)
    kept = in_numpy(mpjax.keep_if_finite)(jax.tree.map(np.asarray, state), 2 * old, old)
    np.testing.assert_array_equal(kept[:, 0], [1.0] + [2.0] * (n - 1))


@pytest.mark.parametrize("use", ["keep_if_finite", "unscale", "scale_loss", "value_and_grad", "update", "apply"])
def test_a_leaf_without_the_mapped_axis_and_a_call_outside_the_map_are_refused(use, members):
    mean = {"mean": np.ones(4, np.float32)}
    calls = {
        "keep_if_finite": lambda: mpjax.keep_if_finite(members, mean, mean),
        "unscale": lambda: mpjax.unscale(mean, members),
        "scale_loss": lambda: mpjax.scale_loss(jnp.sum, members),
        "value_and_grad": lambda: mpjax.value_and_grad(jnp.sum, members)(np.ones(3, np.float32)),
        "update": lambda: TX.update(GRADS, members, GRADS),
        "apply": lambda: mpjax.apply_gradients(TX, GRADS, members, GRADS),
    }
    with pytest.raises(ValueError, match=r"shape \(3,\).*(vmap|pmap)"):
        calls[use]()


def test_unscale_outside_the_map_divides_each_member_by_its_own_scale(members):
    grads = in_numpy(mpjax.unscale)({"w": np.ones((3, 3), np.float32)}, members)
    np.testing.assert_array_equal(grads["w"][:, 2], 1 / np.asarray(members.loss_scale))
    assert len(np.unique(members.loss_scale)) == 2


def test_leaves_of_other_shape_or_dtype_are_refused_instead_of_broadcast():
    state, ones = TX.init(PARAMS), np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"'a' is float32.*but float32"):
        mpjax.keep_if_finite(state, {"a": ones}, {"a": ones[0]})
    with pytest.raises(ValueError, match=r"'a' is float32.*but float16"):
        mpjax.keep_if_finite(state, {"a": ones}, {"a": ones.astype(np.float16)})


class Net(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.dropout(self.norm(x))


def net_loss(model, x):
    return jnp.mean(model(x) ** 2)


BAD = np.full((4, 2), np.inf, np.float32)


@pytest.mark.parametrize("tree", ["state", "module"])
def test_live_nnx_variables_are_refused(tree):
    model = Net()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    live = (lambda: nnx.state(model, nnx.BatchStat)) if tree == "state" else (lambda: model)
    old = live()
    with pytest.raises(ValueError, match=r"same nnx.Variable at .*nnx\.as_pure.*restore_if_skipped"):
        mpjax.keep_if_finite(optimizer, live(), old)


def test_an_nnx_optimizer_shows_the_numbers_of_its_state():
    optimizer = nnx.Optimizer(Net(), TX, wrt=nnx.Param)
    state = optimizer.opt_state
    assert f"{state.loss_scale:.0f} {state.skipped_steps}" == f"{TX.init(PARAMS).loss_scale:.0f} 0"
    assert isinstance(state[0], nnx.Variable)  # the state itself holds Variables, which updates change


def test_an_unchanged_array_in_both_trees_is_legitimate():
    same = np.ones(2, np.float32)
    np.testing.assert_array_equal(mpjax.keep_if_finite(TX.init(PARAMS), {"a": same}, {"a": same})["a"], same)


@pytest.mark.parametrize("filters", [(), (nnx.BatchStat,)])
def test_a_skipped_step_inside_the_context_leaves_the_module_unchanged(filters):
    model = Net()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        with mpjax.restore_if_skipped(model, optimizer, *filters):
            optimizer.update(model, mpjax.grad(net_loss, optimizer)(model, x))

    def values():
        return {path: np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngKey)))}

    step(model, optimizer, np.arange(8, dtype=np.float32).reshape(4, 2))
    before = values()
    assert np.abs(before["norm", "mean"]).max() > 0
    step(model, optimizer, BAD)
    after = values()
    np.testing.assert_array_equal(after["norm", "mean"], before["norm", "mean"])
    np.testing.assert_array_equal(after["norm", "scale"], before["norm", "scale"])
    # Without filters RNG state is restored too.
    assert (after["dropout", "rngs", "count"] == before["dropout", "rngs", "count"]) == (not filters)


def test_one_skipped_step_of_several_inside_the_context_restores_the_module():
    model = Net()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def accumulate(model, optimizer):
        with mpjax.restore_if_skipped(model, optimizer):
            for x in (BAD, np.ones((4, 2), np.float32)):
                optimizer.update(model, mpjax.grad(net_loss, optimizer)(model, x))

    accumulate(model, optimizer)
    np.testing.assert_array_equal(model.norm.mean[...], 0)


def test_the_context_reports_a_missing_update_and_a_plain_state():
    model = Net()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    with (
        pytest.raises(ValueError, match=r"optimizer\.update was not called"),
        mpjax.restore_if_skipped(model, optimizer),
    ):
        pass
    with pytest.raises(TypeError, match="keep_if_finite"), mpjax.restore_if_skipped(model, TX.init(PARAMS)):
        pass
