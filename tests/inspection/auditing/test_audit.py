"""`mpjax.audit`: FLOPs against counts by hand, and programs with exactly one known fault."""

from __future__ import annotations

import csv
import io
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.experimental import pallas as pl

import mpjax
from examples.imagenet.models import create_model
from mpjax.inspection.auditing.risks import MEANINGS as RISK_MEANINGS
from mpjax.inspection.devices import DEVICES, device_of
from testing import measures
from testing.models.zoo import REGISTRY, harness

F16, BF16, F32, I8 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.int8


def shape(*sizes, dtype=F16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def forward_and_backward(report):
    return tuple(sum(report.flops_by_phase[phase].values()) for phase in ("forward", "backward"))


# FLOPs, against sums by hand from the layers' sizes


def resnet50_multiplications(side):
    """By the table of He et al.: 3, 4, 6 and 3 bottlenecks of 64, 128, 256 and 512; the stride is in the 3x3."""
    stem = (side // 2) ** 2 * 7 * 7 * 3 * 64
    total, side, features_in = stem, side // 4, 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            stride = 2 if block == 0 and width > 64 else 1
            total += side**2 * features_in * width
            before, side = side, side // stride
            total += side**2 * 9 * width * width + side**2 * width * 4 * width
            if block == 0:
                total += side**2 * features_in * 4 * width
            assert before == side * stride
            features_in = 4 * width
    return stem, total + 2048 * 1000


def test_resnet50_flops_are_those_of_its_layer_table():
    model = create_model("resnet50", 1000)
    images = shape(2, 224, 224, 3, dtype=F32)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 224, 224, 3))))

    def loss_fn(params, batch_stats, images):
        return jnp.mean(model.apply({"params": params, "batch_stats": batch_stats}, images))

    report = mpjax.audit(jax.grad(loss_fn), variables["params"], variables["batch_stats"], images)
    stem, total = resnet50_multiplications(224)
    assert total == 4_089_184_256, "the 4.1 billion multiplications of the literature"
    # By each layer's weights and by its input, but not by the images.
    assert forward_and_backward(report) == (2 * 2 * total, 2 * (2 * 2 * total - 2 * stem))
    assert {row.module for row in report.matmuls if row.phase == "backward"} == {row.module for row in report.matmuls}


def test_bert_base_encoder_flops_are_those_of_its_sizes():
    batch, length, width, heads, layers = 2, 128, 768, 12, 12

    def encoder(params, x):
        for p in params:
            q, k, v = (jnp.reshape(x @ p[name], (batch, length, heads, -1)) for name in "qkv")
            weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
            x += jnp.reshape(jnp.einsum("bhqk,bkhd->bqhd", weights, v), x.shape) @ p["o"]
            x += jax.nn.gelu(x @ p["up"]) @ p["down"]
        return jnp.mean(x)

    square = shape(width, width, dtype=F32)
    layer = dict.fromkeys("qkvo", square) | {
        "up": shape(width, 4 * width, dtype=F32),
        "down": shape(4 * width, width, dtype=F32),
    }
    report = mpjax.audit(jax.grad(encoder), [layer] * layers, shape(batch, length, width, dtype=F32))
    projections = length * width * width
    per_layer = 4 * projections + 2 * length * length * width + 2 * 4 * projections
    forward = 2 * batch * layers * per_layer
    # The first layer's q, k and v have no gradient by the input.
    assert forward_and_backward(report) == (forward, 2 * forward - 2 * batch * 3 * projections)


@pytest.fixture(scope="module")
def lstm():
    length, batch, inputs, hidden = 7, 16, 24, 40
    model = nn.RNN(nn.OptimizedLSTMCell(hidden), name="rnn")
    x = shape(batch, length, inputs, dtype=F32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(x.shape)))
    report = mpjax.audit(jax.grad(lambda params, x: jnp.mean(model.apply(params, x) ** 2)), params, x)
    return report, 2 * length * batch * inputs * 4 * hidden, 2 * length * batch * hidden * 4 * hidden


def test_lstm_flops_count_every_turn_of_its_scan(lstm):
    report, of_inputs, of_state = lstm
    assert forward_and_backward(report) == (of_inputs + of_state, of_inputs + 2 * of_state)
    assert {row.count % 7 for row in report.matmuls} == {0}


