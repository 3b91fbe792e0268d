"""A Linen classifier of digits with `flax.training.train_state`: gradient and update are compiled separately."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(32)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


@jax.jit
def apply_model(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return grads, loss, jnp.mean(jnp.argmax(logits, -1) == labels)


@jax.jit
def update_model(state, grads):
    return state.apply_gradients(grads=grads)


@jax.jit
def evaluate(state, images):
    return state.apply_fn({"params": state.params}, images)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    digits = load_digits()
    pixels = digits.images[..., None].astype(np.float32) / 16
    model = CNN()
    params = model.init(jax.random.key(args.seed), jnp.ones((1, 8, 8, 1)))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))
    for _ in range(args.steps):
        chosen = rng.integers(0, 1500, 64)
        images, labels = pixels[chosen], digits.target[chosen]
        grads, loss, _ = apply_model(state, images, labels)
        state = update_model(state, grads)
    logits = evaluate(state, pixels[1500:])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, digits.target[1500:]).mean()
    accuracy = np.mean(np.argmax(logits, -1) == digits.target[1500:])
    print(f"loss {loss:.4f}, accuracy {accuracy:.1%}")
    return float(loss)


if __name__ == "__main__":
    main()
