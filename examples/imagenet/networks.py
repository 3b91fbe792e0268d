"""ResNet v1.5 and two plain networks in Flax Linen. `mpjax.with_policy` sets their precision from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

# Up to this side length the stem keeps the resolution: an 8x8 digit is too small to halve twice.
SMALL_IMAGE = 32

Layer = Callable[..., Any]  # makes a module


class _Block(nn.Module):
    """Convolutions with a norm after each, of which one has the stride and the last may widen, and a shortcut."""

    features: int
    stride: int
    conv: Layer
    norm: Layer
    kernels: ClassVar[tuple[int, ...]] = (3, 3)
    strided, expansion = 0, 1  # the convolution with the stride, and the last one's multiple of the features

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y, last = x, len(self.kernels) - 1
        for index, kernel in enumerate(self.kernels):
            features = self.features * (self.expansion if index == last else 1)
            stride = self.stride if index == self.strided else 1
            y = self.conv(features, (kernel, kernel), stride, padding=kernel // 2)(y)
            # Zero initialisation makes each block start as the identity, so that deep networks train from the start.
            y = self.norm(scale_init=nn.initializers.zeros)(y) if index == last else nn.relu(self.norm()(y))
        if x.shape[-1] != y.shape[-1] or self.stride > 1:
            x = self.norm(name="shortcut_norm")(self.conv(y.shape[-1], (1, 1), self.stride, name="shortcut")(x))
        return nn.relu(y + x)


class BasicBlock(_Block):
    """Two 3x3 convolutions and a shortcut (He et al., 2015, https://arxiv.org/abs/1512.03385)."""


class Bottleneck(_Block):
    """1x1, 3x3 and 1x1 convolutions; the 3x3 has the stride (the "v1.5" of ResNet-50)."""

    kernels = (1, 3, 1)
    strided, expansion = 1, 4


class ResNet(nn.Module):
    """A residual network from images [batch, height, width, channels] to logits [batch, num_classes].

    Args:
        stage_sizes: Blocks in each stage; each stage after the first halves the side and doubles the features.
        block: `BasicBlock` or `Bottleneck`.
        num_classes: Number of logits.
        width: Number of features of the first stage.
        dtype: Dtype of all layers in a benchmark's hand-written half precision; None lets a policy decide.
    """

    stage_sizes: tuple[int, ...]
    block: type[BasicBlock] | type[Bottleneck]
    num_classes: int
    width: int = 64
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype)
        conv = partial(nn.Conv, use_bias=False, kernel_init=nn.initializers.he_normal(), dtype=self.dtype)
        if x.shape[1] <= SMALL_IMAGE:
            x = conv(self.width, (3, 3), padding=1, name="stem")(x)
            x = nn.relu(norm(name="stem_norm")(x))
        else:
            x = conv(self.width, (7, 7), 2, padding=3, name="stem")(x)
            x = nn.relu(norm(name="stem_norm")(x))
            x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.stage_sizes):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                x = self.block(self.width * 2**stage, stride, conv, norm)(x)
        return nn.Dense(self.num_classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


# Two plain convolutional networks from published mixed precision benchmarks.

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
