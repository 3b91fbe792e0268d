"""Finds losses whose logits are read by rows only, and writes them from statistics of the rows.

The search starts at each matmul with a parameter. It follows the logits forward: scales, a bias and a cap, a shift that
is the same for a whole row, exponentials, products of logits, exponentials and one-hot labels. Each reduction over the
vocabulary then is a formula of few numbers of a row: its statistics.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.casting.cross_entropy.labels import (
    Labels,
    broadcast_of,
    gathered,
    labels_of,
    number_of,
    scalar_of,
    scaled,
    times,
)
from mpjax.casting.setting import tracked
from mpjax.kernels.cross_entropy import Head, Statistics
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, live_equations, variables
from mpjax.program.dtypes import is_half
from mpjax.program.graph import walk
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import source_line

# By name: a loss is found by what is done to its logits.

_NORMALISING = ("exp", "reduce_sum", "log")
_PADDING = -1e8  # float32 absorbs logits that are added to it
_ONE = Labels((), 1.0)


class Refused(Exception):
    """Something reads the logits themselves: why, and the equation, if it may read those of another head too."""

    def __init__(self, why: str, eqn: Any = None):
        super().__init__(why)
        self.eqn = eqn


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
    """The product of labels, the exponentials of logits and logits, each if given."""

    labels: Labels
    exponentials: Logits | None = None
    logits: Logits | None = None

    @property
    def heads(self) -> list[int]:
        """Those of its exponentials and its logits."""
        return [each.head for each in (self.exponentials, self.logits) if each is not None]

    @property
    def is_exponential(self) -> bool:
        """Whether it is the exponentials of logits, times what is the same in a row."""
        return self.exponentials is not None and self.logits is None and not self.labels.factors


class Sum(NamedTuple):
    """A sum of products."""

    terms: tuple[Product, ...]


class Padding(NamedTuple):
    """A mask over the vocabulary, whether it is true at the padding, and the number that stands there for logits.

    `begin` is the number of steps before it.
    """

    mask: Any
    where: bool
    number: float
    begin: int


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
        vocabulary: The size of it.
        columns: Which of the weights these are; None for all.
        steps: What is done to the product, as in `Head`.
        moves: The moves of rows between the product and the loss.
        bias: The bias before it was broadcast; None without one.
        factor: What logits are multiplied or divided by, as `Factor`; None without any.
        padding: Which of the vocabulary are padding, as `Padding`; None without any.
        inside: The equations that the statistics replace.
        stopped: The names of the operands that have no derivative, as those of a teacher.
    """

    def __init__(self, flow: Dataflow, matmul: Any):
        self.flow, self.matmul = flow, matmul
        self.swapped = _weights_first(flow, matmul)
        self.vocabulary = matmul.outvars[0].aval.shape[0 if self.swapped else -1]
        self.columns: slice | None = None
        self.steps: list[tuple[str, float]] = []
        self.moves: list[Any] = []
        self.bias: Any = None
        self.factor: Factor | None = None
        self.padding: Padding | None = None
        self.inside: list[Any] = [matmul]
        self.stopped: tuple[str, ...] = ()

    def logits(self) -> Any:
        """The logits after scales, bias, cap and moves of their rows: the last value with a single reader."""
        v: Any = self.matmul.outvars[0]
        while len(readers := self.flow.readers.get(v, [])) == 1 and v not in self.flow.returned:
            (eqn,) = readers
            if not self._is_step(eqn, v):
                break
            self.inside.append(eqn)
            v = eqn.outvars[0]
        if self._is_first:
            raise Refused("its vocabulary is not the last dimension of the logits")
        return v

    @property
    def _is_first(self) -> bool:
        """Whether the vocabulary is still the first dimension: no transposition has moved it behind the rows."""
        return self.swapped and not self.moves

    def _is_step(self, eqn: Any, v: Any) -> bool:
        name, shape = eqn.primitive.name, v.aval.shape
        other = next((x for x in eqn.invars if x is not v), None)
        if name in ("mul", "div") and other is not None and not (name == "div" and eqn.invars[0] is not v):
            factor = number_of(self.flow, other)
            if factor is None and self.factor is None and self.padding is None:
                given = scalar_of(self.flow, other)
                if given is None and not self._is_first:
                    given = broadcast_of(self.flow, other, (*shape[:-1], 1))
                self.factor = None if given is None else Factor(name, given, shape[:-1], len(self.moves))
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
        if name == "transpose" and eqn.params["permutation"][-1] == (0 if self._is_first else len(shape) - 1):
            self.moves.append(eqn)
            return True
        if self._is_first:
            return False
        if name == "add" and other is not None and self.bias is None and self.padding is None:
            self.bias = broadcast_of(self.flow, other, _one_row(shape))
            self.steps += [] if self.bias is None else [("bias", 0.0)]
            return self.bias is not None
        if name == "select_n" and self.padding is None and (self.bias is None or self.steps[-1][0] == "bias"):
            self.padding = self._as_padding(eqn, v)
            self.steps += [] if self.padding is None or self.bias is not None else [("bias", 0.0)]
            return self.padding is not None
        if name in ("reshape", "squeeze") and eqn.outvars[0].aval.shape[-1:] == shape[-1:] and not _reorders(eqn):
            self.moves.append(eqn)
            return True
        if name == "slice" and (self.columns is None or eqn.outvars[0].aval.shape[-1] == shape[-1]):
            if (size := eqn.outvars[0].aval.shape[-1]) != shape[-1]:
                starts, ends, strides = (eqn.params[of] for of in ("start_indices", "limit_indices", "strides"))
                self.columns, self.vocabulary = slice(starts[-1], ends[-1], strides and strides[-1]), size
            self.moves.append(eqn)
            return True
        return False

    def _as_padding(self, eqn: Any, v: Any) -> Padding | None:
        """Logits with padding, whose number is so low that a logit added to it is lost in float32."""
        mask, *cases = eqn.invars
        source = broadcast_of(self.flow, mask, _one_row(v.aval.shape)) if len(cases) == 2 else None
        number = number_of(self.flow, cases[1] if cases[0] is v else cases[0])
        if source is None or number is None or number > _PADDING:
            return None
        return Padding(source, cases[0] is v, number, len(self.steps))


