"""Random small Flax models, in Linen and NNX: layers between values that no matmul reads.

A model is a list of operations, made from a number. Beside activations it holds what a policy must not round: category
ids and timesteps in float32, a mask of large numbers, a log-determinant, and counts in the carries of loops.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

SIZE, BATCH, IDS = 6, 3, 40
# Operations with a submodule of Flax's, with own parameters, of the model's code alone, and with a part of the model.
LAYERS = ("dense", "norm", "residual", "attend", "lookup", "tied", "timestep", "shared", "lstm")
CODE = ("raw", "affine", "flow")
PLAIN = ("tanh", "count", "aside")
PARTS = ("block", "remat", "vmap", "scan", "loop", "float32")


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation: its kind, the name of its layer or parameter, and the operations of its part."""

    kind: str
    name: str
    part: tuple[Step, ...] = ()


def random_steps(seed: int) -> tuple[Step, ...]:
    """The operations of a model."""
    rng = random.Random(seed)
    return _draw(rng, rng.randint(2, 6), 2)


def _draw(rng: random.Random, count: int, depth: int) -> tuple[Step, ...]:
    kinds = LAYERS + CODE + PLAIN + (PARTS * 2 if depth else ())
    drawn = [rng.choice(kinds) for _ in range(count)]

    def part(kind: str) -> tuple[Step, ...]:
        # NNX can't scan or map over a part without parameters, nor transform modules in a loop of JAX's.
        return Step("dense", "first"), *_draw(rng, rng.randint(0, 2), 0 if kind == "loop" else depth - 1)

    return tuple(Step(kind, f"{kind}_{i}", part(kind) if kind in PARTS else ()) for i, kind in enumerate(drawn))


def inputs() -> dict[str, np.ndarray]:
    """The arguments of every model. The ids are not representable in bfloat16, and the mask not in float16."""
    rng = np.random.default_rng(0)
    return {
        "h": rng.normal(size=(BATCH, SIZE)).astype(np.float32),
        "ids": np.asarray([257.0, 2049.0, 4099.0], np.float32),
        "t": np.asarray([997.0, 998.5, 999.25], np.float32),
        "mask": np.where(np.tri(BATCH), 0, -1e9).astype(np.float32),
        "logdet": np.asarray(318.8203, np.float32),
        "count": np.asarray(2047.0, np.float32),
    }


Values = dict[str, Any]


def _run(steps: tuple[Step, ...], layers: Any, v: Values) -> Values:
    """The code of a model, on its layers and parameters."""
    for step in steps:
        v = {**v, **_step(step, layers, v)}
    return v


def _step(step: Step, layers: Any, v: Values) -> Values:
    h, kind, name = v["h"], step.kind, step.name
    if kind in ("dense", "norm"):
        return {"h": layers.layer(kind, name)(h)}
    if kind == "residual":
        return {"h": h + layers.layer("dense", name)(h)}
    if kind == "shared":
        layer = layers.layer("dense", name)
        return {"h": layer(jnp.tanh(layer(h)))}
    if kind in ("lookup", "tied"):
        embed = layers.layer("lookup", name)
        rows = embed((v["ids"] % IDS).astype(jnp.int32))
        return {
            "h": h + (rows if kind == "lookup" else jax.nn.softmax(h @ embed.embedding[...].T) @ embed.embedding[...])
        }
    if kind == "timestep":
        angle = v["t"][:, None] * jnp.arange(1, SIZE + 1, dtype=jnp.float32)
        return {"h": h + layers.layer("dense", name)(jnp.sin(angle)), "t": v["t"] + 0.125}
    if kind == "lstm":
        return {"h": layers.layer("lstm", name)(jnp.stack([h, h], 1))[:, -1]}
    if kind == "raw":
        return {"h": h @ layers.parameter(name, (SIZE, SIZE))}
    if kind == "affine":
        return {"h": h * layers.parameter(name, (SIZE,)) + layers.parameter(name + "_shift", (SIZE,))}
    if kind == "flow":
        log_scale = layers.parameter(name, (SIZE,))
        return {"h": h * jnp.exp(log_scale), "logdet": v["logdet"] + log_scale.sum()}
    if kind == "attend":
        q = layers.layer("dense", name)(h)
        return {"h": h + jax.nn.softmax(jnp.einsum("ij,kj->ik", q, q) / SIZE + v["mask"]) @ q}
    if kind == "count":
        return {"count": v["count"] + 1}
    if kind == "aside":
        return {"h": h.astype(jnp.float32)}
    return {"h": jnp.tanh(h)} if kind == "tanh" else layers.part(step, v)


KEPT = ("t", "logdet", "count")


class LinenModel(nn.Module):
    """A model, or a part of one, which takes `h` and all values and returns `h` and the values that it may change."""

    steps: tuple[Step, ...]

    @nn.compact
    def __call__(self, h: Any, v: Values) -> Any:
        out = _run(self.steps, _LinenLayers(self), {**v, "h": h})
        return out["h"], {name: out[name] for name in KEPT}


