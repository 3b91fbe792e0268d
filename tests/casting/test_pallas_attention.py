"""Attention on TPUs: Pallas's flash attention, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

import mpjax
from mpjax import Rules
from mpjax.planning.target import TARGETS, placed, traced_for
from testing import measures
from testing.platforms import tpu

pytestmark = pytest.mark.standard_promotion
B, T, N, H = 1, 256, 2, 8


def attention(q, k, v, seen=None):
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(H)
    scores = scores if seen is None else jnp.where(seen, scores, -1e30)
    return jnp.mean(jnp.sin(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)))


def arrays(tokens=T, heads=N):
    rng = np.random.default_rng(0)
    shapes = [(B, tokens, N, H), (B, tokens, heads, H), (B, tokens, heads, H)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def autocast(fun, choice):
    return mpjax.autocast(fun, "mixed_bfloat16", rules=Rules(attention=choice))


def why(*args, choice="fused", fun=attention):
    with tpu():
        (row,) = [row for row in mpjax.explain(autocast(fun, choice), *args).rows if "attention" in row.op]
    return row.op, row.why


def error(found, reference):
    pairs = zip(found, reference, strict=True)
    return np.sqrt(sum(np.sum((np.asarray(a) - b) ** 2) / np.sum(np.square(b)) for a, b in pairs))


@pytest.mark.filterwarnings("ignore:.*attention='pallas'.*can't split it over devices")
@pytest.mark.parametrize(("mask", "heads"), [(None, N), (np.tril(np.ones((T, T), bool)), 1)])
def test_attention_is_fused_on_a_tpu_and_as_exact_as_today(mask, heads):
    args = arrays(heads=heads)
    loss = lambda q, k, v: attention(q, k, v, mask)
    with tpu():
        traced = jax.jit(jax.grad(autocast(loss, "fused"), (0, 1, 2))).trace(*args)
        shapes = [v.aval.shape for e in measures.equations(traced.jaxpr) for v in e.eqn.outvars]
        assert (B, N, T, T) not in shapes
        assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3
    with pltpu.force_tpu_interpret_mode():
        found = jax.grad(autocast(loss, "pallas"), (0, 1, 2))(*args)
    exact = [np.asarray(x) for x in jax.grad(loss, (0, 1, 2))(*args)]
    today = jax.grad(autocast(loss, "unfused"), (0, 1, 2))(*args)
    assert error(found, exact) <= 1.1 * error(today, exact)


def test_what_the_kernel_does_not_compute_stays_as_it_is_written():
    padding = jnp.arange(T) < 100
    assert why(*arrays()) == ("fused_attention", "pallas: stores no scores")
    assert why(*arrays(), padding) == (
        "attention",
        "pallas refuses it: it would store a mask, a bias or a window for each score",
    )
    assert why(*arrays(tokens=96)) == ("attention", "pallas refuses it: 96 × 96 tokens are not multiples of 128")


def test_by_default_long_rows_are_fused(monkeypatch):
    fused = ("fused_attention", "pallas: stores no scores")
    assert why(*arrays(tokens=1024), choice="auto") == fused
    op, short = why(*arrays(tokens=512), choice="auto")
    assert (op, short[:37]) == ("attention", "auto: its rows have 512 scores, and o")
    with jax.debug_nans(True):
        assert why(*arrays(tokens=1024), choice="auto")[1].startswith("auto: jax_debug_nans")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    assert why(*arrays(tokens=1024), choice="auto")[1].startswith("auto: the kernel's backward pass")
    assert why(*arrays(tokens=1024)) == fused


def test_a_kernel_without_a_cap_leaves_the_program_as_it_is():
    def capped(q, k, v):
        scores = 5 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, k) / 5)
        return jnp.mean(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v))

    assert why(*arrays(tokens=1024), choice="auto", fun=capped) == (
        "attention",
        "pallas refuses it: it does not cap scores",
    )


def test_a_program_that_xla_splits_over_devices_stays_as_it_is_written():
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        explained = mpjax.explain(autocast(attention, "pallas"), *arrays())
    (row,) = [row for row in explained.rows if row.op == "attention"]
    assert row.why.startswith("pallas refuses it: XLA can't split it")


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_libtpu_compiles_the_kernel_with_its_gradient(chip):
    target = TARGETS[chip]
    devices = target.devices()
    if devices is None:
        pytest.skip(target.missing)
    shapes = placed([jax.ShapeDtypeStruct((1, 1024, N, 64), jnp.float32)] * 3, SingleDeviceSharding(devices[0]))
    for choice in ("fused", "unfused"):
        with traced_for(devices[0]):
            traced = jax.jit(jax.grad(autocast(attention, choice), (0, 1, 2))).trace(*shapes)
        text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
        assert text.count('custom_call_target="tpu_custom_call"') == 3 * (choice == "fused")
        assert ("1024,1024]" in text) == (choice == "unfused")
