"""A traced step as it would be with its optimizer wrapped: in `low_bit_state` or in `master_weights`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax

from mpjax.optimizer_state import low_bit_state
from mpjax.planning.arguments import MASTERS, PARAMETERS, STATE, Traced
from mpjax.program import compat, evaluator
from mpjax.program.objects import filled
from mpjax.program.tracing import trace

# By name: a jitted function is entered where it is not part of the differentiated one; a cast reads the half value.

_LOW_BIT = 4096  # `low_bit_state` stores arrays of as many elements


def low_bits(traced: Traced) -> list[int]:
    """The arguments that `low_bit_state` stores in fewer bits."""
    return [i for i in _float32(traced, STATE) if traced.program.arrays[i].size >= _LOW_BIT]


def masters(traced: Traced) -> list[int]:
    """The arguments that `master_weights` keeps in float32 beside their half values."""
    return [i for i in _float32(traced, PARAMETERS) if i in traced.carried]


def _float32(traced: Traced, kind: str) -> list[int]:
    arrays = zip(traced.kinds, traced.program.arrays, strict=True)
    return [i for i, (k, x) in enumerate(arrays) if k == kind and x.dtype == np.float32]


def with_low_bit_state(traced: Traced) -> Traced:
    """The step with an optimizer wrapped in `low_bit_state`: it is the inner transformation of one, as a whole."""
    program, low = traced.program, low_bits(traced)
    others = [i for i in range(len(program.arrays)) if i not in low]
    call: Any = jax.extend.core.jaxpr_as_fun(program.jaxpr)

    def update(given: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        filled = dict(zip(low, state, strict=True)) | dict(zip(others, given, strict=True))
        outs = call(*(filled[i] for i in range(len(filled))))
        states = {traced.carried[i] for i in low}
        return [x for i, x in enumerate(outs) if i not in states], [outs[traced.carried[i]] for i in low]

    tx = low_bit_state(optax.GradientTransformation(lambda state: state, update))
    stored = jax.eval_shape(tx.init, [program.arrays[i] for i in low])
    stored_program = trace(
        lambda given, state: tx.update(given, state), ([program.arrays[i] for i in others], stored), {}, None
    )
    added = len(jax.tree.leaves(stored))
    kinds = [*(traced.kinds[i] for i in others), *[STATE] * added]
    kept = [n for n, i in enumerate(others) if i in traced.donated]
    new = range(len(others), len(others) + added) if set(low) <= {*traced.donated} else ()
    stored_program.names = [*(program.names[i] for i in others), *[""] * added]
    return dataclasses.replace(traced, program=stored_program, kinds=kinds, carried={}, donated=(*kept, *new))


class _Weight(NamedTuple):
    """A parameter: what the optimizer updates, and the half value that the differentiated function reads."""

    master: jax.Array
    half: jax.Array


def with_master_weights(traced: Traced, half: Any) -> Traced:
    """The step with parameters stored in half, and float32 masters in an optimizer wrapped in `master_weights`.

    The differentiated function reads the half values, at a float32 copy;
    everything else reads the masters. Each new parameter is its new master, rounded.
    """
    program, full = traced.program, masters(traced)
    count = len(program.arrays)
    jaxpr = compat.open_jaxpr(program.jaxpr)

    def step(given: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        weights = [_Weight(master, given[i]) for i, master in zip(full, kept, strict=True)]
        values = filled(given, full, weights)
        outs = [_master(x) for x in evaluator.run(jaxpr.jaxpr, (*jaxpr.consts, *values), _equation)]
        new = [outs[traced.carried[i]] for i in full]
        for i, master in zip(full, new, strict=True):
            outs[traced.carried[i]] = master.astype(half)
        return [*outs, *new]

    shapes = [x.update(dtype=half) if i in full else x for i, x in enumerate(program.arrays)]
    stored = trace(step, (shapes, [program.arrays[i] for i in full]), {}, None)
    stored.names = [*program.names, *[""] * len(full)]
    outs = len(compat.open_jaxpr(program.jaxpr).jaxpr.outvars)
    return dataclasses.replace(
        traced,
        program=stored,
        kinds=[*traced.kinds, *[MASTERS] * len(full)],
        carried=traced.carried | {count + n: outs + n for n in range(len(full))},
        donated=(*traced.donated, *(count + n for n, i in enumerate(full) if i in traced.donated)),
    )


def _equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates an equation, some of whose operands are a `_Weight`."""
    name = str(eqn.source_info.name_stack)
    differentiated = "jvp(" in name or "transpose(" in name
    if eqn.primitive.name in ("jit", "pjit") and not differentiated:
        inner = compat.open_jaxpr(eqn.params["jaxpr"])
        return evaluator.run(inner.jaxpr, (*inner.consts, *operands), _equation)
    if differentiated and eqn.primitive.name == "convert_element_type" and isinstance(operands[0], _Weight):
        return [operands[0].half.astype(eqn.params["new_dtype"])]
    widened = [x.half.astype(jnp.float32) if isinstance(x, _Weight) else x for x in operands]
    arrays = widened if differentiated else [_master(x) for x in operands]
    return evaluator.bind_in_context(eqn, arrays)


def _master(x: Any) -> Any:
    return x.master if isinstance(x, _Weight) else x
