"""Programs with one fault each: the troubleshooting pages inspect them."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import mpjax

WIDTH = 64


def masked_attention(params, x, padding):
    """A mask of -1e9 in hand-written float16: it is -inf, and a row that is all padding is NaN."""
    half = x.astype(jnp.float16)
    scores = half @ params["q"].astype(jnp.float16) @ half.swapaxes(-1, -2)
    scores = scores + jnp.where(padding[:, None, :], -1e9, 0.0).astype(jnp.float16)
    return jnp.mean((jax.nn.softmax(scores) @ half).astype(jnp.float32) ** 2)


@jax.jit
def sequences():
    """Eight sequences, of which the fourth is all padding."""
    params = {"q": 0.1 * jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))}
    padding = jnp.zeros((8, 16), bool).at[3].set(True)
    return params, jax.random.normal(jax.random.key(1), (8, 16, WIDTH)), padding


def unit_vectors(params, x):
    """A norm by sqrt, whose derivative at a vector of zeros is infinite in every precision."""
    h = x @ params["up"]
    with jax.named_scope("normalise"):
        h = h / (jnp.sqrt(jnp.sum(h**2, -1, keepdims=True)) + 1e-3)
    return jnp.mean((h @ params["down"]) ** 2)


def unit_vectors_gradient(params, x):
    return jax.grad(mpjax.autocast(unit_vectors, "mixed_bfloat16"))(params, x)


@jax.jit
def padded_batch():
    """A batch whose last row is padding: zeros."""
    keys = jax.random.split(jax.random.key(0))
    params = {"up": jax.random.normal(keys[0], (WIDTH, WIDTH)), "down": jax.random.normal(keys[1], (WIDTH, 4))}
    return params, jnp.ones((8, WIDTH)).at[-1].set(0.0)


class Small(nn.Module):
    """A network whose layers are too small and oddly sized for Tensor Cores."""

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.LayerNorm()(nn.gelu(nn.Dense(100, name=f"dense{i}")(x)))
        return nn.Dense(10, name="head")(x)


def small_gradient(params, x):
    return jax.grad(lambda p: jnp.mean(Small().apply(p, x) ** 2))(params)


def small_shapes():
    x = jax.ShapeDtypeStruct((256, 100), jnp.float32)
    return jax.eval_shape(Small().init, jax.random.key(0), x), x


class Deep(nn.Module):
    """A stack of layers that stores much for its backward pass."""

    @nn.compact
    def __call__(self, x):
        for i in range(8):
            with jax.named_scope(f"layer{i}"):
                h = nn.gelu(nn.Dense(2048, name=f"up{i}")(nn.LayerNorm(name=f"norm{i}")(x)))
                x = x + nn.Dense(512, name=f"down{i}")(h)
        return x


def deep_gradient(params, x):
    return jax.grad(lambda p: jnp.mean(Deep().apply(p, x) ** 2))(params)


def deep_shapes():
    x = jax.ShapeDtypeStruct((8192, 512), jnp.float32)
    return jax.eval_shape(Deep().init, jax.random.key(0), x), x


def contrastive(params, x):
    """A loss whose gradients are small: 1e-7 of its batch's scores, as under a mean over many pairs."""
    h = jnp.tanh(x @ params["encoder"])
    scores = jax.nn.log_softmax(h @ params["projection"] @ h.T)
    return -1e-4 * jnp.mean(scores)


def contrastive_batches():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "encoder": 0.1 * jax.random.normal(keys[0], (WIDTH, 128)),
        "projection": 0.1 * jax.random.normal(keys[1], (128, 128)),
    }
    for i in range(2):
        yield params, jax.random.normal(jax.random.fold_in(keys[2], i), (256, WIDTH))


def sharded_arguments():
    """The arguments of the sharded quick start's step, on its mesh."""
    import pathlib
    import runpy
    import types

    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    path = pathlib.Path(__file__).parent.parent / "quickstart" / "train_sharded.py"
    script = types.SimpleNamespace(**runpy.run_path(str(path)))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    shapes = jax.eval_shape(script.init)
    state = nn.unbox(jax.jit(script.init, out_shardings=nn.get_sharding(shapes, mesh))())
    batch = jnp.ones((64, 8, 8)), jnp.zeros(64, jnp.int32)
    return *state, *jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
