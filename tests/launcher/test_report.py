"""The launcher's report counts what runs."""

import jax
import jax.numpy as jnp
import optax
import pytest

from mpjax.launcher.report import Report, _is_half
from mpjax.program.graph import walk


@pytest.mark.parametrize(
    ("dtype", "half"), [("float32", False), ("bfloat16", True), ("float16", True), ("float8_e4m3fn", True)]
)
def test_matmuls_of_float8_count_as_half_or_less(dtype, half):
    x = jnp.ones((16, 16), dtype)
    dot = lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.float32)
    (site,) = [site for site in walk(jax.make_jaxpr(dot)(x)) if site.eqn.primitive.name == "dot_general"]
    assert _is_half(site) == half


def test_the_summary_names_gradients_that_no_compiled_step_counts(launched, capsys):
    session = launched(quiet=False)
    tx = optax.sgd(0.1)
    w = jnp.ones((16, 16))

    def product(w):
        return jnp.mean((jnp.ones((8, 16)) @ w) ** 2)

    def saddle(w):
        return w[0, 0] * w[1, 1]

    def step(w, _):
        grads = jax.grad(product)(w)
        grads += jax.grad(saddle)(w)
        return tx.update(grads, tx.init(w))[0], None

    jax.lax.scan(step, w, length=2)
    Report(session, always=False).summary()
    line = next(line for line in capsys.readouterr().err.splitlines() if "not counted" in line)
    assert "product at test_report.py:" in line
    assert "saddle (no matmul) at test_report.py:" in line
