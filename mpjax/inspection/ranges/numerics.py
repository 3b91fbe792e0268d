"""`numerics`: the ranges of activations and gradients, what half would lose of them, and the loss scale they need."""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.inspection.auditing.scaled_gradients import repeats
from mpjax.inspection.ranges.range_statistics import (
    BIAS,
    PACKED,
    Counted,
    EightBitRange,
    Limits,
    RangeProbe,
    Tally,
    counted,
    is_measured,
    note,
    stores_eight_bits,
    tally_of,
    together_in_eight_bits,
)
from mpjax.inspection.ranges.report import NumericsReport as NumericsReport
from mpjax.inspection.ranges.report import Range, Tried
from mpjax.inspection.reports import by_key
from mpjax.inspection.trials import Loss, Trial, argument_name, below_root, laid_out, scale_state, trace_to_run
from mpjax.policy import HALF_DTYPES, Policy, get_policy
from mpjax.program import compat
from mpjax.program.dtypes import is_half, is_inexact, widened
from mpjax.program.graph import Block
from mpjax.program.inlining import flow_of
from mpjax.program.interpreter import Eager
from mpjax.program.linearity import NonlinearRuleWarning
from mpjax.program.primitives import MATMULS, Op, primitive
from mpjax.program.source import BACKWARD, FORWARD
from mpjax.program.tracing import TracedCall

# A module that loses more than this share of its nonzero values should be kept in float32.
_MUCH = 0.05
# Half's largest number over the largest gradient seen, because gradients may grow later in training.
_HEADROOM = 4.0
# Gradients of an outlier batch exceed the median of all batches, of which there are at least three, by this factor. A
# scale that fits it gives up 8 of float16's 40 powers of two, and dynamic scaling skips 8 steps to get there.
_OUTLIER, _FEWEST = 256.0, 3
_KEPT = 4  # batches that may be tried
_MOST_SINGLES = 4  # modules that are tried one by one
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-14, 2.0**24  # the limits of `dynamic_loss_scale`


def numerics(
    fun: Callable[..., Any],
    *args: Any,
    batches: Iterable[Any] | None = None,
    loss_scale: Any = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    dtype: Any = "float16",
    budget: float = 0.01,
    verify: bool = True,
) -> NumericsReport:
    """Measures the ranges of a loss function's activations and gradients, and what half precision would lose of them.

    `numerics` runs the gradient program with float32 in place of half, so that the values are exact. The backward pass
    carries the loss scale. Each value x is classified by the effect of rounding it to `dtype`:

        flushed     x ≠ 0 but |x| ≤ half the smallest subnormal number (float16: 2⁻²⁵)
        overflowed  |x| ≥ the largest number plus half a unit in its last place (float16: 65520)

    The tables by module count the operands and results of matmuls and convolutions, and the outputs of modules, in both
    passes. Gradients of parameters have a table of their own. The table by operation holds all arithmetic. If the
    program computes anything in half, the recommended scale and the modules to keep in float32 depend only on its half
    values. Otherwise they depend on all counted values, since all of these could run in half.

    Args:
        fun: The loss function of a model from any library: in float32, under `autocast`, or with `with_policy`.
        args: Its arguments: arrays and trees of arrays.
        batches: Each batch is the last argument of one call, `fun(*args, batch)`. None for a single call `fun(*args)`.
        loss_scale: A number, or a state that holds a `LossScaleState`; None for 1.
        argnums: Positions of the parameters. Only their floating-point arrays are differentiated.
        has_aux: Whether `fun` returns `(loss, aux)`.
        kwargs: Keyword arguments of `fun`.
        dtype: `"float16"` or `"bfloat16"`.
        budget: The error of the gradients that overrides must remove to be recommended.
        verify: Whether to try scale and overrides under `autocast`, if the program is in float32, and compare the
            gradients with those in float32. The trial takes the batch with the largest gradients, apart from outliers
            (256 times the median of all batches). Without a trial no override is recommended.

    Returns:
        A `NumericsReport`.

    Raises:
        ValueError: `dtype` is not a half dtype, there is no batch, the loss scale is not positive, or there is no
            `LossScaleState`.
        TypeError: An argument is a shape without values, or the call is inside `jit`.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2) * 1e-6
        >>> report = mpjax.numerics(loss, jnp.ones((4, 4)), batches=[jnp.ones((8, 4)), 2 * jnp.ones((8, 4))])
        >>> report.activations[0].max, report.gradients[0].max
        (8.0, 4.99...e-07)
        >>> report.largest_safe_scale  # the largest gradient of the weights is 8e-06
        4294967296.0

    Source: the histogram of gradients of Micikevicius et al., "Mixed Precision Training", ICLR 2018, figure 3.
    """
    half = np.dtype(jnp.dtype(dtype))
    if half not in HALF_DTYPES:
        raise ValueError(f"numerics: dtype={dtype!r} is not a half dtype; give 'float16' or 'bfloat16'.")
    state = None if loss_scale is None else scale_state(loss_scale)
    scale = 1.0 if state is None else float(np.max(state.loss_scale))
    loss = Loss(fun, argnums, has_aux, kwargs)
    measuring = _Measuring(loss, state, scale, Limits.of(half), budget)
    for call in [args] if batches is None else ((*args, batch) for batch in batches):
        measuring.add(call)
    if measuring.batches == 0:
        raise ValueError("numerics: batches is empty; give at least one batch.")
    return measuring.verified() if verify else measuring.report()


