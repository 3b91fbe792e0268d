"""`audit` follows the loss scale: gradients without it, with it where they are clipped or applied, divided twice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

PARAMS, X = {"w": np.ones((8, 8), np.float32)}, np.ones((4, 8), np.float32)
FIXED = 2.0**15


def loss_fn(params, x):
    half = x.astype(np.float16) @ params["w"].astype(np.float16)
    return jnp.mean(jax.nn.relu(half).astype(np.float32) ** 2)


def norm(grads):
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))


def times(grads, factor):
    return jax.tree.map(lambda g: g * factor, grads)


def over(grads, divisor):
    return jax.tree.map(lambda g: g / divisor, grads)


CLIPS = {
    "elements": lambda grads: jax.tree.map(lambda g: jnp.clip(g, -1.0, 1.0), grads),
    "by the norm": lambda grads: times(grads, jnp.minimum(1.0, 2.0 / (norm(grads) + 1e-6))),
    "divided": lambda grads: over(grads, jnp.maximum(norm(grads), 1.0)),
    "where": lambda grads: jax.tree.map(lambda g: jnp.where(norm(grads) < 1.0, g, g / norm(grads)), grads),
    "optax": lambda grads: optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0],
    "adaptive": lambda grads: optax.adaptive_grad_clip(0.01).update(grads, optax.EmptyState(), PARAMS)[0],
}
# A bound may be scaled, or the norm unscaled; neither a guard against zero nor a check for inf is a bound.
SCALED = {
    "bound": lambda grads, scale: times(grads, jnp.minimum(1.0, 2.0 * scale / (norm(grads) + 1e-6))),
    "norm": lambda grads, scale: times(grads, jnp.minimum(1.0, 2.0 / (norm(grads) / scale + 1e-6))),
    "guard": lambda grads, scale: times(grads, norm(grads) / jnp.maximum(norm(grads), 1e-6)),
    "check": lambda grads, scale: jax.tree.map(lambda g: jnp.where(jnp.isinf(g), 0.0, g), grads),
}


def lines_of(kind, step, *args):
    """The lines of this file at which a risk is found."""
    lines = [risk.source for risk in mpjax.audit(step, *args).risks if risk.kind == kind]
    assert all(line.startswith("test_scaled_gradients.py:") for line in lines)
    return lines


def clips(step, *args):
    """The lines at which gradients are clipped too early."""
    return lines_of("clipped", step, *args)


def gradients(params, x, scale):
    return jax.grad(lambda params: loss_fn(params, x) * scale)(params)


@pytest.mark.parametrize("form", CLIPS)
def test_a_clip_before_the_division_by_the_loss_scale_is_a_risk(form):
    clip, updated = CLIPS[form], lambda params, grads: jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    early = lambda params, x, scale: updated(params, over(clip(gradients(params, x, scale)), scale))
    late = lambda params, x, scale: updated(params, clip(over(gradients(params, x, scale), scale)))
    inverse = lambda params, x, scale: updated(params, times(clip(gradients(params, x, scale)), 1 / scale))
    for step in (early, inverse):
        assert clips(step, PARAMS, X, np.float32(FIXED))
        assert clips(lambda params, x, step=step: step(params, x, FIXED), PARAMS, X)
    assert not clips(late, PARAMS, X, np.float32(FIXED))
    assert not clips(lambda params, x: late(params, x, FIXED), PARAMS, X)


@pytest.mark.parametrize("form", SCALED)
def test_a_bound_that_is_scaled_too_is_none(form):
    step = lambda params, x, scale: over(SCALED[form](gradients(params, x, scale), scale), scale)
    assert not clips(step, PARAMS, X, np.float32(FIXED))
    assert not clips(lambda params, x: step(params, x, FIXED), PARAMS, X)


def test_the_clip_of_accumulated_gradients_is_named():
    def step(params, xs, scale):
        add = lambda total, x: (jax.tree.map(jnp.add, total, gradients(params, x, scale)), None)
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)
        return over(CLIPS["by the norm"](total), scale)

    assert clips(step, PARAMS, np.stack([X, X]), np.float32(FIXED))


@pytest.mark.parametrize("form", CLIPS)
def test_a_clip_before_an_optimizer_that_unscales_is_a_risk(form):
    def step(params, state, x):
        grads = gradients(params, x, state.loss_scale) if scaled else mpjax.grad(loss_fn, state)(params, x)
        updates, state = tx.update(CLIPS[form](grads), state, params)
        return optax.apply_updates(params, updates), state

    for scaled in (True, False):
        tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), grads_are_scaled=scaled)
        assert bool(clips(step, PARAMS, tx.init(PARAMS), X)) is scaled


def autocast_loss(params, x):
    return jnp.mean(mpjax.autocast(lambda w: jax.nn.relu(x @ w), "mixed_float16")(params["w"]) ** 2)


def loss_without_half_matmuls(params, x):
    return jnp.mean(jnp.tanh((x @ params["w"]).astype(np.float16)).astype(np.float32) ** 2)


@pytest.mark.parametrize("loss", [loss_fn, autocast_loss, loss_without_half_matmuls])
def test_float16_gradients_are_unscaled_unless_something_scales_them_also_by_hand(loss):
    by_hand = lambda params, x, scale: over(jax.grad(lambda params: loss(params, x) * scale)(params), scale)
    assert len(lines_of("unscaled", jax.grad(loss), PARAMS, X)) == 1
    assert len(lines_of("unscaled", jax.grad(lambda params, x: loss(params, x) * 0.5), PARAMS, X)) == 1
    assert not lines_of("unscaled", by_hand, PARAMS, X, np.float32(FIXED))
    assert not lines_of("unscaled", lambda params, x: by_hand(params, x, FIXED), PARAMS, X)
    assert not lines_of(
        "unscaled", jax.grad(lambda params, x, scale: loss(params, x) * scale), PARAMS, X, np.float32(1)
    )
    state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init(PARAMS)
    penalized = lambda params, x: loss(params, x) + jnp.sum(jax.grad(loss, 1)(params, x) ** 2)
    for fun in (loss, penalized):
        assert not lines_of("unscaled", lambda params, x, fun=fun: mpjax.grad(fun, state)(params, x), PARAMS, X)


@pytest.mark.parametrize("divide", [over, lambda grads, scale: times(grads, 1 / scale)])
def test_gradients_that_are_divided_twice_are_a_risk(divide):
    def step(params, state, x, divisions):
        grads = mpjax.grad(loss_fn, state)(params, x)
        for _ in range(divisions):
            grads = jax.tree.map(jnp.nan_to_num, divide(grads, state.loss_scale))
        return times(grads, 0.1)

    state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init(PARAMS)
    assert not lines_of("divided", lambda *args: step(*args, 0), PARAMS, state, X)
    assert lines_of("divided", lambda *args: step(*args, 1), PARAMS, state, X)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("form", ["cond", "switch"])
def test_a_division_in_a_branch_is_followed(form, first):
    def in_branch(grads, divide):
        finite = jnp.isfinite(norm(grads))
        branches = [lambda grads: times(grads, 0.0), divide]
        if form == "switch":
            return jax.lax.switch(finite.astype(int), branches, grads)
        return jax.lax.cond(finite, *branches[::-1], grads)

    def step(params, x, scale, again):
        divide = lambda grads: over(grads, scale)
        grads = gradients(params, x, scale)
        if first:
            grads = in_branch(grads, divide)
            return times(divide(grads) if again else CLIPS["elements"](grads), 0.1)
        return times(in_branch(divide(grads) if again else grads, divide), 0.1)

    for again in (True, False):
        args = PARAMS, X, np.float32(FIXED)
        assert bool(lines_of("divided", lambda *args, again=again: step(*args, again), *args)) is again
    assert not clips(lambda *args: step(*args, False), PARAMS, X, np.float32(FIXED))


def finite(grads):
    return jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))


TX = mpjax.dynamic_loss_scale(optax.sgd(0.1))
STATE = TX.init(PARAMS)
XS = np.stack([X, X])


def applied(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def never_divided(params, scale, x):
    return applied(params, gradients(params, x, scale))


def accumulated_and_not_divided(params, scale, xs):
    add = lambda total, x: (jax.tree.map(jnp.add, total, gradients(params, x, scale)), None)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)
    return applied(params, times(total, 1 / len(xs)))


def scaled_twice(params, state, x):
    grads = mpjax.grad(lambda params: loss_fn(params, x) * state.loss_scale, state)(params)
    return TX.update(grads, state, params)


def divided_by_batches(params, scale, xs):
    add = lambda total, x: (jax.tree.map(jnp.add, total, gradients(params, x, scale)), None)
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)
    is_finite = finite(total)
    new = applied(params, over(total, scale * len(xs)))
    return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new, params), is_finite


def weighted(params, state, weight, x):
    grads = mpjax.grad(lambda params: loss_fn(params, x) * weight, state)(params)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def accumulated_for_later(params, scale, total, x):
    return jax.tree.map(jnp.add, total, gradients(params, x, scale))


@pytest.mark.parametrize(
    ("step", "args"),
    [
        (never_divided, (np.float32(FIXED), X)),
        (accumulated_and_not_divided, (np.float32(FIXED), XS)),
        (scaled_twice, (STATE, X)),
    ],
)
def test_gradients_that_are_applied_with_the_loss_scale_are_a_risk(step, args):
    assert len(lines_of("scaled", step, PARAMS, *args)) == 1


@pytest.mark.parametrize(
    ("step", "args"),
    [
        (divided_by_batches, (np.float32(FIXED), XS)),
        (weighted, (STATE, np.float32(2), X)),
        (accumulated_for_later, (np.float32(FIXED), PARAMS, X)),
    ],
)
def test_gradients_that_are_divided_before_they_are_applied_are_none(step, args):
    assert not mpjax.audit(step, PARAMS, *args).risks


@pytest.mark.parametrize(("factor", "expected"), [(2.0**10, 1), (2.0**15, 1), (1000.0, 0), (128.0, 0)])
def test_a_static_loss_scale_that_is_not_divided_is_a_risk(factor, expected):
    """128 may be the size of a batch, and 1000 a weight."""
    assert len(lines_of("scaled", lambda params, x: never_divided(params, factor, x), PARAMS, X)) == expected
    divided = lambda params, x: applied(params, over(gradients(params, x, factor), factor))
    assert not mpjax.audit(divided, PARAMS, X).risks


def without_a_test(params, state, x):
    return applied(params, mpjax.grad(loss_fn, state)(params, x)), state


def without_the_new_state(params, state, x):
    updates, _ = TX.update(mpjax.grad(loss_fn, state)(params, x), state, params)
    return optax.apply_updates(params, updates)


def in_a_loop(params, state, x):
    def body(carry):
        count, params, state = carry
        updates, state = TX.update(mpjax.grad(loss_fn, state)(params, x), state, params)
        return count + 1, optax.apply_updates(params, updates), state

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, params, state))


@pytest.mark.parametrize(("step", "expected"), [(without_a_test, 1), (without_the_new_state, 1), (in_a_loop, 0)])
def test_a_loss_scale_that_no_overflow_changes_is_a_risk(step, expected):
    assert len(lines_of("unchecked", step, PARAMS, STATE, X)) == expected
    assert len(mpjax.audit(step, PARAMS, STATE, X).risks) == expected
