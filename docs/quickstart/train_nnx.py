"""Handwritten digits with Flax NNX: a network with BatchNorm, in float16."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import mpjax


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.hidden = nnx.Linear(4 * 4 * 32, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.max_pool(
            nnx.relu(self.norm(self.conv(images))), (2, 2), strides=(2, 2)
        )
        return self.head(nnx.relu(self.hidden(x.reshape(len(x), -1))))


@mpjax.autocast
def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
        model(images), labels
    ).mean()


@nnx.jit
def train_step(model, optimizer, images, labels):
    # batch statistics of a skipped step are not kept
    with mpjax.restore_if_skipped(model, optimizer):
        loss, grads = mpjax.value_and_grad(loss_fn, optimizer)(
            model, images, labels
        )
        optimizer.update(model, grads, value=loss)
    return loss


def main(epochs: int = 10) -> float:
    digits = load_digits()
    images, labels = (
        (digits.images[..., None] / 16).astype(np.float32),
        digits.target.astype(np.int32),
    )
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, mpjax.dynamic_loss_scale(optax.adam(1e-3)), wrt=nnx.Param
    )
    order = np.random.default_rng(0)
    for epoch in range(epochs):
        for batch in order.permutation(1472).reshape(-1, 64):
            loss = train_step(model, optimizer, images[batch], labels[batch])
        if epoch % 3 == 0:
            print(f"epoch {epoch}: loss {loss:.3f}")
    model.eval()
    accuracy = float(
        jnp.mean(
            nnx.jit(Net.__call__)(model, images[1472:]).argmax(-1)
            == labels[1472:]
        )
    )
    scale, skipped = (
        optimizer.opt_state.loss_scale[...],
        optimizer.opt_state.skipped_steps[...],
    )
    print(
        f"test accuracy {accuracy:.1%}, "
        f"loss scale {scale:.0f}, "
        f"skipped steps {skipped}"
    )
    return accuracy


if __name__ == "__main__":
    main()
