"""Attentions that no kernel computes are divided by the sums of their softmax after the product with their values."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax import Rules
from mpjax.casting.attention import division
from mpjax.kernels.softmax import exponentials
from testing import measures
from testing.platforms import tpu
from testing.random_programs.evaluate import in_numpy
from testing.sensitive import Kind, error_of_by_hand

pytestmark = pytest.mark.standard_promotion
B, T, N, H = 1, division.SHORTEST, 2, 8
MOVES = ("transpose", "reshape", "convert_element_type", "optimization_barrier")


def scores(q, k, order="bnts"):
    return jnp.einsum(f"btnh,bsnh->{order}", q, k)


def average(weights, v):
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def einsum(q, k, v):
    return average(jax.nn.softmax(scores(q, k)), v)


def masked(q, k, v):
    return average(jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T))), scores(q, k), -jnp.inf)), v)


def causal(s, hidden=-1e9, offset=0):
    return jnp.where(jnp.tril(jnp.ones((T, T), bool), offset), s, hidden)


def scaled(q, k, v):
    return average(jax.nn.softmax(causal(scores(q, k) * -0.3, jnp.finfo(jnp.float32).min)), v)


def scaled_after_its_mask(q, k, v):
    return average(jax.nn.softmax(causal(scores(q, k)) / np.sqrt(H)), v)


def two_masks(q, k, v):
    """The first selects a number where it is true; the last one is added."""
    far = jnp.arange(T)[:, None] - jnp.arange(T) > T // 2
    s = jnp.where(far, -jnp.inf, causal(2.0 * scores(q, k)))
    return average(jax.nn.softmax(s + jnp.where(jnp.arange(T) % 3 == 0, -1e9, 0.0)), v)


def rows_without_keys(q, k, v):
    return average(jax.nn.softmax(causal(scores(q, k), offset=-3)), v)


def with_bias(q, k, v):
    return average(jax.nn.softmax(causal(2.0 * scores(q, k) + v[..., 0].swapaxes(1, 2)[:, :, None])), v)


def by_hand(q, k, v, shift=lambda s: s.max(-1, keepdims=True), over=lambda e, total: e / total):
    s = scores(q, k)
    e = jnp.exp(s - shift(s))
    return average(over(e, e.sum(-1, keepdims=True)), v)


def keys_first(q, k, v):
    return jnp.einsum("bnst,bsnh->btnh", jax.nn.softmax(scores(q, k, "bnst"), axis=2), v)


def flat_batch(q, k, v):
    q, k, v = (x.swapaxes(1, 2).reshape(B * N, T, H) for x in (q, k, v))
    return (jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v).reshape(B, N, T, H).swapaxes(1, 2)


def two_axes(q, k, v):
    k, v = (x.reshape(B, T // 3, 3, N, H) for x in (k, v))
    return jnp.einsum("bntxy,bxynh->btnh", jax.nn.softmax(jnp.einsum("btnh,bxynh->bntxy", q, k), (-2, -1)), v)


def one_query(q, k, v):
    return jax.vmap(jax.vmap(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, 1, 1))(q, k, v)


def in_a_scan(q, k, v):
    return lax.scan(lambda c, qkv: (c, einsum(*(x[None] for x in qkv))[0]), 0, (q, k, v))[1]


def flax_dropout(q, k, v):
    options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.25, "deterministic": False}
    return nn.dot_product_attention(q, k, v, broadcast_dropout=False, **options)


def where_dropout(q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    return average(jnp.where(jax.random.bernoulli(jax.random.key(0), 0.75, weights.shape), weights / 0.75, 0.0), v)


WAYS = [einsum, masked, by_hand, keys_first, flat_batch, two_axes, one_query, in_a_scan, flax_dropout, where_dropout]
WAYS += [scaled, scaled_after_its_mask, two_masks, rows_without_keys, with_bias]
LATER = {fun.__name__: fun for fun in WAYS} | {
    "flax": nn.dot_product_attention,
    "jax": functools.partial(jax.nn.dot_product_attention, is_causal=True),
    "stopped": functools.partial(by_hand, shift=lambda s: lax.stop_gradient(s.max(-1, keepdims=True))),
    "reciprocal": functools.partial(by_hand, over=lambda e, total: e * (1 / total)),
    "remat": jax.checkpoint(einsum),
}


def returned(q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    return average(weights, v) + weights.mean()


# Exponentials without a limit; of which something else reads the quotients or the sums; of another row's maximum.
AS_WRITTEN = {
    "no maximum": functools.partial(by_hand, shift=lambda s: 0.0),
    "a maximum of all": functools.partial(by_hand, shift=jnp.max),
    "a maximum over queries": functools.partial(by_hand, shift=lambda s: s.max(-2, keepdims=True)),
    "returned": returned,
    "squared": lambda q, k, v: average(jax.nn.softmax(scores(q, k)) ** 2, v),
    "rows of two sums": functools.partial(by_hand, over=lambda e, total: e / total + total / T),
    "short rows": lambda q, k, v: einsum(q, k[:, 1:], v[:, 1:]),
    "over queries": lambda q, k, v: average(jax.nn.softmax(scores(q, k), 2), v),
}


def loss_of(attention):
    def loss(p, x):
        q, k, v = ((x @ w + b).reshape(B, T, N, H) for w, b in zip(p["w"], p["b"], strict=True))
        return jnp.mean(jnp.tanh(attention(q, k, v).reshape(B, T, N * H) @ p["out"]) ** 2)

    return loss


def kind(attention, offset=0.0):
    rng = np.random.default_rng(0)
    draw = lambda *shape, scale: np.float32(scale * rng.normal(size=shape))
    params = {"w": draw(3, N * H, N * H, scale=0.25), "b": draw(3, N * H, scale=offset)}
    return Kind(loss_of(attention), params | {"out": draw(N * H, N * H, scale=0.25)}, draw(B, T, N * H, scale=1.0))


def cast(loss, policy="mixed_bfloat16", **rules):
    return mpjax.autocast(loss, policy, rules=Rules(attention="unfused", **rules))


def is_later(kind, **options):
    program = jax.make_jaxpr(cast(kind.loss, **options))(kind.params, kind.batch)
    return any(each.eqn.primitive.name == "reduce_precision" for each in measures.equations(program))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", LATER)
def test_the_error_is_that_of_casts_by_hand(name, dtype):
    found = kind(LATER[name], offset=1.0)
    assert is_later(found, policy=f"mixed_{dtype}")
    assert error_of_by_hand(found, lambda loss: cast(loss, f"mixed_{dtype}"), jnp.dtype(dtype)) <= 1.25


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_that_one_score_outweighs_are_as_exact_as_by_hand(dtype):
    """The derivative of the sum, taken from the result as FlashAttention does, would have 2.5 times the error."""
    found = error_of_by_hand(kind(einsum, offset=3.0), lambda loss: cast(loss, f"mixed_{dtype}"), jnp.dtype(dtype))
    assert found <= 1.25


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_other_quotients_stay_as_they_are_written(name):
    assert not is_later(kind(AS_WRITTEN[name]))


def test_calls_without_a_name_are_no_dropout():
    """JAX's gradient of a checkpointed scan has a call without a name, which had stopped the search: a `KeyError`."""

    @jax.checkpoint
    def steps(a, h):
        return lax.scan(lambda s, each: (each[0] * s + each[1],) * 2, jnp.zeros(h.shape[1:]), (a, h))[1]

    def loss(w, x):
        h = x @ w
        return jnp.mean((steps(jnp.exp(-jax.nn.softplus(h)), h) @ w) ** 2)

    w, x = jnp.eye(4), jnp.ones((8, division.SHORTEST, 4))
    assert measures.half_share(mpjax.autocast(jax.grad(loss)), w, x) == 1.0


