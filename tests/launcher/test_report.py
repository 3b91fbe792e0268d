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


def test_the_summary_names_gradients_that_stay_in_float32(launched, capsys):
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
    jax.jit(lambda w: w - 0.1 * jax.grad(product)(w))(w)
    Report(session, always=False).summary()
    (line,) = capsys.readouterr().err.splitlines()
    outside, by_hand = line.split("; ")
    assert outside.startswith("mpjax run: nothing was cast to half: the gradients of product at test_report.py:")
    assert ", saddle at test_report.py:" in outside
    assert "ran outside of the script's own jax.jit" in outside
    assert by_hand.startswith("the gradients of product at test_report.py:")
    assert "an update that can skip a step" in by_hand
