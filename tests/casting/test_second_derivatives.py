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


def attention(mask=None, scale=0.25):
    def loss(p, x):
        q, k, v = (x @ p[name] for name in "abm")
        scores = q @ k.T * scale
        scores = scores if mask is None else jnp.where(mask, scores, -1e9)
        return jnp.mean((jax.nn.softmax(scores, -1) @ v * p["v"]) ** 2)

    return loss


def layers(p, x):
    """A deep stream in checkpoints."""

    def layer(h, w):
        return 0.9 * h + jax.nn.gelu((h - h.mean(-1, keepdims=True)) @ w) @ w.T

    h, _ = jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w), None), x[:4], jnp.stack([p["a"] / 3] * 30))
    return jnp.mean((h @ p["b"]) ** 2)


def lstm(p, x):
    def step(state, x):
        h, c = state
        c = jax.nn.sigmoid(x @ p["a"] + p["v"]) * c + jax.nn.sigmoid(h @ p["b"]) * jnp.tanh(x @ p["m"])
        return (jax.nn.sigmoid(h @ p["m"]) * jnp.tanh(c), c), c

    start = jnp.zeros((4, 16))
    return jnp.mean(jax.lax.scan(step, (start, start), x.reshape(-1, 4, 16))[1] ** 2)


_causal = np.tril(np.ones((160, 160), bool))
PROGRAMS = {
    "attention": attention(),
    "attention without a scale": attention(scale=1.0),
    "causal attention": attention(_causal),
    "attention of some rows": attention(_causal & (np.arange(160) > 3)[:, None]),
    "deep": layers,
    "lstm": lstm,
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("of_gradient", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_so_is_that_of_larger_programs(name, of_gradient):
    """A softmax that is divided last lost the scale of its scores: 270 times by hand."""
    x = np.random.default_rng(1).normal(size=(160, 16)).astype(np.float32)
    assert ratio(PROGRAMS[name], PARAMS, x, of_gradient) <= 4.0


@pytest.mark.filterwarnings("ignore:float16 is differentiated")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_hessian_of_attention_as_compiled(policy):
    """Its cotangents are subnormal in float16."""
    x = np.random.default_rng(1).normal(size=(160, 16)).astype(np.float32)
    products = (
        jax.jit(lambda p, fun=fun: jax.jvp(jax.grad(fun), (p, x), (p, 0 * x))[1])
        for fun in (mpjax.autocast(attention(), policy), attention())
    )
    found, exact = (each(PARAMS) for each in products)
    for name in "abm":
        assert np.linalg.norm(found[name] - exact[name]) <= 0.03 * np.linalg.norm(exact[name])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_the_hessian_by_a_learned_scale_is_not_zero(policy):
    loss = lambda v: jnp.mean(((X @ PARAMS["a"]) * v @ PARAMS["b"]) ** 2)
    found, exact = (jax.jit(jax.hessian(fun))(PARAMS["v"]) for fun in (mpjax.autocast(loss, policy), loss))
    assert np.linalg.norm(found - exact) <= 0.01 * np.linalg.norm(exact)
