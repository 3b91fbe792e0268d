"""`plan`: will a step fit a device, and what to change if it does not."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import jax

from mpjax.casting import Rules
from mpjax.casting.rules import Attention, CrossEntropy, ResidualStream
from mpjax.inspection.reports import amount
from mpjax.inspection.trials import relative_error
from mpjax.planning import kernel_time
from mpjax.planning.memory import memory_of
from mpjax.planning.report import PlanReport as PlanReport
from mpjax.planning.report import Tried, rules_text
from mpjax.planning.search import Combination, cheapest, largest_batch
from mpjax.planning.step import CAST, WHOLE, BatchArgs, Change, Compiled, Place, Step
from mpjax.planning.target import Target
from mpjax.policy import get_policy
from mpjax.program import contexts
from mpjax.program.tracing import functional, is_array

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# The price of each way to keep values: larger errors of gradients cost more. Stochastic rounding takes the same bytes.
_RESIDUALS = {"half": 0.01, "int8": 0.1, "float8": 0.12, "full": 0.01}


def plan(
    fun: Callable[..., Any],
    *args: Any,
    target: str | Target | None = None,
    memory: str | int | None = None,
    mesh: Mapping[str, int] | None = None,
    policy: Any = "mixed_bfloat16",
    batch_axis: int | None = None,
    batch_args: int | str | Sequence[int | str] | None = None,
    quiet: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> PlanReport:
    """Tells whether a step fits a device, what it holds in memory, and the cheapest change with which it fits.

    The step is compiled for the device, as it is and with each change: nothing is allocated, and nothing of it runs.

        peak = arguments + results + temporaries − donated arguments      XLA's plan, on each device
        changes of Rules: attention, cross_entropy, residuals, residual_stream
        edits of the code: autocast (for a program without mpjax), jax.checkpoint of a scan's body (or one that keeps
                           its carry in host memory), donation, master_weights, low_bit_state

    Args:
        fun: A training step, a gradient, a loss or any other function, jitted or not, with mpjax or without. A step
            returns the parameters and optimizer state that it takes as arguments. Of a loss, a function whose first
            result is a scalar, the gradient is planned.
        *args: Its arguments; `jax.ShapeDtypeStruct`s will do. If all are arrays and `fun` is no step, each change is
            also run here, for the error of its gradients or results.
        target: A device that need not be present, such as `"h200"`, `"a100"` or `"v5e"`, or a
            `mpjax.planning.target.Target` with the numbers of another. None: JAX's own device.
        memory: What the step may take on each device, as `"80GB"`, `"40GiB"` or in bytes. None: the device's memory.
        mesh: The axes of a mesh of such devices with their sizes, `{"data": 8}`. Each argument's sharding gives its
            `PartitionSpec`; what has none is replicated.
        policy: For a program without mpjax, the policy of the autocast that it is tried with.
        batch_axis: The axis of the batch in the step's inputs. If given, the largest batch that fits is sought too,
            as the step is and with each change.
        batch_args: The arguments that carry the batch, by position or keyword. None: all of the step's inputs, which
            must then agree on the size of that axis.
        quiet: Whether not to print each compilation to the standard error.
        kwargs: Keyword arguments of the call.

    Returns:
        A `PlanReport`: `print` it, or read `fits`, `peak`, `kinds`, `rules`, `edits` and `options`.

    Raises:
        ValueError: The target, the memory, the mesh, the policy or the batch axis is not understood.
        RuntimeError: The compiler for the target is not installed. The message says what to install.
        Exception: Any error that `fun` raises while it is traced, or XLA while it compiles the step as it is.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss_fn(w, x):
        ...     return jnp.mean(jnp.tanh(x @ w) @ w)
        >>> w, x = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((4096, 256), jnp.float32)
        >>> report = mpjax.plan(loss_fn, w, x, memory="1GB")
        >>> report.fits, report.kinds["parameters"]
        (True, 262144)

    Source: XLA's buffer assignment (`jax.stages.Compiled.memory_analysis`); the live arrays are read from the schedule.
    """
    given, kwargs = args, dict(kwargs or {})
    policy = get_policy(policy)
    where = Place.of(target, mesh)
    budget = bytes_of(memory) if memory is not None else where.memory
    step = Step(fun, args, kwargs, where, policy)
    batch = None if batch_axis is None else batch_of(step, batch_axis, batch_args)
    if batch is not None and budget is None:
        raise ValueError("plan(batch_axis=...): the device's memory is not known; give memory=.")
    planner = _Planner(step, quiet)
    found = planner.search(budget)
    batches: dict[Combination, int] = {}
    if budget is not None and batch_axis is not None and batch is not None:
        batches = planner.batches(budget, batch_axis, batch_args, batch, found)
    errors = planner.errors(given, kwargs, found) if not planner.given.carried else {}
    return planner.report(budget, found, planner.rows(found, errors, batches), batch)


def bytes_of(memory: str | int) -> int:
    """A size in bytes.

    Raises:
        ValueError: It is not understood.

    Example:
        >>> bytes_of("80GB"), bytes_of("40 GiB"), bytes_of(1000)
        (80000000000, 42949672960, 1000)
    """
    parts = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?I?B?)\s*", str(memory).upper())
    unit = _UNITS.get(parts[2]) if parts else None
    if parts is None or unit is None or float(parts[1]) <= 0:
        raise ValueError(f'plan(memory={memory!r}): give bytes, or a size such as "80GB" (10⁹ bytes) or "80GiB" (2³⁰).')
    return int(float(parts[1]) * unit)


def batch_of(step: Step, axis: int, args: BatchArgs) -> int:
    """The size of the batch: that of an axis of the inputs that carry it.

    Raises:
        ValueError: No such input has the axis, or their sizes differ.
    """
    sizes = {name: x.shape[axis] for name, x in step.batched(axis, args)}
    if not sizes:
        which = "no input of the step has" if args is None else f"no array of batch_args={args!r} has"
        raise ValueError(f"plan(batch_axis={axis}): {which} such an axis.")
    if len({*sizes.values()}) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(
            f"plan(batch_axis={axis}): the inputs differ in the size of that axis: {listed}. Name the arguments that "
            "carry the batch: batch_args=, by position or keyword."
        )
    return next(iter(sizes.values()))


class _Planner:
    """Compiles a step under combinations of changes, each once."""

    def __init__(self, step: Step, quiet: bool):
        self.step, self.quiet = step, quiet
        self.given = step.traced()
        self.plain = not self.given.trial.autocasts
        self.start: Combination = (CAST,) if self.plain else ()
        self._known: dict[frozenset[Change], Compiled] = {}
        self.failed: dict[str, str] = {}
        self.base = self._compiled(())
        probe = step.traced((*self.start, Change("attention", "fused"), Change("cross_entropy", "fused")))
        self.scores, self.logits = probe.trial.scores, probe.trial.logits
        self.options = [change for change in self._options() if self._compiles(change)]

    def _options(self) -> Iterator[Change]:
        """The changes that may have an effect."""
        start = self.step.traced(self.start)
        if start.trial.autocasts:
            given = {
                "attention": [x for x in get_args(Attention) if x in ("fused", "unfused")] if self.scores else [],
                "cross_entropy": get_args(CrossEntropy) if self.logits else [],
                "residuals": _RESIDUALS,
                "residual_stream": get_args(ResidualStream),
            }
            for axis, values in given.items():
                for value in values:
                    yield Change(axis, value, price=_RESIDUALS[value] if axis == "residuals" else 0.01)
        yield from self.step.edits(self.start)

    def _compiles(self, change: Change) -> bool:
        """Whether XLA compiles the step with a change. Why it does not is noted."""
        try:
            self.measure((change,))
            return True
        except NotImplementedError as error:
            self.failed[change.name] = f"is not available: {error}"
        except Exception as error:  # such as a kernel that refuses a shape
            first = (str(error).splitlines() or [""])[0][:160]
            self.failed[change.name] = f"does not compile: {type(error).__name__}: {first}"
        return False

    def _compiled(self, changes: Combination) -> Compiled:
        key = frozenset(changes)
        if key not in self._known:
            if not self.quiet:
                print(f"plan: compiling {len(self._known) + 1}: {_name(changes)}", file=sys.stderr, flush=True)
            self._known[key] = self.step.compile(changes)
        return self._known[key]

    def measure(self, changes: Combination) -> Compiled:
        """The step with changes; of a program without mpjax, under autocast."""
        return self._compiled((*self.start, *changes))

    def search(self, budget: int | None) -> Combination:
        """The changes to make, of which the step that fits needs none."""
        if budget is not None and self.base.peak <= budget:
            return ()
        found = cheapest(self.options, self.measure, budget or 0)
        chosen = (*self.start, *found.chosen)
        return chosen if found.fits or self._compiled(chosen).peak < self.base.peak else ()

    def errors(self, args: Any, kwargs: Any, chosen: Combination) -> dict[Combination, float]:
        """The errors of the gradients with each change, if the arguments are arrays."""
        _, args, kwargs, _ = functional(self.step.fun, args, kwargs)
        leaves = [x for x in jax.tree.leaves((args, kwargs)) if is_array(x)]
        if not leaves or any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves) or self.step.place.mesh is not None:
            return {}
        here = Step(self.step.fun, self.step.args, self.step.kwargs, Place("here"), self.step.policy)

        def gradients(changes: Combination) -> list[Any]:
            call: Any = jax.extend.core.jaxpr_as_fun(here.traced(changes).program.jaxpr)
            return jax.tree.leaves(jax.jit(call)(*leaves))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contexts.autocast_disabled(True), jax.default_matmul_precision("highest"):
                expected = gradients(())
            combinations = [*([] if self.plain else [()]), *self._rows(), *([chosen] if chosen else [])]
            return {each: relative_error(gradients(each), expected) for each in combinations}

    def _rows(self) -> list[Combination]:
        """The combinations in the table, besides the step as it is."""
        start = [self.start] if self.start else []
        return [*start, *((*self.start, change) for change in self.options)]

    def batches(
        self, budget: int, axis: int, args: BatchArgs, batch: int, chosen: Combination
    ) -> dict[Combination, int]:
        """The largest batch that fits with each change, given that of the step."""
        unit = max(_shards(x, axis) for _, x in self.step.batched(axis, args))

        def peak_with(changes: Combination) -> Callable[[int], int]:
            def peak(size: int) -> int:
                if not self.quiet:
                    print(f"plan: compiling a batch of {size}: {_name(changes)}", file=sys.stderr, flush=True)
                return self.step.with_batch(axis, args, size).compile(changes).peak

            return peak

        effective = [each for each in self._rows() if not self._is_idle(each)]
        found = dict.fromkeys([(), *effective, chosen])
        return {each: largest_batch(peak_with(each), budget, batch, unit) for each in found}

    def _is_idle(self, changes: Combination) -> bool:
        """Whether a change leaves the program as it is."""
        without = self.start if len(changes) > len(self.start) else ()
        return bool(changes) and self._compiled(changes).program == self._compiled(without).program

    def rows(
        self, chosen: Combination, errors: Mapping[Combination, float], batches: Mapping[Combination, int]
    ) -> Iterable[Tried]:
        """The table: the step as it is, with each change, and with those that were chosen."""
        every = [(), *self._rows()]
        for changes in [*every, *([] if chosen in every else [chosen])]:
            found = self._compiled(changes)
            name, figures = _name(changes, " + "), (found.peak, found.moved, found.least, found.modelled)
            yield Tried(name, *figures, self._is_idle(changes), errors.get(changes), batches.get(changes))

    def report(self, budget: int | None, chosen: Combination, rows: Iterable[Tried], batch: int | None) -> PlanReport:
        """The report."""
        after, place = self._compiled(chosen) if chosen else None, self.step.place
        options: Any = {change.axis: change.value for change in chosen if not change.edit}
        rules = Rules(**options) if options else None
        return PlanReport(
            name=getattr(self.step.fun, "__name__", type(self.step.fun).__name__),
            device=place.name if place.mesh is None else f"each of {place.mesh.size} × {place.name}",
            budget=budget,
            memory=memory_of(self.base, self.scores, self.logits),
            options=tuple(rows),
            chosen=tuple(change.name for change in chosen),
            after=memory_of(after, self.scores, self.logits) if after else None,
            fits=None if budget is None else (after or self.base).peak <= budget,
            rules=rules,
            edits=tuple(self._edits(chosen, rules)),
            matmuls=self.step.matmuls(self.given),
            compiled=len(self.step.compiled),
            batch=batch,
            notes=tuple(self._notes(budget)),
        )

    def _edits(self, chosen: Combination, rules: Rules | None) -> Iterator[str]:
        for change in chosen:
            if change.edit:
                text = f", rules=mpjax.Rules({rules_text(rules)})" if rules is not None else ""
                whole = change is CAST and self._compiled(chosen).traced.whole and not self.given.is_loss
                yield (WHOLE if whole else change.edit).format(
                    policy=self._policy_name(), rules=text, argnums=self._argnums(), half=self.step.policy.compute_dtype
                )

    def _policy_name(self) -> str:
        name = self.step.policy.compute_dtype
        return f"mixed_{name}" if self.step.policy == get_policy(f"mixed_{name}") else str(self.step.policy)

    def _argnums(self) -> str:
        """The positions of the arguments that the step returns updated."""
        found = {re.match(r"\[0\]\[(\d+)\]", self.given.program.names[i]) for i in self.given.carried}
        return ", ".join(sorted({match[1] for match in found if match}))

    def _notes(self, budget: int | None) -> Iterator[str]:
        for name, why in self.failed.items():
            yield f"{name} {why}"
        kept = max((found.host for found in self._known.values()), default=0)
        if kept:
            yield f"offload keeps up to {amount(kept, 'B')} in host memory; the time of its copies is not modelled"
        if self.given.is_loss:
            yield "the gradient of the loss, with respect to its first argument, was planned: no optimizer is in it"
        if budget is None:
            yield "the device's memory is not known; memory= gives it"
        if self.step.place.platform == "cuda" and self.step.place.target is not None:
            yield kernel_time.unavailable(self.step.place.target) or (
                kernel_time.UNREADABLE if self.base.modelled is None else kernel_time.ACCURACY
            )
            yield (
                "without the device, XLA tries no matmul tiles and cuDNN chooses no algorithms: their scratch is not "
                "in the plan"
            )
            yield (
                "JAX takes three quarters of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says more: "
                "plan with that share"
            )


def _name(changes: Combination, between: str = ", ") -> str:
    return between.join(change.name for change in changes) or "as it is"


def _shards(x: Any, axis: int) -> int:
    """The number of parts into which a sharding divides an axis of an array."""
    return 1 if x.sharding is None else int(x.shape[axis] // x.sharding.shard_shape(x.shape)[axis])