@pytest.mark.parametrize(
    ("side", "stride", "padding", "groups"), [(11, 1, "VALID", 1), (11, 2, "SAME", 1), (11, 3, 1, 4), (2, 1, "SAME", 1)]
)
def test_both_gradients_of_a_convolution_cost_what_it_costs(side, stride, padding, groups):
    model = nn.Conv(16, (3, 3), stride, padding=padding, feature_group_count=groups, use_bias=False)
    x = shape(2, side, side, 8, dtype=F32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(x.shape)))
    report = mpjax.audit(jax.grad(lambda p, x: model.apply(p, x).sum(), argnums=(0, 1)), params, x)
    forward, backward = forward_and_backward(report)
    assert backward == 2 * forward > 0


def test_recomputed_work_of_a_remat_stands_apart():
    w, x = shape(256, 256), shape(64, 256)
    fun = jax.checkpoint(lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w), dtype=F32))
    report = mpjax.audit(jax.value_and_grad(fun), w, x)
    one = 2 * 64 * 256 * 256
    assert report.flops_by_phase == {
        "forward": {"float16": 2 * one},
        "recomputed": {"float16": 2 * one},
        "backward": {"float16": 3 * one},
    }


def test_a_pallas_kernel_counts_for_its_whole_grid():
    def kernel(x, y, out):
        out[...] = x[...] @ y[...]

    matmul = pl.pallas_call(
        kernel,
        grid=(4, 2),
        in_specs=[pl.BlockSpec((64, 256), lambda i, j: (i, 0)), pl.BlockSpec((256, 128), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((64, 128), lambda i, j: (i, j)),
        out_shape=shape(256, 256),
    )
    assert mpjax.audit(matmul, shape(256, 256), shape(256, 256)).flops == {"float16": 2 * 256**3}


# What it takes


def test_takes_a_whole_train_step_and_modules_and_what_is_no_array():
    model = nnx.Linear(256, 256, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, mpjax.dynamic_loss_scale(optax.adam(1e-3)), wrt=nnx.Param)

    @nnx.jit(static_argnames="mode")
    def train_step(model, optimizer, x, mode):
        loss_fn = mpjax.autocast(lambda model: jnp.mean(model(x)))
        grads = nnx.grad(mpjax.scale_loss(loss_fn, optimizer.opt_state))(model)
        optimizer.update(model, grads)

    report = mpjax.audit(train_step, model, optimizer, shape(128, 256, dtype=F32), kwargs={"mode": "train"})
    assert report.flops_by_phase["backward"] == report.flops_by_phase["forward"] == {"float16": 2 * 128 * 256**2}
    assert report.residuals == {"float32": 4}, "the loss scale; the input is an argument, and cast again"
    # Under a module's name, the line in the layer.
    assert {(row.module, row.source.split(":")[0]) for row in report.matmuls} == {("Linear", "test_audit.py")}

    mlp = eqx.filter_eval_shape(eqx.nn.MLP, 256, 256, 256, 1, key=jax.random.key(0))
    report = mpjax.audit(eqx.filter_grad(lambda m, x: jnp.mean(jax.vmap(m)(x))), mlp, shape(256, 256, dtype=F32))
    assert forward_and_backward(report) == (2 * 2 * 256**3, 3 * 2 * 256**3)


@pytest.mark.parametrize(
    "name",
    """linen_cnn_batchnorm linen_transformer_scan_remat scan_lstm moe_ragged contrastive x64_statistics
    custom_vjp_linear shard_map_data gradient_penalty while_power switch_experts nnx_scanned_attention""".split(),
)
def test_autocast_programs_are_in_half_without_a_risk(name):
    program, (loss_fn, params, batch) = REGISTRY[name], harness.abstract(name)
    fun = mpjax.autocast(loss_fn, "mixed_float16")
    with program.context():
        gradient = jax.grad(fun, has_aux=program.has_aux) if program.differentiable else fun
        report = mpjax.audit(gradient, params, batch)
    report.assert_half(1.0)
    assert [risk.kind for risk in report.risks] == ["unscaled"] * program.differentiable


@pytest.mark.parametrize("name", "linen_cnn_batchnorm linen_lstm equinox_recurrent checkpoint_policies".split())
def test_residuals_are_those_of_the_tests_own_measure_from_the_loss_and_from_its_gradient(name):
    program, (loss_fn, params, batch) = REGISTRY[name], harness.abstract(name)
    assert program.has_aux is (name == "linen_cnn_batchnorm")
    expected = measures.residual_bytes(loss_fn, params, batch, has_aux=program.has_aux)
    gradient = jax.value_and_grad(loss_fn, has_aux=program.has_aux)
    reports = [mpjax.audit(fun, params, batch) for fun in (loss_fn, gradient)]
    assert [sum(report.residuals.values()) for report in reports] == [expected, expected]


def test_a_function_without_a_gradient_says_so():
    report = mpjax.audit(lambda x: jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ x, x), shape(256, 256))
    assert report.residuals is None
    assert any("has no gradient" in note for note in report.notes)
    assert any("while" in note and "one iteration" in note for note in report.notes)


# One known fault each

CLEAN, X, MASK, IDS = shape(256, 256), shape(256, 256), shape(256, 256, dtype=bool), shape(256, dtype=jnp.int32)
TABLE, PIXELS = shape(4096, 256), shape(8, 8, dtype=jnp.uint8)
KEY = jax.eval_shape(jax.random.key, 0)
FAULTS = {
    "float32 operands": (lambda x: x @ x, (shape(256, 256, dtype=F32),), ["dtype"]),
    "mixed operands": (lambda x, y: jax.lax.dot(x, y), (X, shape(256, 256, dtype=F32)), ["dtype"]),
    "252 is no multiple of 8": (lambda x, y: x @ y, (X, shape(256, 252)), ["dimension"]),
    "3 input channels": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (shape(8, 32, 32, 3), shape(7, 7, 3, 256)),
        ["dimension"],
    ),
    "a dimension of 64": (lambda x, y: x @ y, (shape(256, 64), shape(64, 256)), ["small"]),
    "tiny": (lambda x: x @ x, (shape(20, 20),), ["tiny"]),
    "exp": (lambda x: jnp.exp(x) @ x, (X,), ["exp"]),
    "log": (lambda x: jnp.log(x) @ x, (X,), ["log"]),
    "power": (lambda x: x**1.5 @ x, (X,), ["pow"]),
    "sum": (lambda x: jnp.sum(x, 0, dtype=F16, keepdims=True) + x @ x, (X,), ["sum"]),
    "softmax": (lambda x: jax.nn.softmax(x) @ x, (X,), ["softmax"]),
    "loss": (lambda x: jnp.sum(x @ x), (X,), ["loss"]),
    "factor": (lambda x: (x @ x) * 1e6, (X,), ["overflow"]),
    "upper bound": (lambda x, m: jnp.where(m, x @ x, 1e9), (X, MASK), ["overflow"]),
    "selected mask": (lambda x, m: jnp.where(m, x @ x, -1e9), (X, MASK), ["overflow"]),
    "added mask": (lambda x, m: x @ x + jnp.where(m, 0.0, -1e9).astype(F16), (X, MASK), ["overflow"]),
    "computed mask": (lambda x, m: x @ x + ((1.0 - m) * -1e9).astype(F16), (X, MASK), ["overflow"]),
    "scaled mask": (lambda x, m: x @ x + (1 - m.astype(F16)) * -1e9, (X, MASK), ["overflow"]),
    "array of a mask": (lambda x: x @ x + jnp.roll(jnp.full((8, 1), -1e9, F16), 1)[:1], (X,), ["overflow"]),
    "epsilon of a root": (lambda x: (x @ x) * jax.lax.rsqrt(x + 1e-8), (X,), ["epsilon"]),
    "epsilon of a quotient": (lambda x: (x @ x) / (jnp.sqrt(x) + 1e-8), (X,), ["epsilon"]),
    "cast epsilon": (lambda x: (x @ x) / (x + jnp.float32(1e-8).astype(F16)), (X,), ["epsilon"]),
    "array of an epsilon": (lambda x: (x @ x) / (x + jnp.full(x.shape, 1e-8).astype(F16)), (X,), ["epsilon"]),
    "sum of gradients": (
        lambda x, b: jax.grad(lambda b: jnp.sum(jnp.sin(x + b)))(b).astype(F16),
        (shape(256, 256, dtype=F32), shape(256, dtype=F32)),
        ["sum"],
    ),
    "count": (lambda x, n: (x @ x, n + jnp.ones((), F16)), (X, np.float16(0)), ["accumulator"]),
    "running mean": (lambda x, m, n: (x @ x, m + (x - m) / n.astype(F16)), (X, X, np.int32(9)), ["accumulator"]),
    "stored mean": (
        lambda x, m, n: (x @ x, (m + (x - m) / (n + 1)).astype(F16)),
        (X, X, np.float32(9)),
        ["accumulator"],
    ),
    "count in 8 bits": (lambda x, i: (x @ x, jnp.sum((i == 3).astype(I8), dtype=I8)), (X, IDS), ["wraps"]),
    "running count": (lambda x, i: (x @ x, jnp.cumsum((i == 3).astype(I8), dtype=I8)), (X, IDS), ["wraps"]),
    "count of a scan": (
        lambda x, i: (x @ x, jax.lax.scan(lambda n, id: (n + (id == 3).astype(I8), None), jnp.int8(0), i)[0]),
        (X, IDS),
        ["wraps"],
    ),
    "short count of a scan": (
        lambda x, i: (x @ x, jax.lax.scan(lambda n, id: (n + (id == 3).astype(I8), None), jnp.int8(0), i[:127])[0]),
        (X, IDS),
        [],
    ),
    "matmul in 8 bits": (lambda a: jax.lax.dot(a, a), (shape(256, 256, dtype=I8),), ["wraps"]),
    "sum of 16 bits": (lambda x, i: (x @ x, jnp.sum(i, dtype=jnp.int16)), (X, shape(9, dtype=jnp.int16)), ["wraps"]),
    "difference of pixels": (lambda x, a, b: (x @ x, (a - b) / 255), (X, PIXELS, PIXELS), ["wraps"]),
    "mean of two images": (lambda x, a, b: (x @ x, (a + b) / 2), (X, PIXELS, PIXELS), ["wraps"]),
    "centred pixels": (lambda x, a: (x @ x, (a - 128).astype(F32)), (X, PIXELS), ["wraps"]),
    "zero points": (
        lambda x, q, z: (x @ x, (q - z).astype(F32)),
        (X, shape(9, dtype=I8), shape(9, dtype=I8)),
        ["wraps"],
    ),
    "difference of samples": (lambda x, a: (x @ x, jnp.diff(a) / 2**15), (X, shape(9, dtype=jnp.int16)), ["wraps"]),
    "rounded ids": (lambda t, i: t[i.astype(F16).astype(jnp.int32)] @ t.T, (TABLE, IDS), ["ids"]),
    "compared ids": (lambda x, i: (x @ x) * (i.astype(F16) == 3).astype(F16), (X, IDS), ["ids"]),
    "log of noise": (
        lambda x, key: x @ x + -jnp.log(-jnp.log(jax.random.uniform(key, x.shape, F16))),
        (X, KEY),
        ["log"],
    ),
    "accumulated gradients": (
        lambda x, w, total: (x @ x, total + (jax.grad(lambda w: jnp.sum(jnp.sin(w)) * 8.0)(w) / 8).astype(F16)),
        (X, shape(9, dtype=F32), shape(9)),
        ["accumulator"],
    ),
    "positions": (lambda x: (x @ x) * jnp.arange(4096).astype(F16)[:256], (X,), ["ids"]),
    "positions of half": (lambda x: (x @ x) * jnp.arange(4096, dtype=F16)[:256], (X,), ["ids"]),
    "positions of a cumulative sum": (
        lambda x: (x @ x) * jnp.sin(jnp.cumsum(jnp.ones(4096, F16))[:256]),
        (X,),
        ["ids", "sum"],
    ),
    "positions in bfloat16": (
        lambda x: (x @ x) * jnp.arange(300).astype(BF16)[:256],
        (shape(256, 256, dtype=BF16),),
        ["ids"],
    ),
}
# What looks like a fault and is none.
FINE = {
    "plain": (lambda x: x @ x, (X,), []),
    "mask of -inf": (lambda x, m: jnp.where(m, x @ x, -jnp.inf), (X, MASK), []),
    "mask of the least": (lambda x, m: jnp.where(m, x @ x, jnp.finfo(F16).min), (X, MASK), []),
    "mask in bfloat16": (lambda x, m: jnp.where(m, x @ x, -1e9), (shape(256, 256, dtype=BF16), MASK), []),
    "bound of 1 beside a small number": (lambda x: (x @ x) * jnp.minimum(x / 200, 1.0) * 1e-4, (X,), []),
    "epsilon that half holds": (lambda x: (x @ x) * jax.lax.rsqrt(x + 1e-5), (X,), []),
    "root of a relu": (lambda x: jnp.sqrt(jax.nn.relu(x @ x)), (X,), []),
    "Python's sum": (lambda x: (x @ x) / sum([x, x]), (X,), []),
    "Python's sum of casts": (
        lambda x, w: (x @ x) / jnp.sqrt(sum([jnp.sum(w.astype(F16), dtype=F32).astype(F16)])),
        (X, shape(9, dtype=F32)),
        [],
    ),
    "test for NaN": (lambda x, i: (x @ x) * jnp.isnan(i.astype(F16) - 1).astype(F16), (X, IDS), []),
    "noise": (lambda x, key: x @ x + jax.random.normal(key, x.shape, F16), (X, KEY), []),
    "sample": (lambda x, key: x @ x + jax.random.categorical(key, x)[:, None].astype(F16), (X, KEY), []),
    "pixels": (lambda x, i: (i.astype(F16) / 255) @ x, (X, shape(256, 256, dtype=jnp.uint8)), []),
    "contrast of pixels": (
        lambda x, a: (x @ x, a / jnp.sqrt(jnp.mean(jnp.square(a.astype(F16)), 0))),
        (X, PIXELS),
        [],
    ),
    "noise of a gumbel": (lambda x, key: x @ x + jax.random.gumbel(key, x.shape, F16), (X, KEY), []),
    "inverted pixels": (lambda x, a: (x @ x, (255 - a) / 255), (X, PIXELS), []),
    "contrast": (lambda x, a: (x @ x, (a - a.min()) / (a.max() - a.min())), (X, PIXELS), []),
    "selected difference": (lambda x, a, b: (x @ x, jnp.where(a > b, a - b, b - a) / 255), (X, PIXELS, PIXELS), []),
    "labels from 1": (lambda x, i: (x @ x, (i - 1).astype(jnp.int32)), (X, PIXELS), []),
    "remainder": (lambda x, i, j: (x @ x, (i % j).astype(F32)), (X, shape(9, dtype=I8), shape(9, dtype=I8)), []),
    "hash of bytes": (lambda x, a, b: (x @ x, a + b), (X, PIXELS, PIXELS), []),
    "waves of positions": (lambda x: (x @ x) * jnp.sin(0.1 * jnp.arange(4096.0))[:256].astype(F16), (X,), []),
    "counts": (lambda x, i: (x @ x) * i.astype(F16), (X, IDS), []),
    "count that fits": (lambda x, i: (x @ x, jnp.sum((i[:100] == 3).astype(I8), dtype=I8)), (X, IDS), []),
    "matmul of 8 bits": (
        lambda a: jax.lax.dot(a, a, preferred_element_type=jnp.int32),
        (shape(256, 256, dtype=I8),),
        [],
    ),
    "truncation": (lambda x, m, t: (x @ x, m + (x - m) / t), (X, X, F16(2)), []),
    "interpolation": (lambda x, y, t: (x @ x, x + (y - x) * t), (X, X, F16(0.5)), []),
    "standard score": (lambda x, m, s: (x @ x, (x - m) / s), (X, X, F16(2)), []),
    "sum in float32": (lambda x: jnp.sum(jnp.sum(x @ x), dtype=F32), (X,), []),
}


