"""Finds losses whose logits are read by rows only, and writes them from statistics of the rows.

The search starts at each matmul with a parameter. It follows the logits forward: scales, a bias and a cap, a shift that
is the same for a whole row, exponentials, products with one-hot labels. Each reduction over the vocabulary then is a
formula of few numbers of a row: its logsumexp, its largest, its sum, and the logits at its labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.casting.cross_entropy.labels import (
    Labels,
    gathered,
    labels_of,
    number_of,
    row_of,
    scalar_of,
    times,
    unvaried,
    weighted,
)
from mpjax.casting.setting import tracked
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow
from mpjax.program.dtypes import is_half
from mpjax.program.graph import walk
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import source_line

# By name: a loss is found by what is done to its logits.

_NORMALISING = frozenset(("exp", "reduce_sum", "log"))
_PADDING = -1e8  # float32 absorbs logits that are added to it


class Refused(Exception):
    """Something reads the logits themselves."""


class Logits(NamedTuple):
    """An array of logits, with what was added to each row: pairs of a sign and a variable that is the same in a row."""

    shift: tuple[tuple[float, Any], ...] = ()


class Exponential(NamedTuple):
    """The exponential of logits."""

    logits: Logits


class Picked(NamedTuple):
    """The product of labels and logits."""

    labels: Labels
    logits: Logits


class _Padding(NamedTuple):
    """A mask over the vocabulary, whether it is true at the padding, and the number that stands there for logits.

    `begin` is the number of steps before it.
    """

    mask: Any
    where: bool
    number: float
    begin: int


class Found(NamedTuple):
    """A loss's head.

    Args:
        matmul: Its equation.
        swapped: Whether its first operand has the vocabulary.
        vocabulary: The size of it.
        steps: What is done to the product, as in `Head`.
        moves: The moves of rows between the product and the loss.
        bias: The bias before it was broadcast; None without one.
        factor: The variable that all logits are multiplied by, or divided by, and which; None without one.
        padding: Which of the vocabulary are padding, as `_Padding`; None without any.
        inside: The equations that the statistics replace.
        reads: The reductions, each with a function from statistics and row values to its result, and its row values.
        labels: The arrays of labels, each with whether a label outside of the vocabulary is the nearest one in it.
        shape: The shape of the logits without the vocabulary.
    """

    matmul: Any
    swapped: bool
    vocabulary: int
    steps: tuple[tuple[str, float], ...]
    moves: tuple[Any, ...]
    bias: Any
    factor: tuple[str, Any] | None
    padding: _Padding | None
    inside: frozenset[int]
    reads: tuple[tuple[Any, Callable[..., Any], tuple[Any, ...]], ...]
    labels: tuple[tuple[Any, bool], ...]
    shape: tuple[int, ...]


class _Search:
    """The search from one matmul."""

    def __init__(self, flow: Dataflow, matmul: Any):
        self.flow, self.matmul = flow, matmul
        self.swapped = _weights_first(flow, matmul)
        self.size = matmul.outvars[0].aval.shape[0 if self.swapped else -1]
        self.steps: list[tuple[str, float]] = []
        self.moves: list[Any] = []
        self.bias: Any = None
        self.factor: tuple[str, Any] | None = None
        self.padding: _Padding | None = None
        self.inside: list[Any] = [matmul]
        self.reads: list[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = []
        self.labels: list[tuple[Any, bool]] = []
        self.known: dict[Any, Any] = {}
        self.stopped: dict[Any, bool] = {}
        self.is_loss = False  # Whether the largest of each row is read, as a softmax does.

    def run(self) -> Found:
        """Follows the logits to all that reads them.

        Raises:
            Refused: Something reads more than statistics of rows.
        """
        if not isinstance(self.size, int):
            raise Refused("its vocabulary has no size yet: it is symbolic")
        logits = self._head()
        self.known[logits] = Logits()
        self.shape = logits.aval.shape[:-1]
        self._follow([logits])
        if not self.has_exponentials():
            raise Refused("nothing sums their exponentials")
        read = (self.bias, self.factor and self.factor[1], self.padding and self.padding.mask)
        given = [*(y for y, _ in self.labels), *read]
        if self.flow.depends([v for v in given if v is not None], self.matmul.outvars[0]):
            raise Refused("its labels follow from its own logits")
        if any(compat.is_explicit(v.aval) for v in self.matmul.invars):
            raise Refused("its arrays are on a mesh with explicit axes: jax.sharding.auto_axes around the loss")
        return Found(
            self.matmul, self.swapped, self.size, tuple(self.steps), tuple(self.moves), self.bias, self.factor,
            self.padding, frozenset(map(id, self.inside)), tuple(self.reads), tuple(self.labels), self.shape,
        )  # fmt: skip

    def has_exponentials(self) -> bool:
        return any(isinstance(kind, Exponential) for kind in self.known.values())

    def _head(self) -> Any:
        """The logits after scales, bias, cap and moves of their rows: the last value with a single reader."""
        v: Any = self.matmul.outvars[0]
        if self.swapped:
            readers = self.flow.readers.get(v, ())
            moved = next((eqn for eqn in readers if eqn.primitive.name == "transpose"), None)
            if moved is None or len(readers) > 1 or moved.params["permutation"][-1] != 0:
                raise Refused("its vocabulary is not the last dimension of the logits")
            self.inside.append(moved)
            self.moves.append(moved)
            (v,) = moved.outvars
        while len(readers := self.flow.readers.get(v, ())) == 1 and v not in self.flow.returned:
            eqn = next(iter(readers))
            if not self._is_step(eqn, v):
                break
            self.inside.append(eqn)
            v = eqn.outvars[0]
        return v

    def _is_step(self, eqn: Any, v: Any) -> bool:
        name, shape = eqn.primitive.name, v.aval.shape
        other = next((x for x in eqn.invars if x is not v), None)
        if name in ("mul", "div") and other is not None and not (name == "div" and eqn.invars[0] is not v):
            factor = number_of(self.flow, other)
            if factor is None and self.factor is None and self.padding is None:
                scalar = scalar_of(self.flow, other)
                self.factor = None if scalar is None else (name, scalar)
                self.steps += [] if scalar is None else [("factors", 0.0)]
                return scalar is not None
            if factor is None or not math.isfinite(factor) or factor == 0:
                return False
            self.steps.append(("scale", factor if name == "mul" else 1 / factor))
            return True
        if name == "tanh":
            self.steps.append(("cap", 1.0))
            return True
        if name in ("sharding_constraint", "name", "copy"):  # of logits that no longer exist
            return True
        if name == "add" and other is not None and self.bias is None and self.padding is None:
            self.bias = self._bias(other, shape)
            self.steps += [] if self.bias is None else [("bias", 0.0)]
            return self.bias is not None
        if name == "select_n" and self.padding is None and (self.bias is None or self.steps[-1][0] == "bias"):
            self.padding = self._as_padding(eqn, v)
            self.steps += [] if self.padding is None or self.bias is not None else [("bias", 0.0)]
            return self.padding is not None
        if name == "reshape" and eqn.outvars[0].aval.shape[-1:] == shape[-1:] and eqn.params["dimensions"] is None:
            self.moves.append(eqn)
            return True
        if name == "transpose" and eqn.params["permutation"][-1] == len(shape) - 1:
            self.moves.append(eqn)
            return True
        if name == "slice" and eqn.outvars[0].aval.shape[-1] == shape[-1]:
            self.moves.append(eqn)
            return True
        return False

    def _bias(self, other: Any, shape: Sequence[int]) -> Any:
        """The bias that was broadcast to the shape of the logits; None if it is none."""
        if isinstance(other, compat.Literal):
            return None
        if other.aval.shape == (*(1 for _ in shape[:-1]), shape[-1]):
            return other
        maker = self.flow.maker(unvaried(self.flow, other))
        if maker is None or maker.primitive.name != "broadcast_in_dim":
            return None
        (source,) = maker.invars
        one_row = source.aval.shape in (shape[-1:], (*(1 for _ in shape[:-1]), shape[-1]))
        return source if one_row and maker.params["broadcast_dimensions"][-1] == len(shape) - 1 else None

    def _as_padding(self, eqn: Any, v: Any) -> _Padding | None:
        """Logits with padding, whose number is so low that a logit added to it is lost in float32."""
        mask, *cases = eqn.invars
        source = self._bias(mask, v.aval.shape) if len(cases) == 2 else None
        number = number_of(self.flow, cases[1] if cases[0] is v else cases[0])
        if source is None or number is None or number > _PADDING:
            return None
        return _Padding(source, cases[0] is v, number, len(self.steps))

    def _follow(self, waiting: list[Any]) -> None:
        while waiting:
            v = waiting.pop()
            if v in self.flow.returned:
                raise Refused("its logits are returned")
            for eqn in self.flow.readers.get(v, ()):
                found = self._reader(eqn)
                if id(eqn) not in map(id, self.inside):
                    self.inside.append(eqn)
                if found is not None and eqn.outvars[0] not in self.known:
                    self.known[eqn.outvars[0]] = found
                    waiting.append(eqn.outvars[0])

    def _reader(self, eqn: Any) -> Any:
        """What an equation that reads logits makes of them; None if it is a reduction, which is noted."""
        name = eqn.primitive.name
        kinds = [self._kind(x) for x in eqn.invars]
        match name, kinds:
            case "copy" | "convert_element_type", [kind] if tracked(eqn.outvars[0]):
                return kind
            case "sub" | "add", [Logits(shift), None]:
                return Logits((*shift, (1.0 if name == "add" else -1.0, self._row(eqn, eqn.invars[1]))))
            case "add", [None, Logits(shift)]:
                return Logits((*shift, (1.0, self._row(eqn, eqn.invars[0]))))
            case "exp", [Logits() as logits]:
                return Exponential(logits)
            case "mul", [Logits() as logits, Labels() as labels] | [Labels() as labels, Logits() as logits]:
                return Picked(labels, logits)
            case "select_n", [Labels(((label, 1.0),), 0.0, ()), None, Logits() as logits] if (
                number_of(self.flow, eqn.invars[1]) == 0
            ):
                return Picked(Labels(((label, 1.0),)), logits)
            case "neg", [Picked(labels, logits)]:
                return Picked(times(labels, -1.0), logits)
            case "neg", [Logits() as logits]:
                return Picked(Labels((), -1.0), logits)
            case "mul", [Picked(), None] | [None, Picked()] | [Logits(), None] | [None, Logits()]:
                kind = kinds[0] if kinds[0] is not None else kinds[1]
                other = eqn.invars[1] if kinds[0] is not None else eqn.invars[0]
                number = number_of(self.flow, other)
                labels, logits = (kind.labels, kind.logits) if isinstance(kind, Picked) else (Labels((), 1.0), kind)
                if number is not None:
                    return Picked(times(labels, number), logits)
                of_rows = weighted(labels, name, row_of(self.flow, other, self.shape))
                if of_rows is not None and isinstance(kind, Picked):
                    return Picked(of_rows, logits)
            case "reduce_max", [Logits(shift)] if self._over_vocabulary(eqn):
                self.is_loss = True
                if not self._is_stopped(eqn.outvars[0]):
                    raise Refused(
                        "its largest logit has a gradient: jax.lax.stop_gradient, if it only shifts the logits"
                    )
                return self._note(eqn, lambda found, *rows: found[1] + _total(shift, rows), shift)
            case "dot_general", [Logits(shift), Labels() as labels] | [Labels() as labels, Logits(shift)] if (
                self._contracts_vocabulary(eqn) and (self.padding is None or labels.rest == 0)
            ):
                return self._note_picked(eqn, labels, shift)
            case "reduce_sum", [Exponential(Logits(shift))] if self._over_vocabulary(eqn):
                return self._note(eqn, lambda found, *rows: jnp.exp(found[0] + _total(shift, rows)), shift)
            case "reduce_sum", [Logits(shift)] if self._sums_vocabulary(eqn) and self.padding is None:
                size = self.size
                return self._note(eqn, lambda found, *rows: found[2] + size * _total(shift, rows), shift)
            case "reduce_sum", [Picked(labels, Logits(shift))] if self._sums_vocabulary(eqn) and (
                self.padding is None or labels.rest == 0
            ):
                return self._note_picked(eqn, labels, shift)
            case "argmax", [Logits(shift)] if eqn.params["axes"] == (len(self.shape),):
                dtype = eqn.params["index_dtype"]
                return self._note(eqn, lambda found, *rows: found[3].astype(dtype), ())
            case "gather", [Logits(shift), None] if (label := gathered(self.flow, eqn, self.shape)) is not None:
                return self._note_gather(eqn, label, shift)
        small = not any(self.size in v.aval.shape for v in eqn.outvars)
        if primitive(name).rule and (small or _NORMALISING.issubset(site.name for site in walk(Dataflow([eqn])))):
            self.is_loss = True
            raise Refused(f"a function with a derivative rule of its own reads its logits ({source_line(eqn)})")
        scopes = "the program contains its gradient already" if "transpose(" in str(eqn.source_info.name_stack) else ""
        raise Refused(scopes or _read_by(eqn))

    def _kind(self, x: Any) -> Any:
        """What an operand is: logits, what is made of them, or labels; None for anything else."""
        if isinstance(x, compat.Literal):
            return None
        return self.known.get(x) or labels_of(self.flow, x, (*self.shape, self.size))

    def _row(self, eqn: Any, x: Any) -> Any:
        source = row_of(self.flow, x, self.shape)
        if source is None:
            raise Refused(_read_by(eqn))
        return source

    def _over_vocabulary(self, eqn: Any) -> bool:
        return bool(eqn.params["axes"] == (len(self.shape),))

    def _sums_vocabulary(self, eqn: Any) -> bool:
        """Whether a sum is over the vocabulary, and maybe over rows too."""
        return bool(eqn.params["axes"][-1:] == (len(self.shape),))

    def _contracts_vocabulary(self, eqn: Any) -> bool:
        """Whether a product of two arrays of logits' shape sums over the vocabulary alone."""
        rows = tuple(range(len(self.shape)))
        contracted, batch = eqn.params["dimension_numbers"]
        return bool(contracted == ((len(rows),),) * 2 and batch == (rows, rows))

    def _is_stopped(self, v: Any) -> bool:
        """Whether a value has no derivative."""
        if v not in self.stopped:
            self.stopped[v] = v not in self.flow.returned and all(
                eqn.primitive.name == "stop_gradient"
                or all(not compat.is_inexact(out.aval) or self._is_stopped(out) for out in eqn.outvars)
                for eqn in self.flow.readers.get(v, ())
            )
        return self.stopped[v]

    def _label(self, v: Any, clipped: bool = False) -> int:
        if (v, clipped) not in self.labels:
            self.labels.append((v, clipped))
        return self.labels.index((v, clipped))

    def _note(self, eqn: Any, result: Callable[..., Any], shift: Sequence[tuple[float, Any]]) -> None:
        self.reads.append((eqn, result, tuple(row for _, row in shift)))

    def _note_picked(self, eqn: Any, labels: Labels, shift: Any) -> None:
        at, size, rest = [(self._label(y), factor) for y, factor in labels.factors], self.size, labels.rest
        begin, end = len(shift), len(shift) + len(at)

        def result(found: Any, *rows: Any) -> Any:
            total = _total(shift, rows[:begin])
            out = rest * (found[2] + size * total) if rest else 0.0
            for (i, factor), y in zip(at, rows[begin:end], strict=True):
                inside = (y >= 0) & (y < size)
                out = out + factor * (found[4 + i] + jnp.where(inside, total, 0))
            for (how, _), weight in zip(labels.weights, rows[end:], strict=True):
                out = out * weight if how == "mul" else out / weight
            return out

        of_rows = (*(row for _, row in shift), *(y for y, _ in labels.factors), *(w for _, w in labels.weights))
        self.reads.append((eqn, result, of_rows))

    def _note_gather(self, eqn: Any, label: Any, shift: Any) -> None:
        size, mode, fill, count = self.size, eqn.params["mode"], eqn.params["fill_value"], len(shift)
        i = self._label(label, mode != lax.GatherScatterMode.FILL_OR_DROP)

        def result(found: Any, *rows: Any) -> Any:
            out = found[4 + i] + _total(shift, rows[:count])
            inside = (rows[count] >= 0) & (rows[count] < size)
            clipped = mode != lax.GatherScatterMode.FILL_OR_DROP
            return out if clipped else jnp.where(inside, out, np.float32(np.nan if fill is None else fill))

        self.reads.append((eqn, result, (*(row for _, row in shift), label)))


