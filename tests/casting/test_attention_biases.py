"""Biases and masks of fused attention: as exact as unfused, for any bias, layout and length."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import Rules
from mpjax.casting.attention import division
from mpjax.kernels import attention, attention_kernels
from testing.random_programs.evaluate import as_typed, evaluate, in_numpy
from testing.random_programs.evaluate import exact as float64

pytestmark = pytest.mark.standard_promotion
N, H = 4, 16
SLOPES = 2.0 ** -np.arange(1, N + 1, dtype=np.float32)


def positions(length):
    return np.arange(length, dtype=np.float32)


def distances(length):
    return positions(length)[:, None] - positions(length)


# Each bias from queries, keys, a table [2 · length, heads] and a padding mask [keys]: [heads or 1, queries or 1, keys].
BIASES = {
    "linear": lambda q, k, table, seen: -0.1 * np.abs(distances(len(seen)))[None],
    "ALiBi by key": lambda q, k, table, seen: SLOPES[:, None, None] * positions(len(seen)),
    "ALiBi by distance": lambda q, k, table, seen: -SLOPES[:, None, None] * np.abs(distances(len(seen))),
    "ALiBi from a mask": lambda q, k, table, seen: SLOPES[:, None, None] * (jnp.cumsum(seen) - 1.0) * seen,
    "ALiBi with learned slopes": lambda q, k, table, seen: jnp.exp(table[0])[:, None, None] * positions(len(seen)),
    "table": lambda q, k, table, seen: by_distance(table, len(seen)),
    "large table": lambda q, k, table, seen: 30 * by_distance(table, len(seen)),
    "offset": lambda q, k, table, seen: 1000 + jnp.sin(positions(len(seen)))[None, None],
    "offset of each row": lambda q, k, table, seen: of_rows(table, len(seen)),
    "norms of keys": lambda q, k, table, seen: -4 * jnp.sum(k**2, -1).T[:, None],
    "gates": lambda q, k, table, seen: -jnp.cumsum(jax.nn.log_sigmoid(k[..., 0] + 2), 0).T[:, None],
}


def by_distance(table, length):
    return table[distances(length).astype(int) + length].transpose(2, 0, 1)


def of_rows(table, length):
    return 3000 * jnp.sin(positions(length))[None, :, None] + table[:length].T[:, None]


def attend(bias, causal):
    def fun(q, k, v, table, seen):
        scores = jnp.einsum("thd,shd->hts", q, k) / 4 + BIASES[bias](q, k, table, seen)
        scores = jnp.where(np.tril(np.ones((len(seen),) * 2, bool)), scores, -1e30) if causal else scores
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.where(seen > 0, scores, -1e30)), v)

    return fun


def operands(length):
    rng = np.random.default_rng(length)
    arrays = [*rng.normal(size=(3, length, N, H)), rng.normal(size=(2 * length, N)), rng.random(length) < 0.9]
    return [x.astype(np.float32) for x in arrays]


def normal(*shape):
    """Queries, keys and values."""
    return np.random.default_rng(0).normal(size=(3, *shape)).astype(np.float32)


def traced(fun, args):
    """The jaxpr of a function and its gradients."""
    weights = np.random.default_rng(1).normal(size=args[0].shape).astype(np.float32)

    def both(*args):
        loss = lambda q, k, v, table: jnp.sum(fun(q, k, v, table, args[4]) * weights)
        return fun(*args), *jax.grad(loss, (0, 1, 2))(*args[:4])

    return jax.make_jaxpr(both)(*args)


def relative(found, expected):
    return np.array(
        [np.linalg.norm(np.asarray(a, float) - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True)]
    )


def as_cudnn_takes_it(monkeypatch):
    """Rounds biases as for cuDNN's kernel, in the formulas that run on a CPU."""
    scores = attention._scores

    def rounded(x, form, first):
        bias = None if x.bias is None else attention_kernels.in_half(x, form).astype(np.float32)
        return scores(x._replace(bias=bias), form, first)

    monkeypatch.setattr(attention, "_scores", rounded)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("length", [32, 160])
