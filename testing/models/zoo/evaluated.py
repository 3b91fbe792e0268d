"""Gradients of the zoo's programs in NumPy, which takes a tenth of the time to compile them for the CPU.

`testing.random_programs.evaluate` evaluates the traced program, after the caster, operation by operation. It stores
each result in the program's dtype, so no compiler hides a wrong dtype by keeping more bits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from testing import measures
from testing.random_programs.evaluate import Casts, Store, as_typed, casts_by_hand, evaluate, exact

from . import harness
from .program import REGISTRY


def _gradients(
    name: str, caster: harness.Caster, dtype: str, arrays: Any, store: Store, casts: Casts | None = None
) -> Any:
    """A program's gradients under a caster, or its results if it has no gradients."""
    jaxpr, shapes = harness.plain(name, caster, dtype)
    leaves = evaluate(jaxpr, jax.tree.leaves(arrays), store, casts=casts)
    found = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    return found[1] if REGISTRY[name].differentiable else found


@functools.cache
def reference(name: str) -> Any:
    """A program's gradients in float64."""
    _, *arrays = harness.concrete(name)
    return _gradients(name, harness.identity, "float16", arrays, exact)


def gradient_error(name: str, caster: harness.Caster, dtype: str) -> float:
    """The relative error of a program's gradients against float64; NaN if one is not finite."""
    _, *arrays = harness.concrete(name)
    return measures.relative_error(_gradients(name, caster, dtype, arrays, as_typed), reference(name))


@functools.cache
def error_by_hand(name: str, dtype: str) -> float:
    """The relative error of the gradients of the same program with careful casts by hand, against float64."""
    _, *arrays = harness.concrete(name)
    casts = casts_by_hand(jnp.dtype(dtype))
    return measures.relative_error(_gradients(name, harness.identity, dtype, arrays, as_typed, casts), reference(name))


def rounding_error(name: str, dtype: str) -> float:
    """The relative error caused by rounding only the params and the batch to half."""
    _, *arrays = harness.concrete(name)
    found = _gradients(name, harness.identity, "float16", measures.rounded(arrays, dtype), exact)
    return measures.relative_error(found, reference(name))
