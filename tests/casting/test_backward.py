"""What the table says that the backward pass takes from a primitive is safe: its derivative stays exact."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax.program.primitives import MATMULS, TABLE, Op, Saves
from testing.random_programs.evaluate import as_typed, evaluate

# Primitives of one float operand, elementwise, whose derivative saves something, by their name in `jax.lax`.
UNARY = sorted(
    name
    for name, row in TABLE.items()
    if row.backward.saves in (Saves.INPUTS, Saves.OUTPUTS, Saves.SATURATING)
    and not (row.elementwise or row.kernel or row.join or row.backward.kept or row.float32_only or row.some_versions)
    and callable(getattr(lax, name, None))
)
POSITIVE = {"log", "log1p", "sqrt", "rsqrt", "lgamma", "digamma", "cbrt"}
WITHIN_ONE = {"asin", "acos", "atanh", "erf_inv", "tan"}
SPREADS = {"small": 0.05, "unit": 1.0, "saturated": 3.0}


def operation(name):
    """The primitive as a function of any real array, within its domain."""
    operation = getattr(lax, name)
    if name in POSITIVE:
        return lambda h: operation(jnp.square(h) + 0.1)
    if name in WITHIN_ONE:
        return lambda h: operation(0.9 * jnp.tanh(h))
    if name == "acosh":
        return lambda h: operation(jnp.square(h) + 1.1)
    return functools.partial(operation, y=3) if name == "integer_pow" else operation


def error_of_choice(name, spread, half):
    """The largest relative error of the derivative of a primitive, in half's rounding steps, against float64.

    The operand is representable in half, and the matmuls around the primitive multiply by one: nothing else rounds.
    """
    rng = np.random.default_rng(0)
    exact_in_half = lambda x: np.asarray(jnp.asarray(x, half), np.float32)
    x, weight = exact_in_half(spread * rng.normal(size=(64, 16))), exact_in_half(rng.uniform(0.5, 1, (64, 16)))
    eye = np.eye(16, dtype=np.float32)
    params = {"first": eye, "gate": np.full(16, 0.5, np.float32), "last": eye}

    def loss(x, p):
        # No matmul reads the result itself: it would store it in half, and the derivative would follow from that.
        return jnp.sum(((operation(name)(x @ p["first"]) * p["gate"]) @ p["last"]) * weight)

    args = jax.tree.leaves((x, params))
    exact = evaluate(jax.make_jaxpr(jax.grad(loss))(x, params), args)[0].astype(np.float64)
    cast = mpjax.autocast(loss, f"mixed_{half}")
    found = evaluate(jax.make_jaxpr(jax.grad(cast))(x, params), args, as_typed)[0].astype(np.float64)
    largest = np.abs(exact).max()
    return np.max(np.abs(found - exact) / np.maximum(np.abs(exact), 1e-3 * largest)) / float(jnp.finfo(half).eps)


@pytest.mark.filterwarnings("ignore:float16 is differentiated")
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", UNARY)
def test_the_derivative_is_exact_to_a_rounding_of_half(name, spread, half):
    assert error_of_choice(name, SPREADS[spread], half) <= 2.5


@pytest.mark.parametrize("name", ["tanh", "logistic"])
def test_a_derivative_that_follows_from_a_saturated_half_output_is_seen(name, monkeypatch):
    row = TABLE[name]
    monkeypatch.setitem(TABLE, name, row._replace(backward=row.backward._replace(saves=Saves.OUTPUTS)))
    assert error_of_choice(name, SPREADS["saturated"], "bfloat16") > 100


def test_results_of_matmuls_are_stored():
    assert all(TABLE[name].backward.kept for name in MATMULS)


def test_what_costs_more_than_a_pass_over_memory_is_stored():
    """Decompositions, messages between devices and random numbers are never computed twice."""
    apart = {name for name, row in TABLE.items() if row.decomposes or row.communicates or row.solve or row.host}
    rows = [TABLE[name] for name in apart if TABLE[name].op not in (Op.OPAQUE, Op.ENTER)]
    assert [row.name for row in rows if not row.backward.kept] == ["reshard"]  # of one shard, which moves nothing
