"""Handwritten digits with Flax Linen and a TrainState, in float16."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import mpjax


class Net(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.LayerNorm()(nn.Conv(32, (3, 3))(images)))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


@jax.jit
def train_step(state, images, labels):
    def loss_fn(params):
        # matmuls in float16, the result in float32
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, labels
        ).mean()

    loss, grads = mpjax.value_and_grad(loss_fn, state)(state.params)
    return mpjax.apply_gradients(state, grads, value=loss), loss


def main(epochs: int = 10) -> float:
    digits = load_digits()
    images, labels = (
        (digits.images[..., None] / 16).astype(np.float32),
        digits.target.astype(np.int32),
    )
    model = mpjax.with_policy(Net(), "mixed_float16")
    # float32: the master weights
    params = jax.jit(model.init)(jax.random.key(0), images[:1])["params"]
    tx = mpjax.loss_scale_for(optax.adam(1e-3), "mixed_float16")
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    order = np.random.default_rng(0)
    for epoch in range(epochs):
        for batch in order.permutation(1472).reshape(-1, 64):
            state, loss = train_step(state, images[batch], labels[batch])
        if epoch % 3 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    logits = jax.jit(state.apply_fn)({"params": state.params}, images[1472:])
    accuracy = float(jnp.mean(logits.argmax(-1) == labels[1472:]))
    scaling = state.opt_state
    print(
        f"test accuracy {accuracy:.1%}, "
        f"loss scale {scaling.loss_scale:.0f}, "
        f"skipped steps {scaling.skipped_steps}"
    )
    return accuracy


if __name__ == "__main__":
    main()
