"""What a plan depends on besides the program: the half dtype, the rules, and the region that contains the program."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mpjax.casting.rules import Rules
from mpjax.casting.scaled import ScaledSetting
from mpjax.kernels.packed import PACKINGS
from mpjax.program import compat
from mpjax.program.graph import NOBODY, Owners
from mpjax.program.primitives import primitive
from mpjax.program.source import join, module_of

FLOAT32 = np.dtype(np.float32)
_CARRY = "mpjax carry"


class Region(enum.StrEnum):
    """The regions that the decorators, `autocast_disabled` and autocast functions inside mark."""

    NONE = ""
    HALF = "half"
    HALF_AS_WRITTEN = "half_as_written"
    FLOAT = "float"
    PROMOTE = "promote"
    TOLERANCE = "tolerance"  # not marked: the default for a loop that ends when a tolerance is met
    OFF = "off"
    PLANNED = "planned"


# The regions that run as traced, and why.
AS_TRACED = {Region.OFF: "autocast is disabled here", Region.PLANNED: "an autocast function inside planned it"}

# The regions that run in half, and why.
IN_HALF = {
    Region.HALF: "half_function",
    Region.HALF_AS_WRITTEN: "half_function, traced with float32 arguments",
}

# The regions that run in float32, and why.
IN_FLOAT32 = {Region.FLOAT: "float_function", Region.TOLERANCE: "its loop ends when its matmuls meet a tolerance"}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Everything that a plan depends on besides the program. Hashable, because it is part of the plan's key.

    Args:
        half: The half dtype.
        rules: The lists.
        higher_order: The rules of the higher-order primitives, by name.
        region: The user's region that contains the program.
        recompute: Whether to form rematerialisation regions.
        folded: Whether the whole program is cheap, so that it may be part of an outer rematerialisation region.
        looped: Whether the program is in the body of a scan.
        invariants: The number of leading inputs that are the same in all iterations of a loop with this body.
        in_rule: Whether the program is a derivative rule. Rules nested in it are planned only when differentiated,
            because a rule may call its own function (relu's does).
        keeps_carries: Whether the carry of a loop keeps float32 if it starts from inputs, parameters or constants.
        plans_rules: Whether derivative rules are planned with the program, for its report and for the user's rules that
            match inside; otherwise when JAX differentiates the program, if they can wait.
        path: The module path. Set only if a rule reads it, so that plans are otherwise shared between paths.
        owners: The module paths of equations whose scopes don't name an instance.
        scaled: The options of matmuls in formats with scales; None if there are none.
        deep: Whether a residual stream of the program has so many additions that its roundings would add up.
        steps: Whether the program is the body of a loop whose iterations are steps of one map, and no layers.
        inlined: Whether the program is that of a call which keeps none of its operands: of a `jit`, not a checkpoint.
    """

    half: np.dtype
    rules: Rules
    higher_order: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)
    region: Region = Region.NONE
    recompute: bool = False
    folded: bool = False
    looped: bool = False
    invariants: int = 0
    in_rule: bool = False
    keeps_carries: bool = False
    plans_rules: bool = False
    path: str = ""
    owners: Owners = NOBODY
    scaled: ScaledSetting | None = None
    deep: bool = False
    steps: bool = False
    inlined: bool = False

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        flags = (
            self.recompute,
            self.folded,
            self.looped,
            self.invariants,
            self.in_rule,
            self.keeps_carries,
            self.steps,
        )
        return hash((self.half, self.rules, self.region, flags, self.path, self.owners))

    def represents(self, literal: Any) -> bool:
        """Whether half represents a literal exactly; no complex one."""
        value = np.asarray(literal.val)
        if np.iscomplexobj(value):
            return False
        with np.errstate(over="ignore"):  # A mask of -1e38 overflows, so it compares as not exact.
            return bool(np.all(value.astype(self.half).astype(value.dtype) == value))

    @property
    def reads_scopes(self) -> bool:
        """Whether a rule matches module paths."""
        return self.rules.reads_scopes or bool(self.scaled and self.scaled.entries)

    @property
    def wide_stream(self) -> bool:
        """Whether the sums of a residual stream are float32."""
        choice = self.rules.residual_stream
        return not self.steps and (choice == "float32" or (choice == "auto" and self.deep))

    @property
    def packs(self) -> bool:
        """Whether half arrays are kept for the backward pass in eight bits."""
        return self.rules.residuals in PACKINGS and self.recompute and not self.folded and not self.in_rule

    @functools.cached_property
    def plain(self) -> bool:
        """Whether only the default lists apply."""
        return not self.rules.entries and self.rules.level == "default" and not self.region

    def inside(self, eqn: Any, region: Region, invariants: int = 0) -> Setting:
        """The setting of the sub-jaxprs of an equation; a loop gives the number of its invariant operands."""
        path = join(self.path, module_of(eqn)) if self.reads_scopes else ""
        owners = self.owners.inside(eqn)
        row = self.higher_order[eqn.primitive.name]
        recompute = self.recompute and row.regions_inside
        looped = self.looped or row.is_scan
        inlined = primitive(eqn.primitive.name).call and row.regions_inside
        now = (self.region, self.path, self.owners, self.recompute, self.looped, self.invariants, self.inlined)
        if (region, path, owners, recompute, looped, invariants, inlined) == now:
            return self
        return dataclasses.replace(
            self, region=region, path=path, owners=owners, recompute=recompute, looped=looped, invariants=invariants,
            inlined=inlined,
        )  # fmt: skip


@dataclasses.dataclass(eq=False)
class Trial:
    """What an inspection tries in every autocast of the code around which it is, in `contexts.trial`.

    Args:
        changes: Options of `Rules`, in place of those that the code gives.
        checkpoint: Whether each iteration of a `scan` is a `jax.checkpoint`.
        offload: Whether such a checkpoint keeps its carry in the host's memory.
        autocasts: The number of autocasts that it changed.
        scans: The number of scans that are checkpoints.
        scores, logits: The numbers of elements of the arrays that fused attentions and losses don't store.
    """

    changes: Mapping[str, Any]
    checkpoint: bool = False
    offload: bool = False
    autocasts: int = 0
    scans: int = 0
    scores: set[int] = dataclasses.field(default_factory=set)
    logits: set[int] = dataclasses.field(default_factory=set)

    def changed(self, rules: Rules) -> Rules:
        """The rules with the changes."""
        self.autocasts += 1
        return dataclasses.replace(rules, **self.changes)

    def checkpointed(self, iteration: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """An iteration of a `scan` as a `jax.checkpoint`."""
        self.scans += 1
        if not self.offload:
            return jax.checkpoint(iteration, prevent_cse=False)

        def named(carry: Any, xs: Any) -> Any:
            return iteration([checkpoint_name(x, _CARRY) if x.ndim else x for x in carry], xs)

        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_CARRY],
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(named, prevent_cse=False, policy=policy)


def tracked(v: Any) -> bool:
    """Whether autocast may choose this value's dtype: a float32 array. float64 is left as the user set it."""
    aval = v.aval
    return compat.is_shaped(aval) and aval.dtype == FLOAT32
