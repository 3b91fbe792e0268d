"""The product of a loss's head and what is read of its logits, as one equation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.kernels.cross_entropy import Heads, statistics
from mpjax.program import contexts

CROSS_ENTROPY = jax.extend.core.Primitive("fused_cross_entropy")
CROSS_ENTROPY.multiple_results = True
_WORDS = {"bias": "bias", "scaled": "scale", "learned temperature": "factors", "capped": "cap"}


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """The parameters of the equation: for each head rows, weights, a bias and a factor if there are any; labels.

    Args:
        heads: How logits follow.
        contracted: The dimensions of rows and of weights that are contracted, of each head.
        rows: The shape of the logits without the vocabulary.
        vocabulary: Its size.
        width: The features of all heads together.
    """

    heads: Heads
    contracted: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    vocabulary: int
    width: int

    @property
    def floats(self) -> tuple[int, ...]:
        """The operands that are read in float32: the weights, the bias, the factor."""
        return self.heads.places("wbf")

    @property
    def flops(self) -> int:
        """FLOPs of the products."""
        return 2 * math.prod(self.rows) * self.vocabulary * self.width

    @property
    def kind(self) -> str:
        """What it is, in words."""
        kinds = [kind for head in self.heads.heads for kind, _ in head.steps]
        words = [word for word, kind in _WORDS.items() if kind in kinds]
        return ", ".join(("stores no logits", *["two heads"] * (len(self.contracted) > 1), *words))

    @property
    def results(self) -> list[Any]:
        """The shapes and dtypes of the results."""
        n = len(self.contracted)
        of_floats = [jax.ShapeDtypeStruct(self.rows, np.float32)] * (n * (3 + n + self.heads.labels))
        return [jax.ShapeDtypeStruct((*self.rows, n), np.int32), *of_floats]

    def __call__(self, *operands: Any) -> list[Any]:
        """The statistics of each row, as `Heads.of_results` reads them."""
        if contexts.trial.value is not None:
            contexts.trial.value.logits.add(math.prod(self.rows) * self.vocabulary)
        arrays, contracted, rows = [], iter(self.contracted), math.prod(self.rows)
        for name, y in zip(self.heads.names, operands, strict=True):
            if name[:1] == "x":
                i, j = next(contracted)
                arrays.append(jnp.moveaxis(y, i, -1).reshape(-1, y.shape[i]))
            elif name[:1] == "w":
                arrays.append(jnp.moveaxis(y, j, 0).astype(np.float32))
            elif name[:1] == "f":
                arrays.append(jnp.broadcast_to(y.astype(np.float32), (rows,)))
            else:
                arrays.append(y.astype(np.float32) if name else y.reshape(-1))
        found = statistics(arrays, self.heads)
        return [y.reshape(*self.rows, *y.shape[1:]) for y in found]
