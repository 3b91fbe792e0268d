"""State beside the optimizer's on a skipped step: chosen by member, never a variable compared with itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax

TX = mpjax.dynamic_loss_scale(optax.sgd(0.1))
PARAMS = {"w": np.zeros(3, np.float32)}
# The second of three members overflows; as many members as there are features, so that a wrong axis would broadcast.
GRADS = {"w": np.ones((3, 3), np.float32)}
GRADS["w"][1, 0] = np.inf


def members():
    state = jax.vmap(lambda _: TX.init(PARAMS))(jnp.arange(3))
    return jax.vmap(TX.update, in_axes=(0, 0, None))(GRADS, state, PARAMS)[1]


@pytest.mark.parametrize("outside", [True, False])
def test_each_member_of_a_vmap_keeps_its_own(outside):
    new = {"mean": jnp.full((3, 3), 2.0), "key": jax.random.split(jax.random.key(0), 3)}
    old = {"mean": jnp.ones((3, 3)), "key": jax.random.split(jax.random.key(1), 3)}
    keep = mpjax.keep_if_finite if outside else jax.vmap(mpjax.keep_if_finite)
    kept = keep(members(), new, old)
    np.testing.assert_array_equal(kept["mean"], [[2.0] * 3, [1.0] * 3, [2.0] * 3])
    data = jax.tree.map(jax.random.key_data, (kept["key"], new["key"], old["key"]))
    np.testing.assert_array_equal(data[0], jnp.stack([data[1][0], data[2][1], data[1][2]]))


def test_replicas_of_a_pmap_are_chosen_outside_of_it():
    n = jax.local_device_count()
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), axis_name=())
    replicate = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * n), tree)
    grads = jnp.ones((n, n)).at[0, 1].set(jnp.nan)
    _, state = jax.pmap(tx.update, axis_name="i")(grads, replicate(tx.init(jnp.zeros(n))), jnp.zeros((n, n)))
    kept = mpjax.keep_if_finite(state, jnp.full((n, n), 2.0), jnp.ones((n, n)))
    np.testing.assert_array_equal(kept[:, 0], [1.0] + [2.0] * (n - 1))


@pytest.mark.parametrize("use", ["keep_if_finite", "unscale", "scale_loss", "value_and_grad", "update", "apply"])
def test_a_leaf_without_the_mapped_axis_and_a_call_outside_the_map_are_refused(use):
    state = members()
    calls = {
        "keep_if_finite": lambda: mpjax.keep_if_finite(state, {"mean": jnp.ones(4)}, {"mean": jnp.ones(4)}),
        "unscale": lambda: mpjax.unscale({"mean": jnp.ones(4)}, state),
        "scale_loss": lambda: mpjax.scale_loss(jnp.sum, state),
        "value_and_grad": lambda: mpjax.value_and_grad(jnp.sum, state)(jnp.ones(3)),
        "update": lambda: TX.update(GRADS, state, GRADS),
        "apply": lambda: mpjax.apply_gradients(TX, GRADS, state, GRADS),
    }
    with pytest.raises(ValueError, match=r"shape \(3,\).*(vmap|pmap)"):
        calls[use]()


def test_unscale_outside_the_map_divides_each_member_by_its_own_scale():
    grads = mpjax.unscale({"w": jnp.ones((3, 3))}, members())
    np.testing.assert_array_equal(grads["w"][:, 2], 1 / members().loss_scale)


def test_leaves_of_other_shape_or_dtype_are_refused_instead_of_broadcast():
    _, state = TX.update({"w": jnp.ones(3)}, TX.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"'a' is float32.*but float32"):
        mpjax.keep_if_finite(state, {"a": jnp.ones(3)}, {"a": jnp.ones(())})
    with pytest.raises(ValueError, match=r"'a' is float32.*but float16"):
        mpjax.keep_if_finite(state, {"a": jnp.ones(3)}, {"a": jnp.ones(3, jnp.float16)})


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
    nnx.jit(lambda o, m: o.update(m, mpjax.grad(net_loss, o)(m, BAD)))(optimizer, model)
    with pytest.raises(ValueError, match=r"same nnx.Variable at .*nnx\.as_pure.*restore_if_skipped"):
        mpjax.keep_if_finite(optimizer, live(), old)


def test_an_unchanged_array_in_both_trees_is_legitimate():
    _, state = TX.update({"w": jnp.ones(3)}, TX.init(PARAMS), PARAMS)
    same = jnp.ones(2)
    np.testing.assert_array_equal(mpjax.keep_if_finite(state, {"a": same}, {"a": same})["a"], same)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("filters", [(), (nnx.BatchStat,)])
def test_a_skipped_step_inside_the_context_leaves_the_module_as_it_was(jit, filters):
    model = Net()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    def step(model, optimizer, x):
        with mpjax.restore_if_skipped(model, optimizer, *filters):
            optimizer.update(model, mpjax.grad(net_loss, optimizer)(model, x))

    step = nnx.jit(step) if jit else step
    step(model, optimizer, jnp.arange(8.0).reshape(4, 2))
    before = jax.tree.map(jnp.copy, nnx.as_pure(nnx.state(model)))
    assert float(jnp.abs(before["norm"]["mean"]).max()) > 0
    step(model, optimizer, BAD)
    after = nnx.as_pure(nnx.state(model))
    np.testing.assert_array_equal(after["norm"]["mean"], before["norm"]["mean"])
    np.testing.assert_array_equal(after["norm"]["scale"], before["norm"]["scale"])
    # Without filters RNG state is restored too.
    assert (after["dropout"]["rngs"]["count"] == before["dropout"]["rngs"]["count"]) == (not filters)


def test_the_context_tells_a_missing_update_and_a_plain_state():
    model = Net()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    with (
        pytest.raises(ValueError, match=r"optimizer\.update was not called"),
        mpjax.restore_if_skipped(model, optimizer),
    ):
        pass
    with pytest.raises(TypeError, match="keep_if_finite"), mpjax.restore_if_skipped(model, TX.init(PARAMS)):
        pass
