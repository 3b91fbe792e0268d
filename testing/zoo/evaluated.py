"""Gradients of the zoo's programs in NumPy, which costs a tenth of compiling them for the CPU.

The traced program is what a caster changes. `testing.random_programs.evaluate` carries it out operation by operation
and stores each result in the dtype that the program names, so no compiler hides a wrong dtype by keeping more bits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from testing import measures
from testing.random_programs.evaluate import as_typed, evaluate, exact

from . import harness
from .program import REGISTRY


def _traced(name: str, caster: harness.Caster, dtype: str) -> Any:
    """The jaxpr of a program's gradients under a caster."""
    program, (loss_fn, params, batch) = REGISTRY[name], harness.concrete(name)
    with program.context():
        return harness.gradients(program, caster(loss_fn, harness.POLICIES[dtype])).trace(params, batch).jaxpr


@functools.cache
def _reference(name: str) -> tuple[Any, Any]:
    """The jaxpr of a program's gradients in float32, and its results in float64."""
    jaxpr = _traced(name, harness.identity, "float16")
    _, *arrays = harness.concrete(name)
    return jaxpr, evaluate(jaxpr, jax.tree.leaves(arrays), exact)


def gradient_error(name: str, caster: harness.Caster, dtype: str) -> float:
    """The relative error of a program's gradients to float64's; NaN if one is not finite."""
    _, *arrays = harness.concrete(name)
    found = evaluate(_traced(name, caster, dtype), jax.tree.leaves(arrays), as_typed)
    return measures.relative_error(found, _reference(name)[1])


def rounding_error(name: str, dtype: str) -> float:
    """The relative error that rounding only the params and the batch to half causes."""
    _, *arrays = harness.concrete(name)
    jaxpr, expected = _reference(name)
    found = evaluate(jaxpr, jax.tree.leaves(measures.rounded(arrays, dtype)), exact)
    return measures.relative_error(found, expected)
