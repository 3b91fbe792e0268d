"""The launcher's report counts what runs."""

import jax
import jax.numpy as jnp
import pytest

from mpjax._jaxpr.program import walk
from mpjax.launcher.report import _is_half


@pytest.mark.parametrize(
    ("dtype", "half"), [("float32", False), ("bfloat16", True), ("float16", True), ("float8_e4m3fn", True)]
)
def test_matmuls_of_float8_count_as_half_or_less(dtype, half):
    x = jnp.ones((16, 16), dtype)
    dot = lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.float32)
    (site,) = [site for site in walk(jax.make_jaxpr(dot)(x)) if site.eqn.primitive.name == "dot_general"]
    assert _is_half(site) == half
