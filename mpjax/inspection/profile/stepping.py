"""Runs a step again and again as a training loop does: batches, state that is carried on, donated buffers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from mpjax.inspection.profile import profiler_trace
from mpjax.inspection.profile.carry import carried, signature
from mpjax.inspection.profile.compilations import Compilations, Recompilation, changes, described, differences

_MANY_SHAPES = 5  # Once so many steps in a row had a new shape, the next one has a new one too.
# A step alone is timed so often, or until so many seconds are over: what is long varies little.
_ALONE, _ENOUGH = 3, 1.0
INPUT, DISPATCH, WAIT = "input", "dispatch", "wait"  # Names of the host's time in traces.


class Stepper:
    """A step with its arguments, ready to be run any number of times.

    Args:
        step: a jitted function, or a plain one, which is then jitted.
        args: its first arguments.
        batches: gives the last argument of each call; None if there is none.
        carry: how many leading outputs replace the leading arguments; None to find it.

    Attributes:
        compile_seconds: what tracing and compiling took.
        text: the optimized HLO; empty where the step doesn't give it.
        carry: as given or found.
        step: the jitted step.
        compiled: for each step of the last `run`, whether it was compiled again.
        out: what it returned last.
        last_batch: what it was called with last, besides `args`; a tuple of one, or empty.
    """

    def __init__(self, step: Any, args: tuple[Any, ...], batches: Iterable[Any] | None, carry: int | None):
        _check_arrays(args)
        if carry is not None and not 0 <= carry <= len(args):
            raise ValueError(f"carry={carry}: must be from 0 to the number of arguments, {len(args)}")
        self._jitted = hasattr(step, "lower")
        self.step = step if self._jitted else jax.jit(step)
        self._batches = None if batches is None else _Batches(batches)
        self.last_batch = self._next()
        start = time.perf_counter()
        try:
            self._lowered = self.step.lower(*args, *self.last_batch)
            compiled = self._lowered.compile()
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            if not self._jitted:
                error.add_note(
                    "mpjax.profile jits a step that isn't: take out of it what needs values (float(loss), printing), "
                    "or pass the jitted function inside it"
                )
            raise
        self.compile_seconds = time.perf_counter() - start
        self.executable = compiled
        self.text: str = _hlo(compiled)
        self.compiled: list[bool] = []
        self._seconds_again = 0.0
        self._calls = [described((*args, *self.last_batch))]
        donates = _donates(self._lowered)
        self._args = _copied(args) if donates else args
        self.out = self.step(*self._args, *self.last_batch)
        self.carry = carried(step, (*args, *self.last_batch), self.out, donates) if carry is None else carry
        # One output that is all that is carried on, and not a tuple of results.
        self._is_whole = not isinstance(self.out, (tuple, list)) or (
            bool(args) and signature(self.out) == signature(args[0])
        )
        outputs = 1 if self._is_whole else len(self.out)
        if outputs < self.carry:
            raise ValueError(f"carry={self.carry} is more than the step's outputs, {outputs}")
        self._carry_on()
        self._check_alive()

    def run(self, steps: int) -> None:
        """Runs steps one after the other, without waiting in between, and waits for the last."""
        self.compiled, self._seconds_again = [], 0.0
        with Compilations() as compilations:
            for _ in range(steps):
                self.last_batch = self._next()
                args, before, count = self._args, compilations.seconds, compilations.count
                with profiler_trace.mark(DISPATCH):
                    self.out = self.step(*args, *self.last_batch)
                    self._carry_on()
                self.compiled.append(compilations.count > count)
                if self.compiled[-1]:
                    self._seconds_again += compilations.seconds - before
                    self._calls.append(described((*args, *self.last_batch)))
            with profiler_trace.mark(WAIT):
                jax.block_until_ready((self.out, self._args))

    def warm_up(self) -> bool:
        """Runs steps until one finds its program compiled, or many have not; whether one did."""
        for _ in range(_MANY_SHAPES):
            self.run(1)
            if not self.compiled[0]:
                return True
        return False

    def timed(self, steps: int) -> tuple[float, float]:
        """The wall time of a step in a running loop, and alone, as `seconds_per_step`."""
        programs = len(self._calls)
        times = seconds_per_step(self.run, steps, alike=not self.changed)
        if len(self._calls) > programs and not all(self.compiled):
            times = seconds_per_step(self.run, steps, alike=not self.changed)
        return times

    @property
    def changed(self) -> dict[str, tuple[str, ...]]:
        """The shapes and dtypes of arguments for which it was compiled, where they differ."""
        return changes(self._calls)

    @property
    def recompilation(self) -> Recompilation | None:
        """The compilations in all steps of the last `run` but its first, if there were any."""
        times, measured = sum(self.compiled[1:]), len(self.compiled) - 1
        return Recompilation(times, measured, self._seconds_again / sum(self.compiled), self.changed) if times else None

    def leave_cuda_graphs(self) -> None:
        """Compiles the step again so that each kernel is launched by itself, and runs that from now on."""
        # As JAX does it for the profiles that its own compilation is guided by (AutoPGLE).
        compiled = self._lowered.compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
        self.step, self.text = compiled, _hlo(compiled)
        self.run(1)

    def _check_alive(self) -> None:
        for i, arg in enumerate(self._args):
            if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(arg)):
                raise ValueError(
                    f"argument {i} of the step is donated, and no output takes its place: return the new value among "
                    f"the leading outputs (carry={self.carry} of them replace arguments now), or don't donate it"
                )

    def notes(self) -> Iterator[str]:
        """What was done to the step that its author may not expect."""
        if not self._jitted:
            yield "the step was not jitted: it was profiled under jax.jit"
        if self.changed and not any(self.compiled):
            yield (
                f"compiled for several shapes ({differences(self.changed)}): times are means over them, and kernels "
                "are named by the program of the first"
            )
        if self.carry:
            yield f"carried on from step to step: the first {self.carry} of the step's arguments"

    def _next(self) -> tuple[Any, ...]:
        if self._batches is None:
            return ()
        with profiler_trace.mark(INPUT):
            return (next(self._batches),)

    def _carry_on(self) -> None:
        if self.carry:
            outs = (self.out,) if self._is_whole else tuple(self.out)
            self._args = (*outs[: self.carry], *self._args[self.carry :])


class _Batches(Iterator[Any]):
    """An iterator over batches that starts a collection again when it has ended."""

    def __init__(self, batches: Iterable[Any]):
        self._source = batches
        self._iterator = iter(batches)
        self._given = 0

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._iterator is self._source or not self._given:
                raise ValueError(
                    f"batches ended after {self._given}: a profile reads 2 * steps + 7, on a GPU up to steps + 2 more, "
                    "and where their shapes change up to steps + 8 more. "
                    "Pass a list or a data set that can be read again, itertools.cycle(...), or fewer steps"
                ) from None
            self._iterator = iter(self._source)
            batch = next(self._iterator)
        self._given += 1
        return batch


def seconds_per_step(
    run: Callable[[int], None], steps: int, clock: Callable[[], float] = time.perf_counter, alike: bool = True
) -> tuple[float, float]:
    """The wall time of a step in a running loop, and of a step alone.

    A loop of n + 1 steps less one step alone: filling the pipeline and waiting for the last step are in both.

    Args:
        run: runs so many steps and waits for them.
        steps: how many to time.
        clock: gives the time in seconds.
        alike: whether all steps do the same; otherwise the pipeline's filling can't be told from a step.
    """

    def timed(n: int) -> float:
        start = clock()
        run(n)
        return clock() - start

    alones = [timed(1)]
    while len(alones) < _ALONE and sum(alones) < _ENOUGH:
        alones.append(timed(1))
    alone = statistics.median(alones)
    # Noise can make so short a loop look shorter than a step; what it took in whole bounds it from above.
    whole = timed(steps + 1)
    if not alike:
        return whole / (steps + 1), alone
    return max(whole - alone, whole * steps / (steps + 1) ** 2) / steps, alone


def _check_arrays(args: tuple[Any, ...]) -> None:
    for i, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(f"argument {i} has {leaf}: profile runs the step, so it needs arrays")


def _hlo(compiled: Any) -> str:
    inner = getattr(compiled, "compiled", compiled)  # Equinox wraps JAX's object.
    return (inner.as_text() or "") if hasattr(inner, "as_text") else ""


def _donates(lowered: Any) -> bool:
    infos = jax.tree.leaves(getattr(lowered, "args_info", ()), is_leaf=lambda x: hasattr(x, "donated"))
    return any(getattr(info, "donated", False) for info in infos)


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the arguments, so that the caller's own outlive a step that donates them."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args)
