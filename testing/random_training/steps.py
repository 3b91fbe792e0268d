"""Training steps, as source: how the loss is written, what differentiates it, and how the gradients are applied.

A step reads `p` (the trained tree or model), `x`, `ids`, `stats`, `state` and `batch`, and `f(p, x)`, the model's loss.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of a loss, of a gradient or of an update.

    Args:
        lines: Its statements. A loss assigns `total`, and a gradient assigns `loss` and `grads`. `{grad}` is one of
            `INNER_GRADIENTS`, and `<vag>` the library's `value_and_grad`.
        needs: What `p` must be: "tree" for the dict of arrays, "arrays" for any tree of arrays, "nnx", or anything.
        aux: Whether it needs a loss function that returns `(loss, aux)`.
    """

    lines: tuple[str, ...]
    needs: str = ""
    aux: bool = False


def form(*lines: str, needs: str = "", aux: bool = False) -> Form:
    return Form(lines, needs, aux)


# Inside a loss, which is differentiated with the scale as well: all of these are the same derivative.
INNER_GRADIENTS = (
    "jax.grad({})",
    "mpjax.grad({}, state)",
    "jax.grad(mpjax.scale_loss({}, state))",
    "(lambda *a: mpjax.value_and_grad({}, state)(*a)[1])",
    "mpjax.true_cotangents(jax.grad({}), state)",
)


LOSSES = {
    "plain": form("total = f(p, x)"),
    "sum of two": form("total = f(p, x) + 0.5 * f(p, -x)"),
    "gradient penalty": form("slope = <grad lambda x: f(p, x)>(x)", "total = f(p, x) + 0.1 * jnp.sum(slope**2)"),
    "penalty by argnums": form(
        "slope = mpjax.grad(f, state, argnums=1)(p, x)", "total = f(p, x) + 0.1 * jnp.sum(slope**2)"
    ),
    "MAML": form(
        "slope = <grad f>(p, x)",
        "fast = jax.tree.map(lambda a, g: a - 0.1 * g, p, slope)",
        "total = f(fast, 0.5 * x)",
        needs="arrays",
    ),
    "unrolled": form(
        "def descend(b, _):",
        "    slope = <grad lambda b: f({**p, 'b': b}, x)>(b)",
        "    return b - jnp.tanh(p['s']) * slope, None",
        "b, _ = lax.scan(descend, p['b'], None, length=2)",
        "total = f({**p, 'b': b}, x)",
        needs="tree",
    ),
    "closure": form(
        "slope = <grad lambda b: f({**p, 'b': b}, x)>(p['b'])",
        "total = f(p, x) + jnp.sum(jnp.sin(slope))",
        needs="tree",
    ),
    "adversarial": form(
        "slope = <grad lambda x: f(p, x)>(x)", "total = f(p, x + 0.1 * lax.stop_gradient(jnp.sign(slope)))"
    ),
    "adversarial by argnums": form(
        "slope = mpjax.grad(f, state, argnums=1)(p, x)", "total = f(p, x + 0.1 * jnp.tanh(slope))"
    ),
    "clipped": form("total = mpjax.true_cotangents(clip, state)(f(p, mpjax.true_cotangents(clip, state)(x)))"),
    "clipped params": form(
        "w = mpjax.true_cotangents(clip, state)(p['w'])", "total = f({**p, 'w': w}, x)", needs="tree"
    ),
    "layer with true cotangents": form("total = mpjax.true_cotangents(lambda x: f(p, x), state)(x) + f(p, 0.5 * x)"),
    "layer with clipped cotangents": form(
        "total = jnp.sin(mpjax.true_cotangents(lambda x: clip(f(p, clip(x))), state)(x))"
    ),
    "several members": form("total = jnp.mean(jax.vmap(lambda x: f(p, x))(jnp.stack([x, 0.5 * x])))"),
    "remat": form("total = jax.checkpoint(f)(p, x)", needs="arrays"),
    "curvature": form(
        "turn = jax.jvp(<grad lambda x: f(p, x)>, (x,), (jnp.ones_like(x),))[1]", "total = f(p, x) + jnp.sum(turn)"
    ),
    "penalty of each example": form(
        "slopes = jax.vmap(<grad lambda x: f(p, x)>)(jnp.stack([x, -x]))", "total = f(p, x) + 0.1 * jnp.sum(slopes**2)"
    ),
    "custom_vjp": form("total = halved_vjp(f)(p, x) + f(p, -x)", needs="arrays"),
    "clipped in a recomputed layer": form(
        "clipped = lambda p, x: mpjax.true_cotangents(clip, state)(f(p, x))",
        "total = recomputed(clipped)(p, x) + recomputed(jax.jit(clipped))(p, -x)",
        needs="arrays",
    ),
    "in a branch": form("total = lax.cond(x[0, 0] > 0, f, lambda p, x: 0.5 * f(p, x), p, x)", needs="arrays"),
    "teacher": form("total = f(p, x) - f(lax.stop_gradient(p), 0.5 * x)", needs="arrays"),
    "fixed point": form(
        "slope = <grad lambda b: f({**p, 'b': b}, x)>",
        "b = lax.custom_root(lambda b: b + 0.1 * slope(b), p['b'], lambda g, b: b - g(b), solve_twice)",
        "total = f({**p, 'b': b}, x)",
        needs="tree",
    ),
}

