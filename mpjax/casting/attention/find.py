"""Finds attention in a program: softmax(scale · Q Kᵀ + biases, masked) V, however it is written.

The search starts at each exponential. Forward, it follows the normalisation and the product with the values. Backward,
it follows masks, biases and scales to the product of queries and keys. It reads dataflow only, no names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from mpjax._jaxpr import compat
from mpjax._jaxpr.evaluator import bind
from mpjax._jaxpr.primitives import primitive
from mpjax.casting.attention.axes import Axis, Dims, Unfit, downstream, flat, fresh, joined, of_operand, upstream
from mpjax.casting.classify import tracked

# A score below this is masked: its probability is 0 beside any score that is not.
_MASKED = -1e4
# Added to a score, this leaves nothing of it: a row whose every key is masked has equal probabilities.
_ABSORBS = -1e8
_REACH = 40  # The most operations between two parts of an attention.


@dataclasses.dataclass(eq=False)
class Mask:
    """A boolean array that selects keys, by axes; the keys where it is False if `inverted`."""

    v: Any
    dims: Dims
    inverted: bool = False


@dataclasses.dataclass(eq=False)
class Bias:
    """An array that is added to the scores, `factor` times."""

    v: Any
    dims: Dims
    factor: float


@dataclasses.dataclass(eq=False)
class Found:
    """An attention in a program.

    Args:
        values: The equation that multiplies the probabilities by the values.
        scores: The equation that multiplies queries and keys.
        inside: All equations that nothing else needs.
        parts: The operands with their axes: q, k, v.
        out: The axes of the result.
        batch, queries, keys, head, width: The axes of these kinds; `width` is the head of the values.
        scale: The factor of the scores.
        biases, masks: What is added to them, and what selects keys.
        why_not: The reason why it is not fused; empty if it can be.
    """

    values: Any
    scores: Any = None
    inside: list[Any] = dataclasses.field(default_factory=list)
    parts: tuple[tuple[Any, Dims], ...] = ()
    out: Dims = ()
    batch: tuple[Axis, ...] = ()
    queries: tuple[Axis, ...] = ()
    keys: tuple[Axis, ...] = ()
    head: tuple[Axis, ...] = ()
    width: tuple[Axis, ...] = ()
    scale: float = 1.0
    biases: list[Bias] = dataclasses.field(default_factory=list)
    masks: list[Mask] = dataclasses.field(default_factory=list)
    why_not: str = ""

    def refuse(self, why: str) -> None:
        """Notes a reason why it is not fused. The first one stays."""
        self.why_not = self.why_not or why


class Flow:
    """The dataflow of an open jaxpr without calls: who makes and who reads each variable."""

    def __init__(self, jaxpr: Any, consts: Mapping[Any, Any] = MappingProxyType({})):
        self.jaxpr, self.consts = jaxpr, consts
        self.made: dict[Any, Any] = {}
        self.readers: dict[Any, list[Any]] = {}
        self.seen: set[int] = set()  # The equations that a search has looked at, by `id`.
        self.returned = {v for v in jaxpr.outvars if not isinstance(v, compat.Literal)}
        live = set(self.returned)
        for eqn in reversed(jaxpr.eqns):
            if not eqn.effects and live.isdisjoint(eqn.outvars):
                continue
            self.made.update((v, eqn) for v in eqn.outvars)
            for v in {v for v in eqn.invars if not isinstance(v, compat.Literal)}:
                live.add(v)
                self.readers.setdefault(v, []).append(eqn)

    def maker(self, v: Any) -> Any:
        """The equation that makes a variable; None for inputs, constants and literals."""
        eqn = None if isinstance(v, compat.Literal) else self.made.get(v)
        self.seen.add(id(eqn))
        return eqn

    def stripped(self, v: Any, dims: Dims, casts: bool = False) -> tuple[Any, Dims]:
        """The variable before the moves that made this one, with its axes; before casts too, if `casts`."""
        while (eqn := self.maker(v)) is not None and (casts or not _changes_dtype(eqn)):
            try:
                dims = upstream(eqn, dims)
            except Unfit:
                break
            v = eqn.invars[0]
        return v, dims

    def scalar(self, v: Any) -> float | None:
        """The value of all elements of a variable, if they are one number that depends on no input; else None."""
        if not isinstance(v, compat.Literal):
            v, _ = self.stripped(v, fresh(v.aval.shape), casts=True)
        found = self.constant(v) if v.aval.size == 1 else None
        return None if found is None else float(found.reshape(()))

    def constant(self, v: Any) -> np.ndarray | None:
        """The value of a variable that depends on no input; None for any other."""
        needed = self.makers(v)
        if needed is None:
            return None
        values: dict[Any, Any] = dict(self.consts)
        with jax.ensure_compile_time_eval():
            for eqn in needed:
                arrays = [x.val if isinstance(x, compat.Literal) else values[x] for x in eqn.invars]
                # Outside of its `shard_map`, a mark of a value that varies over devices is the identity.
                outs = arrays if eqn.primitive.name == "pvary" else bind(eqn, arrays)
                values.update(zip(eqn.outvars, outs, strict=True))
            return np.asarray(v.val if isinstance(v, compat.Literal) else values[v])

    def makers(self, v: Any) -> list[Any] | None:
        """The equations that compute a variable from constants, in order; None if it depends on an input."""
        needed: dict[int, Any] = {}
        if not self._closed(v, needed):
            return None
        return [eqn for eqn in self.jaxpr.eqns if id(eqn) in needed] if needed else []

    def _closed(self, v: Any, needed: dict[int, Any]) -> bool:
        if isinstance(v, compat.Literal) or v in self.consts:
            return True
        eqn = self.maker(v)
        if eqn is None or eqn.effects or len(needed) > _REACH or primitive(eqn.primitive.name).foreign:
            return False
        if _communicates(eqn):
            return False
        if id(eqn) in needed:
            return True
        needed[id(eqn)] = eqn
        return all(self._closed(each, needed) for each in eqn.invars)

    def depends(self, v: Any, names: Sequence[str]) -> bool:
        """Whether one of these primitives is among the last operations that made a variable."""
        waiting, seen = [v], 0
        while waiting and seen < 2 * _REACH:
            eqn, seen = self.maker(waiting.pop()), seen + 1
            if eqn is not None:
                if any(name in eqn.primitive.name for name in names):
                    return True
                waiting.extend(eqn.invars)
        return False


def _communicates(eqn: Any) -> bool:
    """Whether an equation has a meaning only inside its `shard_map`."""
    axes = (eqn.params.get("axis_name"), *(eqn.params.get("axes") or ()))
    return eqn.primitive.name != "pvary" and any(isinstance(axis, (str, tuple)) for axis in axes)


def _changes_dtype(eqn: Any) -> bool:
    """Whether an equation is a cast to another dtype."""
    return eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype


def attentions(flow: Flow) -> Iterator[Found]:
    """The attentions of a program without calls, in program order, with those that can't be fused."""
    for eqn in flow.jaxpr.eqns:
        if eqn.primitive.name == "exp" and eqn.outvars[0] in flow.readers and tracked(eqn.outvars[0]):
            found = _Search(flow, eqn).run()
            if found is not None:
                yield found