def test_any_bias_is_as_exact_as_in_unfused_attention(length, bias, causal, monkeypatch):
    args, fun = operands(length), attend(bias, causal)
    exact = evaluate(traced(fun, args), args, float64)
    autocast = lambda choice: mpjax.autocast(fun, "mixed_bfloat16", rules=Rules(attention=choice))
    (row,) = [row for row in mpjax.explain(autocast("xla"), *args).rows if "attention" in row.op]
    assert (row.op, "bias" in row.why) == ("fused_attention", True), row.why
    program = traced(autocast("xla"), args)
    fused = relative(evaluate(program, args, as_typed), exact)
    with monkeypatch.context() as as_written:  # Divided after the product, it is more exact still.
        as_written.setattr(division, "SHORTEST", length + 1)
        today = relative(evaluate(traced(autocast("unfused"), args), args, as_typed), exact)
    assert (fused <= 1.5 * today).all(), (fused, today)
    if bias == "norms of keys":  # `prepare._has_wide_bias` refuses it for cuDNN.
        return
    as_cudnn_takes_it(monkeypatch)
    rounded = relative(evaluate(program, args, as_typed), exact)
    assert (rounded <= 1.5 * today).all(), (rounded, today)


def split(added):
    """Grouped queries: heads are split into groups."""

    def fun(q, k, v):
        q = q.reshape(2, 6, 2, 2, H)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k[:, :, :2]) + added.reshape(2, 2, *added.shape[1:])
        return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v[:, :, :2])

    return fun


def merged(added):
    """Batch and heads are one axis, as in BLOOM."""

    def fun(q, k, v):
        q, k, v = (x.swapaxes(1, 2).reshape(2 * N, 6, H) for x in (q, k, v))
        scores = jnp.einsum("btd,bsd->bts", q, k).reshape(2, N, 6, 6) + added
        return jax.nn.softmax(scores).reshape(2 * N, 6, 6) @ v

    return fun


def tiled(added):
    """The bias itself has batch and heads as one axis."""

    def fun(q, k, v):
        q, k, v = (x.swapaxes(1, 2).reshape(2 * N, 6, H) for x in (q, k, v))
        scores = jnp.einsum("btd,bsd->bts", q, k) + jnp.tile(jnp.asarray(added), (2, 1, 1))
        return jax.nn.softmax(scores) @ v

    return fun


def transposed(added):
    def fun(q, k, v):
        scores = jnp.einsum("bthd,bshd->tbhs", q, k) + added.transpose(1, 0, 2)[:, None]
        return jnp.einsum("tbhs,bshd->bthd", jax.nn.softmax(scores), v)

    return fun


PER_HEAD = {
    "slopes": SLOPES[:, None, None] * positions(6),
    "mask": np.where(np.arange(6) <= np.arange(6)[:, None], 0, -1e9)[None] * np.array([1, 1, 0, 1])[:, None, None],
    "bands": np.where(np.abs(distances(6)) < np.array([1, 2, 3, 9])[:, None, None], 0, -1e9),
}


@pytest.mark.parametrize("form", [split, merged, tiled, transposed])
@pytest.mark.parametrize("added", PER_HEAD)
def test_a_constant_for_each_head_in_any_layout(form, added):
    fun = form(PER_HEAD[added].astype(np.float32))
    q, k, v = normal(2, 6, N, H)
    fused = mpjax.autocast(fun, "mixed_bfloat16", rules=Rules(attention="xla"))
    (row,) = [row for row in mpjax.explain(fused, q, k, v).rows if "attention" in row.op]
    assert row.op == "fused_attention", row.why
    assert relative([jax.jit(fused)(q, k, v)], [in_numpy(fun)(q, k, v)]) < 0.02
    assert mpjax.audit(lambda *args: jnp.sum(fused(*args)), q, k, v)


