"""Handwritten digits with Haiku: autocast around the loss, in float16."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import mpjax


def forward(images):
    x = jax.nn.relu(hk.Conv2D(32, 3)(images))
    x = hk.max_pool(x, (2, 2, 1), (2, 2, 1), "VALID")
    return hk.nets.MLP([64, 10])(hk.Flatten()(x))


net = hk.without_apply_rng(hk.transform(forward))
tx = mpjax.dynamic_loss_scale(optax.adam(1e-3))


@mpjax.autocast
def loss_fn(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
        net.apply(params, images), labels
    ).mean()


@jax.jit
def train_step(params, opt_state, images, labels):
    loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(
        params, images, labels
    )
    return *mpjax.apply_gradients(
        tx, grads, opt_state, params, value=loss
    ), loss


def main(epochs: int = 10) -> float:
    digits = load_digits()
    images, labels = (
        (digits.images[..., None] / 16).astype(np.float32),
        digits.target.astype(np.int32),
    )
    params = jax.jit(net.init)(jax.random.key(0), images[:1])
    opt_state = tx.init(params)
    order = np.random.default_rng(0)
    for epoch in range(epochs):
        for batch in order.permutation(1472).reshape(-1, 64):
            params, opt_state, loss = train_step(
                params, opt_state, images[batch], labels[batch]
            )
        if epoch % 3 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    accuracy = float(
        jnp.mean(
            jax.jit(net.apply)(params, images[1472:]).argmax(-1)
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
