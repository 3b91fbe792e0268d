"""The plan of a program, which `rewrite` carries out and `explain` shows."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from mpjax.casting.classify import UNTIL_TOLERANCE, Listing
from mpjax.casting.lattice import Inferred, Storage
from mpjax.casting.scaled import Decision
from mpjax.casting.setting import IN_HALF, Setting, tracked
from mpjax.policy import HALF_DTYPES
from mpjax.program.graph import may_hold_matmuls, site_of, sub_jaxprs, walk
from mpjax.program.primitives import MATMULS, Op, is_product, primitive
from mpjax.program.source import source_line


class Action(enum.Enum):
    """How `rewrite` carries out a step."""

    BIND = "bind"  # Bind the primitive again.
    ALIAS = "alias"  # Return the input.
    SKIP = "skip"  # Leave it out: the outputs are unused.
    ENTER = "enter"  # Issue it again through its higher-order rule.

    __hash__ = object.__hash__  # Enum's __hash__ is slow enough to show in trace times.


@dataclasses.dataclass(eq=False, slots=True)  # A frozen dataclass takes four times as long to create.
class Step:
    """One equation of a program, and how it runs.

    Args:
        eqn: The equation as traced.
        action: How `rewrite` carries it out.
        reads: The storage dtype of each input, as it reads it.
        outs: The inferred level and storage dtype of each output; None if autocast leaves it alone (integers, float64).
        why: The reason, shown to the user.
        listing: Its list under the rules.
        half: Whether it computes in half.
        broadcast: Indices of the inputs that are smaller than the output, or are rounded once. They are broadcast in
            float32 before the cast, because the derivative with respect to them is a sum.
        rounded_once: Whether it reads float32 and rounds the result: a parameter that it adds to an activation or
            multiplies it by, whose rounding would be the same error in each row of a batch, and not average out; or a
            value near the number that it adds, `1 + tanh(h)`.
        biases: Indices of the parameters that it adds, in float32, to an activation of which half is stored.
        parameters: Indices of the operands of a matmul that are parameters. The backward pass reads them in float32,
            so that no half copy is stored.
        wide_gradients: Whether the matmul writes their gradients in float32.
        half_move: Whether a value is moved (sent or looked up) in half, and its gradient moved back in float32.
        scaled: Whether a matmul runs in a format with scales, and why not; None for any other operation.
        inner: For a higher-order primitive, the data that its rule needs to issue it again; it has `plans`.
        all_reads: The values that it reads, each with its storage dtype.
        closures: The values of this program that its derivative rules close over; further operands.
        packs: The operands (of a call, the arrays that go in) that its derivative keeps in fewer bits, by index, each
            with the format; without one, it follows from what a region keeps in half, and is not kept itself.
    """

    eqn: Any
    action: Action
    reads: tuple[Storage, ...]
    outs: tuple[Inferred | None, ...]
    why: str
    listing: Listing
    half: bool = False
    broadcast: tuple[int, ...] = ()
    rounded_once: bool = False
    biases: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    wide_gradients: bool = True
    half_move: bool = False
    scaled: Decision | None = None
    inner: Any = None
    all_reads: tuple[tuple[Any, Storage], ...] = ()
    closures: Sequence[Any] = ()
    packs: dict[int, str] = dataclasses.field(default_factory=dict)

    @property
    def is_scaled(self) -> bool:
        """Whether it is a matmul in a format with scales."""
        return self.scaled is not None and bool(self.scaled.dtypes)

    @property
    def invars(self) -> Sequence[Any]:
        """Its operands."""
        return [*self.eqn.invars, *self.closures] if self.closures else self.eqn.invars

    @property
    def outvars(self) -> Sequence[Any]:
        """Its results."""
        return self.eqn.outvars

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of its sub-jaxprs that run with it."""
        return self.inner.plans if self.inner is not None else ()

    @property
    def rules(self) -> tuple[Plan, ...]:
        """The plans of its derivative rules, which run only if it is differentiated."""
        return getattr(self.inner, "rules", ())

    @property
    def backward(self) -> Plan | None:
        """The plan of its backward rule."""
        pair: tuple[Any, Plan] | None = getattr(self.inner, "backward", None)
        return pair and pair[1]


