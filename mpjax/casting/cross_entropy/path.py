"""What is done to the product of a head up to what its loss reads: scales, a bias, a cap, padding and moves of rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from mpjax.casting.cross_entropy.labels import Layout, broadcast_of, number_of, scalar_of
from mpjax.casting.cross_entropy.repeated import Repeated, computed, mask_of
from mpjax.casting.setting import tracked
from mpjax.kernels.cross_entropy import Head
from mpjax.program.dataflow import Dataflow

# By name: a loss is found by what is done to its logits.

_PADDING = -1e8  # float32 absorbs logits that are added to it


class Refused(Exception):
    """Something reads the logits themselves: why, and the equation, if it may read those of another head too."""

    def __init__(self, why: str, eqn: Any = None):
        super().__init__(why)
        self.eqn = eqn


class Factor(NamedTuple):
    """What logits are multiplied or divided by: how, and a variable with one number, or one for each row.

    `rows` is the shape of the rows, after the moves before `begin`.
    """

    how: str
    value: Any
    rows: tuple[int, ...]
    begin: int


class Path:
    """What is done to the product of a head up to what its loss reads: logits.

    Attributes:
        matmul: Its equation.
        swapped: Whether its first operand has the vocabulary.
        axis: That of the vocabulary.
        vocabulary: The size of it.
        columns: Which of the weights these are; None for all.
        steps: What is done to the product, as in `Head`.
        moves: The equations that move logits between the product and the loss, each with the axis before and after it.
        base: The logits to which biases are added, or over which the numbers of padding are written; None without any.
        added: A row of these after it, as what is repeated.
        end, sizes: The logits after it, and the sizes of a row of it.
        is_padded: Whether numbers stand for some of the logits.
        mask: Where they do, as `mask_of` finds it, if `end` is masked; else None.
        factor: What logits are multiplied or divided by, as `Factor`; None without any.
        inside: The equations that the statistics replace.
        stopped: The names of the operands that have no derivative, as those of a teacher.
    """

    def __init__(self, flow: Dataflow, matmul: Any, other: bool = False):
        self.flow, self.matmul = flow, matmul
        self.swapped = _weights_first(flow, matmul) != other
        self.axis = 0 if self.swapped else matmul.outvars[0].aval.ndim - 1
        self.vocabulary = matmul.outvars[0].aval.shape[self.axis]
        self.columns: slice | None = None
        self.steps: list[tuple[str, float]] = []
        self.moves: list[tuple[Any, int, int]] = []
        self.base: Any = None
        self.added, self.end = Repeated(lambda row: row), None
        self.sizes: tuple[int, ...] = ()
        self.is_padded = False
        self.mask: Any = None
        self.factor: Factor | None = None
        self.inside: list[Any] = [matmul]
        self.stopped: tuple[str, ...] = ()

    @property
    def arrays(self) -> list[Any]:
        """The variables of what is added."""
        return [v for v in self.added.of if v is not self.base]

    def logits(self) -> Any:
        """The logits after scales, bias, cap and moves of their rows: the last value with a single reader."""
        v: Any = self.matmul.outvars[0]
        while len(readers := self.flow.readers.get(v, [])) == 1 and v not in self.flow.returned:
            (eqn,) = readers
            if not self._is_step(eqn, v):
                break
            self.inside.append(eqn)
            v = eqn.outvars[0]
        return v

    def _move(self, eqn: Any, axis: int) -> bool:
        self.moves.append((eqn, self.axis, axis))
        self.axis = axis
        return True

    def _is_step(self, eqn: Any, v: Any) -> bool:
        name, layout = eqn.primitive.name, Layout(v.aval.shape, self.axis)
        other = next((x for x in eqn.invars if x is not v), None)
        if name in ("mul", "div") and other is not None and not (name == "div" and eqn.invars[0] is not v):
            factor = number_of(self.flow, other)
            if factor is None and self.factor is None and not self.is_padded:
                given = scalar_of(self.flow, other)
                if given is None:
                    given = broadcast_of(self.flow, other, layout.of_row)
                self.factor = None if given is None else Factor(name, given, layout.rows, len(self.moves))
                self.steps += [] if given is None else [("factors", 0.0)]
                return given is not None
            if factor is None or not math.isfinite(factor) or factor == 0:
                return False
            self.steps.append(("scale", factor if name == "mul" else 1 / factor))
            return True
        if name == "tanh":
            self.steps.append(("cap", 1.0))
            return True
        if name in ("sharding_constraint", "name", "copy"):  # of logits that no longer exist
            return True
        if name == "stop_gradient":
            self.stopped = Head(tuple(self.steps)).floats
            return True
        if name == "transpose":
            return self._move(eqn, eqn.params["permutation"].index(self.axis))
        if self._adds(eqn, v, layout):
            return True
        shape = eqn.outvars[0].aval.shape
        if name in ("reshape", "squeeze") and not _reorders(eqn) and (new := layout.reshaped(shape)) is not None:
            return self._move(eqn, new.axis)
        if name == "slice" and (self.columns is None or shape[self.axis] == self.vocabulary):
            if (size := shape[self.axis]) != self.vocabulary:
                limits = (eqn.params[of] for of in ("start_indices", "limit_indices", "strides"))
                self.columns, self.vocabulary = slice(*(each and each[self.axis] for each in limits)), size
            return self._move(eqn, self.axis)
        return False

    def _adds(self, eqn: Any, v: Any, layout: Layout) -> bool:
        """Whether an equation adds the same to all rows, or writes a number over the same elements of each.

        The number is so low that a logit added to it is lost in float32.
        """
        name, others = eqn.primitive.name, [x for x in eqn.invars if x is not v]
        if len(others) != {"add": 1, "select_n": 2, "scatter": 2}.get(name):
            return False
        number = None if name == "add" else number_of(self.flow, others[-1])
        low = name == "add" or (number is not None and number <= _PADDING)
        known = {v: Repeated(lambda row: row, (v,))} if self.base is None else {self.end: self.added}
        found = computed(self.flow, eqn, layout, known) if low and v in known else None
        if found is None:
            return False
        if self.base is None:
            self.base, self.sizes = v, layout.of_vocabulary
            self.steps.append(("bias", 0.0))
        self.added, self.end = found, eqn.outvars[0]
        self.is_padded |= number is not None
        self.mask = mask_of(self.flow, eqn, v) if name == "select_n" else None
        return True


def is_head(flow: Dataflow, eqn: Any) -> bool:
    """Whether a matmul multiplies float32 rows by a matrix."""
    return multiplies_rows(eqn) and all(map(tracked, (*eqn.invars, *eqn.outvars))) and eqn.outvars[0] in flow.readers


def multiplies_rows(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    ((left, right), (batch, _)) = eqn.params["dimension_numbers"]
    return len(left) == len(right) == 1 and not batch and min(v.aval.ndim for v in eqn.invars) == 2


def _weights_first(flow: Dataflow, matmul: Any) -> bool:
    """Whether the weights are the first operand of a matmul, and the vocabulary the first dimension of its result."""
    (w, x), v = (v.aval.ndim for v in matmul.invars), matmul.outvars[0]
    while len(readers := flow.readers.get(v, [])) == 1 and readers[0].primitive.name in ("mul", "div"):
        (v,) = readers[0].outvars
    return bool(w == 2 and (x > 2 or [eqn.primitive.name for eqn in readers] == ["transpose"]))


def _reorders(reshape: Any) -> bool:
    return reshape.primitive.name == "reshape" and reshape.params["dimensions"] is not None
