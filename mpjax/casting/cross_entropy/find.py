"""Finds losses whose logits are read by rows only, and writes them from statistics of the rows.

The search starts at each matmul with a parameter. It follows the logits forward: scales, a bias and a cap, a shift that
is the same for a whole row, exponentials, products of logits, exponentials and one-hot labels. Each reduction over the
vocabulary then is a formula of few numbers of a row: its statistics.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.casting.cross_entropy.apart import NORMALISING, is_normalised
from mpjax.casting.cross_entropy.kinds import ONE, Logits, Product, Sum, Underflow, multiplied, summed, terms_of
from mpjax.casting.cross_entropy.labels import Labels, Layout, broadcast_of, gathered, labels_of, number_of, scaled
from mpjax.casting.cross_entropy.path import Path, Refused, is_head, multiplies_rows
from mpjax.casting.cross_entropy.repeated import LABEL, Repeated, computed, mask_of, repeated
from mpjax.casting.setting import tracked
from mpjax.kernels.cross_entropy import Statistics
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, variables
from mpjax.program.dtypes import is_half
from mpjax.program.graph import walk
from mpjax.program.primitives import primitive
from mpjax.program.source import source_line

# By name: a loss is found by what is done to its logits.

RETURNED, DIFFERENTIATED = "its logits are returned", "the program contains its gradient already"


class LossHead:
    """The heads of a loss: matmuls, and what is done to their products up to reductions over the vocabulary.

    Attributes:
        paths: Each as a `Path`.
        inside: The equations that the statistics replace, besides those of the paths.
        reads: The reductions, each with a function from statistics and row values to its result, and its row values.
        labels: The arrays of labels, each with whether a label outside of the vocabulary is the nearest one in it, and
            its number.
        layout: The layout of the logits.
        frozen: The heads without a derivative, of two: a teacher's.
    """

    def __init__(self, flow: Dataflow, *paths: Path):
        self.flow, self.paths = flow, paths
        self.vocabulary = self.paths[0].vocabulary
        self.inside: list[Any] = []
        self.reads: list[tuple[Any, Callable[..., Any], tuple[Any, ...]]] = []
        self.labels: dict[tuple[Any, bool], int] = {}
        self.known: dict[Any, Any] = {}
        self.frozen: set[int] = set()
        self.stopped: set[Any] = set()  # what is made of logits, and has no derivative
        self.sums: set[Any] = set()  # sums of exponentials
        self.is_loss = False  # Whether the largest of each row is read, as a softmax does.

    def search(self) -> LossHead:
        """Follows the logits to all that reads them. Returns the head.

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
        self.layout, *others = (Layout(v.aval.shape, p.axis) for v, p in zip(logits, self.paths, strict=True))
        if any(each != self.layout for each in others):
            raise Refused("its loss reads logits of another shape, too")
        self._plain = [Logits(head=i) for i, _ in enumerate(logits)]
        self._follow(dict(zip(logits, self._plain, strict=True)))
        if not self.has_exponentials():
            raise Refused("nothing sums their exponentials")
        given = [y for y, _ in self.labels]
        for path in self.paths:
            given += [*([path.factor.value] if path.factor else []), *path.arrays]
        for path in self.paths:
            if self.flow.depends(given, path.matmul.outvars[0]):
                raise Refused("its labels follow from its own logits")
            if any(compat.is_explicit(v.aval) for v in path.matmul.invars):
                raise Refused("its arrays are on a mesh with explicit axes: jax.sharding.auto_axes around the loss")
        return self

    def has_exponentials(self) -> bool:
        return any(isinstance(kind, Product) and kind.exponentials is not None for kind in self.known.values())

    def _follow(self, new: dict[Any, Any]) -> None:
        waiting: dict[int, Any] = {}  # by place: an equation follows all that it reads
        while True:
            self.known.update(new)
            for v in new:
                if v in self.flow.returned:
                    raise Refused(RETURNED)
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
        plain = any(self.known.get(v) in self._plain for v in variables(eqn.invars))
        if True in stopped or (stopped and plain and eqn.primitive.name == "stop_gradient"):
            self.stopped.update(eqn.outvars)

    def _is_derived(self, v: Any) -> bool:
        """Whether something is made of the logits of a head that has a derivative."""
        return any(t.functions or not self.frozen.issuperset(t.heads) for t in terms_of(self.known.get(v)))

    def _has_functions(self, v: Any) -> bool:
        """Whether something is made of functions that are computed at labels only."""
        return any(term.functions for term in terms_of(self.known.get(v)))

    def _reader(self, eqn: Any) -> Any:
        """What an equation that reads logits makes of them; None if it is a reduction, which is noted."""
        name, ins = eqn.primitive.name, eqn.invars
        kinds = [self._kind(x) for x in ins]
        product: Any = None
        if name in ("add", "mul") and kinds[0] is None:
            ins, kinds = ins[::-1], kinds[::-1]
        match name, kinds:
            case "copy" | "convert_element_type", [kind] if all(map(tracked, (*ins, *eqn.outvars))):
                return kind
            case "stop_gradient", [kind] if not self._is_derived(ins[0]) or kind in self._plain:
                return kind
            case "stop_gradient", [_] if self._is_at_label(ins[0]):
                return Product(ONE, functions=(Repeated(lax.stop_gradient, (ins[0],)),))
            case "sub" | "add", [Logits(shift, _, False) as kind, None] if (
                row := broadcast_of(self.flow, ins[1], self.layout.of_row)
            ) is not None:
                return kind._replace(shift=(*shift, (name, row)))
            case "add" | "sub", [left, right]:
                terms = [self._as_terms(*each) for each in zip(ins, kinds, strict=True)]
                if all(terms):
                    sign = Labels((), -1.0 if name == "sub" else 1.0)
                    product = summed((*terms[0], *terms_of(multiplied(Sum(terms[1]), sign))))
            case "exp", [Logits(_, _, False) as logits]:
                return Product(ONE, logits)
            case "log", [Product(Labels((), 1.0, weights), Logits(shift) as kind, None, ())]:
                return kind._replace(shift=(*shift, *weights))
            case "eq", [Product(_, Logits(), None) as kind, None] if number_of(self.flow, ins[1]) == 0:
                product = Underflow(kind.heads[0]) if kind.is_exponential else None
            case "select_n", [Underflow(i), Logits(_, j) | Product(_, Logits(_, j), _, ()) as kind, None] if i == j:
                if number_of(self.flow, ins[2]) == 0:
                    return kind._replace(guarded=True) if isinstance(kind, Logits) else kind
            case "select_n", [None, *cases] if any(map(self._is_masked, (eqn, eqn), ins[1:], cases)):
                return next(kind for kind in cases if kind is not None)
            case "neg", [kind]:
                product = multiplied(kind, Labels((), -1.0))
            case "mul" | "div", [kind, None]:
                product = self._scaled(kind, name, ins[1])
            case "mul", [left, right]:
                product = multiplied(left, right)
            case "select_n", [Labels(((_, 1.0),), 0.0, ()) as hit, None, kind] if number_of(self.flow, ins[1]) == 0:
                product = multiplied(hit, kind)
            case "dot_general", [left, right] if self._contracts_vocabulary(eqn):
                if (found := multiplied(left, right)) is not None and self._is_summed(found):
                    return self._note(eqn, terms_of(found))
            case "reduce_sum", [kind] if self.layout.axis in eqn.params["axes"] and self._is_summed(kind):
                return self._note(eqn, terms_of(kind))
            case "reduce_max", [kind] if self.layout.axis in eqn.params["axes"] and self._rises(kind):
                self.is_loss = True
                return self._note(eqn, terms_of(kind), largest=True)
            case "argmax", [kind] if eqn.params["axes"] == (self.layout.axis,) and self._rises(kind):
                (term,), dtype = terms_of(kind), eqn.params["index_dtype"]
                self.reads.append((eqn, lambda found: found[term.heads[0]].best.astype(dtype), ()))
                return None
            case "gather", [Logits(_, _, False) | Product() | Sum() as kind, None] if (
                label := gathered(self.flow, eqn, self.layout)
            ) is not None and not any(term.labels.factors for term in terms_of(kind)):
                return self._note_gather(eqn, terms_of(kind), label)
        if product is None and primitive(name).pointwise:
            product = self._function(eqn)
        if product is not None:
            return product
        small = not any(self.vocabulary in v.aval.shape for v in eqn.outvars)
        if primitive(name).rule and (small or {*NORMALISING} <= {site.name for site in walk(Dataflow([eqn]))}):
            self.is_loss = True
            raise Refused(f"a function with a derivative rule of its own reads its logits ({source_line(eqn)})")
        scopes = DIFFERENTIATED if "transpose(" in str(eqn.source_info.name_stack) else ""
        first = eqn  # A sum of a function stands for what computes it.
        while functions := [v for v in variables(first.invars) if "reduce_" in name and self._has_functions(v)]:
            first = self.flow.maker(functions[0])
        raise Refused(scopes or _read_by(first), eqn)

    def _function(self, eqn: Any) -> Any:
        """What a pointwise equation makes of logits, as a function that is computed at labels; None if it can't be."""
        if eqn.primitive.name == "mul":
            return multiplied(*map(self._at_label, eqn.invars))
        known = {v: Repeated(lambda y: y, (v,)) for v in variables(eqn.invars) if self._is_at_label(v)}
        found = computed(self.flow, eqn, self.layout, known, at_label=True)
        return None if found is None else Product(ONE, functions=(found,))

    def _at_label(self, x: Any) -> Any:
        """A factor, as what it is at labels if it differs from these elsewhere; None if it is neither."""
        kind, maker = self._kind(x), self.flow.maker(x)
        if kind is None and maker is not None and maker.primitive.name == "mul":
            kind = multiplied(*map(self._at_label, maker.invars))
        if any(term.labels.factors for term in terms_of(kind)):
            return kind
        known = {x: Repeated(lambda y: y, (x,))} if self._is_at_label(x) else {}
        found = repeated(self.flow, x, self.layout, known, at_label=True)
        return None if found is None else Product(ONE, functions=(found,))

    def _is_at_label(self, v: Any) -> bool:
        """Whether something that is made of logits follows, at a label, from the logit there."""
        terms = terms_of(None if isinstance(v, compat.Literal) else self.known.get(v))
        return bool(terms) and not any(t.labels.factors or (t.logits and t.logits.guarded) for t in terms)

    def _as_terms(self, x: Any, kind: Any) -> tuple[Product, ...]:
        """What is added as products: what an equation knows, a number, or what is the same in a row; () for others."""
        if kind is None:
            labels = scaled(self.flow, ONE, "mul", x, self.layout.of_row)
            return () if labels is None else (Product(labels),)
        return terms_of(kind)

    def _kind(self, x: Any) -> Any:
        """What an operand is: logits, what is made of them, or labels; None for anything else."""
        if isinstance(x, compat.Literal):
            return None
        return self.known.get(x) or labels_of(self.flow, x, self.layout)

    def _is_summed(self, kind: Any) -> bool:
        """Whether a sum of products over the vocabulary follows from statistics."""
        for labels, exponentials, logits, functions in terms_of(kind):
            guarded = logits is not None and logits.guarded and (not exponentials or exponentials.head != logits.head)
            padded = logits is not None and exponentials is None and self.paths[logits.head].is_padded
            if guarded or (labels.rest and (functions or padded)):
                return False
        return bool(terms_of(kind))

    def _rises(self, kind: Any) -> bool:
        """Whether something is largest where the logits are: logits, and probabilities of a softmax."""
        if not isinstance(kind, Product):
            return isinstance(kind, Logits) and not kind.guarded
        sources = (self.flow.source(w, _only_moves) for how, w in kind.labels.weights if how == "div")
        positive = len(kind.labels.weights) == sum(w in self.sums for w in sources)
        return bool(kind.is_exponential and kind.labels.rest > 0 and positive)

    def _is_masked(self, eqn: Any, x: Any, kind: Any) -> bool:
        """Whether a select leaves logits as they are, which are -inf elsewhere, or exponentials, which are 0 there."""
        plain = isinstance(kind, Logits)
        if not plain and not (isinstance(kind, Product) and kind.is_exponential):
            return False
        path = self.paths[terms_of(kind)[0].heads[0]]
        *mask, number = mask_of(self.flow, eqn, x)
        ends = path.steps[-1:] == [("bias", 0.0)] and path.mask == (*mask, -np.inf)
        return bool(ends and number == (-np.inf if plain else 0))

    def _scaled(self, kind: Any, how: str, by: Any) -> Any:
        """Products, multiplied or divided by a number or by what is the same in a row; None if it is neither."""
        labels = scaled(self.flow, ONE, how, by, self.layout.of_row)
        return None if labels is None else multiplied(kind, labels)

    def _contracts_vocabulary(self, eqn: Any) -> bool:
        """Whether a product of two arrays of logits' shape sums over the vocabulary alone."""
        axis = self.layout.axis
        rows = tuple(d for d in range(len(self.layout.sizes)) if d != axis)
        return bool(eqn.params["dimension_numbers"] == (((axis,),) * 2, (rows, rows)))

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
        size, stopped, given = self.vocabulary, eqn.outvars[0] in self.stopped, [*self._given(terms, {})]
        for (factors, rest, _), exponentials, _, _ in terms:
            for y, _ in factors:
                self.labels.setdefault((y, clipped), len(self.labels))
            if [*terms] == [Product(Labels((), rest), exponentials)] and exponentials and rest > 0 and not largest:
                self.sums.add(eqn.outvars[0])

        def of_term(term: Product, found: Sequence[Statistics], rows: _Rows) -> tuple[Any, Any]:
            (factors, rest, _), exponentials, _, _ = term
            e, z = term.places
            read = found[e].expected[z], found[e].logsumexp
            if largest or exponentials is None:
                read = found[z].largest if largest else found[z].total, found[e].largest
            out = rest * rows.value(term, *read, 1 if largest or exponentials else size) if rest else np.float32(0)
            inside: Any = True
            for y, factor in factors:
                i, y = self.labels[y, clipped], rows(y)
                inside = clipped | ((y >= 0) & (y < size))
                # The exponential of a logsumexp does not overflow. No probability is 1, where powers have no slope.
                at = [jnp.where(inside, each.at[i], each.logsumexp - 1) for each in found]
                label = jnp.clip(y, 0, size - 1).astype(np.int32)
                out = out + factor * jnp.where(inside, rows.at_label(term, at, label, {}), 0)
            return out, inside

        def result(found: Sequence[Statistics], *arrays: Any) -> Any:
            found = jax.tree.map(lax.stop_gradient, found) if stopped else found
            rows = _Rows(self.layout, self.known, dict(zip(given, arrays, strict=True)))
            outs, inside = zip(*(of_term(term, found, rows) for term in terms), strict=True)
            return sum(outs) if fill == 0 else jnp.where(inside[0], sum(outs), np.float32(fill))

        self.reads.append((eqn, result, tuple(given)))

    def _given(self, terms: Sequence[Product], found: dict[Any, bool]) -> Iterator[Any]:
        """The variables besides logits from which products follow; `found` gets all, with whether each is one."""
        for (factors, _, weights), exponentials, logits, functions in terms:
            rows = [row for each in (exponentials, logits) if each is not None for _, row in each.shift]
            found.update(dict.fromkeys((*rows, *(y for y, _ in factors), *(y for _, y in weights)), True))
            for v in (v for function in functions for v in function.of if v is not LABEL and v not in found):
                found[v] = v not in self.known
                self._given(terms_of(self.known.get(v)), found)
        return (v for v, is_given in found.items() if is_given)

    def _note_gather(self, eqn: Any, terms: Sequence[Product], label: Any) -> None:
        """Notes a gather of one element of products in each row, that at the label."""
        fill = eqn.params["fill_value"]
        labels = [term.labels._replace(factors=((label, term.labels.rest),), rest=0.0) for term in terms]
        at_label = [term._replace(labels=each) for term, each in zip(terms, labels, strict=True)]
        self._note(eqn, at_label, mode=eqn.params["mode"], fill=np.nan if fill is None else fill)


