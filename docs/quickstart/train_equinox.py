"""Handwritten digits with Equinox: autocast around the loss, in float16."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mpjax


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 32, 3, padding=1, key=keys[0])
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.mlp = eqx.nn.MLP(4 * 4 * 32, 10, 64, 1, key=keys[1])

    def __call__(self, image):
        return self.mlp(self.pool(jax.nn.relu(self.conv(image))).reshape(-1))


@mpjax.autocast
def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, labels
    ).mean()


tx = mpjax.dynamic_loss_scale(optax.adam(1e-3))


@eqx.filter_jit
def train_step(model, opt_state, images, labels):
    loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(
        model, images, labels
    )
    return *mpjax.apply_gradients(tx, grads, opt_state, model, value=loss), loss


def main(epochs: int = 10) -> float:
    digits = load_digits()
    images, labels = (
        (digits.images[:, None] / 16).astype(np.float32),
        digits.target.astype(np.int32),
    )
    model = Net(jax.random.key(0))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    order = np.random.default_rng(0)
    for epoch in range(epochs):
        for batch in order.permutation(1472).reshape(-1, 64):
            model, opt_state, loss = train_step(
                model, opt_state, images[batch], labels[batch]
            )
        if epoch % 3 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    accuracy = float(
        jnp.mean(
            eqx.filter_jit(eqx.filter_vmap(model))(images[1472:]).argmax(-1)
            == labels[1472:]
        )
    )
    print(
        f"test accuracy {accuracy:.1%}, "
        f"loss scale {opt_state.loss_scale:.0f}, "
        f"skipped steps {opt_state.skipped_steps}"
    )
    return accuracy


if __name__ == "__main__":
    main()