@pytest.mark.parametrize("name", [*FAULTS, *FINE])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy's, of the mask
@pytest.mark.standard_promotion  # the faults are a user's
def test_names_just_the_one_fault(name):
    fun, args, expected = (FAULTS | FINE)[name]
    report = mpjax.audit(fun, *args)
    assert [found.kind for found in (*report.findings, *report.risks)] == expected
    places = {found.source.split(":")[0] for found in (*report.findings, *report.risks)}
    assert places <= {"test_audit.py"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("252 is no multiple of 8", "N = 252: pad to 256"),
        ("3 input channels", "input channels = 3: pad to 8"),
        ("added mask", "-1e+09 is beyond float16's 6.55e+04; jnp.finfo(dtype).min fits"),
        ("scaled mask", "a constant is beyond float16's range; jnp.finfo(dtype).min fits a mask, float32 a factor"),
        ("factor", "a constant is beyond float16's range; jnp.finfo(dtype).max fits a mask, float32 a factor"),
        ("upper bound", "jnp.finfo(dtype).max fits"),
        ("positions in bfloat16", "up to 299; bfloat16 holds all up to 256 only"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy's, of the mask
def test_says_what_would_do(name, words):
    report = mpjax.audit(*FAULTS[name][:1], *FAULTS[name][1])
    (found,) = (*report.findings, *report.risks)
    assert words in found.why
    assert words.split(":")[0].split(";")[0] in " ".join(str(report).split())


def test_forward_and_backward_of_a_bad_dimension_are_one_finding():
    fun = jax.grad(lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w.T, dtype=F32))
    report = mpjax.audit(fun, shape(256, 1000), shape(256, 256))
    assert [found.kind for found in report.findings] == []
    report = mpjax.audit(fun, shape(256, 1001), shape(256, 256))
    assert [found.kind for found in report.findings] == ["dimension"]
    assert report.findings[0].share == 1.0


# The report


@pytest.fixture(scope="module")
def report(lstm):
    return lstm[0]


def test_assert_half_fails_with_the_list_of_what_is_not(report):
    with pytest.raises(AssertionError) as error:
        report.assert_half()
    text = str(error.value)
    assert "0.00% of the matmul and convolution FLOPs" in text
    assert "rnn" in text
    assert "recurrent.py" in text
    assert "dot_general" in text
    assert "float32" in text
    assert "16×40" in text
    report.assert_half(min_share=0.0)
    with pytest.raises(AssertionError, match="no matmul"):
        mpjax.audit(jnp.sin, shape(2)).assert_half()


def test_assert_half_passes_where_the_share_is_enough():
    fun = lambda x, y: (x @ x, y @ y)
    report = mpjax.audit(fun, X, shape(128, 128, dtype=F32))
    assert report.half_share == pytest.approx(8 / 9)
    report.assert_half(0.88)
    with pytest.raises(AssertionError, match=r"88\.89%.*less than 89\.00%"):
        report.assert_half(0.89)


def test_files_have_every_row_and_need_nothing_else(report, tmp_path):
    assert json.loads(report.to_json(tmp_path / "r.json"))["flops"] == report.flops
    assert json.loads((tmp_path / "r.json").read_text())["matmuls"][0]["module"] == report.matmuls[0].module
    rows = list(csv.DictReader(io.StringIO(report.to_csv(tmp_path / "r.csv"))))
    assert sum(int(row["flops"]) for row in rows) == sum(report.flops.values())
    page = report.to_html(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == page
    assert "http" not in page
    assert "src=" not in page
    assert all(row.module in page for row in report.matmuls)


# The bound on speedup


def test_no_program_beats_its_matmuls_at_the_peak_rates():
    n = 8192
    half, wide = shape(n, n), shape(n, n, dtype=F32)
    in_half, in_float32 = (mpjax.audit(lambda x: x @ x, x).speedup_bound("V100") for x in (half, wide))
    assert in_half.least == in_float32.least_half == pytest.approx(2 * n**3 / 125e12)
    assert in_half.speedup == in_float32.limit == pytest.approx(125 / 15.7)
    assert in_float32.speedup == 1
    assert mpjax.audit(lambda x: x @ x, half).speedup_bound("L4").speedup == pytest.approx(121 / 60), "of memory: 2"


def test_devices_go_by_jax_names_and_unknown_ones_are_refused():
    assert device_of("NVIDIA H100 80GB HBM3").name == "H100"
    assert device_of("Tesla V100-SXM2-16GB").bfloat16 == DEVICES["V100"].float32, "no bfloat16 before Ampere"
    assert device_of("NVIDIA A100-SXM4-40GB").bandwidth == 1555e9, "the variant, not the first A100 of the table"
    assert device_of("NVIDIA GeForce RTX 4090").name == "RTX 4090"
    assert [device_of(kind).name for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite")] == [
        "TPU v5e",
        "TPU v5p",
        "TPU v6e",
    ]
    with pytest.raises(ValueError, match=r"'B100'.*did you mean.*B200.*most like"):
        device_of("B100")


def test_the_table_has_the_devices_of_today_with_a_source_each():
    assert len(DEVICES) >= 15
    for name, device in DEVICES.items():
        assert name == device.name
        assert device.source
        assert 1e11 < device.bandwidth < 1e13
        assert device.float8 >= device.float16 >= device.tfloat32 >= device.float32 >= device.float64 > 1e11
    assert {"B200", "GB200", "MI300X", "RTX 4090", "RTX 5090", "A10G", "TPU v5e", "TPU v5p", "TPU v6e"} <= {*DEVICES}
    assert {"B300", "MI350X", "MI355X", "TPU7x"} <= {*DEVICES}
    assert device_of("TPU7x").float8 == 2 * device_of("TPU7x").bfloat16 == 4.614e15


def test_float8_matmuls_are_bounded_by_the_rate_of_float8():
    x = shape(4096, 4096, dtype=jnp.float8_e4m3fn)
    report = mpjax.audit(lambda x: jax.lax.dot(x, x, preferred_element_type=jnp.bfloat16), x)
    least = {name: report.speedup_bound(name).least for name in ("A100", "H100", "TPU7x")}
    assert least["H100"] == pytest.approx(2 * 4096**3 / 1978.9e12)
    assert least["TPU7x"] == pytest.approx(2 * 4096**3 / 4614e12)
    assert least["A100"] == pytest.approx(2 * 4096**3 / 312e12)


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.0), ("float8_e4m3fn", 1.0)])
def test_the_answer_names_the_kind_of_eight_bits(dtype, share):
    report = mpjax.audit(lambda a: jax.lax.dot(a, a, preferred_element_type=F32), shape(64, 64, dtype=dtype))
    assert report.float8_share == share
    assert f"(100.0% in {dtype.partition('_')[0]})" in str(report)