def test_batch_and_heads_as_one_axis_with_a_bias_from_a_mask():
    """As in BLOOM. On a CPU, the layout of these products has no kernel with half operands and a float32 result."""

    def fun(q, k, v, seen):
        alibi = (SLOPES[:, None] * ((jnp.cumsum(seen, -1) - 1) * seen)[:, None]).reshape(2 * N, 1, 6)
        q, k, v = (x.swapaxes(1, 2).reshape(2 * N, 6, H) for x in (q, k, v))
        scores = (alibi + q @ k.swapaxes(1, 2) / 4).reshape(2, N, 6, 6)
        scores = scores + jnp.triu(jnp.ones((6, 6)), 1) * -1e9 + (1 - seen)[:, None, None] * -1e30
        return jax.nn.softmax(scores).reshape(2 * N, 6, 6) @ v

    q, k, v = normal(2, 6, N, H)
    seen = np.float32([[1, 1, 1, 1, 0, 0], [1] * 6])
    fused = mpjax.autocast(fun, "mixed_bfloat16", rules=Rules(attention="xla"))
    assert "fused_attention" in [row.op for row in mpjax.explain(fused, q, k, v, seen).rows]
    gradient = lambda fun: jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(fun(*args))), (0, 1, 2)))(q, k, v, seen)
    assert (relative(gradient(fused), gradient(fun)) < 0.03).all()


WINDOWS = {
    "tril": (lambda n: jnp.tril(jnp.ones((n, n), bool)), "causal"),
    "compared positions": (lambda n: jnp.arange(n)[:, None] >= jnp.arange(n)[None], "causal"),
    "in float32": (lambda n: jnp.arange(n, dtype=jnp.float32)[:, None] >= jnp.arange(n, dtype=jnp.float32), "causal"),
    "NumPy": (lambda n: np.tril(np.ones((n, n), bool)), "causal"),
    "band": (lambda n: jnp.abs(jnp.arange(n)[:, None] - jnp.arange(n)) <= 3, "window (3, 3)"),
    "product of two": (
        lambda n: jnp.tri(n, dtype=bool) & jnp.triu(jnp.ones((n, n), bool), -7),
        "causal, window (7, 0)",
    ),
    "not": (lambda n: ~(jnp.arange(n)[:, None] < jnp.arange(n)), "causal"),
    "of integers": (lambda n: (jnp.tri(n, dtype=jnp.int32) * 2 - 1) > 0, "causal"),
    "a hole": (lambda n: np.tril(np.ones((n, n), bool)) & (np.arange(n * n).reshape(n, n) != n + 1), "mask"),
    "prefix": (lambda n: (jnp.arange(n)[:, None] >= jnp.arange(n)) | (jnp.arange(n) < 4), "mask"),
    "every other": (lambda n: (jnp.arange(n)[:, None] - jnp.arange(n)) % 2 == 0, "mask"),
    "blocks": (lambda n: jnp.arange(n)[:, None] // 4 == jnp.arange(n) // 4, "mask"),
    "in float16": (lambda n: jnp.arange(n, dtype=jnp.float16)[:, None] >= jnp.arange(n, dtype=jnp.float16), "causal"),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_constant_mask_is_what_is_computed(name):
    mask, kind = WINDOWS[name]

    def fun(q, k, v):
        scores = jnp.where(mask(12), jnp.einsum("thd,shd->hts", q, k), -1e30)
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v)

    q, k, v = normal(12, N, H)
    fused = mpjax.autocast(fun, "mixed_bfloat16", rules=Rules(attention="xla"))
    (row,) = [row for row in mpjax.explain(fused, q, k, v).rows if "attention" in row.op]
    assert row.why == f"xla: stores no scores, {kind}"
    assert relative([jax.jit(fused)(q, k, v)], [in_numpy(fun)(q, k, v)]) < 0.02


def test_tracing_16_thousand_tokens_makes_no_array_of_scores():
    code = """
        import resource, jax, jax.numpy as jnp, mpjax

        def loss(q, k, v):
            n = q.shape[1]
            seen = jnp.tril(jnp.ones((n, n), bool)) & (jnp.arange(n)[:, None] - jnp.arange(n) < 4096)
            scores = jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, k), -1e30)
            return jnp.sum(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v))

        def trace(n):
            x = jax.ShapeDtypeStruct((1, n, 2, 64), jnp.float32)
            for choice in ("xla", "unfused"):
                fun = mpjax.autocast(loss, "mixed_bfloat16", rules=mpjax.Rules(attention=choice))
                jax.make_jaxpr(jax.grad(fun))(x, x, x)
                why = [row.why for row in mpjax.explain(fun, x, x, x).rows if "attention" in row.op]
                mpjax.audit(fun, x, x, x)
            return why

        trace(64)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trace(16384)
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 0.3e9
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
