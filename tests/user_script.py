"""A user's script under the strict rules of pyright and mypy: the lines of the README keep their types.

The last lines are wrong on purpose. mypy, which runs with the linter, reports ignored errors that do not occur.
"""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

import mpjax

Params = dict[str, jax.Array]


def loss_fn(params: Params, x: jax.Array, *, shift: float = 0.0) -> jax.Array:
    return jnp.mean((x @ params["w"] + shift) ** 2)


def loss_with_aux(params: Params, x: jax.Array) -> tuple[jax.Array, int]:
    return loss_fn(params, x), 1


def module_loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


tx = mpjax.dynamic_loss_scale(optax.MultiSteps(optax.adamw(1e-3), 2), growth_interval=200)
tx = mpjax.loss_scale_for(mpjax.master_weights(optax.adamw(1e-3), "O2"), "mixed_float16")
tx = mpjax.static_loss_scale(optax.adamw(1e-3), 128.0)
plain: optax.GradientTransformationExtraArgs = tx

params: Params = {"w": jnp.ones((2, 1))}
x = jnp.ones((4, 2))
opt_state = tx.init(params)
assert_type(float(opt_state.loss_scale), float)

loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, x, shift=1.0)
assert_type(loss, jax.Array)
assert_type(grads, Params)
assert_type(mpjax.grad(loss_fn, opt_state)(params, x), Params)
assert_type(
    mpjax.value_and_grad(loss_with_aux, opt_state, has_aux=True)(params, x), tuple[tuple[jax.Array, int], Params]
)
assert_type(mpjax.grad(loss_with_aux, opt_state, has_aux=True)(params, x), tuple[Params, int])
assert_type(mpjax.scale_loss(loss_fn, opt_state)(params, x), jax.Array)
params, opt_state = mpjax.apply_gradients(tx, grads, opt_state, params, value=loss)
assert_type(params, Params)
updates, opt_state = tx.update(grads, opt_state, params, value=loss)
print(f"{opt_state.loss_scale:.0f}, {opt_state.skipped_steps}")


def train_step(state: TrainState) -> None:
    assert_type(mpjax.apply_gradients(state, grads, value=loss), TrainState)


assert_type(mpjax.keep_if_finite(opt_state, params, params), Params)

model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
with mpjax.restore_if_skipped(model, optimizer):
    _, module_grads = mpjax.value_and_grad(module_loss, optimizer)(model, x)
    optimizer.update(model, module_grads)
mpjax.check_progress(opt_state)

rules = mpjax.Rules(deny=["*/head"], attention="fused", float8=mpjax.Float8(allow=["*/mlp"], axis_name=["data"]))
rules = rules.add(allow=["tanh"])
assert_type(mpjax.autocast(loss_fn, rules=rules)(params, x, shift=1.0), jax.Array)
policy = mpjax.Policy("float32", "float16", "float32", [("*/head", "float32")])
mpjax.low_bit_state(optax.adam(1e-3), keep=["*/head"])


@mpjax.autocast(policy="mixed_bfloat16")
def decorated(params: Params, x: jax.Array) -> jax.Array:
    return loss_fn(params, x)


assert_type(decorated(params, x), jax.Array)
report = mpjax.profile(jax.jit(loss_fn), params, x, steps=1)
assert_type(report, mpjax.inspection.ProfileReport)

mpjax.Rules(attention="flash")  # type: ignore[arg-type]  # error: not an implementation
decorated(params)  # type: ignore[call-arg]  # error: x is missing
mpjax.value_and_grad(loss_fn, opt_state)(params)  # type: ignore[call-arg]  # error: x is missing
mpjax.scale_loss(loss_fn, opt_state)("params", x)  # type: ignore[arg-type]  # error: not the params
