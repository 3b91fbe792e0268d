"""The plan of a program: what `rewrite` carries out and `explain` shows."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

from mpjax._jaxpr.primitives import Op
from mpjax._jaxpr.walk import programs_in
from mpjax.casting.classify import Listing, Setting
from mpjax.casting.lattice import Inferred, Storage


class Action(enum.Enum):
    """How a step is carried out."""

    BIND = "bind"  # The primitive is bound again.
    ALIAS = "alias"  # The result is the input.
    SKIP = "skip"  # Nothing reads it.
    ENTER = "enter"  # The rule of a higher-order primitive issues it again.

    __hash__ = object.__hash__  # Enum's own is slow enough to show in trace times.


@dataclasses.dataclass(eq=False, slots=True)  # A frozen one takes four times as long to make.
class Step:
    """One equation of a program, and how it runs.

    Args:
        eqn: the equation as it was traced.
        action: how it is carried out.
        reads: the storage dtype in which each input is read.
        outs: for each output its inferred dtype; None where autocast leaves it alone (integers, float64).
        why: the reason, for people.
        listing: its list under the rules.
        half: computes in half.
        spread: the inputs that are smaller than the output, to be broadcast in float32 before the cast, because the
            derivative with respect to them is a sum.
        parameters: the operands of a matmul that are parameters: the backward pass reads them in float32, so that no
            half copy is stored.
        wide_gradients: whether their gradients leave the matmul in float32.
        gathers: a parameter is cast, then gathered; its gradient is scattered in float32.
        inner: for a higher-order primitive, what its own rule needs to issue it again; it has `plans`.
        touched: each value that it reads, and in which storage dtype.
    """

    eqn: Any
    action: Action
    reads: tuple[Storage, ...]
    outs: tuple[Inferred | None, ...]
    why: str
    listing: Listing
    half: bool = False
    spread: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    wide_gradients: bool = True
    gathers: bool = False
    inner: Any = None
    touched: tuple[tuple[Any, Storage], ...] = ()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of its sub-jaxprs that run with it."""
        return self.inner.plans if self.inner is not None else ()

    @property
    def rules(self) -> tuple[Plan, ...]:
        """The plans of its derivative rules, which run only when it is differentiated."""
        return getattr(self.inner, "rules", ())


def is_left_alone(step: Step) -> bool:
    """Whether programs run inside of it as they were traced, without a plan."""
    return step.listing.op is Op.OPAQUE and step.action is not Action.SKIP and bool(programs_in(step.eqn))


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """The matmuls and convolutions of a plan with its sub-jaxprs, and the user's rules that matched.

    Args:
        cast: cast to half.
        written: half already, by their author.
        left: left in float32.
        entries: the user's rules that matched.
    """

    cast: int = 0
    written: int = 0
    left: int = 0
    entries: frozenset[Any] = frozenset()

    def __add__(self, other: Tally) -> Tally:
        if other is NOTHING:
            return self
        entries = self.entries | other.entries
        return Tally(self.cast + other.cast, self.written + other.written, self.left + other.left, entries)


NOTHING = Tally()


@dataclasses.dataclass(eq=False, slots=True)
class Plan:
    """The plan of a program.

    Args:
        setting: half dtype, rules, region.
        steps: one for each equation, in order; some stand together in a rematerialisation region.
        invars, constvars, outvars: the program's variables.
        ins, outs: what is inferred of its inputs and outputs; None where autocast leaves them alone.
        in_reads: for each input the storage dtypes that are read, as a bit mask.
        trivial: it runs as it was traced, so its equation can be issued as it stands.
        tally: counts for warnings.
        runners: functions that `rewrite` made of it, kept so that JAX's own caches recognise them.
    """

    setting: Setting
    steps: list[Any]
    invars: Sequence[Any]
    constvars: Sequence[Any]
    outvars: Sequence[Any]
    ins: tuple[Inferred | None, ...]
    outs: tuple[Inferred | None, ...]
    in_reads: tuple[int, ...]
    trivial: bool
    tally: Tally
    runners: dict[Any, Any] = dataclasses.field(default_factory=dict)
