"""Fused attention under every transformation that works for attention as it is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import mpjax
from mpjax import Rules
from testing.random_programs.evaluate import in_numpy

pytestmark = pytest.mark.standard_promotion
B, T, S, N, K, H = 2, 5, 7, 4, 2, 8


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, H), (1, N, T, S)]
    return tuple(rng.normal(size=shape).astype(dtype) for shape in shapes)


def grouped(q, k, v, bias, cap=0.0, seen=None):
    """Attention whose queries share keys, with a bias."""
    k, v = (jnp.repeat(x, N // K, axis=-2) for x in (k, v))
    scores = jnp.einsum("...thd,...shd->...hts", q, k) * 0.3
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    scores = scores + bias
    scores = scores if seen is None else jnp.where(seen, scores, -1e30)
    return jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(scores), v)


FORMS = {
    "bias": grouped,
    "capped": functools.partial(grouped, cap=2.0),
    "causal": functools.partial(grouped, seen=np.tril(np.ones((T, S), bool))),
    "window": functools.partial(grouped, seen=np.tri(T, S, 1, bool) & ~np.tri(T, S, -2, bool)),
}


def loss_of(attend):
    return lambda *args: jnp.mean(jnp.sin(3 * attend(*args)) ** 2)


def directions(args):
    return tuple(np.random.default_rng(i).normal(size=x.shape).astype(x.dtype) for i, x in enumerate(args))


EVERY = (0, 1, 2, 3)


def hvp(loss, args):
    """The product of the Hessian with a vector, forward over reverse."""
    return jax.jvp(jax.grad(loss, EVERY), args, directions(args))[1]


def twice(loss, args):
    """The gradient of a function of the gradient, reverse over reverse."""
    norm = lambda *args: sum(jnp.sum(g**2) for g in jax.grad(loss, EVERY)(*args))
    return jax.grad(norm, EVERY)(*args)


def mapped(axis, loss, args):
    """Each operand is mapped over an axis of its own; or only some are."""
    stacked = [jnp.stack([x, 2 * x, -x], axis) for x in args]
    return jax.vmap(jax.grad(loss, EVERY), in_axes=axis)(*stacked)


def partly_mapped(loss, args):
    q, k, v, bias = args
    of_some = jax.vmap(jax.grad(loss, EVERY), in_axes=(0, None, 1, None))
    return of_some(jnp.stack([q, 2 * q]), k, jnp.stack([v, -v], 1), bias)


TRANSFORMS = {
    "value": lambda loss, args: loss(*args),
    "grad": lambda loss, args: jax.grad(loss, EVERY)(*args),
    "grad of q": lambda loss, args: jax.grad(loss)(*args),
    "jvp": lambda loss, args: jax.jvp(loss, args, directions(args)),
    "jacfwd of bias": lambda loss, args: jax.jacfwd(loss, 3)(*args),
    "linearize": lambda loss, args: jax.linearize(loss, *args)[1](*directions(args)),
    "hessian": lambda loss, args: jax.hessian(loss, 3)(*args)[0, 1, 2, 0],
    "hvp": hvp,
    "twice": twice,
    "vmap 0": functools.partial(mapped, 0),
    "vmap 1": functools.partial(mapped, 1),
    "vmap 3": functools.partial(mapped, 3),
    "vmap of some": partly_mapped,
    "checkpoint": lambda loss, args: jax.grad(jax.checkpoint(loss), EVERY)(*args),
    "scan": lambda loss, args: jax.grad(
        lambda *args: jax.lax.scan(lambda c, _: (c + loss(*args), None), 0.0, None, length=2)[0], EVERY
    )(*args),
    "jet": lambda loss, args: jet(loss, args),
}


def jet(loss, args):
    from jax.experimental import jet as taylor

    return taylor.jet(loss, args, [[d] for d in directions(args)])


def relative(found, expected):
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    numbers = [np.sum((np.asarray(a, float) - b) ** 2) for a, b in pairs], [np.sum(np.square(b)) for _, b in pairs]
    return np.sqrt(np.sum(numbers[0]) / np.sum(numbers[1]))


def autocast(fun, attention, policy="mixed_bfloat16"):
    return mpjax.autocast(fun, policy, rules=Rules(attention=attention))


def is_fused(fun, *args):
    (row,) = [row for row in mpjax.explain(fun, *args).rows if "attention" in row.op]
    return row.op == "fused_attention", row.why


# Each transformation with a form, and each form with a transformation.
PAIRS = [(name, list(FORMS)[i % len(FORMS)]) for i, name in enumerate(TRANSFORMS)] + [
    ("vmap of some", "bias"),
    ("hvp", "capped"),
    ("grad", "causal"),
    ("grad", "window"),
]


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_a_transformation_is_as_exact_as_of_attention_as_it_is_written(name, form):
    args, loss = arrays(), loss_of(FORMS[form])
    assert is_fused(autocast(loss, "xla"), *args)[0]
    transform = lambda fun: jax.jit(lambda *args: TRANSFORMS[name](fun, args))(*args)
    if name == "jet":
        transform = lambda fun: TRANSFORMS[name](fun, args)
    exact = in_numpy(lambda *args: TRANSFORMS[name](loss, args))(*args)
    today, fused = (relative(transform(autocast(loss, choice)), exact) for choice in ("unfused", "xla"))
    assert fused <= max(1.5 * today, 2 * float(jnp.finfo(jnp.bfloat16).eps))


@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("tpu",), ("cuda", "cpu")])
@pytest.mark.parametrize("symbolic", ["b", "t"])
def test_export_with_symbolic_shapes(platforms, symbolic):
    def attend(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / 8**0.5
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)

    batch, tokens = export.symbolic_shape("b, 128" if symbolic == "b" else "4, t")
    x = jax.ShapeDtypeStruct((batch, tokens, N, H), jnp.float32)
    gradient = jax.grad(lambda q, k, v: jnp.sum(autocast(attend, "fused")(q, k, v) ** 2), (0, 1, 2))
    exported = export.export(jax.jit(gradient), platforms=platforms)(x, x, x)
    if "cpu" in platforms:
        args = [np.random.default_rng(i).normal(size=(4, 128, N, H)).astype(np.float32) for i in range(3)]
        exact = in_numpy(jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v) ** 2), (0, 1, 2)))(*args)
        assert relative(exported.call(*args), exact) < 0.02


def test_one_module_for_two_platforms():
    args, loss = arrays(), loss_of(FORMS["causal"])
    step = jax.jit(jax.grad(autocast(loss, "fused"), EVERY))
    assert step.trace(*args).lower(lowering_platforms=("cuda", "cpu")).as_text()


def test_blocks_of_queries_are_as_exact_as_the_whole(monkeypatch):
    args = arrays()
    monkeypatch.setattr("mpjax.kernels.attention._BLOCK", 16 * S)
    big = [*(np.tile(x, (1, 8, 1, 1)) for x in args[:3]), np.tile(args[3], (1, 1, 8, 8))]
    attend = lambda q, k, v, bias: grouped(q, k, v, bias, seen=np.tri(8 * T, 8 * S, 3, bool))
    in_blocks = jax.value_and_grad(autocast(loss_of(attend), "xla"), EVERY)
    lowered = jax.jit(in_blocks).lower(*big)
    assert "while" in lowered.as_text()
    found, exact = lowered.compile()(*big), in_numpy(jax.value_and_grad(loss_of(attend), EVERY))(*big)
    today = jax.jit(jax.value_and_grad(autocast(loss_of(attend), "unfused"), EVERY))(*big)
    assert relative(found, exact) <= 1.1 * relative(today, exact)
