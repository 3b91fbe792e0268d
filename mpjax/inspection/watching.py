"""`watch`: amax, flushed and non-finite values by module inside a compiled training step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.inspection.lockstep import groups_of
from mpjax.inspection.ranges.range_statistics import (
    PACKED,
    Limits,
    RangeNote,
    RangeProbe,
    counted,
    floats,
    merged_in_eight_bits,
    stores_eight_bits,
)
from mpjax.inspection.reports import Report, Section, by_key, percent
from mpjax.inspection.trials import Loss, laid_out
from mpjax.loss_scale.replicas import all_finite
from mpjax.loss_scale.state import find_loss_scale_state, loss_scale_of
from mpjax.program.dtypes import widened
from mpjax.program.graph import Site
from mpjax.program.interpreter import Instrumented
from mpjax.program.source import BACKWARD
from mpjax.program.tracing import traced_call

# The columns of a record's statistics.
COLUMNS = ("amax", "flushed", "zeros", "nonfinite")
_MUCH = 0.5  # the share of flushed values from which a record warns


@dataclasses.dataclass(frozen=True)
class WatchedModule:
    """The statistics of one module in one pass of one step.

    Args:
        name: The module path; outside of named modules, the user's function.
        phase: `"forward"`, `"backward"`, or `"kept"` for arrays that the backward pass keeps in eight bits.
        amax: The largest magnitude of a finite value, computed in float32. Gradients do not include the loss scale.
        flushed: Of the nonzero values that the program stores in half, or reads in half, the share that is flushed to
            zero at the loss scale. Of kept values, the share that is zero beside the largest of its block.
        zeros: The share of values that are zero in float32 too.
        nonfinite: The number of values that are inf or NaN, or beyond the range of the dtype that stores them.
    """

    name: str
    phase: str
    amax: float
    flushed: float
    zeros: float
    nonfinite: int


@dataclasses.dataclass(frozen=True)
class WatchRecord(Report):
    """The statistics of one step; `print` it.

    Args:
        step: The step number, counted from 0.
        loss_scale: The loss scale of the step's gradients.
        overflow: Whether the gradients were not finite.
        modules: The statistics by module, in program order.
        unseen: Operations of which only the results count, and why.
    """

    step: int
    loss_scale: float
    overflow: bool
    modules: tuple[WatchedModule, ...]
    unseen: tuple[str, ...] = ()

    heading = "Ranges of step {0.step}"
    main = "modules"

    def scalars(self) -> dict[str, float]:
        """The statistics by tag, such as `backward/Net/Dense_0/amax`, for TensorBoard and similar tools."""
        numbers = {
            f"{row.phase}/{row.name or '-'}/{name}": float(getattr(row, name))
            for row in self.modules
            for name in COLUMNS
        }
        return {"loss_scale": self.loss_scale, **numbers}

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        lines = [f"step {self.step}, loss scale {self.loss_scale:g}" + (": overflow" if self.overflow else "")]
        bad = [row for row in self.modules if row.nonfinite]
        if bad:
            lines.append(f"first inf or NaN: {bad[0].name or '-'}, {bad[0].phase} ({bad[0].nonfinite} values)")
        elif self.overflow:
            lines.append("no watched value leaves its range: mpjax.find_nonfinite finds the operation")
        lost = [row for row in self.modules if row.flushed > _MUCH]
        if lost:
            several = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            what = f"{lost[0].name or '-'}, {lost[0].phase} ({lost[0].flushed:.0%}){several}"
            scale = ": gradients need a larger loss scale" if lost[0].phase == "backward" else ""
            lines.append(f"warning: flushed to zero are most values of {what}{scale}")
        rows = [
            (
                row.name or "-",
                row.phase,
                f"{row.amax:.4g}",
                percent(row.flushed),
                f"{row.zeros:.1%}",
                str(row.nonfinite),
            )
            for row in sorted(self.modules, key=lambda row: (-row.nonfinite, -row.flushed, -row.amax))
        ]
        lines += [f"not inspected: {place}" for place in self.unseen]
        return [Section("", "\n".join(lines), "module|pass|>amax|>flushed|>zeros|>inf/NaN", rows)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchState:
    """State of `watch`: arrays of fixed shapes and dtypes, passed from step to step like the optimizer state.

    Args:
        step: Shape (), int32; the number of steps taken.
        last_finite: Shape (), bool; whether the last step's gradients were finite.
        written: Shape (), int32; the number of records written.
        steps: Shape (keep,), int32; the steps of the last records, in a ring buffer.
        scales: Shape (keep,), float32; their loss scales.
        overflows: Shape (keep,), bool; whether their gradients were not finite.
        statistics: Shape (keep, modules, 4), float32; the columns are `COLUMNS`.
        names: Name and pass of each module; static, not an array.
        unseen: Operations of which only the results count; static.
    """

    step: jax.Array
    last_finite: jax.Array
    written: jax.Array
    steps: jax.Array
    scales: jax.Array
    overflows: jax.Array
    statistics: jax.Array
    names: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True})
    unseen: tuple[str, ...] = dataclasses.field(metadata={"static": True}, default=())

    def records(self) -> tuple[WatchRecord, ...]:
        """Returns the last records, oldest first.

        Call it on the host, outside of `jit`.
        """
        state = jax.device_get(self)
        keep, written = len(state.steps), int(state.written)

        def record(at: int) -> WatchRecord:
            modules = tuple(
                WatchedModule(*place, float(amax), float(underflow), float(zeros), int(nonfinite))
                for place, (amax, underflow, zeros, nonfinite) in zip(self.names, state.statistics[at], strict=True)
            )
            overflow = bool(state.overflows[at])
            return WatchRecord(int(state.steps[at]), float(state.scales[at]), overflow, modules, self.unseen)

        return tuple(record(i % keep) for i in range(max(written - keep, 0), written))


class Watch(NamedTuple):
    """The result of `watch`: a pair of pure functions, like an optax transformation.

    Args:
        init: `init(*args) -> WatchState`, with the arguments of the loss function (arrays or shapes).
        update: `update(state, *args, grads=None, opt_state=None, finite=None) -> WatchState`, called in each step with
            the arguments at which the step's gradients are taken (the parameters before their update).
    """

    init: Callable[..., WatchState]
    update: Callable[..., WatchState]


def watch(
    fun: Callable[..., Any],
    *,
    every: int = 100,
    callback: Callable[[WatchRecord], Any] | None = None,
    keep: int = 8,
    policy: Any = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Watch:
    """Records statistics of a loss function's activations and gradients by module, at regular steps, inside `jit`.

    On each step:

        due = step % every == 0, or the gradients are not finite and those of the step before were
        lax.cond(due, run the gradient once more in float32; compare its values with the range of the dtypes that the
                      program stores them in; keep these statistics; call back, nothing)

    The training program itself is unchanged, so watching changes no result. Steps without a record cost nothing (with
    `grads=`, one read of the gradients). A step with a record takes two to three times as long. All state is in
    `WatchState`, an argument and a result of the training step. The step counter therefore always matches the run,
    nothing is recompiled, and no step waits for the host.

    Args:
        fun: The loss function that the training step differentiates.
        every: The number of steps between two records.
        callback: A Python function that receives the `WatchRecord` of each recorded step (see its `scalars`). The
            runtime calls it asynchronously on the host. None to read `WatchState.records` instead.
        keep: The number of most recent records in the state.
        policy: Anything that `get_policy` accepts; `fun` runs under autocast, as in `value_and_grad(policy=...)`.
        argnums: Positions of the arguments to differentiate.
        has_aux: Whether `fun` returns `(loss, aux)`.

    Returns:
        A `Watch`, two pure functions `init(*args)` and `update(state, *args, grads=None, opt_state=None, finite=None)`.
        `opt_state` holds the `LossScaleState` of the step's gradients, before its update; the amax of gradients in
        records does not include its scale. To record an overflow at once, pass `finite` or `grads`. `finite` is a bool
        of shape (), or the optimizer state after the update, whose `LossScaleState` holds it. `grads` are the step's
        gradients, which are read once more.

    Raises:
        ValueError: `every` or `keep` is less than 1, the arguments of `update` result in another program than those of
            `init`, or `update` is called inside a `shard_map` or `pmap`.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss_fn(w, x):
        ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
        >>> watched = mpjax.watch(loss_fn, every=2, policy="mixed_bfloat16")
        >>> @jax.jit
        ... def step(w, state, x):
        ...     loss, grads = mpjax.value_and_grad(loss_fn, policy="mixed_bfloat16")(w, x)
        ...     return w - 0.1 * grads, watched.update(state, w, x, grads=grads)
        >>> w, x = jnp.eye(4), jnp.ones((8, 4))
        >>> state = watched.init(w, x)
        >>> for _ in range(3):
        ...     w, state = step(w, state, x)
        >>> [(record.step, record.modules[0].phase) for record in state.records()]
        [(0, 'forward'), (2, 'forward')]

    Source: the statistics are those of NVIDIA Transformer Engine's debug features (`LogTensorStats`).
    """
    for name, value in (("every", every), ("keep", keep)):
        if not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"watch: {name}={value!r}: give a whole number of 1 or more.")
    loss = Loss(fun, argnums, has_aux) if policy is None else Loss(fun, argnums, has_aux).under(policy)
    measured = functools.partial(_measured, loss)

    def init(*args: Any) -> WatchState:
        modules, _, unseen = measured(jax.ShapeDtypeStruct((), jnp.float32), args)
        return WatchState(
            step=jnp.zeros((), jnp.int32),
            last_finite=jnp.ones((), bool),
            written=jnp.zeros((), jnp.int32),
            steps=jnp.full(keep, -1, jnp.int32),
            scales=jnp.ones(keep, jnp.float32),
            overflows=jnp.zeros(keep, bool),
            statistics=jnp.zeros((keep, len(modules), len(COLUMNS)), jnp.float32),
            names=modules,
            unseen=unseen,
        )

    def update(
        state: WatchState, *args: Any, grads: Any = None, opt_state: Any = None, finite: Any = None
    ) -> WatchState:
        scale = jnp.ones((), jnp.float32) if opt_state is None else loss_scale_of(opt_state)
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                "watch: update is called inside of a shard_map or pmap, where each device has its own statistics. "
                "Call it in the jit around that, with a loss function that contains the shard_map; or shard the arrays."
            )
        finite = _is_finite(grads, finite, state)
        modules, run, _ = measured(scale, args)
        if modules != state.names:
            raise ValueError(
                f"watch: the program of update has {_difference(modules, state.names)} the program of init: "
                "call init with arguments of the same structure, shapes and dtypes."
            )

        def record(state: WatchState) -> WatchState:
            at = state.written % state.steps.shape[0]
            new = dataclasses.replace(
                state,
                written=state.written + 1,
                steps=state.steps.at[at].set(state.step),
                scales=state.scales.at[at].set(scale),
                overflows=state.overflows.at[at].set(~finite),
                statistics=state.statistics.at[at].set(run(scale)),
            )
            if callback is not None:
                jax.debug.callback(lambda state: callback(jax.tree.map(np.asarray, state).records()[-1]), new)
            return new

        due = (state.step % every == 0) | (~finite & state.last_finite)
        state = lax.cond(due, record, lambda state: state, state)
        return dataclasses.replace(state, step=state.step + 1, last_finite=finite)

    return Watch(init, update)


def _is_finite(grads: Any, finite: Any, state: WatchState) -> Any:
    if finite is None:
        return all_finite(grads, state.last_finite, ())
    if hasattr(finite, "dtype"):
        return finite
    return find_loss_scale_state(finite).last_finite


def _difference(found: Sequence[tuple[str, str]], expected: Sequence[tuple[str, str]]) -> str:
    more = [f"{name or '-'} ({phase})" for name, phase in found if (name, phase) not in expected]
    missing = f"modules ({', '.join(more[:3])}) that are not in"
    return missing if more else "fewer modules, or modules in another order, than"


# The name and the pass of each module; the statistics at a loss scale, shape (modules, 4); what is not inspected.
_Measurement = tuple[tuple[tuple[str, str], ...], Callable[[Any], jax.Array], tuple[str, ...]]


def _measured(loss: Loss, scale: Any, args: Sequence[Any]) -> _Measurement:
    """The gradient program for given arguments, with range statistics."""
    names: list[str] = []
    program = traced_call(loss.gradient_at_any_scale(names), args, {"mpjax_loss_scale": scale})
    block = laid_out(program)
    counts, groups = counted(block, len(names)), groups_of(block)
    places = (p for p in block.places() if p.number in counts.all | counts.loss and floats(p.outvars))
    # Each against the half dtype in which it is stored or read.
    kept = (p for p in block.places() if p.name == PACKED and stores_eight_bits(p))
    probe = RangeProbe(places, lambda number: Limits.of(counts.half.get(number, np.float32)), quantised=kept)

    def row(place: Site) -> tuple[str, str]:
        phase = "backward" if place.phase == BACKWARD else "forward"
        return groups[place.number].name, "kept" if place.number in probe.quantised else phase

    rows = by_key((row(place), place) for _, place in sorted({**probe.places, **probe.quantised}.items()))

    def run(scale: Any) -> jax.Array:
        arrays, consts = [*map(widened, program.arrays)], [*map(widened, block.consts)]
        _, notes = Instrumented(probe, wide=True).block(block, arrays, consts=consts)
        return jnp.stack(
            [
                _kept(notes, places)
                if phase == "kept"
                else _row(notes, places, counts.half, scale if phase == "backward" else 1)
                for (_, phase), places in rows.items()
            ]
        )

    return tuple(rows), run, block.not_entered()


def _kept(notes: Mapping[Any, Any], places: Sequence[Site]) -> Any:
    """The values of `COLUMNS` over what one module keeps in eight bits."""
    found = [notes["eight bits", p.number] for p in places]
    largest, _, size, nonzero, flushed, nonfinite = [*functools.reduce(merged_in_eight_bits, found, jnp.zeros(6))]
    zeros = size - nonzero - nonfinite
    return jnp.stack([largest, flushed / jnp.maximum(nonzero, 1), zeros / jnp.maximum(size, 1), nonfinite])


def _row(notes: Mapping[Any, RangeNote], places: Sequence[Site], half: Mapping[int, Any], scale: Any) -> Any:
    """The values of `COLUMNS` over the equations of one module; `half` as in `Counted`."""
    found = [(notes["range", p.number], p.number in half) for p in places]
    amax = functools.reduce(jnp.maximum, (extremes[0] for (_, extremes, _), _ in found), jnp.float32(0))
    nothing = jnp.zeros(5, jnp.float32)
    counts = sum((counts.astype(jnp.float32) for (counts, _, _), _ in found), nothing)
    in_half = sum((counts.astype(jnp.float32) for (counts, _, _), is_half in found if is_half), nothing)
    nonzero = jnp.maximum(in_half[0] - in_half[1] - in_half[4], 1)
    return jnp.stack([amax / scale, in_half[2] / nonzero, counts[1] / jnp.maximum(counts[0], 1), counts[3] + counts[4]])
