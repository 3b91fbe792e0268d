"""Planted wrong implementations of loss scaling and modules.

Each is run on the numbered training programs that name what it breaks, until one of them fails. A wrong implementation
that none of them catches is a gap in what they draw: `pytest -m exhaustive tests/testing/test_random_training.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from mpjax.loss_scale import replicas, transformation
from mpjax.loss_scale.cotangents import unscale_by
from mpjax.modules.precision import cast
from mpjax.optimizer_state import low_bit, masters, rounding
from testing.random_training import Rejected, check, numbered_case


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A wrong implementation: it replaces `target`, which only programs with this text in their source use."""

    target: str
    wrong: Any
    used_by: str = ""


def _counted(name: str, value: Any, which: str, wrong: Callable[[int], int], right: Any = transformation._count) -> int:
    count = right(name, value)
    assert isinstance(count, int)
    return wrong(count) if name == which else count


def _loss_ignored(tree: Any, *args: Any) -> jax.Array:
    is_loss = len(jax.tree.leaves(tree)) == 1 and jnp.ndim(jax.tree.leaves(tree)[0]) == 0
    return jnp.ones((), jnp.bool_) if is_loss else replicas.all_finite(tree, *args)


def _advanced(state: Any, like: Any, right: Any = transformation.cast_like) -> Any:
    is_count = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.int32)
    return jax.tree.map(lambda x: x + 1 if is_count(x) else x, right(state, like))


def _narrowed(tree: Any, dtype: Any, right: Any = cast) -> Any:
    return right(right(tree, jnp.dtype(jnp.bfloat16)), dtype)


def _rounded_at_entry(model: Any, policy: Any, right: Any = mpjax.with_policy) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *cast(cast(args, jnp.dtype(jnp.bfloat16)), jnp.dtype("float32")), **kwargs)

    model = right(model, policy)
    original = type(model).__call__
    wrong = type(type(model).__name__, (type(model),), {"__call__": call})
    object.__setattr__(model, "__class__", wrong)
    return model


def _biased(x: jax.Array, dtype: Any, bits: jax.Array, right: Any = rounding.round_stochastically) -> jax.Array:
    return right(x, dtype, bits | np.uint32(0x80008000))


def _signed_only(x: jax.Array, block_size: int, right: Any = low_bit.block_scales) -> jax.Array:
    return jnp.abs(right(x, block_size))


MUTATIONS: dict[str, Mutation] = {
    "what scale_loss closes over keeps the scale": Mutation(
        "mpjax.loss_scale.boundary.closed", lambda caller, fun, arrays: (lambda given: fun(*given), [])
    ),
    "gradients are divided by twice the scale": Mutation(
        "mpjax.loss_scale.transformation.unscale_by", lambda grads, scale: unscale_by(grads, 2 * scale)
    ),
    "an overflow is taken": Mutation(
        "mpjax.loss_scale.transformation.all_finite", lambda *args: jnp.ones((), jnp.bool_)
    ),
    "a loss that is not finite is taken": Mutation("mpjax.loss_scale.transformation.all_finite", _loss_ignored),
    "the scale grows a step late": Mutation(
        "mpjax.loss_scale.transformation._count",
        functools.partial(_counted, which="growth_interval", wrong=lambda count: min(count + 1, 2**31 - 1)),
        "growth_interval=",
    ),
    "hysteresis is ignored": Mutation(
        "mpjax.loss_scale.transformation._count",
        functools.partial(_counted, which="hysteresis", wrong=lambda count: 1),
        "hysteresis=",
    ),
    "a skipped step advances the inner state": Mutation("mpjax.loss_scale.transformation.cast_like", _advanced),
    "derivative rules see scaled cotangents": Mutation(
        "mpjax.true_cotangents", lambda fun, state: fun, "true_cotangents"
    ),
    "a skipped step changes statistics": Mutation("mpjax.keep_if_finite", lambda state, new, old: new),
    "restore_if_skipped restores nothing": Mutation(
        "mpjax.restore_if_skipped", lambda *args: contextlib.nullcontext(), "restore_if_skipped"
    ),
    "masters are rounded": Mutation(
        "mpjax.optimizer_state.masters._masters",
        lambda master, full, right=masters._masters: jax.tree.map(
            lambda x: jax.lax.reduce_precision(x, 8, 7), right(master, full)
        ),
        "master_weights",
    ),
    "Kahan summation loses its compensation": Mutation(
        "mpjax.optimizer_state.rounding._compensation",
        lambda params, *args: jax.tree.map(
            lambda p: jnp.zeros_like(p) if p.dtype != jnp.float32 else optax.MaskedNode(), params
        ),
        "kahan",
    ),
    "stochastic rounding rounds up too often": Mutation(
        "mpjax.optimizer_state.rounding.round_stochastically", _biased, "stochastic_rounding"
    ),
    "moments in bfloat16 are rounded up too often": Mutation(
        "mpjax.optimizer_state.low_bit.round_stochastically", _biased, "low_bit_state"
    ),
    "second moments are stored as if they had signs": Mutation(
        "mpjax.optimizer_state.low_bit.block_scales", _signed_only, "low_bit_state"
    ),
    "the results of a Flax model are rounded": Mutation("mpjax.modules.linen.cast", _narrowed, "nn.Module"),
    "the results of an NNX model are rounded": Mutation("mpjax.modules.nnx.cast", _narrowed, "nnx.Module"),
    "the arguments of a Flax model are rounded": Mutation("mpjax.with_policy", _rounded_at_entry, "with_policy"),
}


def first_catch(mutation: Mutation, numbers: range) -> tuple[int, str] | None:
    """The first program that fails with a wrong implementation, and how; None if none does."""
    with mock.patch(mutation.target, mutation.wrong):
        for number in numbers:
            case = numbered_case(number)
            if mutation.used_by not in case.source:
                continue
            try:
                check(case)
            except Rejected:
                continue
            except Exception as failure:
                return number, str(failure).splitlines()[0]
    return None
