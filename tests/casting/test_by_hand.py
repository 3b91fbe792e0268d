"""Gradients of programs that amplify a rounding are as accurate as with careful casts by hand."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import mpjax
from testing.sensitive import KINDS, error_of_by_hand


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:autocast. .*% of the FLOPs of matmuls and convolutions stay in float32, because")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", KINDS)
def test_the_error_of_the_gradient_is_at_most_twice_that_of_casts_by_hand(name, dtype):
    found = error_of_by_hand(KINDS[name], lambda loss: mpjax.autocast(loss, f"mixed_{dtype}"), jnp.dtype(dtype))
    assert found <= 2.0
