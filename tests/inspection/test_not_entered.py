"""Every report names the operations that it did not look into, and looks into all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

import mpjax

mystery = Primitive("mystery")  # of another library, with its own derivative elsewhere
mystery.def_abstract_eval(lambda x: x)
mystery.def_impl(jnp.tanh)
mlir.register_lowering(mystery, mlir.lower_fun(jnp.tanh, multiple_results=False))


@jax.custom_batching.custom_vmap
def with_vmap_rule(x):
    return jnp.exp(x)


with_vmap_rule.def_vmap(lambda size, batched, x: (jnp.exp(x), True))


def kernel(x):
    def body(x_ref, out_ref):
        out_ref[...] = jnp.exp(x_ref[...])

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def called_back(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def loss(w, x):
    h = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float16)
    constant = jax.lax.stop_gradient(h)
    hidden = with_vmap_rule(constant) + kernel(constant) + called_back(constant) + mystery.bind(constant)
    return jnp.mean((h + hidden).astype(jnp.float32) ** 2)


W, X = np.eye(8, dtype=np.float32) / 8, np.ones((4, 8), np.float32)
HIDDEN = {"pure_callback": "code outside of JAX", "mystery": "a primitive that mpjax does not know"}
EVALUATED = {**HIDDEN, "pallas_call": "runs as a whole"}


def watched():
    state = mpjax.watch(loss, every=1).init(W, X)
    return mpjax.watch(loss, every=1).update(state, W, X).records()[-1]


REPORTS = {
    "explain": (lambda: mpjax.explain(loss, W, X), HIDDEN),
    "audit": (lambda: mpjax.audit(loss, W, X), HIDDEN),
    "numerics": (lambda: mpjax.numerics(loss, W, X, verify=False), EVALUATED),
    "layerwise_error": (lambda: mpjax.layerwise_error(loss, W, X), EVALUATED),
    "find_nonfinite": (lambda: mpjax.find_nonfinite(loss, W, 1e3 * X), EVALUATED),
    "search": (lambda: mpjax.search(loss, W, X), EVALUATED),
    "watch": (watched, EVALUATED),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_names_what_it_did_not_enter(name):
    make, expected = REPORTS[name]
    lines = [line.strip() for line in str(make()).splitlines() if "not inspected: " in line]
    found = {line.split()[2]: line.rpartition(": ")[2] for line in lines}
    assert found == expected
    assert all(" at test_not_entered.py:" in line for line in lines)


def test_an_audit_sees_the_risks_in_a_kernel_and_behind_a_batching_rule():
    risks = mpjax.audit(lambda x: (with_vmap_rule(x), kernel(x)), X.astype("float16")).risks
    assert [(risk.kind, risk.op) for risk in risks] == [("exp", "exp")] * 2


def test_find_nonfinite_looks_behind_a_batching_rule():
    fault = mpjax.find_nonfinite(lambda x: with_vmap_rule(x * 2), np.full(3, 10, np.float16))
    assert (fault.primitive, fault.unseen) == ("exp", ())