class _Search:
    """The search for one attention, from its exponential."""

    def __init__(self, flow: Flow, exp: Any):
        self.flow, self.exp = flow, exp
        self.dims = fresh(exp.outvars[0].aval.shape)
        self.inside: list[Any] = [exp]
        self.probabilities: set[Any] = set()  # Variables after the normalisation.

    def run(self) -> Found | None:
        """The attention; None if there is none around this exponential."""
        try:
            normalised = self._normalised()
            if normalised is None:
                return None
            probabilities, keys = normalised
            found = self._forward(probabilities, self.dims, keys)
            if found is None:
                return None
            values, side, dims = found
            attention = Found(values, inside=self.inside)
            (shifted,) = self.exp.invars
            scores = self._unshifted(shifted, keys)
            if not self._backward(attention, scores, self.dims, 1.0):
                return None
            self._roles(attention, side, dims, keys)
        except Unfit:
            return None
        attention.biases.reverse()
        self._check_readers(attention)
        _check(attention)
        return attention

    def _normalised(self) -> tuple[Any, tuple[Axis, ...]] | None:
        """The probabilities, and the axes over which they sum to one."""
        (e,) = self.exp.outvars
        sums = [eqn for eqn in self.flow.readers[e] if eqn.primitive.name == "reduce_sum"]
        for total in sums:
            axes = total.params["axes"]
            kept = tuple(dim for d, dim in enumerate(self.dims) if d not in axes)
            for eqn, path in self._reached(total.outvars[0]):
                if eqn.primitive.name not in ("div", "mul") or e not in eqn.invars:
                    continue
                other = eqn.invars[1] if eqn.invars[0] is e else eqn.invars[0]
                source, dims = self.flow.stripped(other, of_operand(other, self.dims))
                reciprocal = self.flow.maker(source)
                if eqn.primitive.name == "div":
                    matches = eqn.invars[0] is e and source is total.outvars[0]
                else:
                    matches = _is_reciprocal(reciprocal) and self._is(reciprocal, total.outvars[0])
                    if matches:
                        operand = reciprocal.invars[-1]
                        dims = self.flow.stripped(operand, dims)[1]
                if matches and joined(dims) == joined(kept):
                    self.inside += [total, *path, eqn]
                    return eqn.outvars[0], joined(self.dims[d] for d in axes)
        return None

    def _is(self, reciprocal: Any, total: Any) -> bool:
        operand = reciprocal.invars[-1]
        return self.flow.stripped(operand, fresh(operand.aval.shape))[0] is total

    def _reached(self, v: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """The readers of a variable after moves and reciprocals, with the equations before them."""
        for eqn in self.flow.readers.get(v, ()):
            yield eqn, path
            if len(path) < 5 and (primitive(eqn.primitive.name).moves or _is_reciprocal(eqn) or _is_broadcast(eqn)):
                yield from self._reached(eqn.outvars[0], (*path, eqn))

    def _forward(self, v: Any, dims: Dims, keys: tuple[Axis, ...], depth: int = 0) -> tuple[Any, int, Dims] | None:
        """The product with the values: its equation, the operand that holds the probabilities, and their axes."""
        self.probabilities.add(v)
        for eqn in self.flow.readers.get(v, ()) if depth < _REACH else ():
            name = eqn.primitive.name
            if name == "dot_general":
                side = 0 if eqn.invars[0] is v else 1
                summed = joined(dims[d] for d in eqn.params["dimension_numbers"][0][side])
                if set(summed) == set(flat(keys)):
                    return eqn, side, dims
                continue
            if name in ("mul", "div", "select_n", "add", "sub", "and", "custom_jvp_call"):
                after = dims if eqn.outvars[0].aval.shape == v.aval.shape else None
            else:
                try:
                    after = downstream(eqn, dims)
                except Unfit:
                    after = None
            if after is None:
                continue
            found = self._forward(eqn.outvars[0], after, keys, depth + 1)
            if found is not None:
                self.inside.append(eqn)
                return found
        return None

    def _unshifted(self, v: Any, keys: tuple[Axis, ...]) -> Any:
        """The scores before the subtraction of a value that is the same for all keys, which changes nothing."""
        eqn = self.flow.maker(v)
        if eqn is None or eqn.primitive.name != "sub":
            return v
        scores, shift = eqn.invars
        if isinstance(shift, compat.Literal):
            return v
        _, dims = self.flow.stripped(shift, of_operand(shift, self.dims))
        if set(joined(dims)) & set(flat(keys)) or isinstance(scores, compat.Literal):
            return v
        self.inside.append(eqn)
        self._note_shift(shift, scores, 0)
        return scores

    def _note_shift(self, v: Any, scores: Any, depth: int) -> bool:
        """Notes the operations that compute the shift from the scores. Whether it depends on them."""
        if v is scores:
            return True
        eqn = self.flow.maker(v)
        if eqn is None or depth > 12:
            return False
        found = [self._note_shift(each, scores, depth + 1) for each in eqn.invars]
        if any(found) and not any(eqn is each for each in self.inside):
            self.inside.append(eqn)
        return any(found)

    def _backward(self, attention: Found, v: Any, dims: Dims, factor: float, depth: int = 0) -> bool:
        """Follows the scores back to the product of queries and keys. Whether it is reached."""
        eqn = self.flow.maker(v)
        if eqn is None or depth > _REACH:
            return False
        name = eqn.primitive.name
        before = len(self.inside), len(attention.biases), len(attention.masks), attention.why_not
        self.inside.append(eqn)
        if name == "dot_general":
            attention.scores, attention.scale, attention.out = eqn, factor, dims
            return True
        for operand, apply in self._through(attention, eqn, dims, factor):
            try:
                now, scale = apply()
                if self._backward(attention, operand, now, scale, depth + 1):
                    return True
            except Unfit:  # Another operand may be the scores.
                pass
            inside, biases, masks, attention.why_not = before
            del self.inside[inside + 1 :], attention.biases[biases:], attention.masks[masks:]
        self.inside.pop()
        return False

    def _through(self, attention: Found, eqn: Any, dims: Dims, factor: float) -> Iterator[tuple[Any, Any]]:
        """The operands of an equation that may be the scores, and what the equation does to them."""
        name, ins = eqn.primitive.name, eqn.invars
        if name in ("mul", "div"):
            for i, operand in enumerate(ins[: 2 if name == "mul" else 1]):
                if not isinstance(operand, compat.Literal) and operand.aval.shape == eqn.outvars[0].aval.shape:
                    yield operand, functools.partial(self._scaled, attention, name, ins[1 - i], dims, factor)
        elif name in ("add", "sub", "add_any"):
            for i, operand in enumerate(ins[: 1 if name == "sub" else 2]):
                sign = -1.0 if name == "sub" else 1.0
                yield operand, functools.partial(self._biased, attention, ins[1 - i], dims, factor, sign)
        elif name == "select_n" and len(ins) == 3:
            for i, operand in ((1, ins[1]), (2, ins[2])):
                yield operand, functools.partial(self._masked, attention, ins[0], ins[3 - i], i == 1, dims, factor)
        elif name == "tanh":
            yield ins[0], functools.partial(_refused, attention, "its scores are capped (tanh)", dims, factor)
        elif name == "stop_gradient":
            yield ins[0], functools.partial(_refused, attention, "its scores have no gradient", dims, factor)
        elif name in ("max", "min", "clamp"):
            for operand in ins:
                if not isinstance(operand, compat.Literal) and operand.aval.shape == eqn.outvars[0].aval.shape:
                    yield operand, functools.partial(_refused, attention, "its scores are clipped", dims, factor)
        else:
            try:
                before = upstream(eqn, dims)
            except Unfit:
                return
            if eqn.invars[0].aval.size == eqn.outvars[0].aval.size:
                yield ins[0], functools.partial(_cast, attention, eqn, before, factor)

    def _scaled(self, attention: Found, name: str, other: Any, dims: Dims, factor: float) -> tuple[Dims, float]:
        scale = self.flow.scalar(other)
        if scale is None or not scale > 0 or not math.isfinite(scale):
            attention.refuse("its scores are multiplied by a value that the program computes")
            scale = 1.0
        return dims, factor * (1 / scale if name == "div" else scale)

    def _biased(self, attention: Found, other: Any, dims: Dims, factor: float, sign: float) -> tuple[Dims, float]:
        self._add_bias(attention, other, of_operand(other, dims), factor * sign)
        return dims, factor

    def _add_bias(self, attention: Found, v: Any, dims: Dims, factor: float) -> None:
        v, dims = self.flow.stripped(v, dims)
        eqn = self.flow.maker(v)
        name = eqn.primitive.name if eqn is not None else ""
        if name == "add":
            for operand in eqn.invars:
                self._add_bias(attention, operand, of_operand(operand, dims), factor)
            return
        if name == "select_n" and len(eqn.invars) == 3:
            numbers = [self.flow.scalar(each) for each in eqn.invars[1:]]
            for i, (zero, other) in enumerate((numbers, numbers[::-1])):
                if zero == 0 and other is not None and other * factor <= _ABSORBS:
                    self._add_mask(attention, eqn.invars[0], of_operand(eqn.invars[0], dims), i == 0)
                    return
        if isinstance(v, compat.Literal) or not v.aval.shape:
            if self.flow.scalar(v) is None:
                attention.biases.append(Bias(v, dims, factor))
            return  # A number added to all scores of a row changes nothing.
        attention.biases.append(Bias(v, dims, factor))

    def _masked(
        self, attention: Found, which: Any, other: Any, inverted: bool, dims: Dims, factor: float
    ) -> tuple[Dims, float]:
        number = self.flow.scalar(other)
        if number is None or not number * factor <= _MASKED:
            attention.refuse("its masked scores are not far below the others")
        self._add_mask(attention, which, of_operand(which, dims), inverted)
        return dims, factor

    def _add_mask(self, attention: Found, which: Any, dims: Dims, inverted: bool) -> None:
        v, dims = self.flow.stripped(which, dims)
        if isinstance(v, compat.Literal):
            if bool(v.val) == inverted:
                raise Unfit  # It masks every key.
            return
        eqn = self.flow.maker(v)
        name = eqn.primitive.name if eqn is not None else ""
        if name == "not":
            return self._add_mask(attention, eqn.invars[0], dims, not inverted)
        if name == ("or" if inverted else "and"):
            for operand in eqn.invars:
                self._add_mask(attention, operand, of_operand(operand, dims), inverted)
            return
        number = self.flow.scalar(eqn.invars[1]) if name in ("ne", "eq") else None
        if number in (0.0, 1.0):  # A comparison of numbers that were booleans.
            source, of_source = self.flow.stripped(eqn.invars[0], dims, casts=True)
            if source.aval.dtype == np.bool_:
                keeps = (name == "ne") == (number == 0.0)
                return self._add_mask(attention, source, of_source, inverted == keeps)
        attention.masks.append(Mask(v, dims, inverted))

    def _roles(self, attention: Found, side: int, dims: Dims, keys: tuple[Axis, ...]) -> None:
        """Which axes are batch, queries and keys; the axes of q, k, v and the result."""
        scores, values = attention.scores, attention.values
        (contracted, batch) = scores.params["dimension_numbers"]
        of_scores, count = attention.out, len(batch[0])
        heads = fresh(scores.invars[0].aval.shape[d] for d in contracted[0])
        operands = []
        rest = list(of_scores[count:])
        for v, c, b in zip(scores.invars, contracted, batch, strict=True):
            free = iter([rest.pop(0) for _ in range(len(v.aval.shape) - len(c) - len(b))])
            operands.append(
                tuple(
                    heads[c.index(d)] if d in c else of_scores[b.index(d)] if d in b else next(free)
                    for d in range(len(v.aval.shape))
                )
            )
        keys, common = flat(keys), joined(of_scores[:count])
        frees = [tuple(a for a in joined(d) if a not in common and a not in joined(heads)) for d in operands]
        if keys and set(keys) == set(frees[1]):
            q, k = 0, 1
        elif keys and set(keys) == set(frees[0]):
            q, k = 1, 0
        else:
            raise Unfit  # A softmax over another axis, or over a single key.
        attention.batch, attention.queries, attention.keys = common, frees[q], keys
        attention.head = joined(heads)
        # The values.
        (contracted, batch) = values.params["dimension_numbers"]
        of_p, v = dims, values.invars[1 - side]
        if set(joined(of_p[d] for d in batch[side])) != set(common):
            attention.refuse("its keys and values have different batches")
        width = fresh(v.aval.shape)
        c, b = contracted[1 - side], batch[1 - side]
        of_v = tuple(
            of_p[contracted[side][c.index(d)]] if d in c else of_p[batch[side][b.index(d)]] if d in b else width[d]
            for d in range(len(v.aval.shape))
        )
        frees_of = [
            [dim for d, dim in enumerate(of) if d not in contracted[i] and d not in batch[i]]
            for i, of in enumerate((of_p, of_v) if side == 0 else (of_v, of_p))
        ]
        attention.out = (*(of_p[d] for d in batch[side]), *frees_of[0], *frees_of[1])
        attention.width = joined(dim for d, dim in enumerate(of_v) if d not in c and d not in b)
        if math.prod(a.size for a in attention.width) != math.prod(a.size for a in attention.head):
            attention.refuse("its values have another head size than its keys")
        attention.parts = ((scores.invars[q], operands[q]), (scores.invars[k], operands[k]), (v, of_v))

    def _check_readers(self, attention: Found) -> None:
        """Refuses an attention whose scores or probabilities something else reads."""
        flow, inside = self.flow, {id(eqn) for eqn in self.inside} | {id(attention.values)}
        for eqn in self.inside:
            for v in eqn.outvars:
                what = "probabilities" if v in self.probabilities else "scores"
                if v in flow.returned:
                    attention.refuse(f"its {what} are returned")
                for reader in flow.readers.get(v, ()):
                    if id(reader) in inside:
                        continue
                    if "jvp(" in str(reader.source_info.name_stack):
                        attention.refuse(
                            "the program contains its gradient already; put autocast inside the function that is "
                            "differentiated"
                        )
                    attention.refuse(f"its {what} are read by {reader.primitive.name} too")
        changed = [eqn for eqn in self.inside if self.probabilities & set(_variables(eqn)) and _changes(eqn)]
        for eqn in changed:
            if eqn.outvars[0] in self.probabilities:
                random = any(flow.depends(v, ("random", "threefry")) for v in eqn.invars)
                attention.refuse(
                    "dropout on its probabilities" if random else f"{eqn.primitive.name} changes its probabilities"
                )


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, compat.Literal)]