def _read_by(eqn: Any) -> str:
    where = source_line(eqn)
    return f"its logits are read by {eqn.primitive.name}" + (f" ({where})" if where else "")


def _only_moves(eqn: Any) -> bool:
    return eqn.primitive.name in ("broadcast_in_dim", "reshape")


class _Rows(NamedTuple):
    """What results follow from besides statistics: what variables are made of logits, and the values of others."""

    layout: Layout
    known: Mapping[Any, Any]
    values: Mapping[Any, Any]

    def __call__(self, v: Any) -> Any:
        """The value of each row."""
        return self.values[v].reshape(self.layout.rows)

    def value(self, term: Product, logit: Any, exponent: Any, count: int = 1) -> Any:
        """The sum over elements of a term without labels, from that of their logits, or their number."""
        of = {"add": lambda y: y, "sub": lambda y: -y, "mul": jnp.log, "div": lambda y: -jnp.log(y)}
        e, z = (sum(of[how](self(v)) for how, v in (each.shift if each else ())) for each in term[1:3])
        out = logit + count * z if term.logits else count
        out = out if term.exponentials is None else out * jnp.exp(exponent + e)
        for how, v in term.labels.weights:
            out = out * self(v) if how == "mul" else out / self(v)
        return out

    def at_label(self, term: Product, logits: Sequence[Any], label: Any, found: dict[Any, Any]) -> Any:
        """A term at a label, without the factor of the label, from the logits of each head there.

        `found` holds what functions have read, which several of them may read.
        """

        def operand(v: Any) -> Any:
            if v not in self.known:
                return label.reshape(self.layout.of_row) if v is LABEL else self.values[v]
            if v not in found:
                terms = terms_of(self.known[v])
                outs = sum(each.labels.rest * self.at_label(each, logits, label, found) for each in terms)
                found[v] = outs.reshape(self.layout.of_row).astype(v.aval.dtype)
            return found[v]

        e, z = term.places
        functions = (function.make(*map(operand, function.of)) for function in term.functions)
        return math.prod((y.reshape(label.shape) for y in functions), start=self.value(term, logits[z], logits[e]))


