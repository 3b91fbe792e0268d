"""A residual network on a folder of images: BatchNorm, weight decay in the loss, a schedule, `pmap`."""

import argparse
import functools
import pathlib
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.training import train_state
from PIL import Image
from sklearn.datasets import load_digits


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        for features, strides in ((8, 1), (16, 2)):
            y = nn.relu(norm()(nn.Conv(features, (3, 3), (strides, strides), use_bias=False)(x)))
            y = norm(scale_init=nn.initializers.zeros)(nn.Conv(features, (3, 3), use_bias=False)(y))
            if x.shape != y.shape:
                x = norm()(nn.Conv(features, (1, 1), (strides, strides), use_bias=False)(x))
            x = nn.relu(x + y)
        return nn.Dense(10)(jnp.mean(x, (1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def train_step(state, batch):
    def loss_fn(params):
        logits, new = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats}, batch["image"], True, mutable=["batch_stats"]
        )
        loss = optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["label"], 10)).mean()
        decay = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return loss + 0.5 * 1e-4 * decay, (new, logits)

    (loss, (new, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads = jax.lax.pmean(grads, "batch")
    stats = jax.lax.pmean(new["batch_stats"], "batch")
    return state.apply_gradients(grads=grads, batch_stats=stats), jax.lax.pmean(loss, "batch")


def write_folder(root):
    digits = load_digits()
    for i, (image, label) in enumerate(zip(digits.images[:400], digits.target, strict=False)):
        path = pathlib.Path(root) / f"{label}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).convert("RGB").resize((12, 12)).save(path)


def read_folder(root):
    paths = sorted(pathlib.Path(root).glob("*/*.png"))
    images = np.stack([np.asarray(Image.open(path), np.float32) / 255 for path in paths])
    return images, np.array([int(path.parent.name) for path in paths])


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        if args.folder is None:
            write_folder(temporary)
        images, labels = read_folder(args.folder or temporary)
    model = ResNet()
    variables = model.init(jax.random.key(args.seed), jnp.ones((1, 12, 12, 3)), False)
    tx = optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.2, 5, args.steps), momentum=0.9, nesterov=True)
    state = TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    state = jax_utils.replicate(state)
    p_train_step = jax.pmap(train_step, axis_name="batch", donate_argnums=0)
    for _ in range(args.steps):
        chosen = rng.integers(0, len(labels), (jax.local_device_count(), 32))
        state, loss = p_train_step(state, {"image": images[chosen], "label": labels[chosen]})
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.batch_stats))
    print(f"loss {loss[0]:.4f}")
    return float(loss[0])


if __name__ == "__main__":
    main()
