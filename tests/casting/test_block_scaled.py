"""Block-scaled matmuls against a quantiser in NumPy, and the calls that GPUs get."""

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax import Float8, Rules
from mpjax.kernels import block_scaled
from mpjax.kernels.block_scaled import E4M3, multiply, operand
from mpjax.program import compat
from mpjax.program.formats import MXFP8, multiplies_blocks

BF16 = np.dtype(jnp.bfloat16)
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def rounded(x, names, contracted, dtype=ml_dtypes.float8_e4m3fn):
    """An array in float64, rounded in blocks of 32 along the contracted axes; axes have one-letter names."""
    order = [names.index(name) for name in contracted]
    x = np.moveaxis(np.asarray(x, np.float64), order, range(-len(order), 0))
    flat = x.reshape(*x.shape[: x.ndim - len(order)], -1)
    blocks = np.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 32)])
    blocks = blocks.reshape(*flat.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        scale = np.where(largest > 0, 2.0 ** np.ceil(np.log2(largest / LARGEST[np.dtype(dtype).name])), 1.0)
    back = (blocks / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale
    back = back.reshape(*flat.shape[:-1], -1)[..., : flat.shape[-1]].reshape(x.shape)
    return np.moveaxis(back, range(-len(order), 0), order)


@pytest.mark.parametrize(
    ("subscripts", "sizes"),
    [
        ("ik,kj->ij", {"i": 64, "k": 96, "j": 32}),
        ("ik,jk->ij", {"i": 64, "k": 96, "j": 32}),
        ("bsk,bsj->kj", {"b": 4, "s": 16, "k": 32, "j": 8}),
        ("bsk,sbj->kj", {"b": 4, "s": 16, "k": 32, "j": 8}),  # in another order
        ("bik,bkj->bij", {"b": 3, "i": 64, "k": 40, "j": 5}),  # 24 zeros are added to 40
        ("ibk,kbj->bij", {"b": 3, "i": 8, "k": 64, "j": 8}),
        ("ksj,kjn->sn", {"k": 32, "s": 3, "j": 16, "n": 7}),  # contracted axes are apart
    ],
)
def test_results_and_gradients_are_those_of_rounded_operands(subscripts, sizes):
    left, right, out = subscripts.replace("->", ",").split(",")
    summed = [name for name in left if name in right and name not in out]
    batch = [name for name in left if name in right and name in out]
    numbers = tuple(tuple(tuple(names.index(n) for n in each) for names in (left, right)) for each in (summed, batch))
    keys, shapes = jax.random.split(jax.random.key(3), 5), [[sizes[n] for n in names] for names in (left, right, out)]
    x, y, ct = (
        jax.random.normal(key, s) * jnp.exp2(8 * jax.random.normal(key, s))
        for key, s in zip(keys, shapes, strict=False)
    )
    x, ct = x.astype(BF16), ct.astype(BF16)

    def matmul(x, y):
        return multiply({"dimension_numbers": numbers}, [operand(x, E4M3), operand(y, E4M3)], BF16)

    found, vjp = jax.vjp(matmul, x, y)
    ordered = "".join([*batch, *(n for n in left + right if n in out and n not in batch)])
    assert ordered == out
    free = {names: [n for n in names if n in out and n not in batch] for names in (left, right)}
    expected = [
        np.einsum(subscripts, rounded(x, left, summed), rounded(y, right, summed)),
        np.einsum(f"{out},{right}->{left}", rounded(ct, out, free[right]), rounded(y, right, free[right])),
        np.einsum(f"{out},{left}->{right}", rounded(ct, out, free[left]), rounded(x, left, free[left])),
    ]
    results = found, *vjp(ct)
    assert [each.dtype for each in results] == [BF16, BF16, np.float32]
    for result, exact in zip(results, expected, strict=True):
        # The results are bfloat16, or sums of float32.
        eps = float(jnp.finfo(result.dtype).eps)
        np.testing.assert_allclose(np.float64(result), exact, rtol=eps, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_every_block_keeps_its_range(dtype):
    x = jnp.exp2(jnp.linspace(-120, 120, 64))[:, None] * jnp.linspace(-1, 1, 64)
    elements, scales = block_scaled.quantised(x, np.dtype(dtype))
    back = np.float64(elements).reshape(64, 2, 32) * np.float64(scales)[..., None]
    np.testing.assert_array_equal(back.reshape(64, 64), rounded(x, "ik", "k", dtype))
    assert set(np.frexp(np.float64(scales))[0].flat) == {0.5}  # powers of two


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_nan_and_no_other(bad):
    elements, scales = block_scaled.quantised(jnp.ones((2, 64)).at[0, 3].set(bad), E4M3)
    back = np.float32(elements).reshape(2, 2, 32) * np.float32(scales)[..., None]
    assert np.isnan(back).all(-1).tolist() == [[True, False], [False, False]]
    assert np.isfinite(back).all(-1).tolist() == [[False, True], [True, True]]


B200 = types.SimpleNamespace(device_kind="NVIDIA B200", platform="gpu", compute_capability="10.0")


@pytest.mark.filterwarnings("ignore:autocast")
@pytest.mark.parametrize("device", ["cpu", "B200"])
def test_a_b200_multiplies_blocks_itself(monkeypatch, device):
    if device == "B200":
        monkeypatch.setattr(compat, "device", lambda: B200)

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.sin(x) ** 2)

    fun = jax.jit(jax.grad(mpjax.autocast(loss, "mixed_mxfp8", rules=Rules(float8=Float8(min_size=(0, 0))))))
    args = [jnp.ones((64, 64))] * 4, jnp.ones((32, 64))
    for platform in ("cuda", "cpu"):
        text = fun.trace(*args).lower(lowering_platforms=(platform,)).as_text()
        in_blocks = device == "B200" and platform == "cuda"
        assert ("block_scaled_dot" in text) == in_blocks, (device, platform)
    assert all(np.isfinite(g).all() for g in fun(*args))  # the CPU runs the same program


@pytest.mark.parametrize(
    ("kind", "capability", "multiplies"),
    [
        ("NVIDIA B200", "10.0", True),
        ("NVIDIA B300", "10.3", True),
        ("NVIDIA GB200", None, True),
        ("NVIDIA H200", "9.0", False),
        ("NVIDIA GeForce RTX 5090", "12.0", False),
        ("TPU7x", None, False),
    ],
)
def test_devices_that_multiply_blocks_are_known(kind, capability, multiplies):
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    device = types.SimpleNamespace(device_kind=kind, platform=platform, compute_capability=capability)
    assert multiplies_blocks(device) == multiplies
    assert (kind in MXFP8.slow_on(device)) != multiplies


def test_an_axis_of_shared_scales_is_an_error():
    rules = Rules(float8=Float8(min_size=(0, 0), axis_name="data"))
    with pytest.raises(ValueError, match="axis_name"):
        mpjax.autocast(lambda w, x: x @ w, "mixed_mxfp8", rules=rules)(jnp.ones((32, 32)), jnp.ones((32, 32)))