def _read_by(eqn: Any) -> str:
    where = source_line(eqn)
    return f"its logits are read by {eqn.primitive.name}" + (f" ({where})" if where else "")


def _total(shift: Sequence[tuple[float, Any]], rows: Sequence[Any]) -> Any:
    return sum((sign * row for (sign, _), row in zip(shift, rows, strict=True)), start=np.float32(0))


def losses(flow: Dataflow) -> Iterator[tuple[Any, Found | str]]:
    """The matmuls whose results are reduced like the logits of a loss, each with its head or why it stays."""
    for eqn in flow.eqns:
        if _is_head(flow, eqn):
            search = _Search(flow, eqn)
            try:
                yield eqn, search.run()
            except Refused as why:
                if search.is_loss or search.has_exponentials() or _is_normalised(flow, eqn.outvars[0]):
                    yield eqn, str(why)
        elif _multiplies_rows(eqn) and all(map(is_half, eqn.invars)) and _is_normalised(flow, eqn.outvars[0]):
            yield eqn, "the program casts its operands to half itself: autocast does so, if they are float32"


def _is_normalised(flow: Dataflow, v: Any) -> bool:
    """Whether the logarithm of a sum of exponentials of a value is taken, before any matmul."""
    steps, waiting, seen = ("exp", "reduce_sum", "log"), [(v, 0)], set[Any]()
    while waiting:
        v, done = waiting.pop()
        for eqn in flow.readers.get(v, ()):
            name, now = eqn.primitive.name, done
            now += name == steps[now]
            if now == len(steps):
                return True
            if primitive(name).op is not Op.ALLOW:
                new = [(out, now) for out in eqn.outvars if (out, now) not in seen]
                seen.update(new)
                waiting += new
    return False


def _weights_first(flow: Dataflow, matmul: Any) -> bool:
    """Whether the weights are the first operand of a matmul, and the vocabulary the first dimension of its result."""
    w, x = (v.aval.ndim for v in matmul.invars)
    return w == 2 and (x > 2 or [eqn.primitive.name for eqn in flow.readers[matmul.outvars[0]]] == ["transpose"])


def _is_head(flow: Dataflow, eqn: Any) -> bool:
    """Whether a matmul multiplies float32 rows by a matrix."""
    return _multiplies_rows(eqn) and all(map(tracked, (*eqn.invars, *eqn.outvars))) and eqn.outvars[0] in flow.readers


def _multiplies_rows(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    ((left, right), (batch, _)) = eqn.params["dimension_numbers"]
    return len(left) == len(right) == 1 and not batch and min(v.aval.ndim for v in eqn.invars) == 2