def test_one_device_is_chosen_by_its_name():
    text = mpjax.audit(lambda x: x @ x, shape(256, 256), device="T4").text()
    assert "T4" in text
    assert "V100" not in text


def test_mixed_operands_come_with_the_way_out():
    findings = mpjax.audit(lambda x, y: jax.lax.dot(x, y), X, shape(256, 256, dtype=F32)).findings
    assert [f.why for f in findings] == [
        "float16 and float32 operands: cast the float32 one (created in the model? Use jnp.zeros(shape, x.dtype))"
    ]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("promote", [lambda h: h * np.float32(0.5), lambda h: h + jnp.arange(256.0)])
def test_the_line_that_widens_an_operand_is_named(promote):
    def fun(x, w):
        h = jnp.tanh(x @ w)
        h = promote(h)
        return h.T @ w

    line = promote.__code__.co_firstlineno
    (found,) = (f for f in mpjax.audit(fun, X, X).findings if f.kind == "dtype")
    assert found.why.startswith(f"float32 and float16 operands, widened at test_audit.py:{line}: use half numbers")


def test_a_program_of_49_equal_layers_without_half_is_told_so():
    assert math.fsum([1 / 49] * 49) < 1  # so a sum of rounded shares is not the share of all

    def layers(x, w):
        for i in range(49):
            with jax.named_scope(f"layer_{i}"):
                x = x @ w
        return x

    square = shape(128, 128, dtype=F32)
    assert "nothing is in half" in str(mpjax.audit(layers, square, square))


