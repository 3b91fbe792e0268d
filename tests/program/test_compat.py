"""Differences between JAX versions that no test of a feature shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.program import compat
from mpjax.program.tracing import intercepted

X = np.ones((2, 2), np.float32)


@pytest.mark.parametrize(
    ("fun", "inlined"),
    [
        (jnp.tanh, True),
        (lambda x: jnp.dot(x, x), True),
        (jax.jit(lambda x: x + 1), False),
        (jax.jit(lambda x: x + 1, inline=False), False),
        (lambda x: jax.jit(lambda y: y @ y)(x), False),
    ],
)
def test_functions_of_jax_are_inlined_and_those_that_a_user_jits_are_not(fun, inlined):
    found, kept = [], []

    def call(operation, args, params):
        found.append(compat.is_inlined(params))
        kept.append(compat.kept_as_call(params))
        return operation.bind(*args, **kept[-1])

    def traced(x):
        with intercepted(lambda operation, args: operation.name == "jit", call):
            return fun(x)

    program = jax.make_jaxpr(traced)(X)
    assert found[0] is inlined
    assert program.eqns[0].primitive.name == "jit"
    assert not any(map(compat.is_inlined, kept))