def _changes(eqn: Any) -> bool:
    return eqn.primitive.name in ("mul", "div", "select_n", "add", "sub", "and", "custom_jvp_call")


def _is_reciprocal(eqn: Any) -> bool:
    if eqn is None:
        return False
    name = eqn.primitive.name
    if name == "integer_pow":
        return bool(eqn.params["y"] == -1)
    return name == "div" and isinstance(eqn.invars[0], compat.Literal) and float(np.asarray(eqn.invars[0].val)) == 1


def _is_broadcast(eqn: Any) -> bool:
    return eqn.primitive.name == "broadcast_in_dim"


def _refused(attention: Found, why: str, dims: Dims, factor: float) -> tuple[Dims, float]:
    attention.refuse(why)
    return dims, factor


def _cast(attention: Found, eqn: Any, dims: Dims, factor: float) -> tuple[Dims, float]:
    if _changes_dtype(eqn):
        attention.refuse("the program fixes the dtype of its scores")
    return dims, factor


def _check(attention: Found) -> None:
    """Refuses what no fused kernel computes."""
    for eqn in (attention.scores, attention.values):
        if not all(map(tracked, (*eqn.invars, *eqn.outvars))):
            attention.refuse("the program fixes its dtypes")
    if not all(tracked(bias.v) for bias in attention.biases):
        attention.refuse("the program fixes the dtype of its bias")