GRADIENTS = {
    "mpjax.value_and_grad": form("loss, grads = mpjax.value_and_grad(loss_fn, state)(p, x)"),
    "value_and_grad of scale_loss": form("loss, grads = <vag>(mpjax.scale_loss(loss_fn, state))(p, x)"),
    "has_aux": form("(loss, aux), grads = mpjax.value_and_grad(loss_fn, state, has_aux=True)(p, x)", aux=True),
    "scale_loss with has_aux": form(
        "(loss, aux), grads = <vag>(mpjax.scale_loss(loss_fn, state, has_aux=True), has_aux=True)(p, x)", aux=True
    ),
    "argnums": form("loss, (grads, aux) = mpjax.value_and_grad(loss_fn, state, argnums=(0, 1))(p, x)"),
    "grad": form("grads = mpjax.grad(loss_fn, state)(p, x)", "loss = jnp.float32(0)"),
    "grad with has_aux": form(
        "grads, aux = mpjax.grad(loss_fn, state, has_aux=True)(p, x)", "loss = jnp.float32(0)", aux=True
    ),
    "keywords": form("loss, grads = mpjax.value_and_grad(loss_fn, state)(p, x=x)"),
    "jitted": form("loss, grads = jax.jit(mpjax.value_and_grad(loss_fn, state))(p, x)", needs="arrays"),
    "of a jitted loss": form("loss, grads = mpjax.value_and_grad(jax.jit(loss_fn), state)(p, x)", needs="arrays"),
    "vjp": form(
        "loss, pull = jax.vjp(mpjax.scale_loss(loss_fn, state), p, x)",
        "grads, aux = pull(jnp.ones_like(loss))",
        needs="arrays",
    ),
    "linearize": form(
        "loss, push = jax.linearize(mpjax.scale_loss(loss_fn, state), p, x)",
        "aux = push(p, x)",
        "grads = jax.linear_transpose(lambda q: push(q, jnp.zeros_like(x)), p)(jnp.ones_like(loss))[0]",
        needs="arrays",
    ),
    "jacrev": form(
        "both = lambda p, x: jnp.stack([loss_fn(p, x), loss_fn(p, 0.5 * x)])",
        "rows = jax.jacrev(mpjax.scale_loss(both, state))(p, x)",
        "loss, grads = loss_fn(p, x), jax.tree.map(lambda r: r.sum(0), rows)",
        needs="arrays",
    ),
    "each example": form(
        "losses, rows = jax.vmap(mpjax.value_and_grad(loss_fn, state), (None, 0))(p, jnp.stack([x, -x]))",
        "loss, grads = losses.mean(), jax.tree.map(lambda r: r.mean(0), rows)",
        needs="arrays",
    ),
    "two losses": form(
        "loss, grads = mpjax.value_and_grad(loss_fn, state)(p, x)",
        "grads = jax.tree.map(jnp.add, grads, <vag>(mpjax.scale_loss(loss_fn, state))(p, 0.5 * x)[1])",
    ),
    "part of the params": form(
        "loss, part = mpjax.value_and_grad(lambda q: loss_fn({**p, **q}, x), state)({'w': p['w']})",
        "grads = {**jax.tree.map(jnp.zeros_like, p), **part}",
        needs="tree",
    ),
    "part by scale_loss": form(
        "loss, b = <vag>(mpjax.scale_loss(lambda b: loss_fn({**p, 'b': b}, x), state))(p['b'])",
        "grads = {**jax.tree.map(jnp.zeros_like, p), 'b': b}",
        needs="tree",
    ),
    "around the value": form(
        "inside = lambda p: mpjax.value_and_grad(lambda x: loss_fn(p, x), state)(x)[0]",
        "loss, grads = <vag>(inside)(p)",
    ),
    "around a gradient": form(
        "inside = lambda p: jnp.sum(mpjax.grad(loss_fn, state, argnums=1)(p, x) ** 2)", "loss, grads = <vag>(inside)(p)"
    ),
    "around a gradient of a closure": form(
        "inside = lambda p: jnp.sum(mpjax.grad(lambda x: loss_fn(p, x), state)(x) ** 2)",
        "loss, grads = <vag>(inside)(p)",
    ),
    "closed over by scale_loss": form(
        "loss, grads = <vag>(lambda p: mpjax.scale_loss(lambda x: loss_fn(p, x), state)(x))(p)"
    ),
    "in a scan": form(
        "def accumulate(total, x):",
        "    loss, grads = mpjax.value_and_grad(loss_fn, state)(p, x)",
        "    return jax.tree.map(jnp.add, total, grads), loss",
        "zeros = jax.tree.map(lambda a: jnp.zeros_like(a, jnp.float32), p)",
        "grads, losses = lax.scan(accumulate, zeros, jnp.stack([x, -x]))",
        "loss = losses.mean()",
        needs="arrays",
    ),
    "by hand": form(
        "scaled, grads = <vag>(lambda p: loss_fn(p, x) * scale_of(state))(p)",
        "loss, aux = scaled / scale_of(state), mpjax.unscale(grads, state)",
        needs="arrays",
    ),
}