class LossHead:
    """The heads of a loss: matmuls, and what is done to their products up to reductions over the vocabulary.

    Attributes:
        paths: Each as a `Path`.
        inside: The equations that the statistics replace, besides those of the paths.
        reads: The reductions, each with a function from statistics and row values to its result, and its row values.
        labels: The arrays of labels, each with whether a label outside of the vocabulary is the nearest one in it, and
            its number.
        shape: The shape of the logits without the vocabulary.
        frozen: The heads without a derivative, of two: a teacher's.
    """

    def __init__(self, flow: Dataflow, *matmuls: Any):
        self.flow, self.paths = flow, [Path(flow, matmul) for matmul in matmuls]
        self.vocabulary = self.paths[0].vocabulary
        self.inside: list[Any] = []
        self.reads: list[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = []
        self.labels: dict[tuple[Any, bool], int] = {}
        self.known: dict[Any, Any] = {}
        self.frozen: set[int] = set()
        self.stopped: set[Any] = set()  # what is made of logits, and has no derivative
        self.sums: set[Any] = set()  # sums of exponentials
        self.is_loss = False  # Whether the largest of each row is read, as a softmax does.

    def search(self) -> None:
        """Follows the logits to all that reads them.

        Raises:
            Refused: Something reads more than statistics of rows.
        """
        if not isinstance(self.vocabulary, int):
            raise Refused("its vocabulary has no size yet: it is symbolic")
        logits = [path.logits() for path in self.paths]
        if len(logits) > 1:
            derived = {id(eqn) for eqn in self.flow.made_by(self.flow.returned, _derived_operands)}
            self.frozen = {i for i, path in enumerate(self.paths) if id(path.inside[-1]) not in derived}
        self.vocabulary = self.paths[0].vocabulary
        self.shape = logits[0].aval.shape[:-1]
        if any(v.aval.shape != logits[0].aval.shape for v in logits):
            raise Refused("its loss reads logits of another shape, too")
        self._plain = [Logits(head=i) for i, _ in enumerate(logits)]
        self._follow(dict(zip(logits, self._plain, strict=True)))
        if not self.has_exponentials():
            raise Refused("nothing sums their exponentials")
        given = [y for y, _ in self.labels]
        for path in self.paths:
            given += [path.bias, path.factor and path.factor.value, path.padding and path.padding.mask]
        for path in self.paths:
            if self.flow.depends([v for v in given if v is not None], path.matmul.outvars[0]):
                raise Refused("its labels follow from its own logits")
            if any(compat.is_explicit(v.aval) for v in path.matmul.invars):
                raise Refused("its arrays are on a mesh with explicit axes: jax.sharding.auto_axes around the loss")

    def has_exponentials(self) -> bool:
        return any(isinstance(kind, Product) and kind.exponentials is not None for kind in self.known.values())

    def _follow(self, new: dict[Any, Any]) -> None:
        waiting: dict[int, Any] = {}  # by place: an equation follows all that it reads
        while True:
            self.known.update(new)
            for v in new:
                if v in self.flow.returned:
                    raise Refused("its logits are returned")
                waiting |= {self.flow.place(eqn): eqn for eqn in self.flow.readers.get(v, ())}
            if not waiting:
                return
            eqn = waiting.pop(min(waiting))
            self._stop(eqn)
            found = self._reader(eqn)
            self.inside.append(eqn)
            new = {} if found is None else {eqn.outvars[0]: found}

    def _stop(self, eqn: Any) -> None:
        """Notes whether what an equation makes of logits has no derivative.

        Raises:
            Refused: It takes logits with a derivative and logits without one.
        """
        stopped = {v in self.stopped for v in variables(eqn.invars) if self._is_derived(v)}
        if len(stopped) > 1:
            raise Refused(_read_by(eqn))
        if True in stopped or (stopped and eqn.primitive.name == "stop_gradient"):
            self.stopped.update(eqn.outvars)

    def _is_derived(self, v: Any) -> bool:
        """Whether something is made of the logits of a head that has a derivative."""
        return any(head not in self.frozen for term in _terms(self.known.get(v)) for head in term.heads)

    def _reader(self, eqn: Any) -> Any:
        """What an equation that reads logits makes of them; None if it is a reduction, which is noted."""
        name, ins, rows = eqn.primitive.name, eqn.invars, (*self.shape, 1)
        kinds = [self._kind(x) for x in ins]
        product: Any = None
        if name in ("add", "mul") and kinds[0] is None:
            ins, kinds = ins[::-1], kinds[::-1]
        match name, kinds:
            case "copy" | "convert_element_type", [kind] if tracked(eqn.outvars[0]):
                return kind
            case "stop_gradient", [kind] if not self._is_derived(ins[0]) or kind in self._plain:
                return kind
            case "sub" | "add", [Logits(shift, _, False) as kind, None] if (
                row := broadcast_of(self.flow, ins[1], rows)
            ) is not None:
                return kind._replace(shift=(*shift, (name, row)))
            case "add" | "sub", [left, right]:
                terms = [self._as_terms(*each) for each in zip(ins, kinds, strict=True)]
                if all(terms):
                    sign = Labels((), -1.0 if name == "sub" else 1.0)
                    product = Sum((*terms[0], *_terms(_multiplied(Sum(terms[1]), sign))))
            case "exp", [Logits(_, _, False) as logits]:
                return Product(_ONE, logits)
            case "log", [Product(Labels((), 1.0, weights), Logits(shift) as kind, None)]:
                return kind._replace(shift=(*shift, *weights))
            case "eq", [Product(_, Logits(), None) as kind, None] if number_of(self.flow, ins[1]) == 0:
                product = Underflow(kind.heads[0]) if kind.is_exponential else None
            case "select_n", [Underflow(head), Logits(_, i) as kind, None] if head == i:
                if number_of(self.flow, ins[2]) == 0:
                    return kind._replace(guarded=True)
            case "neg", [kind]:
                product = _multiplied(kind, Labels((), -1.0))
            case "mul" | "div", [kind, None]:
                product = self._scaled(kind, name, ins[1])
            case "mul", [left, right]:
                product = _multiplied(left, right)
            case "select_n", [Labels(((_, 1.0),), 0.0, ()) as hit, None, kind] if number_of(self.flow, ins[1]) == 0:
                product = _multiplied(hit, kind)
            case "dot_general", [left, right] if self._contracts_vocabulary(eqn):
                if (found := _multiplied(left, right)) is not None and self._is_summed(found):
                    return self._note(eqn, _terms(found))
            case "reduce_sum", [kind] if self._is_over_vocabulary(eqn) and self._is_summed(kind):
                return self._note(eqn, _terms(kind))
            case "reduce_max", [kind] if self._is_over_vocabulary(eqn) and self._rises(kind):
                self.is_loss = True
                return self._note(eqn, _terms(kind), largest=True)
            case "argmax", [kind] if eqn.params["axes"] == (len(self.shape),) and self._rises(kind):
                (term,), dtype = _terms(kind), eqn.params["index_dtype"]
                self.reads.append((eqn, lambda found: found[term.heads[0]].best.astype(dtype), ()))
                return None
            case "gather", [Logits(_, _, False) | Product() | Sum() as kind, None] if (
                label := gathered(self.flow, eqn, self.shape)
            ) is not None and not any(term.labels.factors for term in _terms(kind)):
                return self._note_gather(eqn, _terms(kind), label)
        if product is not None:
            return product
        small = not any(self.vocabulary in v.aval.shape for v in eqn.outvars)
        if primitive(name).rule and (small or {*_NORMALISING} <= {site.name for site in walk(Dataflow([eqn]))}):
            self.is_loss = True
            raise Refused(f"a function with a derivative rule of its own reads its logits ({source_line(eqn)})")
        scopes = "the program contains its gradient already" if "transpose(" in str(eqn.source_info.name_stack) else ""
        raise Refused(scopes or _read_by(eqn), eqn)

    def _as_terms(self, x: Any, kind: Any) -> tuple[Product, ...]:
        """What is added as products: what an equation knows, a number, or what is the same in a row; () for others."""
        if kind is None:
            labels = scaled(self.flow, _ONE, "mul", x, (*self.shape, 1))
            return () if labels is None else (Product(labels),)
        return _terms(kind)

    def _kind(self, x: Any) -> Any:
        """What an operand is: logits, what is made of them, or labels; None for anything else."""
        if isinstance(x, compat.Literal):
            return None
        return self.known.get(x) or labels_of(self.flow, x, (*self.shape, self.vocabulary))

    def _is_over_vocabulary(self, eqn: Any) -> bool:
        """Whether a reduction is over the vocabulary, and maybe over rows too."""
        return bool(eqn.params["axes"][-1:] == (len(self.shape),))

    def _is_summed(self, kind: Any) -> bool:
        """Whether a sum of products over the vocabulary follows from statistics."""
        return bool(_terms(kind)) and all(
            not logits.guarded and (self.paths[logits.head].padding is None or labels.rest == 0)
            if exponentials is None
            else not logits.guarded or logits.head == exponentials.head
            for labels, exponentials, logits in _terms(kind)
            if logits is not None
        )

    def _rises(self, kind: Any) -> bool:
        """Whether something is largest where the logits are: logits, and probabilities of a softmax."""
        if not isinstance(kind, Product):
            return isinstance(kind, Logits) and not kind.guarded
        sources = (self.flow.source(w, _only_moves) for how, w in kind.labels.weights if how == "div")
        positive = len(kind.labels.weights) == sum(w in self.sums for w in sources)
        return bool(kind.is_exponential and kind.labels.rest > 0 and positive)

    def _scaled(self, kind: Any, how: str, by: Any) -> Any:
        """Products, multiplied or divided by a number or by what is the same in a row; None if it is neither."""
        labels = scaled(self.flow, _ONE, how, by, (*self.shape, 1))
        return None if labels is None else _multiplied(kind, labels)

    def _contracts_vocabulary(self, eqn: Any) -> bool:
        """Whether a product of two arrays of logits' shape sums over the vocabulary alone."""
        rows = tuple(range(len(self.shape)))
        contracted, batch = eqn.params["dimension_numbers"]
        return bool(contracted == ((len(rows),),) * 2 and batch == (rows, rows))

    def _note(
        self, eqn: Any, terms: Sequence[Product], largest: bool = False, mode: Any = None, fill: Any = 0.0
    ) -> None:
        """Notes a reduction of products.

        Args:
            eqn: The reduction.
            terms: What it reduces, a sum.
            largest: Whether its result is that at the largest logit of a row, and not a sum over the vocabulary.
            mode: The mode of a gather, at labels outside of the vocabulary.
            fill: What it gives there.
        """
        clipped = mode not in (None, lax.GatherScatterMode.FILL_OR_DROP)
        size, stopped, given = self.vocabulary, eqn.outvars[0] in self.stopped, []
        for (factors, rest, weights), exponentials, logits in terms:
            for y, _ in factors:
                self.labels.setdefault((y, clipped), len(self.labels))
            shifts = [row for each in (exponentials, logits) if each is not None for _, row in each.shift]
            given += [*shifts, *(y for y, _ in factors), *(weight for _, weight in weights)]
            if [*terms] == [Product(Labels((), rest), exponentials)] and exponentials and rest > 0 and not largest:
                self.sums.add(eqn.outvars[0])

        def of_term(product: Product, found: Sequence[Statistics], rows: Iterator[Any]) -> tuple[Any, Any]:
            (factors, rest, weights), exponentials, logits = product
            e, z = (0 if each is None else each.head for each in (exponentials, logits))
            of_exponentials, of_logits = (_total(each.shift if each else (), rows) for each in (exponentials, logits))

            def value(logit: Any, exponent: Any) -> Any:
                powers = 1.0 if exponentials is None else jnp.exp(exponent + of_exponentials)
                return powers * (1.0 if logits is None else logit + of_logits)

            if largest:
                out = rest * value(found[z].largest, found[e].largest)
            elif not rest:
                out = np.float32(0)
            elif exponentials is None:
                out = rest * (size if logits is None else found[z].total + size * of_logits)
            else:
                out = rest * value(found[e].expected[z], found[e].logsumexp)
            inside: Any = True
            for y, factor in factors:
                i, y = self.labels[y, clipped], next(rows)
                inside = clipped | ((y >= 0) & (y < size))
                # The exponential of a logsumexp does not overflow.
                at = [jnp.where(inside, found[k].at[i], found[k].logsumexp) for k in (z, e)]
                out = out + factor * jnp.where(inside, value(*at), 0)
            for (how, _), weight in zip(weights, rows, strict=False):
                out = out * weight if how == "mul" else out / weight
            return out, inside

        def result(found: Sequence[Statistics], *rows: Any) -> Any:
            found = jax.tree.map(lax.stop_gradient, found) if stopped else found
            each = iter(rows)
            outs, inside = zip(*(of_term(term, found, each) for term in terms), strict=True)
            return sum(outs) if fill == 0 else jnp.where(inside[0], sum(outs), np.float32(fill))

        self.reads.append((eqn, result, tuple(given)))

    def _note_gather(self, eqn: Any, terms: Sequence[Product], label: Any) -> None:
        """Notes a gather of one element of products in each row, that at the label."""
        fill = eqn.params["fill_value"]
        labels = [term.labels._replace(factors=((label, term.labels.rest),), rest=0.0) for term in terms]
        at_label = [term._replace(labels=each) for term, each in zip(terms, labels, strict=True)]
        self._note(eqn, at_label, mode=eqn.params["mode"], fill=np.nan if fill is None else fill)


def _one_row(shape: Sequence[int]) -> tuple[int, ...]:
    return (*(1 for _ in shape[:-1]), shape[-1])


def _read_by(eqn: Any) -> str:
    where = source_line(eqn)
    return f"its logits are read by {eqn.primitive.name}" + (f" ({where})" if where else "")


def _only_moves(eqn: Any) -> bool:
    return eqn.primitive.name in ("broadcast_in_dim", "reshape")


def _total(shift: Sequence[tuple[str, Any]], rows: Iterator[Any]) -> Any:
    """The sum of what was added to rows, the values of which come first."""
    of = {"add": lambda y: y, "sub": lambda y: -y, "mul": jnp.log, "div": lambda y: -jnp.log(y)}
    return sum((of[how](next(rows)) for how, _ in shift), start=np.float32(0))


def _terms(kind: Any) -> tuple[Product, ...]:
    """Logits, labels or a product as a sum of products; () for anything else."""
    match kind:
        case Sum(terms):
            return terms
        case Product():
            return (kind,)
        case Labels():
            return (Product(kind),)
        case Logits():
            return (Product(_ONE, None, kind),)
    return ()


def _multiplied(left: Any, right: Any) -> Any:
    """The product of two; None if a term of it has several labels, logits or exponentials."""
    terms = []
    for pair in itertools.product(_terms(left), _terms(right)):
        a, b = sorted(pair, key=lambda product: len(product.labels.factors))
        if a.labels.factors or not all(None in pair for pair in zip(a[1:], b[1:], strict=True)):
            return None
        labels = times(b.labels, a.labels.rest)._replace(weights=(*a.labels.weights, *b.labels.weights))
        terms.append(Product(labels, a.exponentials or b.exponentials, a.logits or b.logits))
    return terms[0] if len(terms) == 1 else Sum(tuple(terms)) if terms else None


def losses(flow: Dataflow) -> Iterator[tuple[Any, LossHead | str]]:
    """The matmuls whose results are reduced like the logits of a loss, each with its head or why it stays."""
    done: set[int] = set()
    for eqn in flow.eqns:
        if _is_head(flow, eqn):
            if id(eqn) in done:
                continue
            head = LossHead(flow, eqn)
            try:
                try:
                    head.search()
                except Refused as why:
                    head = _pair(flow, head, why)
                done |= {id(path.matmul) for path in head.paths}
                yield eqn, head
            except Refused as why:
                if head.is_loss or head.has_exponentials() or _is_normalised(flow, eqn.outvars[0]):
                    yield eqn, str(why)
        elif _multiplies_rows(eqn) and all(map(is_half, eqn.invars)) and _is_normalised(flow, eqn.outvars[0]):
            yield eqn, "the program casts its operands to half itself: autocast does so, if they are float32"


def _pair(flow: Dataflow, head: LossHead, why: Refused) -> LossHead:
    """A head with another, whose logits an equation reads that refuses its own.

    Raises:
        Refused: There is none, or their loss reads more than statistics of rows.
    """
    first, is_loss = head.paths[0].matmul, head.is_loss or head.has_exponentials()
    unknown = [v for v in variables(why.eqn.invars) if v not in head.known] if why.eqn is not None and is_loss else []
    makers = flow.made_by(unknown, lambda eqn: variables(eqn.invars))
    other = next((eqn for eqn in makers if eqn is not first and _is_head(flow, eqn)), None)
    if other is None:
        raise why
    pair = LossHead(flow, first, other)
    pair.search()
    return pair


def _derived_operands(eqn: Any) -> list[Any]:
    """The operands that have a derivative if the results have one."""
    ins = () if eqn.primitive.name == "stop_gradient" else variables(eqn.invars)
    return [v for v in ins if compat.is_inexact(v.aval)]


def _is_normalised(flow: Dataflow, v: Any) -> bool:
    """Whether the logarithm of a sum of exponentials of a value is taken, before any matmul."""
    waiting, seen = [(v, 0)], set[Any]()
    while waiting:
        v, done = waiting.pop()
        for eqn in flow.readers.get(v, ()):
            name, now = eqn.primitive.name, done
            now += name == _NORMALISING[now]
            if now == len(_NORMALISING):
                return True
            if primitive(name).op is not Op.ALLOW:
                new = [(out, now) for out in eqn.outvars if (out, now) not in seen]
                seen.update(new)
                waiting += new
    return False


def _weights_first(flow: Dataflow, matmul: Any) -> bool:
    """Whether the weights are the first operand of a matmul, and the vocabulary the first dimension of its result."""
    (w, x), v = (v.aval.ndim for v in matmul.invars), matmul.outvars[0]
    while len(readers := flow.readers.get(v, [])) == 1 and readers[0].primitive.name in ("mul", "div"):
        (v,) = readers[0].outvars
    return bool(w == 2 and (x > 2 or [eqn.primitive.name for eqn in readers] == ["transpose"]))


def _reorders(reshape: Any) -> bool:
    return reshape.primitive.name == "reshape" and reshape.params["dimensions"] is not None


def apart(jaxpr: Any) -> tuple[Any, frozenset[Any]]:
    """A program with a matmul of its own for each scale, layout or part of logits that is read, and their products."""
    flow = Dataflow(live_equations(jaxpr), jaxpr.outvars)
    copies: dict[int, tuple[list[Any], dict[Any, Any]]] = {}
    products: set[Any] = set()
    for matmul in (eqn for eqn in flow.eqns if _is_head(flow, eqn)):
        head = Path(flow, matmul)
        with contextlib.suppress(Refused):
            v = head.logits()
            readers = flow.readers.get(v, [])
            differing = [eqn for eqn in readers if _differs(flow, eqn, v)]
            if len(readers) == 1 or not differing or not _is_normalised(flow, v):
                continue
            products.add(matmul.outvars[0])
            for reader in differing[len(differing) == len(readers) :]:
                names: dict[Any, Any] = {}
                copies[id(reader)] = [*copied(head.inside, names)], {v: names[v]}
                products.add(names[matmul.outvars[0]])
    eqns = []
    for eqn in jaxpr.eqns:
        before, names = copies.get(id(eqn), ([], {}))
        eqns += [*before, eqn.replace(invars=renamed(eqn.invars, names))]
    return jaxpr.replace(eqns=eqns), frozenset(products)


def copied(eqns: Iterable[Any], names: dict[Any, Any]) -> Iterator[Any]:
    """Copies of equations, which read the variables of `names`; it gets new ones for their results."""
    for eqn in eqns:
        ins, outs = renamed(eqn.invars, names), [compat.new_variable(v) for v in eqn.outvars]
        names.update(zip(eqn.outvars, outs, strict=True))
        yield eqn.replace(invars=ins, outvars=outs)


def renamed(atoms: Sequence[Any], names: Mapping[Any, Any]) -> list[Any]:
    """Variables by their other names, and literals."""
    return [names.get(v, v) if isinstance(v, compat.Var) else v for v in atoms]


def _differs(flow: Dataflow, reader: Any, logits: Any) -> bool:
    """Whether a reader takes other rows than those of logits, or scales them."""
    scale = reader.primitive.name in ("mul", "div")
    others = [x for x in reader.invars if x is not logits]
    return reader.primitive.name in ("transpose", "slice") or (
        scale and all(number_of(flow, x) is not None or scalar_of(flow, x) is not None for x in others)
    )


def _is_head(flow: Dataflow, eqn: Any) -> bool:
    """Whether a matmul multiplies float32 rows by a matrix."""
    return _multiplies_rows(eqn) and all(map(tracked, (*eqn.invars, *eqn.outvars))) and eqn.outvars[0] in flow.readers


def _multiplies_rows(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    ((left, right), (batch, _)) = eqn.params["dimension_numbers"]
    return len(left) == len(right) == 1 and not batch and min(v.aval.ndim for v in eqn.invars) == 2