@pytest.mark.parametrize(
    ("fun", "kinds"),
    [
        (lambda x: jnp.log(jax.nn.softmax(x)), {"softmax", "log"}),
        (lambda x: jax.nn.log_softmax(x), {"softmax"}),
    ],
)
def test_the_log_of_a_softmax_on_one_line_is_a_risk_of_its_own(fun, kinds):
    assert {risk.kind for risk in mpjax.audit(fun, shape(8, 8)).risks} == kinds


def attention(q, k, v):
    scores = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), jnp.einsum("bthd,bshd->bhts", q, k), -jnp.inf)
    return jnp.mean(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v) ** 2)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("wrap", [lambda loss: loss, jax.grad, lambda loss: jax.jit(jax.grad(loss))])
def test_the_advice_on_attention_removes_the_scores(wrap):
    q = jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.float32)
    scores = 2 * 4 * 64 * 64 * 2
    audited = lambda rules: mpjax.audit(wrap(mpjax.autocast(attention, "mixed_bfloat16", rules=rules)), q, q, q)
    as_written, fused = audited(None), audited(mpjax.Rules(attention="xla"))
    assert (as_written.scores, fused.scores) == (scores, 0)
    # q, k, v and the result, and a number for each row: nothing of 64 × 64.
    assert sum(fused.residuals.values()) == 4 * 2 * 64 * 4 * 16 * 2 + 2 * 64 * 4 * 4
    kept = f"scores: 65.5 kB of {sum(as_written.residuals.values()) / 1e3:.1f} kB; Rules(attention='fused') stores none"
    assert kept in str(as_written)
    assert "scores:" not in str(fused)


