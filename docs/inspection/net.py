"""A small network whose author put the norm in bfloat16, for the pages of this folder."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, name="stem")(x)
        y = x.astype(jnp.bfloat16)
        with jax.named_scope("norm"):
            y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
        return nn.Dense(8, name="head")(y.astype(jnp.float32))


net, x = Net(), jax.random.normal(jax.random.key(0), (16, 32))
params = jax.jit(net.init)(jax.random.key(1), x)


def squares(params, x):
    return jnp.mean(net.apply(params, x) ** 2)