class _LinenCarried(nn.Module):
    """The body of a scan: all that changes is in its carry."""

    steps: tuple[Step, ...]

    @nn.compact
    def __call__(self, carry: Any, x: Any, v: Values) -> Any:
        h, aux = carry
        h, aux = LinenModel(self.steps, name="part")(h, {**v, **aux})
        return (h, aux), x


class _LinenMapped(nn.Module):
    steps: tuple[Step, ...]

    @nn.compact
    def __call__(self, h: Any, v: Values) -> Any:
        return LinenModel(self.steps, name="part")(h, v)[0]


class _LinenLayers:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def layer(self, kind: str, name: str) -> Any:
        make: dict[str, Callable[..., Any]] = {
            "dense": lambda: nn.Dense(SIZE, name=name),
            "norm": lambda: nn.LayerNorm(name=name),
            "lookup": lambda: nn.Embed(IDS, SIZE, name=name),
            "lstm": lambda: nn.RNN(nn.OptimizedLSTMCell(SIZE), name=name),
        }
        return make[kind]()

    def parameter(self, name: str, shape: tuple[int, ...]) -> Any:
        return self.module.param(name, nn.initializers.normal(0.5), shape)

    def part(self, step: Step, v: Values) -> Values:
        split: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        if step.kind == "vmap":
            mapped = nn.vmap(_LinenMapped, in_axes=(None, None), axis_size=2, **split)
            return {"h": mapped(step.part, name=step.name)(v["h"], v).sum(0) / 2}
        if step.kind in ("scan", "loop"):
            scanned = nn.scan(_LinenCarried, in_axes=(0, nn.broadcast), length=2, **split)
            carry = v["h"], {name: v[name] for name in KEPT}
            (h, aux), _ = scanned(step.part, name=step.name)(carry, jnp.zeros(2), v)
            return {"h": h, **aux}
        module = nn.remat(LinenModel) if step.kind == "remat" else LinenModel
        h, aux = module(step.part, name=step.name)(v["h"], v)
        return {"h": h, **aux}


class NnxModel(nnx.Module):
    """The same model in NNX."""

    def __init__(self, steps: tuple[Step, ...], rngs: nnx.Rngs) -> None:
        self.steps = steps
        for step in steps:
            self._make(step, rngs)

    def _make(self, step: Step, rngs: nnx.Rngs) -> None:
        kind, name = step.kind, step.name
        if kind in ("dense", "residual", "attend", "shared", "timestep"):
            setattr(self, name, nnx.Linear(SIZE, SIZE, rngs=rngs))
        elif kind == "norm":
            setattr(self, name, nnx.LayerNorm(SIZE, rngs=rngs))
        elif kind in ("lookup", "tied"):
            setattr(self, name, nnx.Embed(IDS, SIZE, rngs=rngs))
        elif kind == "lstm":
            setattr(self, name, nnx.RNN(nnx.OptimizedLSTMCell(SIZE, SIZE, rngs=rngs), rngs=rngs))
        elif kind in CODE:
            shape = (SIZE, SIZE) if kind == "raw" else (SIZE,)
            for each in (name, name + "_shift") if kind == "affine" else (name,):
                setattr(self, each, nnx.Param(0.5 * jax.random.normal(rngs.params(), shape)))
        elif kind in ("vmap", "scan"):
            setattr(self, name, nnx.vmap(lambda rngs: NnxModel(step.part, rngs), in_axes=0)(rngs.split(2)))
        elif kind in PARTS:
            setattr(self, name, NnxModel(step.part, rngs))

    def __call__(self, h: Any, v: Values) -> Any:
        out = _run(self.steps, self, {**v, "h": h})
        return out["h"], {name: out[name] for name in KEPT}

    def layer(self, kind: str, name: str) -> Any:
        return getattr(self, name)

    def parameter(self, name: str, shape: tuple[int, ...]) -> Any:
        return getattr(self, name)[...]

    def part(self, step: Step, v: Values) -> Values:
        part = getattr(self, step.name)
        carry = v["h"], {name: v[name] for name in KEPT}
        if step.kind == "vmap":
            return {"h": nnx.vmap(lambda m, h: m(h, v)[0], in_axes=(0, None))(part, v["h"]).sum(0) / 2}
        if step.kind == "scan":
            body = lambda m, carry: _kept(carry, m(carry[0], {**v, **carry[1]}))
            h, aux = nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(part, carry)
        elif step.kind == "loop":
            step_once = lambda carry, _: (_kept(carry, part(carry[0], {**v, **carry[1]})), None)
            (h, aux), _ = jax.lax.scan(step_once, carry, None, length=2)
        else:
            call = nnx.remat(lambda m, h, v: m(h, v)) if step.kind == "remat" else lambda m, h, v: m(h, v)
            h, aux = call(part, v["h"], v)
        return {"h": h, **aux}


def _kept(old: Any, new: Any) -> Any:
    """A carry, half where it was half: an author does that, because a policy never rounds the results of user code."""
    return jax.tree.map(lambda a, b: b if a.dtype == jnp.float32 else b.astype(a.dtype), old, new)