@pytest.mark.standard_promotion
def test_repeated_keys_and_values_are_no_scores():
    def grouped(q, k, v):  # fused attention keeps no repeats, which have another size than the scores
        return attention(q, jnp.repeat(k, 4, 2), jnp.repeat(v, 4, 2))

    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 16), jnp.float32) for heads in (4, 1))
    for _ in range(2):  # the second trial does not find the first one's trace
        audited = mpjax.audit(jax.jit(jax.grad(mpjax.autocast(grouped, "mixed_bfloat16"))), q, k, k)
        assert audited.scores == 2 * 4 * 64 * 64 * 2


def test_what_is_kept_for_the_backward_pass_has_the_line_that_makes_it():
    def loss(w, x):
        with jax.named_scope("large"):
            h = jnp.exp(jnp.concatenate([x] * 4) @ w)
        with jax.named_scope("small"):
            return jnp.mean(jnp.sin(x @ w)) + jnp.mean(h)

    report = mpjax.audit(jax.grad(loss), shape(64, 64, dtype=F32), shape(128, 64, dtype=F32))
    assert sum(row.bytes for row in report.kept) <= sum(report.residuals.values())
    first = report.kept[0]
    assert (first.module, first.bytes) == ("large", 4 * 128 * 64 * 4)
    assert first.source.startswith("test_audit.py:")
    assert str(report).split("kept by")[1].splitlines()[2].startswith("large")