def is_left_alone(step: Step) -> bool:
    """Whether it has sub-jaxprs that run as traced, without a plan."""
    return step.listing.op is Op.OPAQUE and step.action is not Action.SKIP and bool(sub_jaxprs(step.eqn))


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulCounts:
    """Counts of the matmuls and convolutions of a plan and its sub-jaxprs, and the user's rules that matched.

    Args:
        cast: Those cast to half.
        written: Those that the program already runs in half.
        left: Those left in float32, and primitives that may contain some.
        entries: The user's rules that matched.
        loops: The lines of loops that are float32 because they end when a tolerance is met.
        hidden: Primitives that are not entered and may contain matmuls, each with its line.
        scaled: Those in a format with scales.
        why_not_scaled: Why others are not.
        packed: The operands that derivatives keep in eight bits.
        primitives: Of those cast, the primitives; a fused attention or loss is one.
        unfused: The kinds of what is not fused, each with a reason.
    """

    cast: int = 0
    written: int = 0
    left: int = 0
    entries: frozenset[Any] = frozenset()
    loops: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    scaled: int = 0
    why_not_scaled: frozenset[str] = frozenset()
    packed: int = 0
    primitives: frozenset[str] = frozenset()
    unfused: frozenset[tuple[str, str]] = frozenset()

    def __add__(self, other: MatmulCounts) -> MatmulCounts:
        if other is NOTHING:
            return self
        pairs = ((getattr(each, field.name) for each in (self, other)) for field in dataclasses.fields(self))
        return MatmulCounts(*(a + b if isinstance(a, int) else a | b for a, b in pairs))


NOTHING = MatmulCounts()


@dataclasses.dataclass(eq=False, slots=True)
class Plan:
    """The plan of a program.

    Args:
        setting: Half dtype, rules, region.
        eqns: A `Step` for each equation, in order; some are grouped into rematerialisation regions.
        invars, constvars, outvars: The program's variables.
        ins, outs: The inferred dtypes of its inputs and outputs; None where autocast leaves them alone.
        in_reads: A bit mask for each input, of the storage dtypes in which it is read.
        unchanged: Whether it runs as traced, so that its equation can be issued unchanged.
        counts: Counts for warnings.
        unfused: The attentions and losses that are not fused: what it is, an equation of it, and the reason.
        runners: Functions that `rewrite` made from it, kept so that JAX's caches hit.
    """

    setting: Setting
    eqns: list[Any]
    invars: Sequence[Any]
    constvars: Sequence[Any]
    outvars: Sequence[Any]
    ins: tuple[Inferred | None, ...]
    outs: tuple[Inferred | None, ...]
    in_reads: tuple[int, ...]
    unchanged: bool
    counts: MatmulCounts
    unfused: tuple[tuple[str, Any, str], ...] = ()
    runners: dict[Any, Any] = dataclasses.field(default_factory=dict)


def counts_of(step: Step) -> MatmulCounts:
    """The counts of one step and its sub-jaxprs."""
    is_matmul = step.eqn.primitive.name in MATMULS and not is_product(step.eqn) and step.action is not Action.SKIP
    left_alone, hides = is_left_alone(step), not step.listing.region and may_hold_matmuls(step.eqn)
    if not is_matmul and not left_alone and not hides and step.inner is None and step.listing.entry is None:
        return NOTHING
    entries = frozenset(() if step.listing.entry is None else (step.listing.entry,))
    if step.scaled is not None and step.scaled.entry is not None:
        entries |= {step.scaled.entry}
    left = int(hides)
    if left_alone:
        left = sum(_is_float32_matmul(site.eqn) for j in sub_jaxprs(step.eqn) for site in walk(j.jaxpr))
    counts = MatmulCounts(left=left, entries=entries)
    if step.scaled is not None:
        why = step.scaled.why
        counts += MatmulCounts(scaled=int(not why), why_not_scaled=frozenset({why} if why else ()))
    if left and not step.listing.region and not primitive(step.eqn.primitive.name).solve:
        counts += MatmulCounts(hidden=frozenset({site_of(step.eqn).label}))
    for inner in (*step.plans, *step.rules):
        counts += inner.counts
    loops = counts.loops | {""} if step.listing == UNTIL_TOLERANCE else counts.loops
    if "" in loops:  # JAX's own functions have no line, but their callers do.
        line = source_line(step.eqn)
        counts = dataclasses.replace(counts, loops=loops - {""} | {line})
    if is_matmul:
        if step.half:
            counts += MatmulCounts(cast=1, primitives=frozenset({step.eqn.primitive.name}))
        elif all(v.aval.dtype in HALF_DTYPES for v in step.eqn.invars[:2]):
            by_region = step.listing.region in IN_HALF  # half_function cast their operands.
            counts += MatmulCounts(cast=1) if by_region else MatmulCounts(written=1)
        elif _is_float32_matmul(step.eqn):
            counts += MatmulCounts(left=1)
    return counts


def _is_float32_matmul(eqn: Any) -> bool:
    return eqn.primitive.name in MATMULS and not is_product(eqn) and any(map(tracked, eqn.invars))
