"""Code of a user's own in a model with a policy: complex layers, and arithmetic between layers."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from testing.measures import relative_error
from testing.random_programs.evaluate import arrays_in_numpy

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
# The rounding of inputs, weights and results of two layers, forward and backward; without float32, the error is 1.
TOLERANCE = {
    half: 8 * float(jnp.finfo(half.removeprefix("mixed_")).eps) for half in ("mixed_float16", "mixed_bfloat16")
}
STATE = mpjax.static_loss_scale(optax.sgd(0.1), 2.0**10).init({})


@pytest.mark.standard_promotion  # a real batch and complex parameters
@pytest.mark.parametrize("policy", [*TOLERANCE, "O2"])
def test_complex_layers_keep_their_imaginary_part(policy):
    linen = nn.Dense(4, param_dtype=jnp.complex64)
    params = jax.jit(lambda: jax.tree.map(lambda x: x + 1j, linen.init(jax.random.key(0), X)))()
    with_policy = mpjax.with_policy(linen, policy)
    assert jax.eval_shape(with_policy.init, jax.random.key(0), X) == jax.eval_shape(lambda: params)
    np.testing.assert_array_equal(*(jax.jit(model.apply)(params, X) for model in (with_policy, linen)))

    layer = nnx.Linear(8, 4, param_dtype=jnp.complex64, rngs=nnx.Rngs(0))
    expected = layer(X)
    np.testing.assert_array_equal(mpjax.with_policy(layer, policy)(X), expected)
    assert np.any(np.imag(expected))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(64)(x)
        h = h / jnp.linalg.norm(h, axis=-1, keepdims=True)
        return nn.Dense(4)(h)


class NormalisedNNX(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(8, 64, rngs=rngs), nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        h = self.first(x)
        return self.second(h / jnp.linalg.norm(h, axis=-1, keepdims=True))


# The squares of these vectors are above float16's largest number. bfloat16 has float32's range.
def test_a_norm_between_layers_is_computed_in_float32():
    policy, x = "mixed_float16", X * np.float32(3e3)
    model = Normalised()
    params = arrays_in_numpy(model.init)(jax.random.key(0), x)

    def value_and_gradient(model):
        loss = lambda params: jnp.sum(model.apply(params, x) ** 2)
        return arrays_in_numpy(lambda params: mpjax.value_and_grad(loss, STATE)(params))(params)

    expected, found = value_and_gradient(model), value_and_gradient(mpjax.with_policy(model, policy))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < TOLERANCE[policy]

    h = x @ params["params"]["Dense_0"]["kernel"]
    assert np.isinf(jnp.linalg.norm(h.astype(np.float16), axis=-1)).all()

    module = NormalisedNNX(nnx.Rngs(0))
    expected, found = (arrays_in_numpy(module)(x) for module in (module, mpjax.with_policy(module, policy)))
    assert relative_error(found, expected) < TOLERANCE[policy]
