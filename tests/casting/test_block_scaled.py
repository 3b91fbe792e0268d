"""Block-scaled matmuls against a quantiser in NumPy, and the calls that GPUs get."""

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax import Float8, Rules
from mpjax.kernels import block_dot, block_scaled
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


@pytest.mark.filterwarnings("ignore:autocast. cpu is not known to")
@pytest.mark.parametrize(("shape", "spec"), [((64, 32), ("d",)), ((128, 32), ("d",)), ((2, 4, 12, 32), (None, "d"))])
def test_explicit_axes_may_split_blocks(shape, spec):
    """The gradient of a parameter contracts the batch: 16 rows on each device are half a block."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    rng = np.random.default_rng(0)
    w, x = [np.float32(rng.normal(size=(32, 32)) / 6) for _ in range(3)], np.float32(rng.normal(size=shape))
    fun = lambda w, x: jnp.mean((jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) @ w[2]) ** 2)
    gradient = jax.jit(jax.grad(mpjax.autocast(fun, "mixed_mxfp8", rules=Rules(float8=Float8(allow=("*",))))))
    expected = gradient(w, x)
    with jax.set_mesh(mesh):
        found = gradient(jax.sharding.reshard(w, P()), jax.sharding.reshard(x, P(*spec)))
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, other, atol=0.01 * np.abs(other).max())


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


SPLITS = [
    ("data parallel", P(None, "x", None), P(None, None, None), P(None, "x", None)),
    ("its weight gradient, scattered", P(None, None, "x"), P(None, None, "x"), P(None, "x", None)),
    ("scattered over the other rows", P(None, None, "x"), P(None, None, "x"), P(None, None, "x")),
    ("its weight gradient, summed", P(None, None, "x"), P(None, None, "x"), P()),
    ("rows of both", P(None, "x", None), P(None, "y", None), P(None, "x", "y")),
    ("rows of both by one axis", P(None, "x", None), P(None, "x", None), P(None, "x", None)),
    ("a batch", P("x", None, None), P("x", None, None), P("x", None, None)),
    ("one operand's contraction", P(None, None, "x"), P(None, None, None), P()),
    ("two axes", P(None, "y", "x"), P(None, None, "x"), P(None, "y", None)),
    ("both axes of the contraction", P(None, None, ("x", "y")), P(None, None, ("x", "y")), P()),
]


@pytest.mark.parametrize("blocks", [8, 2])  # 2 blocks are not split over 4 devices
@pytest.mark.parametrize(("left", "right", "out"), [each[1:] for each in SPLITS], ids=[each[0] for each in SPLITS])
def test_a_matmul_split_over_devices_is_the_same(monkeypatch, left, right, out, blocks):
    def product(a, b, of_a, of_b, result):
        assert a.shape[2] == 32 * of_a.shape[2]  # whole blocks on each device
        wide = [x.astype(np.float32) * jnp.repeat(s, 32, axis=2) for x, s in ((a, of_a), (b, of_b))]
        return jnp.einsum("bmk,bnk->bmn", *wide).astype(result)

    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    monkeypatch.setattr(block_dot, "_local", product)
    split = custom_partitioning(product, static_argnums=(4,))
    split.def_partition(**block_dot.PARTITIONING)
    keys = jax.random.split(jax.random.key(0), 2)
    x, y = (jax.random.normal(key, (2, 8, 32 * blocks)) for key in keys)
    pairs = [block_scaled.quantised(each, E4M3) for each in (x, y)]
    given = [
        jax.device_put(each, jax.NamedSharding(mesh, spec if each.shape[2] % 4 == 0 or n == 0 else P()))
        for n in (0, 1)
        for each, spec in zip([pair[n] for pair in pairs], (left, right), strict=True)
    ]
    run = jax.jit(split, static_argnums=4, out_shardings=jax.NamedSharding(mesh, out))
    found = run(*given, np.dtype(np.float32))
    expected = product(*(pair[0] for pair in pairs), *(pair[1] for pair in pairs), np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


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
