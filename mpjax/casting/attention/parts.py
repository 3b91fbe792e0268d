"""The parts of an attention that a search has found."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpjax.casting.attention.axes import Axis, Dims


@dataclasses.dataclass(eq=False)
class Mask:
    """A boolean array that selects keys, by axes; the keys where it is False if `inverted`.

    Args:
        number: What the scores of other keys are, or what is added to them, as the exponential sees it.
    """

    v: Any
    dims: Dims
    inverted: bool = False
    number: float = 0.0


@dataclasses.dataclass(eq=False)
class Bias:
    """An array that is added to the scores, `factor` times."""

    v: Any
    dims: Dims
    factor: float


@dataclasses.dataclass(eq=False)
class Attention:
    """An attention in a program.

    Args:
        values: The equation that multiplies the probabilities by the values.
        scores: The equation that multiplies queries and keys.
        inside: All equations that nothing else needs.
        probabilities: The variables after the normalisation.
        parts: The operands with their axes: q, k, v.
        out: The axes of the result.
        batch, queries, keys, head, width: The axes of these kinds; `width` is the head of the values.
        scale: The factor of the scores.
        cap: If not 0, the scores are `cap · tanh(scores / cap)`.
        biases, masks: What is added to them, and what selects keys.
        why_not: The reason why it is not fused; empty if it can be.
    """

    values: Any
    scores: Any = None
    inside: list[Any] = dataclasses.field(default_factory=list)
    probabilities: set[Any] = dataclasses.field(default_factory=set)
    parts: tuple[tuple[Any, Dims], ...] = ()
    out: Dims = ()
    batch: tuple[Axis, ...] = ()
    queries: tuple[Axis, ...] = ()
    keys: tuple[Axis, ...] = ()
    head: tuple[Axis, ...] = ()
    width: tuple[Axis, ...] = ()
    scale: float = 1.0
    cap: float = 0.0
    biases: list[Bias] = dataclasses.field(default_factory=list)
    masks: list[Mask] = dataclasses.field(default_factory=list)
    why_not: str = ""

    @property
    def added(self) -> tuple[Mask | Bias, ...]:
        """The masks and the biases."""
        return (*self.masks, *self.biases)

    def refuse(self, why: str) -> None:
        """Notes a reason why it is not fused. The first one stays."""
        self.why_not = self.why_not or why
