"""Handwritten digits with plain JAX and optax: a residual net, in float16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mpjax


def init(key, width=128, blocks=3):
    def dense(key, fan_in, fan_out):
        return {
            "w": jax.random.normal(key, (fan_in, fan_out)) * fan_in**-0.5,
            "b": jnp.zeros(fan_out),
        }

    keys = jax.random.split(key, blocks + 2)
    return {
        "stem": dense(keys[0], 64, width),
        "blocks": [dense(k, width, width) for k in keys[1:-1]],
        "head": dense(keys[-1], width, 10),
    }


def apply(params, x):
    def dense(p, x):
        return x @ p["w"] + p["b"]

    x = dense(params["stem"], x)
    for block in params["blocks"]:
        x = x + jax.nn.gelu(
            dense(block, x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6))
        )
    return dense(params["head"], x)


@mpjax.autocast
def loss_fn(params, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
        apply(params, x), labels
    ).mean()


tx = mpjax.dynamic_loss_scale(optax.adamw(1e-3))


@jax.jit
def train_epoch(params, opt_state, batches):
    def step(carry, batch):
        params, opt_state = carry
        loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, *batch)
        return mpjax.apply_gradients(
            tx, grads, opt_state, params, value=loss
        ), loss

    return jax.lax.scan(step, (params, opt_state), batches)


def main(epochs: int = 20) -> float:
    digits = load_digits()
    x, labels = (
        (digits.data / 16).astype(np.float32),
        digits.target.astype(np.int32),
    )
    params = jax.jit(init)(jax.random.key(0))
    opt_state = tx.init(params)
    order = np.random.default_rng(0)
    for epoch in range(epochs):
        rows = order.permutation(1472).reshape(-1, 64)
        (params, opt_state), losses = train_epoch(
            params, opt_state, (x[rows], labels[rows])
        )
        if epoch % 5 == 0:
            print(f"epoch {epoch}: loss {losses.mean():.3f}")
    accuracy = float(
        jnp.mean(jax.jit(apply)(params, x[1472:]).argmax(-1) == labels[1472:])
    )
    print(
        f"test accuracy {accuracy:.1%}, "
        f"loss scale {opt_state.loss_scale:.0f}, "
        f"skipped steps {opt_state.skipped_steps}"
    )
    return accuracy


if __name__ == "__main__":
    main()
