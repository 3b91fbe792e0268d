"""The names that a training program may use, with mpjax or with its plain meaning."""

from __future__ import annotations

import functools
import types
import typing
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import mpjax
from testing import cheap_keys
from testing.random_programs import namespace as programs

X = np.array([[0.7, -0.3, 0.4], [-0.5, 0.9, 0.2]], np.float32)
IDS = np.array([3.001, 5.003], np.float32)  # categories or times, given as floats that half rounds


def array(*shape: int) -> Any:
    """Fixed float32 values."""
    return _values("", shape)


def _values(path: str, shape: Any) -> np.ndarray[Any, Any]:
    seed = sum(ord(letter) * (i + 1) for i, letter in enumerate(path)) + len(shape)
    values = np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32) * np.float32(0.6)
    # A variance is positive.
    return np.abs(values) + np.float32(0.5) if "var" in path else values


def filled(tree: Any) -> Any:
    """Fixed values for the abstract arrays of a tree."""

    def leaf(path: Any, x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return _values(name, x.shape)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return np.arange(x.size, dtype=x.dtype).reshape(x.shape) if x.ndim else np.zeros((), x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def initialised(init: Any) -> tuple[Any, Any]:
    """The params and the other collections of a Linen model."""
    variables = filled(jax.eval_shape(init, cheap_keys.key(0)))
    return variables.pop("params"), variables


def haiku_initialised(net: Any) -> tuple[Any, Any]:
    """The params and the state of a Haiku model."""
    return filled(jax.eval_shape(net.init, cheap_keys.key(0), X, IDS))


def split(model: Any) -> tuple[Any, Any, Any]:
    """The graph, the params and the other variables of an abstract NNX model."""
    parts: Any = nnx.split(model, nnx.Param, ...)
    graph, params, rest = parts
    return graph, filled(params), filled(nnx.as_pure(rest))


def partition(model: Any) -> Any:
    """The arrays of an Equinox model that are trained, and its other leaves."""
    return eqx.partition(model, eqx.is_inexact_array)


def moved(p: Any) -> Any:
    """The sum of the trained leaves: a loss whose gradient is 1."""
    leaves = nnx.as_pure(nnx.state(p, nnx.Param)) if isinstance(p, nnx.Module) else p
    return sum(jnp.sum(x) for x in jax.tree.leaves(leaves) if eqx.is_inexact_array(x))


def halved(tree: Any) -> Any:
    """A tree of bfloat16 params."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def optimizer_of(tx: Any, model: Any, state: Any) -> Any:
    """An `nnx.Optimizer` in this state."""
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    leaves = (jax.tree.leaves(tree, is_leaf=_is_variable) for tree in (optimizer.opt_state, state))
    for variable, value in zip(*leaves, strict=True):
        variable.set_raw_value(value.get_raw_value() if _is_variable(value) else value)
    return optimizer


def carry_of(model: Any, optimizer: Any, state: Any) -> tuple[Any, Any]:
    """The params of a model, and the state of an `nnx.Optimizer` in the structure of `state`."""
    params = nnx.split(model, nnx.Param, ...)[1]
    return params, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(nnx.as_pure(optimizer.opt_state)))


@jax.custom_vjp
def clip(x: Any) -> Any:
    """The identity, with a rule that is not linear in its cotangent."""
    return x


clip.defvjp(lambda x: (x, None), lambda _, cotangent: (jnp.clip(cotangent, -0.05, 0.05),))


def recomputed(fun: Any) -> Any:
    """A function whose backward pass computes it again, by a derivative rule."""
    again = jax.custom_vjp(fun)
    again.defvjp(lambda *args: (fun(*args), args), lambda args, cotangent: jax.vjp(fun, *args)[1](cotangent))
    return again


def first_only(params: Any) -> Any:
    """A mask: true for every second leaf."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [i % 2 == 0 for i in range(len(leaves))])


def labelled(params: Any) -> Any:
    """Labels of the leaves: a and b alternately."""
    return jax.tree.map(lambda first: "a" if first else "b", first_only(params))


def solve_twice(matvec: Any, b: Any) -> Any:
    """Two iterations of a solver for an operator near the identity."""
    first = b + b - matvec(b)
    return first + b - matvec(first)


@functools.cache
def _shared() -> dict[str, Any]:
    shared = programs.namespace() | {
        name: value
        for name, value in globals().items()
        if name
        in "X IDS array filled initialised haiku_initialised split partition moved halved clip recomputed first_only "
        "optimizer_of carry_of labelled solve_twice".split()
    }
    libraries = {
        "eqx": eqx,
        "hk": hk,
        "nn": nn,
        "nnx": nnx,
        "TrainState": TrainState,
        "Any": typing.Any,
        "KEY": cheap_keys.key(0),
    }
    return shared | libraries | {"abstract": nnx.eval_shape, "optax": optax}


def namespace(meaning: dict[str, Any] | None, policy: str) -> dict[str, Any]:
    """The names of a program.

    Args:
        meaning: The names of mpjax that a program uses, without a loss scale; None for mpjax.
        policy: The policy of the model.
    """
    plain = meaning is not None
    scale_of = lambda state: 1.0 if plain else optax.tree_utils.tree_get(state, "loss_scale")
    own = {"mpjax": types.SimpleNamespace(**meaning) if meaning is not None else mpjax, "scale_of": scale_of}
    # A policy changes the order of a float32 model's operations.
    with_policy = lambda model: model if plain or policy == "float32" else mpjax.with_policy(model, policy)
    return {**_shared(), **own, "with_policy": with_policy}