_MAKE = "optimizer = optimizer_of(tx, p, state)"
_HELD = "p, state = held.params, held.opt_state"
_READ = "params, state = carry_of(p, optimizer, state)"
_TRAIN_STATE = "held = TrainState(step=0, apply_fn=None, params=p, tx=tx, opt_state=state)"
APPLICATIONS = {
    "apply_gradients": form("p, state = mpjax.apply_gradients(tx, grads, state, p)"),
    "apply_gradients with the loss": form("p, state = mpjax.apply_gradients(tx, grads, state, p, value=loss)"),
    "update": form("updates, state = tx.update(grads, state, p, value=loss)", "p = optax.apply_updates(p, updates)"),
    "TrainState": form(_TRAIN_STATE, "held = mpjax.apply_gradients(held, grads, value=loss)", _HELD, needs="arrays"),
    "TrainState.apply_gradients": form(_TRAIN_STATE, "held = held.apply_gradients(grads=grads)", _HELD, needs="arrays"),
    "nnx.Optimizer": form(_MAKE, "optimizer.update(p, grads, value=loss)", _READ, needs="nnx"),
    "apply_gradients to an nnx.Optimizer": form(
        _MAKE, "mpjax.apply_gradients(tx, grads, optimizer, p, value=loss)", _READ, needs="nnx"
    ),
    # The gradient and the update are within the context.
    "restore_if_skipped": form(
        _MAKE, "mpjax.restore_if_skipped(p, optimizer)", "optimizer.update(p, grads, value=loss)", _READ, needs="nnx"
    ),
}
