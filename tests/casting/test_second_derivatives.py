"""Second derivatives of a program under autocast: products of Hessians, as exact as by hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from testing import by_hand
from testing.sensitive import KINDS, gradient

_rng = np.random.default_rng(0)
PARAMS = {name: _rng.normal(size=(16, 16)).astype(np.float32) / 3 for name in "abm"}
PARAMS["v"] = np.linspace(0.5, 1.5, 16, dtype=np.float32)
X = _rng.normal(size=(12, 16)).astype(np.float32)

# What is done to a matmul's result before another matmul reads it.
FORMS = {
    "a parameter": lambda p, h: h * p["v"],
    "a parameter of each row": lambda p, h: h * p["m"][:12],
    "a constant": lambda p, h: h * np.linspace(0.5, 1.5, 16, dtype=np.float32),
    "a quotient": lambda p, h: h / p["v"],
    "a bias and a scale": lambda p, h: (h + p["v"]) * p["v"],
    "a mask": lambda p, h: jnp.where(X > 0, h, p["v"]) * p["v"],
    "a number": lambda p, h: h * p["v"][3],
    "a gate": lambda p, h: h * jax.nn.sigmoid(X @ p["m"]),
    "a gate of rows": lambda p, h: h * jax.nn.sigmoid(X @ p["v"])[:, None],
    "a norm": lambda p, h: h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * p["v"],
    "a maximum": lambda p, h: jnp.maximum(h, p["v"]),
}


def of_form(form):
    return lambda p, x: jnp.mean(jnp.tanh(FORMS[form](p, x @ p["a"]) @ p["b"]) ** 2)


def product(loss, cast=lambda fun: fun, of_gradient=False):
    """The product of a Hessian and the params."""

    def along(p, batch):
        float0 = jax.dtypes.float0
        tangents = [
            x if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, float0) for x in jax.tree.leaves(p)
        ]
        tangents = jax.tree.unflatten(jax.tree.structure(p), tangents)
        return jax.jvp(lambda p: gradient(cast(loss) if not of_gradient else loss)(p, batch), (p,), (tangents,))[1]

    return cast(along) if of_gradient else along


def ratio(loss, params, batch, of_gradient=False):
    cast = lambda fun: mpjax.autocast(fun, "mixed_bfloat16")
    plain = jax.make_jaxpr(product(loss))(params, batch)
    found = jax.make_jaxpr(product(loss, cast, of_gradient))(params, batch)
    return by_hand.ratio(plain, found, jax.tree.leaves((params, batch)), jnp.dtype("bfloat16"), draws=1)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("of_gradient", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_of_the_hessian_is_as_exact_as_by_hand(form, of_gradient):
    """Where a parameter multiplies, half of it was missing: the Hessian by that parameter was 0."""
    # JAX before 0.12 writes 1 - tanh² of a tanh that a matmul reads in half.
    most = 4.0 if of_gradient and jax.__version_info__ < (0, 12) else 2.0
    assert ratio(of_form(form), PARAMS, X, of_gradient) <= most


# Careful authors keep no matmul of these in float32.
ROUNDED = [name for name, kind in KINDS.items() if "exact" not in inspect.signature(kind.loss).parameters]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.filterwarnings("ignore:autocast. .*% of the FLOPs of matmuls and convolutions stay in float32, because")
def test_so_is_that_of_programs_that_amplify_a_rounding(name):
    kind = KINDS[name]
    found = ratio(kind.loss, kind.params, kind.batch)
    if found is None:
        pytest.skip("casts by hand lose it")
    assert found <= 2.0


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_hessian_by_a_learned_scale_is_not_zero(policy):
    loss = lambda v: jnp.mean(((X @ PARAMS["a"]) * v @ PARAMS["b"]) ** 2)
    found, exact = (jax.jit(jax.hessian(fun))(PARAMS["v"]) for fun in (mpjax.autocast(loss, policy), loss))
    assert np.linalg.norm(found - exact) <= 0.01 * np.linalg.norm(exact)
