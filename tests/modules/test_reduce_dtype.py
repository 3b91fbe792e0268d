"""`with_policy`: the dtype in which weight gradients leave their matmul, and are summed across devices."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import measures

HALF = "p=f32,c=f16,o=f32,r=f16"


class Linen(nn.Module):
    """Every Flax layer whose matmul can be replaced."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(40, 16)
        x = nn.DenseGeneral((2, 9))(embed(tokens))
        x = nn.Dense(16)(x.reshape(*x.shape[:-2], 18))
        x = nn.Conv(16, (1,), use_bias=False)(x)
        return embed.attend(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(40, 16, rngs=rngs)
        self.heads = nnx.LinearGeneral(16, (2, 9), rngs=rngs)
        self.dense = nnx.Linear(18, 16, rngs=rngs)
        self.conv = nnx.Conv(16, 16, (1,), use_bias=False, rngs=rngs)
        self.mix = nnx.Einsum("bti,io->bto", (16, 16), rngs=rngs)

    def __call__(self, tokens):
        x = self.heads(self.embed(tokens))
        x = self.conv(self.dense(x.reshape(*x.shape[:-2], 18)))
        return self.embed.attend(self.mix(x))


TOKENS = np.arange(6 * 5, dtype=np.int32).reshape(6, 5)


def loss_of(kind, policy):
    """The loss of a model under a policy, and its parameters' shapes."""
    if kind == "linen":
        model = mpjax.with_policy(Linen(), policy)
        params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
        apply = model.apply
    else:
        graph, params = nnx.split(nnx.eval_shape(lambda: mpjax.with_policy(Nnx(nnx.Rngs(0)), policy)))
        apply = lambda params, tokens: nnx.merge(graph, params)(tokens)
    return (lambda params, tokens: jnp.mean(apply(params, tokens) ** 2)), params


@pytest.mark.parametrize(("kind", "kernels"), [("linen", 4), ("nnx", 5)])
@pytest.mark.parametrize(("policy", "dtype"), [("mixed_float16", "float32"), (HALF, "float16")])
def test_weight_gradients_leave_flaxs_matmuls_in_the_reduce_dtype(kind, kernels, policy, dtype):
    loss, params = loss_of(kind, policy)
    sizes = {16 * 18, 16 * 16, 40 * 16}  # of kernels; no activation is one of these
    found = [e.eqn.outvars[0].aval for e in measures.matmuls(jax.grad(loss), params, TOKENS)]
    assert [aval.dtype.name for aval in found if aval.size in sizes] == [dtype] * kernels
    # Forward, and towards the activations.
    assert {aval.dtype.name for aval in found if aval.size not in sizes} == {"float16"}
