"""`audit` names gradients whose inf and NaN are replaced before the loss scale looks for them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

PARAMS, X = {"w": np.ones((8, 8), np.float32)}, np.ones((4, 8), np.float32)


def loss_fn(params, x):
    return jnp.mean(jax.nn.relu(x @ params["w"]) ** 2)


def risks(clean, tx=None, dtype="mixed_float16", loss=loss_fn):
    """How often the risk is there in a step whose gradients are cleaned by a function."""
    tx = mpjax.dynamic_loss_scale(optax.adam(0.1)) if tx is None else tx

    def step(params, state, x):
        fun = mpjax.autocast(loss, dtype)
        scaled = any("loss_scale" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(state))
        grads = (mpjax.value_and_grad(fun, state) if scaled else jax.value_and_grad(fun))(params, x)[1]
        updates, state = tx.update(clean(grads), state, params)
        return optax.apply_updates(params, updates), state

    found = mpjax.audit(step, PARAMS, tx.init(PARAMS), X).risks
    return sum(risk.kind == "unchecked" for risk in found)


def finite(tree):
    return jnp.all(jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]))


HIDING = {
    "nan_to_num": jnp.nan_to_num,
    "where": lambda g: jnp.where(jnp.isnan(g) | jnp.isinf(g), 0.0, g),
    "isfinite": lambda g: jnp.where(jnp.isfinite(g), g, 0.0),
    "of the whole tree": lambda g: jnp.where(finite(g), g, 0.0),
    "clip": lambda g: jnp.clip(g, -1.0, 1.0),
    "clamp": lambda g: jax.lax.clamp(-1.0, g, 1.0),
    "scaled": lambda g: jnp.nan_to_num(g / 4 + 1e-4),
}


@pytest.mark.parametrize("form", HIDING)
def test_gradients_that_hide_an_overflow_are_a_risk(form):
    assert risks(lambda grads: jax.tree.map(HIDING[form], grads))
    assert not risks(lambda grads: jax.tree.map(HIDING[form], grads), dtype="mixed_bfloat16")


def test_another_check_than_the_loss_scales_is_meant_as_well():
    tx = optax.apply_if_finite(optax.sgd(0.1), 3)
    assert risks(lambda grads: jax.tree.map(jnp.nan_to_num, grads), tx)
    assert not risks(lambda grads: grads, tx)


@pytest.mark.parametrize("form", HIDING)
def test_nothing_that_looks_for_an_overflow_is_a_risk_if_the_loss_is_scaled(form):
    """Scaled by hand; a clip hides none on purpose."""

    def step(params, x, clean, check=False):
        grads = jax.grad(lambda params: mpjax.autocast(loss_fn, "mixed_float16")(params, x) * 1024)(params)
        new = jax.tree.map(lambda p, g: p - 0.1 * clean(g / 1024), params, grads)
        return jax.tree.map(lambda new, old: jnp.where(finite(grads), new, old), new, params) if check else new

    def hides(clean, **options):
        found = mpjax.audit(lambda *args: step(*args, clean, **options), PARAMS, X).risks
        return "unchecked" in [risk.kind for risk in found]

    assert hides(HIDING[form]) == (form not in ("clip", "clamp", "of the whole tree"))
    assert not hides(lambda g: g)
    assert not hides(HIDING[form], check=True), "looks at the gradients before"


SHOWING = {
    "unchanged": lambda grads: grads,
    "by norm": lambda grads: optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0],
    "of a constant": lambda grads: jax.tree.map(lambda g: jnp.where(jnp.arange(8) < 4, g, 0.0), grads),
    "one bound": lambda grads: jax.tree.map(lambda g: jnp.maximum(g, -1.0), grads),
}


@pytest.mark.parametrize("form", SHOWING)
def test_gradients_that_show_an_overflow_are_none(form):
    assert not risks(SHOWING[form])


def test_neither_is_what_an_optimizer_or_a_loss_does():
    for inside in (optax.clip(1.0), optax.zero_nans()):
        assert not risks(lambda grads: grads, mpjax.dynamic_loss_scale(optax.chain(inside, optax.adam(0.1))))
    guarded = lambda params, x: loss_fn(params, jnp.where(jnp.isfinite(x @ params["w"]), x, 0.0))
    assert not risks(lambda grads: grads, loss=guarded)
    bounded = lambda params, x: jnp.mean(jnp.clip(jnp.nan_to_num(x @ params["w"]), -1.0, 1.0))
    assert not risks(lambda grads: grads, loss=bounded)
