"""What a loss makes of logits before it reduces them: logits with a shift, exponentials, labels, and their products."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpjax.casting.cross_entropy.labels import Labels, times
from mpjax.casting.cross_entropy.repeated import Repeated

ONE = Labels((), 1.0)
_MOST = 32  # products and functions in a sum


class Logits(NamedTuple):
    """An array of logits, with what was done to each row.

    Args:
        shift: Pairs of how and a variable that is the same in a row: `add` and `sub` of it, `mul` and `div` of it and
            the exponentials of the logits.
        head: Which head's logits they are.
        guarded: Whether they are 0 where their exponentials are.
    """

    shift: tuple[tuple[str, Any], ...] = ()
    head: int = 0
    guarded: bool = False


class Underflow(NamedTuple):
    """Where the exponentials of the logits of a head are 0."""

    head: int


class Product(NamedTuple):
    """The product of labels, the exponentials of logits, logits and any functions of them, each if given.

    The functions are computed at labels only: one element of each row, from those of the variables that they read.
    """

    labels: Labels
    exponentials: Logits | None = None
    logits: Logits | None = None
    functions: tuple[Repeated, ...] = ()

    @property
    def heads(self) -> list[int]:
        """Those of its exponentials and its logits."""
        return [each.head for each in (self.exponentials, self.logits) if each is not None]

    @property
    def places(self) -> list[int]:
        """The heads of its exponentials and of its logits; 0 for what it has not."""
        return [0 if each is None else each.head for each in (self.exponentials, self.logits)]

    @property
    def is_exponential(self) -> bool:
        """Whether it is the exponentials of logits, times what is the same in a row."""
        return self.exponentials is not None and self.logits is None and not (self.labels.factors or self.functions)


class Sum(NamedTuple):
    """A sum of products."""

    terms: tuple[Product, ...]


def terms_of(kind: Any) -> tuple[Product, ...]:
    """Logits, labels or a product as a sum of products; () for anything else."""
    match kind:
        case Sum(terms):
            return terms
        case Product():
            return (kind,)
        case Labels():
            return (Product(kind),)
        case Logits():
            return (Product(ONE, None, kind),)
    return ()


def multiplied(left: Any, right: Any) -> Any:
    """The product of two; None if a term of it has several labels, logits or exponentials, or if it has many terms."""
    terms = []
    for pair in itertools.product(terms_of(left), terms_of(right)):
        a, b = sorted(pair, key=lambda product: len(product.labels.factors))
        if a.labels.factors or None not in (a.exponentials, b.exponentials) or None not in (a.logits, b.logits):
            return None
        labels = times(b.labels, a.labels.rest)._replace(weights=(*a.labels.weights, *b.labels.weights))
        functions = (*a.functions, *b.functions)
        terms.append(Product(labels, a.exponentials or b.exponentials, a.logits or b.logits, functions))
    return summed(terms)


def summed(terms: Sequence[Product]) -> Any:
    """A sum of products; None if there are none, or too many: those of `f = f * (f + 1)` double with each step."""
    if sum(1 + len(term.functions) for term in terms) > _MOST:
        return None
    return terms[0] if len(terms) == 1 else Sum(tuple(terms)) if terms else None
