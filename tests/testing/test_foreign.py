"""Tests of other authors under autocast: which fail, and how accurate what they compute is."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from benchmarks import foreign
from testing import by_hand
from testing.foreign import running


def test_foreign_tests_that_fail_only_under_autocast_are_listed(tmp_path, capsys):
    (tmp_path / "some_test.py").write_text("""
import jax, jax.numpy as jnp
def dtype_inside(x): return str(jax.make_jaxpr(jax.jit(lambda x: x @ x))(x))
def test_only_wrapped(): assert "f16" in dtype_inside(jnp.eye(2))
def test_only_plainly(): assert "f16" not in dtype_inside(jnp.eye(2))
def test_looks_at_values(): jax.grad(lambda x: x if x > 0 else -x)(jnp.float32(1))
def test_fails(): assert False
""")
    foreign.main(["--tests", str(tmp_path), "--out", str(tmp_path)])
    found, limits = capsys.readouterr().out.split("Also fail in jax.jit:")
    # Columns: pass, only under autocast, in jax.jit too, without autocast too, skipped.
    assert "| some_test.py | 1 | 1 | 1 | 1 | 0 |" in found
    assert "test_only_plainly" in found
    assert running.CONTROL_FLOW in limits
    assert "test_looks_at_values" in limits
    assert "some_test.py" in (tmp_path / "foreign_float16_cpu.md").read_text()


PROGRAMS = """
import jax, jax.numpy as jnp, numpy as np
x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
def loss(x): return jnp.sum(jnp.tanh(x @ x))
def test_gradient(): jax.grad(loss)(x)
def test_values(): jax.jit(lambda x: x @ x)(x)
def test_no_numbers(): jax.jit(lambda x: x > 0)(x)
"""


def test_programs_of_foreign_tests_are_compared_with_casts_by_hand(tmp_path, capsys):
    (tmp_path / "some_test.py").write_text(PROGRAMS)
    foreign.main(["--tests", str(tmp_path), "--out", str(tmp_path), "--by-hand", "--dtype", "bfloat16"])
    # Two values, and the gradients of both.
    assert "| some_test.py | 4 | " in capsys.readouterr().out
    assert "test_" not in (tmp_path / "foreign_bfloat16_by_hand_cpu.md").read_text(), "none is above the limit"


def program(x):
    return jnp.tanh(x @ x) + x


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_the_ratio_to_casts_by_hand(half):
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)

    def ratio(fun, x=x):
        return by_hand.ratio(jax.make_jaxpr(program)(x), jax.make_jaxpr(fun)(x), (x,), jnp.dtype(half))

    assert ratio(program) < 0.01  # float32
    assert 0.5 < ratio(mpjax.autocast(program, f"mixed_{half}")) <= 1.1
    assert ratio(lambda x: program(x).astype(half).astype("float32") * 1.02) > 2
    assert ratio(lambda x: program(x) / 0) == np.inf
    assert ratio(program, 0 * x) is None


@pytest.mark.exhaustive
@pytest.mark.skipif("FOREIGN_TESTS" not in os.environ, reason="FOREIGN_TESTS is no folder of JAX's and Flax's tests")
@pytest.mark.parametrize("arguments", [[], ["--by-hand"], ["--by-hand", "--dtype", "bfloat16"]])
def test_the_tests_of_jax_and_flax(tmp_path, arguments):
    foreign.main(["--tests", os.environ["FOREIGN_TESTS"], "--out", str(tmp_path), *arguments])
    (table,) = tmp_path.glob("*.md")
    assert "\n- " not in table.read_text(), "a test fails, or is less accurate than casts by hand"
