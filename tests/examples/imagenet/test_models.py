"""The image models: sizes as published, and the same network in Linen and in NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from examples.common.training import Variables
from examples.imagenet.models import KINDS, network
from testing.measures import half_share, matmuls


def abstract(name: str, classes: int, image_shape: tuple[int, int, int]):
    """The model's function, the shapes of its variables, and one image."""
    model = network(name, classes, image_shape[-1])
    images = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    return model, jax.eval_shape(model.init, jax.random.key(0), images), images


# Parameters (without running statistics) and multiply-adds of one image forward, in their native size: torchvision's
# for ResNet; the other two follow from their authors' layers.
PUBLISHED = {
    "resnet18": (11_689_512, 1.814e9),
    "resnet34": (21_797_672, 3.664e9),
    "resnet50": (25_557_032, 4.089e9),
    "resnet101": (44_549_160, 7.801e9),
    "convnet": (1_095_946, None),
    "convnet_nnx": (1_095_946, None),
    "mnist_cnn": (4_275_210, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_multiply_adds_are_as_published(name):
    parameters, multiply_adds = PUBLISHED[name]
    kind = KINDS[name]
    model, variables, images = abstract(name, kind.classes, kind.image_shape)
    assert sum(x.size for x in jax.tree.leaves(variables.params)) == parameters
    if multiply_adds is not None:
        found = matmuls(lambda v, x: model.apply(v, x, None), variables, images)
        assert sum(e.flops for e in found) / 2 == pytest.approx(multiply_adds, rel=1e-3)


def test_nnx_convnet_equals_the_linen_one():
    shape = (16, 16, 3)
    linen, nnx = (network(name, 10, 3) for name in ("convnet", "convnet_nnx"))
    images = jax.random.normal(jax.random.key(0), (2, *shape))
    variables = jax.jit(linen.init)(jax.random.key(1), images)
    like = jax.eval_shape(nnx.init, jax.random.key(0), images)
    # Both name layers in the order of the network, so the sorted leaves are in the same order within a kind of layer.
    order = {"Conv": "convs", "BatchNorm": "norms", "Dense": "head"}

    def as_nnx(tree):
        renamed: dict = {}
        for name, leaves in tree.items():
            kind, number = name.split("_")
            if kind == "Dense":
                renamed["head"] = leaves
            else:
                renamed.setdefault(order[kind], {})[int(number)] = leaves
        return renamed

    moved = Variables(*map(as_nnx, variables))
    assert jax.tree.map(jnp.shape, moved) == jax.tree.map(jnp.shape, like)
    for key in (jax.random.key(2), None):
        one, stats = jax.jit(linen.apply)(variables, images, key)
        two, nnx_stats = jax.jit(nnx.apply)(moved, images, key)
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), as_nnx(stats), nnx_stats)


def test_policy_reaches_the_nnx_convnet():
    model = network("convnet_nnx", 10, 3, mpjax.get_policy("mixed_float16"))
    images = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    assert half_share(lambda v, x: model.apply(v, x, jax.random.key(0)), variables, images) == 1.0
