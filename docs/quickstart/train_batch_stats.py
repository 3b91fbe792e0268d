"""Handwritten digits with Flax Linen and BatchNorm, in float16."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits

import mpjax


class Net(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(32, (3, 3), use_bias=False)(images)
        x = nn.relu(
            nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        )
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


class TrainState(train_state.TrainState):
    batch_stats: Any


@jax.jit
def train_step(state, images, labels):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(
            variables, images, train=True, mutable=["batch_stats"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, labels
        ).mean(), changed["batch_stats"]

    (loss, batch_stats), grads = mpjax.value_and_grad(
        loss_fn, state, has_aux=True
    )(state.params)
    new = mpjax.apply_gradients(state, grads, value=loss)
    # The statistics of a skipped step may be infinite; once in the running
    # average, they stay there.
    return new.replace(
        batch_stats=mpjax.keep_if_finite(new, batch_stats, state.batch_stats)
    ), loss


def main(epochs: int = 10) -> float:
    digits = load_digits()
    images, labels = (
        (digits.images[..., None] / 16).astype(np.float32),
        digits.target.astype(np.int32),
    )
    model = mpjax.with_policy(Net(), "mixed_float16")
    variables = jax.jit(model.init, static_argnames="train")(
        jax.random.key(0), images[:1], train=False
    )
    tx = mpjax.loss_scale_for(optax.adam(1e-3), "mixed_float16")
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    order = np.random.default_rng(0)
    for epoch in range(epochs):
        for batch in order.permutation(1472).reshape(-1, 64):
            state, loss = train_step(state, images[batch], labels[batch])
        if epoch % 3 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = jax.jit(state.apply_fn, static_argnames="train")(
        variables, images[1472:], train=False
    )
    accuracy = float(jnp.mean(logits.argmax(-1) == labels[1472:]))
    kept = {leaf.dtype.name for leaf in jax.tree.leaves(state.batch_stats)}
    print(
        f"test accuracy {accuracy:.1%}, "
        f"statistics in {', '.join(kept)}, "
        f"skipped steps {state.opt_state.skipped_steps}"
    )
    return accuracy


if __name__ == "__main__":
    main()
