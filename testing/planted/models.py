"""One small model in Linen, NNX, Haiku, Equinox, plain JAX and under `vmap`, with a module `planted`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

SIZE, BATCH = 16, 8
HALF = "mixed_float16"
Plant = Callable[[Any, Any], Any]  # of the module's input and its weights


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss function with its arguments, the path of the module `planted`, and what makes it of another plant."""

    loss: Callable[..., Any]
    args: tuple[Any, ...]
    path: str
    again: Callable[[Plant], Model] = dataclasses.field(repr=False, default=lambda plant: plain(plant))


def normal(*shape: int) -> Any:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


X = normal(BATCH, SIZE)
_WEIGHTS = nn.initializers.normal(SIZE**-0.5)


def plain(plant: Plant, per_example: bool = False) -> Model:
    """Functions under named scopes; `per_example` maps them over the batch."""

    def network(params: Any, x: Any) -> Any:
        with jax.named_scope("body"):
            x = jnp.tanh(x @ params["body"])
        with jax.named_scope("planted"):
            x = plant(x, params["planted"])
        with jax.named_scope("head"):
            return x @ params["head"]

    def loss(params: Any, x: Any) -> Any:
        out = jax.vmap(network, (None, 0))(params, x) if per_example else network(params, x)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    params = {name: normal(SIZE, SIZE + i)[:, :SIZE] / 4 for i, name in enumerate(("body", "planted", "head"))}
    return Model(loss, (params, X), "planted", functools.partial(plain, per_example=per_example))


def linen(plant: Plant) -> Model:
    class Planted(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return plant(x, self.param("w", _WEIGHTS, (SIZE, SIZE)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = Planted(name="planted")(jnp.tanh(nn.Dense(SIZE, name="body")(x)))
            return nn.Dense(SIZE, name="head")(x)

    net: Any = Net()
    params = jax.jit(net.init)(jax.random.key(0), X)
    return Model(
        lambda params, x: jnp.mean(net.apply(params, x).astype(jnp.float32) ** 2), (params, X), "Net/planted", linen
    )


def flax_nnx(plant: Plant) -> Model:
    class Planted(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.asarray(normal(SIZE, SIZE) / 4))

        def __call__(self, x: Any) -> Any:
            return plant(x, self.w[...])

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.body, self.head = (nnx.Linear(SIZE, SIZE, rngs=rngs) for _ in range(2))
            self.planted = Planted()

        def __call__(self, x: Any) -> Any:
            return self.head(self.planted(jnp.tanh(self.body(x))))

    return Model(lambda net, x: jnp.mean(net(x).astype(jnp.float32) ** 2), (Net(nnx.Rngs(0)), X), "planted", flax_nnx)


def haiku(plant: Plant) -> Model:
    class Planted(hk.Module):
        def __call__(self, x: Any) -> Any:
            return plant(x, hk.get_parameter("w", (SIZE, SIZE), init=hk.initializers.RandomNormal(SIZE**-0.5)))

    def network(x: Any) -> Any:
        x = Planted(name="planted")(jnp.tanh(hk.Linear(SIZE, name="body")(x)))
        return hk.Linear(SIZE, name="head")(x)

    net: Any = hk.without_apply_rng(hk.transform(network))
    params = net.init(jax.random.key(0), X)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(net.apply(params, x).astype(jnp.float32) ** 2)

    return Model(loss, (params, X), "planted", haiku)


def equinox(plant: Plant) -> Model:
    class Planted(eqx.Module):
        w: Any

        def __call__(self, x: Any) -> Any:
            return plant(x, self.w)

    class Net(eqx.Module):
        body: Any
        planted: Any
        head: Any

        def __call__(self, x: Any) -> Any:
            return self.head(self.planted(jnp.tanh(self.body(x))))

    body, head = (eqx.nn.Linear(SIZE, SIZE, key=jax.random.key(i)) for i in range(2))
    net = Net(body, Planted(normal(SIZE, SIZE) / 4), head)
    return Model(lambda net, x: jnp.mean(jax.vmap(net)(x).astype(jnp.float32) ** 2), (net, X), "planted", equinox)


LIBRARIES: dict[str, Callable[[Plant], Model]] = {
    "Linen": linen,
    "NNX": flax_nnx,
    "Haiku": haiku,
    "Equinox": equinox,
    "plain": plain,
    "vmap": functools.partial(plain, per_example=True),
}
