"""The image models: sizes as published, and the same network in Linen and in NNX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from examples.imagenet.models import KINDS, network
from testing.measures import matmuls


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
