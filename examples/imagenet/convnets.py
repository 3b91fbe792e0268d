"""Two plain convolutional networks from published mixed precision benchmarks, in Linen; one also in NNX."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

# Filters and kernel sizes of the three layers; each halves the side.
_LAYERS = ((32, 5), (64, 7), (128, 11))
_MOMENTUM, _EPSILON = 0.99, 1e-3  # Keras's defaults


class ConvNet(nn.Module):
    """Three strided convolutions, each with BatchNorm after its ReLU, and global average pooling.

    From images [batch, height, width, channels] to logits [batch, num_classes]; trained on Imagenette at 256x256.

    Source: S. Keydana, First experiments with TensorFlow mixed-precision training, Posit AI Blog (2020).
    """

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for features, kernel in _LAYERS:
            x = nn.relu(nn.Conv(features, (kernel, kernel), 2)(x))
            x = nn.BatchNorm(use_running_average=not train, momentum=_MOMENTUM, epsilon=_EPSILON)(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.num_classes)(x)


class NNXConvNet(nnx.Module):
    """The same network in Flax NNX."""

    def __init__(self, num_classes: int, channels: int, *, rngs: nnx.Rngs) -> None:
        inputs = (channels, *(features for features, _ in _LAYERS))
        self.convs = nnx.List(
            [
                nnx.Conv(before, features, (kernel, kernel), strides=2, rngs=rngs)
                for before, (features, kernel) in zip(inputs, _LAYERS, strict=False)
            ]
        )
        self.norms = nnx.List(
            [nnx.BatchNorm(features, momentum=_MOMENTUM, epsilon=_EPSILON, rngs=rngs) for features, _ in _LAYERS]
        )
        self.head = nnx.Linear(inputs[-1], num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(nnx.relu(conv(x)))
        return self.head(jnp.mean(x, axis=(1, 2)))


class MnistCNN(nn.Module):
    """Two 3x3 convolutions of 420 and 1,000 channels, each with max-pooling, and one dense layer.

    From images [batch, height, width, channels] to logits [batch, num_classes]; trained on MNIST at 28x28. Its
    width fills a GPU: the largest batch was 590 in float32 and 1,000 in float16.

    Source: D. Clinton, Benchmarking GPUs for Mixed Precision Training with Deep Learning, Paperspace Blog.
    """

    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for features in (420, 1000):
            x = nn.relu(nn.Conv(features, (3, 3), padding=1)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1))
