"""Under `jax_numpy_dtype_promotion="strict"`, as all tests run, a model's own implicit promotion is not hidden."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax


def test_a_models_own_implicit_promotion_is_still_refused():
    class Promotes(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x) + jnp.ones(4)

    with pytest.raises(Exception, match="promotion"):
        jax.eval_shape(
            mpjax.with_policy(Promotes(), "mixed_float16").init, jax.random.key(0), np.ones((2, 4), np.float32)
        )