# Constants that half rounds away, against those that were written as 0 or 1.

LOST = {
    "an epsilon of the caller": (lambda x, eps: x / (jnp.sqrt(x) + eps), 1e-8, F16, {"epsilon"}),
    "an epsilon that float16 holds": (lambda x, eps: x / (jnp.sqrt(x) + eps), 1e-4, F16, set()),
    "an epsilon of 0": (lambda x, eps: jnp.sqrt(x + eps), 0.0, F16, set()),
    "the largest probability": (lambda x, top: jnp.minimum(x, top), 1 - 1e-6, BF16, {"constant"}),
    "a decay": (lambda x, decay: decay * x + x, 0.999, BF16, {"constant"}),
    "a decay of 1": (lambda x, decay: decay * x + x, 1.0, BF16, set()),
    "a decay that bfloat16 holds": (lambda x, decay: decay * x + x, 0.99, BF16, set()),
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.standard_promotion
def test_a_constant_is_compared_with_what_was_written(name):
    fun, constant, dtype, expected = LOST[name]
    found = mpjax.audit(lambda x: fun(x, constant), shape(8, 8, dtype=dtype)).risks
    assert {risk.kind for risk in found} == expected, found
    assert all(f"{constant:.7g} is " in risk.why for risk in found)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # NumPy's, of the bound
@pytest.mark.standard_promotion
def test_the_text_of_the_line_tells_what_a_cast_of_the_code_itself_rounded():
    def literal(x):
        x = x.astype(F16)
        return x / (jnp.abs(x) + 1e-8)

    def zero(x):
        x = x.astype(F16)
        return x / (jnp.abs(x) + 0.0)

    def name(x, epsilon=1e-8):
        x = x.astype(F16)
        return x / (jnp.abs(x) + epsilon)

    # fmt: off
    def decay(x):
        x = x.astype(F16)
        return jnp.asarray(.9999, F16) * x  # without a zero, and rounded in float32 too

    def bound(x):
        x = x.astype(F16)
        return jnp.minimum(x, jnp.asarray(65_536.0, F16))
    # fmt: on

    functions = literal, zero, name, decay, bound
    reasons = [[risk.why for risk in mpjax.audit(f, shape(8, 8, dtype=F32)).risks] for f in functions]
    assert reasons[0][0].startswith("1e-08 is zero in float16")
    assert reasons[1] == []
    assert reasons[2] == ["zero in float16: nothing guards this div"]
    assert [reason[0].split(" is ")[0] for reason in reasons[3:]] == ["0.9999", "65536"]


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_an_optimizer_of_half_gradients_is_named_where_it_fails(dtype):
    params = {"w": shape(8, 8, dtype=dtype)}
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = jax.eval_shape(tx.init, params)
    risks = mpjax.audit(tx.update, params, state).risks
    found = {(risk.kind, risk.why.split(" is ")[0]) for risk in risks if risk.kind != "update"}
    expected = {
        F16: {("epsilon", "1e-08"), ("norm", RISK_MEANINGS["norm"])},
        BF16: {("constant", "0.999")},
        F32: set(),
    }
    assert found == expected[dtype]


@pytest.mark.standard_promotion  # optax's
def test_the_line_is_the_users_where_a_librarys_branch_knows_none():
    tx = optax.MultiSteps(optax.clip_by_global_norm(1.0), 1)

    def step(grads, state):
        return tx.update(grads, state)

    grads = {"w": jnp.ones(3, F16)}
    lines = [risk.source for risk in mpjax.audit(step, grads, tx.init(grads)).risks if risk.kind == "norm"]
    assert lines == [f"test_audit.py:{step.__code__.co_firstlineno + 1}"]


def test_a_norm_over_devices_is_a_norm():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    norm = lambda x: jnp.sqrt(jax.lax.psum(jnp.sum(x.astype(F16) ** 2), "data"))
    spec = jax.sharding.PartitionSpec
    fun = jax.shard_map(norm, mesh=mesh, in_specs=spec("data"), out_specs=spec())
    assert "norm" in [risk.kind for risk in mpjax.audit(fun, shape(8, 8, dtype=F32)).risks]
