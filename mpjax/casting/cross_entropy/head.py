"""The product of a loss's head and what is read of its logits, as one equation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.cross_entropy import Head, statistics
from mpjax.program import contexts

CROSS_ENTROPY = jax.extend.core.Primitive("fused_cross_entropy")
CROSS_ENTROPY.multiple_results = True
_WORDS = {"bias": "bias", "scaled": "scale", "learned temperature": "factors", "capped": "cap"}


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """The parameters of the equation of a head: rows, weights, a bias and a factor if there are any, labels.

    Args:
        head: How logits follow.
        contracted: The dimensions of rows and of weights that are contracted.
        rows: The shape of the logits without the vocabulary.
        vocabulary: Its size.
    """

    head: Head
    contracted: tuple[int, int]
    rows: tuple[int, ...]
    vocabulary: int

    @property
    def floats(self) -> tuple[int, ...]:
        """The operands that are read in float32: the weights, the bias, the factor."""
        return tuple(range(1, len(self.head.floats)))

    @property
    def flops(self) -> int:
        """FLOPs of the product, without the width of the rows."""
        return 2 * math.prod(self.rows) * self.vocabulary

    @property
    def kind(self) -> str:
        """What it is, in words."""
        kinds = [kind for kind, _ in self.head.steps]
        words = [word for word, kind in _WORDS.items() if kind in kinds]
        return ", ".join(("stores no logits", *words))

    @property
    def results(self) -> list[Any]:
        """The shapes and dtypes of the results."""
        dtypes = (np.float32, np.float32, np.int32, np.float32, np.float32, *[np.float32] * self.head.labels)
        return [jax.ShapeDtypeStruct(self.rows, dtype) for dtype in dtypes]

    def __call__(self, x: Any, w: Any, *rest: Any) -> list[Any]:
        """The statistics of each row."""
        if contexts.trial.value is not None:
            contexts.trial.value.logits.add(math.prod(self.rows) * self.vocabulary)
        x = jnp.moveaxis(x, self.contracted[0], -1)
        w = jnp.moveaxis(w, self.contracted[1], 0)
        x = x.reshape(-1, x.shape[-1])
        given = dict(zip(self.head.floats[2:], rest, strict=False))
        labels = [y.reshape(-1) for y in rest[len(given) :]]
        bias = given["bias"].astype(np.float32) if "bias" in given else None
        factors = jnp.broadcast_to(given["factors"].astype(np.float32), x.shape[:1]) if "factors" in given else None
        found = statistics(x, w.astype(np.float32), bias, labels, self.head, factors)
        return [y.reshape(self.rows) for y in (*found[:5], *found.at)]