def losses(flow: Dataflow) -> Iterator[tuple[Any, LossHead | str]]:
    """The matmuls whose results are reduced like the logits of a loss, each with its head or why it stays."""
    done: set[int] = set()
    refused: list[tuple[Any, str]] = []
    for eqn in flow.eqns:
        if is_head(flow, eqn):
            if id(eqn) in done:
                continue
            head = LossHead(flow, Path(flow, eqn))
            try:
                head = _searched(flow, head)
                done |= {id(path.matmul) for path in head.paths}
                yield eqn, head
            except Refused as why:
                if head.is_loss or head.has_exponentials() or is_normalised(flow, eqn.outvars[0]):
                    refused.append((eqn, str(why)))
        elif eqn.primitive.name == "dot_general" and is_normalised(flow, eqn.outvars[0]):
            if multiplies_rows(eqn) and all(map(is_half, eqn.invars)):
                yield eqn, "the program casts its operands to half itself: autocast does so, if they are float32"
            elif not multiplies_rows(eqn):
                yield eqn, "its rows do not share one matrix of weights"
    yield from ((eqn, why) for eqn, why in refused if id(eqn) not in done)  # A later head may be the other of a pair.


def _searched(flow: Dataflow, head: LossHead) -> LossHead:
    """A head after its search, that with another one, or one whose vocabulary is the other dimension of a matrix.

    Raises:
        Refused: None of these loss reads statistics of rows only.
    """
    (path,) = head.paths
    try:
        return head.search()
    except Refused as why:
        try:
            return _pair(flow, head, why)
        except Refused:
            if path.matmul.outvars[0].aval.ndim == 2:
                with contextlib.suppress(Refused):
                    return LossHead(flow, Path(flow, path.matmul, other=True)).search()
            raise


def _pair(flow: Dataflow, head: LossHead, why: Refused) -> LossHead:
    """A head with another, whose logits an equation reads that refuses its own.

    Raises:
        Refused: There is none, or their loss reads more than statistics of rows.
    """
    first, is_loss = head.paths[0].matmul, head.is_loss or head.has_exponentials()
    unknown = [v for v in variables(why.eqn.invars) if v not in head.known] if why.eqn is not None and is_loss else []
    makers = flow.made_by(unknown, lambda eqn: variables(eqn.invars))
    other = next((eqn for eqn in makers if eqn is not first and is_head(flow, eqn)), None)
    if other is None:
        raise why
    return LossHead(flow, Path(flow, first), Path(flow, other)).search()


def _derived_operands(eqn: Any) -> list[Any]:
    """The operands that have a derivative if the results have one."""
    ins = () if eqn.primitive.name == "stop_gradient" else variables(eqn.invars)
    return [v for v in ins if compat.is_inexact(v.aval)]