@pytest.mark.parametrize(
    "rules",
    [
        {"level": "half"},
        {"level": "conservative"},
        {"residuals": "full"},
        {"deny": ["reduce_max"]},
        {"allow": ["exp"]},
    ],
)
def test_rules_keep_it_as_it_is_written(rules):
    assert is_later(kind(einsum))
    assert not is_later(kind(einsum), **rules)


@pytest.mark.parametrize("residuals", ["int8", "float8_stochastic"])
def test_residuals_in_eight_bits_are_no_reason_to_keep_it_as_it_is_written(residuals):
    assert is_later(kind(einsum), residuals=residuals)


def test_a_tpu_runs_it_as_it_is_written():
    """XLA computes probabilities in the kernels that read them there."""
    with tpu():
        assert not is_later(kind(einsum))


def test_the_backward_pass_keeps_one_half_array_of_scores(monkeypatch):
    found = kind(einsum)
    kept = lambda: measures.residual_bytes(cast(found.loss), found.params, found.batch)
    later = kept()
    monkeypatch.setattr(division, "SHORTEST", T + 1)
    of_result = 4 * B * N * T * H  # in float32, for the mean of the derivative
    assert kept() - later == pytest.approx(2 * B * N * T * T - of_result, rel=0.05)


SIMPLE = [scaled, scaled_after_its_mask, two_masks, rows_without_keys, einsum, masked, keys_first, by_hand]


