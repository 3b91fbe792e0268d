"""Handwritten digits with a Transformer, sharded over 2 × 2 devices."""

import os

# four devices on a CPU
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import mpjax

WIDTH = 64


def dense(features, axes, name):
    """A layer with the logical axes of its kernel."""
    return nn.Dense(
        features,
        kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), axes),
        name=name,
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        q, k, v = jnp.split(
            dense(3 * WIDTH, ("data", "model"), "qkv")(nn.LayerNorm()(x)),
            3,
            axis=-1,
        )
        scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) / WIDTH**0.5)
        x = x + dense(WIDTH, ("model", "data"), "out")(scores @ v)
        h = nn.gelu(
            dense(4 * WIDTH, ("data", "model"), "up")(nn.LayerNorm()(x))
        )
        return x + dense(WIDTH, ("model", "data"), "down")(h)


class Net(nn.Module):
    @nn.compact
    def __call__(self, rows):  # the 8 rows of an image are a sequence
        x = nn.Dense(WIDTH, name="embed")(rows) + self.param(
            "positions", nn.initializers.normal(0.02), (8, WIDTH)
        )
        x = Block()(x)
        return nn.Dense(10, name="head")(nn.LayerNorm()(x).mean(-2))


@mpjax.autocast
def loss_fn(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(
        Net().apply(params, images), labels
    ).mean()


tx = mpjax.dynamic_loss_scale(optax.adamw(1e-3))


def init():
    params = Net().init(jax.random.key(0), jnp.zeros((1, 8, 8)))
    return params, tx.init(params)


def train_step(params, opt_state, images, labels):
    loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(
        params, images, labels
    )
    return *mpjax.apply_gradients(
        tx, grads, opt_state, params, value=loss
    ), loss


def main(epochs: int = 16) -> float:
    digits = load_digits()
    images, labels = (
        (digits.images / 16).astype(np.float32),
        digits.target.astype(np.int32),
    )
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
    )
    by_batch = NamedSharding(mesh, PartitionSpec("data"))
    with jax.set_mesh(mesh):
        shardings = nn.get_sharding(jax.eval_shape(init), mesh)
        params, opt_state = nn.unbox(jax.jit(init, out_shardings=shardings)())
        step = jax.jit(
            train_step,
            out_shardings=(*nn.unbox(shardings), None),
            donate_argnums=(0, 1),
        )
        order = np.random.default_rng(0)
        for epoch in range(epochs):
            for rows in order.permutation(1472).reshape(-1, 64):
                batch = jax.device_put((images[rows], labels[rows]), by_batch)
                params, opt_state, loss = step(params, opt_state, *batch)
            if epoch % 5 == 0:
                print(f"epoch {epoch}: loss {loss:.3f}")
        kernel = params["params"]["Block_0"]["up"]["kernel"]
        shape, spec = list(kernel.shape), kernel.sharding.spec
        print(f"a kernel: {kernel.dtype}{shape}, {spec}")
        accuracy = float(
            jnp.mean(
                jax.jit(Net().apply)(params, images[1472:]).argmax(-1)
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
