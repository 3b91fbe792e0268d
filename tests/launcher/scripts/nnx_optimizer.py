"""NNX: modules with BatchNorm and Dropout, `nnx.jit`, `nnx.value_and_grad` and `nnx.Optimizer`."""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.hidden = nnx.Linear(8 * 64, 32, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.out(self.dropout(nnx.relu(self.hidden(x.reshape(x.shape[0], -1)))))


def loss_fn(model, images, labels):
    logits = model(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


@nnx.jit
def train_step(model, optimizer, images, labels):
    (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, images, labels)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def eval_step(model, images):
    return model(images)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--outlier", type=int, help="a step whose images are far off scale")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    prototypes = np.random.default_rng(0).random((10, 8, 8, 1), np.float32)
    model = CNN(nnx.Rngs(args.seed))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3), wrt=nnx.Param)
    for step in range(args.steps):
        labels = rng.integers(0, 10, 32)
        images = prototypes[labels] + 0.2 * rng.normal(size=(32, 8, 8, 1)).astype(np.float32)
        if step == args.outlier:
            images = images * np.float32(1e6)
        model.train()
        loss = train_step(model, optimizer, images, labels)
    model.eval()
    assert jnp.isfinite(model.norm.mean[...]).all()
    assert jnp.isfinite(model.norm.var[...]).all()
    assert jnp.isfinite(eval_step(model, images)).all()
    print(f"loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