@pytest.mark.parametrize("attention", SIMPLE)
def test_the_derivative_of_scores_is_one_product_in_half(attention):
    """XLA for GPUs computes it in the matmul's kernel, but neither masks, nor scales in float32."""
    found = kind(attention)
    _, backward = jax.vjp(cast(found.loss), found.params, found.batch)
    eqns = [each.eqn for each in measures.equations(jax.make_jaxpr(backward)(np.float32(1)))]
    of_scores = [eqn for eqn in eqns if "jaxpr" not in eqn.params and eqn.outvars[0].aval.size == B * N * T * T]
    names = {(eqn.primitive.name, str(eqn.outvars[0].aval.dtype)) for eqn in of_scores}
    assert {each for each in names if each[0] not in MOVES} == {("dot_general", "float32"), ("mul", "bfloat16")}


def results_of_exponentials(attention):
    found = kind(attention)
    rows = mpjax.explain(cast(found.loss), found.params, found.batch).rows
    return next(row.dtypes_out for row in rows if row.op == "softmax_exponentials")


@pytest.mark.parametrize("attention", [with_bias, flax_dropout, where_dropout])
def test_biases_with_a_gradient_and_dropouts_keep_the_mean_of_the_scores(attention):
    assert results_of_exponentials(attention) == ("bfloat16", "float32")


def test_rows_that_are_short_for_their_values_keep_the_mean_of_the_scores(monkeypatch):
    assert results_of_exponentials(einsum) == ("bfloat16", "float32", "float32")
    monkeypatch.setattr(division, "LONG", T // H + 1)
    assert results_of_exponentials(einsum) == ("bfloat16", "float32")


def along(fun, direction):
    return lambda p, x: jax.jvp(lambda p: fun(p, x), [p], [direction])[1]


def of_examples(fun, direction):
    return lambda p, x: jax.vmap(jax.grad(fun), (None, 0))(p, x[None])


def along_gradient(fun, direction):
    return jax.grad(along(fun, direction))


@pytest.mark.parametrize("derivative", [along, of_examples, along_gradient])
def test_derivatives_are_as_exact_as_as_written(derivative, monkeypatch):
    found = kind(einsum)
    direction = jax.tree.map(lambda x: np.float32(np.cos(np.arange(x.size)).reshape(x.shape)), found.params)
    run = lambda fun: jax.jit(derivative(fun, direction))(found.params, found.batch)
    exact, later = in_numpy(derivative(found.loss, direction))(found.params, found.batch), run(cast(found.loss))
    monkeypatch.setattr(division, "SHORTEST", T + 1)
    as_written = run(cast(found.loss))
    errors = [measures.relative_error(each, exact) for each in (later, as_written)]
    assert errors[0] <= 1.2 * errors[1]


def test_the_gradient_of_values_that_are_parameters_is_float32():
    """Two examples' gradients cancel up to bits that half lacks."""
    table = np.float32(np.random.default_rng(0).normal(size=(T, H)))

    def loss(table, x):
        return jnp.sum(jnp.asarray([1.0, -1.0])[:, None] * (jax.nn.softmax(x @ table.T) @ table))

    program = jax.make_jaxpr(jax.grad(cast(loss)))(table, np.ones((2, H), np.float32))
    assert any(each.eqn.primitive.name == "reduce_precision" for each in measures.equations(program))
    wide = [each.eqn for each in measures.matmuls_of(program) if each.eqn.outvars[0].aval.shape in ((T, H), (H, T))]
    assert wide
    assert all(eqn.outvars[0].aval.dtype == np.float32 for eqn in wide)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_exponentials_are_rounded_as_a_cast_does(half):
    x = np.float32(np.concatenate([np.linspace(-20, 0, 1000), [-87, -1e4, -np.inf]]))
    low, total = jax.jit(exponentials, static_argnums=(1, 2))(x, (0,), np.dtype(half))
    np.testing.assert_array_equal(low, jnp.exp(x).astype(half))
    np.testing.assert_allclose(total, np.sum(np.float64(low)), rtol=1e-6)


def test_explain_says_where_it_is_divided():
    found = kind(einsum)
    rows = mpjax.explain(cast(found.loss), found.params, found.batch).rows
    by_name = {row.op: row for row in rows}
    assert "divided by the sums" in by_name["softmax_product"].why
    assert by_name["softmax_product"].dtypes_in == ("bfloat16",)
    assert by_name["softmax_exponentials"].dtypes_out == ("bfloat16", "float32", "float32")


def test_a_mask_that_multiplies_is_kept_in_half():
    """It is a parameter to autocast, and its float32 would be the largest array that the backward pass keeps."""

    def loss(w, x):
        keep = jax.random.bernoulli(jax.random.key(0), 0.75, (64, 16)).astype(jnp.float32)
        return jnp.mean((x @ w * keep) @ w)

    w, x = np.ones((16, 16), np.float32), np.ones((64, 16), np.float32)
    kept = measures.residual_bytes(cast(loss), w, x)
    without = measures.residual_bytes(cast(lambda w, x: jnp.mean((x @ w * 0.5) @ w)), w, x)
    assert kept - without <= 2 * 64 * 16