@dataclasses.dataclass
class _Compiled:
    """The program for one batch shape, and its evaluation."""

    block: Block
    counts: Counted
    probe: RangeProbe
    evaluation: Eager
    multiplied: tuple[int, ...]  # the inputs that a matmul reads as they are


class _Row(NamedTuple):
    """The key of a tally: a table, a name and a pass; in the table by operation, also an operation and its line."""

    table: str
    name: str
    phase: str
    op: str = ""
    source: str = ""


class _Measuring:
    """Accumulates statistics over batches. Each batch shape has its own program."""

    def __init__(self, loss: Loss, state: Any, scale: float, limits: Limits, budget: float):
        self.loss, self.state, self.scale, self.budget = loss, state, scale, budget
        self.limits, self.batches, self.has_half = limits, 0, False
        self.compiled: dict[Any, _Compiled] = {}
        self.tallies = collections.defaultdict[_Row, Tally](Tally)
        self.eight_bits: list[tuple[bool, EightBitRange]] = []  # whether it is packed for the backward pass
        self.unseen: dict[str, None] = {}
        self.beyond: dict[str, float] = {}
        self.gradients: list[dict[str, float]] = []  # by batch and path, the largest at scale 1
        self.largest: list[tuple[float, int, Any, Any]] = []  # the batches with the largest gradients

    def add(self, args: Sequence[Any]) -> None:
        """Measures one call."""
        names: list[str] = []
        program = trace_to_run("numerics", self.loss.gradient(self.state, names), args, {})
        consts = compat.open_jaxpr(program.jaxpr).consts
        key = jax.tree.structure(args), *(jax.typeof(x) for x in (*program.arrays, *consts))
        if key not in self.compiled:
            self.compiled[key] = self._compile(program, len(names))
        compiled = self.compiled[key]
        arrays, consts = [*map(widened, program.arrays)], [*map(widened, consts)]
        for i in compiled.multiplied:
            size, name = tally_of(note([arrays[i]], self.limits)).max, argument_name(program.names[i])
            if size >= self.limits.overflowed:
                self.beyond[name] = max(size, self.beyond.get(name, 0.0))
        outs, notes = compiled.evaluation.block(compiled.block, arrays, consts=consts)
        grads = outs[: len(names)]
        self.gradients.append({})
        self._take(compiled, jax.device_get(notes), zip(names, grads, strict=True))
        size = max(self.gradients[-1].values(), default=0.0)
        rows = [*self.largest, (size, self.batches, args, grads)]
        self.largest = sorted(rows, key=lambda row: -row[0])[:_KEPT]
        self.batches += 1

    def _compile(self, program: TracedCall, num_gradients: int) -> _Compiled:
        block, flow = laid_out(program), flow_of(program.jaxpr)
        read = {flow.source(v, repeats) for node in flow.eqns if node.site.name in MATMULS for v in node.reads}
        multiplied = tuple(i for i, v in enumerate(flow.inputs) if v in read and is_inexact(v))
        counts = counted(block, num_gradients)
        quantised = filter(stores_eight_bits, block.places())
        measured = (p for p in block.places() if is_measured(p, counts))
        probe = RangeProbe(measured, lambda _: self.limits, counts.gradients | counts.parameters, quantised)
        self.unseen |= dict.fromkeys(block.not_entered())
        self.has_half |= any(is_half(v) for place in block.places() for v in place.eqn.outvars)
        return _Compiled(block, counts, probe, Eager(probe, wide=True), multiplied)

    def _take(self, compiled: _Compiled, notes: Mapping[Any, Any], grads: Iterable[tuple[str, Any]]) -> None:
        counts = compiled.counts
        for number, place in compiled.probe.places.items():
            matters = counts.matters(number)
            phase, table = (BACKWARD, "gradients") if place.phase == BACKWARD else (FORWARD, "activations")
            rows = [_Row("by_op", place.path, phase, place.name, place.source)]
            if number in counts.gradients or number in counts.activations:
                rows.append(_Row(table, place.path, phase))
            if number in counts.gradients and matters:
                rows.append(_Row("half gradients", place.path, phase))
            if number in counts.all and matters:
                rows.append(_Row("matters", place.path, phase))
            tally = tally_of(notes["range", number], *(v.aval.dtype.name for v in place.outvars if is_inexact(v)))
            for row in rows:
                self.tallies[row] += tally
            if phase == BACKWARD and rows[-1].table == "matters":
                size = math.inf if tally.nonfinite else tally.max / self.scale
                self.gradients[-1][place.path] = max(size, self.gradients[-1].get(place.path, 0.0))
        for number, place in compiled.probe.quantised.items():
            self.eight_bits.append((place.name == PACKED, EightBitRange.of(place, notes["eight bits", number])))
        for name, grad in grads:
            scaled = np.asarray(grad, np.float32) * np.float32(self.scale)
            self.tallies[_Row("parameters", name, BACKWARD)] += tally_of(note([scaled], self.limits), "float32")

    def verified(self) -> NumericsReport:
        """The report with a trial of the loss scale, and of overrides for the modules that lose values."""
        report = self.report()
        losing = [] if self.has_half else self._losing()  # Overrides can't undo casts of the program's own.
        if report.init_scale is None:
            return report
        try:
            with warnings.catch_warnings(record=True) as caught:
                # Those about operations that the policy leaves in float32 are dropped: here that is intended.
                warnings.simplefilter("always")
                inner = {path for path in losing for outer in losing if outer and path.startswith(f"{outer}/")}
                kept, trials = self._tried([path for path in losing if path not in {"", *inner}], report.init_scale)
        except Exception as error:  # The report is valid without the trial.
            note = f"the recommendation was not tried: {type(error).__name__}: {error}"
            return dataclasses.replace(report, notes=(*report.notes, note))
        rules = dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, NonlinearRuleWarning))
        return dataclasses.replace(self.report(kept, trials), rules=tuple(rules))

    def _tried(self, losing: Sequence[str], init_scale: float) -> tuple[tuple[str, ...], tuple[Tried, ...]]:
        """The modules that must stay in float32, and the trials that show it."""
        left_out = self._left_out()
        rows = [row for row in self.largest if row[1] not in left_out] or self.largest[-1:]
        _, number, args, exact = rows[0]
        half = Policy(jnp.float32, self.limits.dtype, jnp.float32)
        paths = self._paths()
        trials: dict[frozenset[str], Trial] = {}

        def tried(what: str, scale: float, kept: Sequence[str] = ()) -> Tried:
            key = frozenset(kept)
            if key not in trials:
                pairs = tuple((f"*/{below_root(path, paths)}", get_policy("float32")) for path in kept)
                policy = dataclasses.replace(half, overrides=pairs)
                trials[key] = Trial("numerics", self.loss if self.has_half else self.loss.under(policy), args)
            return Tried(what, number, scale, trials[key].error(scale, exact), trials[key].half_share)

        found = [tried("as it is", self.scale)]
        if init_scale != self.scale:
            found.append(tried("with the recommended scale", init_scale))
        if not losing:
            return (), tuple(found)
        kept, budget = list(losing), self.budget
        best = tried("with scale and overrides", self._scales(losing)[1] or init_scale, losing)
        if not found[-1].error - best.error > budget or (self.beyond and not best.half_share):
            return (), tuple(found)
        for path in losing if 1 < len(losing) <= _MOST_SINGLES else ():
            rest = [other for other in kept if other != path]
            without = tried("with scale and overrides", self._scales(rest)[1] or init_scale, rest)
            if without.error <= best.error + budget and found[-1].error - without.error > budget:
                kept, best = rest, without
        return tuple(kept), (*found, best)

    def _nonfinite(self) -> set[int]:
        """The numbers of the batches whose gradients are inf or NaN, which a run in float32 has computed."""
        return {i for i, batch in enumerate(self.gradients) if math.inf in batch.values()}

    def _outliers(self) -> set[int]:
        """The numbers of the batches whose gradients are finite, and far larger than those of the others."""
        bad = self._nonfinite()
        sizes = {i: max(batch.values(), default=0.0) for i, batch in enumerate(self.gradients) if i not in bad}
        median = float(np.median([*sizes.values()])) if sizes else 0.0
        return {i for i, size in sizes.items() if len(sizes) >= _FEWEST and size > _OUTLIER * median}

    def _left_out(self) -> set[int]:
        """The numbers of the batches from which no scale is derived, unless there is no other batch."""
        bad = self._nonfinite()
        return self._outliers() | (bad if len(bad) < self.batches else set())

    def _paths(self) -> set[str]:
        return {row.name for row in self.tallies if row.table == "by_op" and row.name}

    def report(self, kept: Sequence[str] = (), trials: tuple[Tried, ...] = ()) -> NumericsReport:
        """The report over all batches.

        Args:
            kept: The modules to keep in float32.
            trials: What was tried.
        """
        losing, (safe, init) = self._losing(), self._scales(kept)
        outside = "" in losing and not (trials and math.isfinite(trials[-1].error))
        paths = self._paths()
        eight_bits = by_key(((packed, row.name, row.phase, row.dtypes), row) for packed, row in self.eight_bits)
        return NumericsReport(
            dtype=self.limits.dtype.name,
            loss_scale=self.scale,
            batches=self.batches,
            activations=self._table("activations"),
            gradients=self._table("gradients"),
            parameters=self._table("parameters"),
            by_op=self._table("by_op"),
            float8=tuple(together_in_eight_bits(alike) for (packed, *_), alike in eight_bits.items() if not packed),
            packed=tuple(together_in_eight_bits(alike) for (packed, *_), alike in eight_bits.items() if packed),
            gradient_exponents=_by_exponent(self._total("half gradients")),
            largest_safe_scale=safe,
            init_scale=init,
            keep_float32=tuple(below_root(path, paths) for path in kept),
            losing=() if trials and not self.has_half else tuple(below_root(path, paths) for path in losing if path),
            losing_lines=self._lines() if outside else (),
            outliers=tuple(sorted(self._outliers())),
            nonfinite=tuple(sorted(self._nonfinite())),
            trials=trials,
            beyond=tuple(self.beyond.items()),
            unseen=tuple(self.unseen),
            budget=self.budget,
        )

    def _losing(self) -> list[str]:
        """The paths of the modules whose values half overflows, or flushes at a scale that fits the others."""
        matters = [(row.name, row.phase, tally) for row, tally in self.tallies.items() if row.table == "matters"]
        losing = dict.fromkeys(path for path, phase, tally in matters if self._loses(phase, tally, flushes=True))
        gradients = {path: _by_exponent(tally) for path, phase, tally in matters if phase == BACKWARD}
        for row, tally in self.tallies.items():  # inside of modules
            if row.table == "by_op" and self._loses(row.phase, tally) and self._may_be_half(row):
                losing[row.name] = None
        while (init := self._scales(losing)[1]) is not None:
            flushed = [
                path
                for path, counts in gradients.items()
                if path not in losing and self.limits.flushed_share(counts, init / self.scale) > _MUCH
            ]
            if not flushed:
                break
            losing |= dict.fromkeys(flushed)
        return list(losing)

    def _loses(self, phase: str, tally: Tally, flushes: bool = False) -> bool:
        """Whether half overflows values of a pass, or flushes many of the forward pass if that counts."""
        if phase == FORWARD:
            return tally.overflowed > 0 or (flushes and tally.flushed_share > _MUCH)
        # It overflows even at scale 1. A scale small enough for it would flush everything else.
        return tally.max / self.scale > float(compat.finfo(self.limits.dtype).max)

    def _may_be_half(self, row: _Row) -> bool:
        if self.has_half:
            return self.limits.dtype.name in self.tallies[row].dtypes
        return primitive(row.op).op not in (Op.DENY, Op.OPAQUE)

    def _scales(self, kept: Iterable[str]) -> tuple[float | None, float | None]:
        """The largest safe and the recommended scale for all other modules, in batches that are no outliers."""
        gradient = self._largest_gradient(kept)
        if gradient is None:
            return None, None
        safe = 2.0 ** math.floor(math.log2(float(compat.finfo(self.limits.dtype).max) / gradient))
        init = min(max(safe / _HEADROOM, _SMALLEST_SCALE), _LARGEST_SCALE)
        return safe, init if self.limits.dtype == jnp.float16 else 1.0

    def _lines(self) -> tuple[str, ...]:
        """The operations outside of named modules that lose values there, with their lines."""
        outside = self.tallies.get(_Row("matters", "", FORWARD), Tally())
        flushes = outside.flushed_share > _MUCH
        lost = [
            f"{row.op} at {row.source or 'an unknown line'}"
            for row, tally in self.tallies.items()
            if row.table == "by_op" and not row.name and self._may_be_half(row)
            if self._loses(row.phase, tally, flushes)
        ]
        return tuple(dict.fromkeys(lost))

    def _largest_gradient(self, kept: Iterable[str]) -> float | None:
        """The largest gradient at scale 1 outside of the kept modules; None if there is none or one is not finite."""
        left_out, kept = self._left_out(), set(kept)
        batches = [batch for i, batch in enumerate(self.gradients) if i not in left_out]
        seen = [size for batch in batches for path, size in batch.items() if path not in kept]
        if not seen:
            total = self._total("parameters")
            seen = [math.inf if total.nonfinite else total.max / self.scale]
        return max(seen) if 0 < max(seen) < math.inf else None

    def _table(self, table: str) -> tuple[Range, ...]:
        def row(key: _Row, of: Tally) -> Range:
            numbers = of.max, of.min_nonzero, of.size, *of.shares, of.nonfinite
            return Range(key.name, key.phase, of.dtypes, *numbers, key.op, key.source)

        return tuple(row(key, tally) for key, tally in self.tallies.items() if key.table == table)

    def _total(self, table: str) -> Tally:
        return sum((tally for row, tally in self.tallies.items() if row.table == table), start=Tally())


def _by_exponent(tally: Tally) -> dict[int, int]:
    """The number of values per exponent of two."""
    return {int(i) - BIAS: int(tally.exponents[i]) for i in np.flatnonzero(tally.exponents)}
