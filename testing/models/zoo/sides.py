"""Networks combined with other computation: complex numbers, integers, randomness, host callbacks, x64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from .linen import cross_entropy
from .program import dense_params, labelled, program


@program()
def fourier_mixing(key):
    """A Fourier layer: FFT, a complex matmul by complex weights of the spectrum, inverse FFT."""
    spectrum = jax.random.normal(key, (2, 17, 16, 16)) / 16**0.5
    params = {"spectrum": spectrum, "layers": dense_params(key, 8, 16, 8)}

    def loss_fn(params, x):
        first, last = params["layers"]
        y = x @ first["w"] + first["b"]
        modes = jnp.fft.rfft(y, axis=1)
        weights = jax.lax.complex(*params["spectrum"])
        mixed = jnp.fft.irfft(jnp.einsum("bkc,kcd->bkd", modes, weights), axis=1)
        return jnp.mean((jax.nn.gelu(y + mixed) @ last["w"] + last["b"] - x) ** 2)

    return loss_fn, params, jax.random.normal(key, (32, 32, 8))


@program(has_aux=True)
def integers_beside(key):
    """Integer and boolean computation beside the network: ranks, bit masks, integer matmuls, counts as aux."""
    params = dense_params(key, 32, 64, 16)

    def loss_fn(params, batch):
        inputs, labels, ids = batch
        features = ((ids[:, None] >> jnp.arange(32)) & 1).astype(inputs.dtype)
        x = jax.nn.silu((inputs + features) @ params[0]["w"] + params[0]["b"])
        logits = x @ params[1]["w"] + params[1]["b"]
        predicted = jnp.argmax(logits, -1)
        confusion = jax.nn.one_hot(labels, 16, dtype=jnp.int32).T @ jax.nn.one_hot(predicted, 16, dtype=jnp.int32)
        rank = jnp.argsort(jnp.argsort(logits, -1), -1)
        return cross_entropy(logits, labels), (confusion, rank.astype(jnp.uint8), predicted == labels)

    return loss_fn, params, (*labelled(key, (256, 32)), jnp.arange(256))


@program()
def random_inside(key):
    """A variational autoencoder: noise and a dropout mask are drawn inside."""
    params = dense_params(key, 32, 64, 16, 32)

    def loss_fn(params, batch):
        x, key = batch
        noise, drop = jax.random.split(key)
        hidden = jax.nn.silu(x @ params[0]["w"] + params[0]["b"])
        mean, log_variance = jnp.split(hidden @ params[1]["w"], 2, -1)
        code = mean + jnp.exp(0.5 * log_variance) * jax.random.normal(noise, mean.shape)
        code = jnp.where(jax.random.bernoulli(drop, 0.9, code.shape), code / 0.9, 0.0)
        decoded = jnp.concatenate([code, -code], -1) @ params[2]["w"] + params[2]["b"]
        divergence = 0.5 * jnp.mean(jnp.exp(log_variance) + mean**2 - 1.0 - log_variance)
        return jnp.mean((decoded - x) ** 2) + 0.1 * divergence

    return loss_fn, params, (jax.random.normal(key, (64, 32)), jax.random.key(2))


@program(has_aux=True)
def weak_types(key):
    """Python scalars everywhere: as inputs, params and carries; the auxiliary outputs are weakly typed."""
    params = {"layers": dense_params(key, 32, 64, 16), "temperature": 1.5}

    def loss_fn(params, batch):
        x, labels, scale = batch["x"], batch["labels"], batch["scale"]
        first, last = params["layers"]
        x = jnp.where(x > 0, x, 0.25 * x) @ first["w"] + first["b"]
        x = jnp.clip(x, -3, 3.0) * scale
        x, total = jax.lax.fori_loop(0, 3, lambda i, s: (s[0] / 2 + i, s[1] + 0.5), (x, 0.0))
        logits = (x @ last["w"] + last["b"]) / params["temperature"]
        return cross_entropy(logits, labels), (total, scale * 2, jnp.asarray(1.0))

    inputs, labels = labelled(key, (256, 32))
    return loss_fn, params, {"x": inputs, "labels": labels, "scale": 0.5}


@program(has_aux=True, context=lambda: jax.enable_x64(True))
def x64_statistics(key):
    """Under x64: float32 matmuls, a statistic that the user asked for in float64, int64 indices."""
    params = jax.tree.map(lambda x: x.astype(jnp.float32), dense_params(key, 32, 64, 16))

    def loss_fn(params, batch):
        x, labels = batch
        hidden = jnp.tanh(x @ params[0]["w"] + params[0]["b"])
        logits = hidden @ params[1]["w"] + params[1]["b"]
        exact = jnp.var(logits.astype(jnp.float64))
        loss = cross_entropy(logits, labels) + 0.01 * exact.astype(jnp.float32)
        return loss, (exact, jnp.argmax(logits, -1))

    inputs, labels = labelled(key, (256, 32))
    return loss_fn, params, (inputs.astype(jnp.float32), labels)


def _host_gelu(x):
    x = np.asarray(x)
    return (0.5 * x * (1.0 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))).astype(x.dtype)


@jax.custom_vjp
def host_activation(x):
    """An activation computed on the host, which requires float32."""
    assert x.dtype == jnp.float32, "the callback was traced for float32"
    return jax.pure_callback(_host_gelu, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")


host_activation.defvjp(
    lambda x: (host_activation(x), x),
    lambda x, g: (g * jax.grad(lambda x: jnp.sum(jax.nn.gelu(x)))(x),),
)


@program()
def pure_callback(key):
    """A host function between two matmuls, called with the dtypes that it was traced for."""
    params = dense_params(key, 32, 64, 16)

    def loss_fn(params, batch):
        hidden = host_activation(batch[0] @ params[0]["w"] + params[0]["b"])
        return cross_entropy(hidden @ params[1]["w"] + params[1]["b"], batch[1])

    return loss_fn, params, labelled(key, (256, 32))


@program()
def debug_effects(key):
    """`jax.debug.callback` on an activation, which must arrive in float32."""
    params = dense_params(key, 32, 64, 16)

    def expect_float32(x):
        assert x.dtype == np.float32, x.dtype

    def loss_fn(params, batch):
        hidden = jax.nn.silu(batch[0] @ params[0]["w"] + params[0]["b"])
        jax.debug.callback(expect_float32, hidden)
        return cross_entropy(hidden @ params[1]["w"], batch[1])

    return loss_fn, params, labelled(key, (256, 32))


# JAX has no batching rule for ordered effects, and `jax.checkpoint` does not allow them.
@program(refuses={"vmap", "remat"})
def io_effects(key):
    """An ordered `io_callback` that logs a statistic of an activation and returns an integer."""
    params = dense_params(key, 32, 64, 16)

    def loss_fn(params, batch):
        hidden = jax.nn.silu(batch[0] @ params[0]["w"] + params[0]["b"])
        peak = jax.lax.stop_gradient(jnp.max(hidden))
        count = io_callback(lambda peak: np.int32(peak > 0), jax.ShapeDtypeStruct((), jnp.int32), peak, ordered=True)
        return cross_entropy(hidden @ params[1]["w"] * count.astype(hidden.dtype), batch[1])

    return loss_fn, params, labelled(key, (256, 32))
