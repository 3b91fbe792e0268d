"""Runs a step repeatedly like a training loop, with batches, carried state and donated buffers; counts compilations."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import os
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpjax.inspection.profiling.kernels import DISPATCH, INPUT, WAIT, mark
from mpjax.inspection.reports import array_text
from mpjax.inspection.trials import argument_name
from mpjax.program.source import is_library, reason, traceback_line

_EVENTS = "/jax/core/compile/"  # Tracing, lowering and XLA's compilation, as `jax.monitoring` reports them.
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Recompilation:
    """Recompilation of a step during its measurement.

    Args:
        steps: Number of measured steps that were recompiled.
        measured: Number of measured steps.
        seconds: Mean time of tracing and compiling in a recompiled step.
        changed: For each argument that changed, by tree path, its successive types, as `float32[8,64]`. If it is empty,
            a static argument or the function itself is a new object at each call.
    """

    steps: int
    measured: int
    seconds: float
    changed: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return differences(self.changed) or (
            "no shape, dtype or structure changed: a static argument, or a function created at each call "
            "(a lambda, functools.partial)"
        )


class Compilations:
    """A context manager that counts compilations.

    Attributes:
        seconds: Total time of tracing and compiling.
        count: Number of compiled programs.
    """

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(_EVENTS):
            self.seconds += duration_secs
            self.count += event.endswith("backend_compile_duration")


def described(args: Sequence[Any]) -> dict[str, str]:
    """The types of the arguments by tree path, as in the compilation cache: `args[1]['x']` is `float32[8,64]`.

    Example:
        >>> import jax.numpy as jnp
        >>> described((jnp.ones((2, 3)), {"n": 1}))
        {'args[0]': 'float32[2,3]', "args[1]['n']": 'int32[] (weakly typed)'}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(([*args],))
    return {argument_name(jax.tree_util.keystr(path)): _kind(leaf) for path, leaf in leaves}


def changes(calls: Sequence[dict[str, str]]) -> dict[str, tuple[str, ...]]:
    """The arguments whose types differ between calls.

    Example:
        >>> changes([{"args[0]": "float32[2]", "args[1]": "int"}, {"args[0]": "float32[3]", "args[1]": "int"}])
        {'args[0]': ('float32[2]', 'float32[3]')}
    """
    names = dict.fromkeys(name for call in calls for name in call)
    found = {name: tuple(dict.fromkeys(call.get(name, "absent") for call in calls)) for name in names}
    return {name: kinds for name, kinds in found.items() if len(kinds) > 1}


def differences(changed: Mapping[str, Sequence[str]]) -> str:
    """The first results of `changes`, as text."""
    rows = [f"{name}: {', '.join(_first(kinds))}" for name, kinds in changed.items()]
    return "; ".join(_first(rows))


def _kind(leaf: Any) -> str:
    leaf = jax.typeof(leaf) if isinstance(leaf, int | float | complex) else leaf
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    weak = " (weakly typed)" if getattr(leaf, "weak_type", False) else ""
    return array_text(leaf) + weak


def _first(texts: Sequence[str]) -> list[str]:
    more = [f"{len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return [*texts[:_SHOWN], *more]


_MANY_SHAPES = 5  # After this many recompiled steps in a row, every step is assumed to recompile.


class Stepper:
    """A step with its arguments, ready to run as it is given, and its program compiled as a whole.

    Args:
        step: The step; it need not be jitted.
        args: Its initial arguments.
        batches: An iterable of the last argument of each call; None if there is no such argument.
        carry: Number of leading outputs that replace the leading arguments; None for those that replace donated ones.
        kwargs: Its keyword arguments.

    Attributes:
        compile_seconds: Time of tracing and compiling the whole step; 0 if that failed.
        text: The optimized HLO; empty if it is not available.
        carry: As given or inferred.
        jitted: Whether the step is a jitted function as it is given.
        compiled: For each step of the last `run`, whether something was compiled.
        out: The last outputs.
        last_batch: A tuple of the last batch; empty without batches.
        why_not: Why the step can't be compiled as a whole; empty if it can.
        reads_at: The lines of a step without jit that wait for the value of an array.
    """

    def __init__(
        self,
        step: Any,
        args: tuple[Any, ...],
        batches: Iterable[Any] | None,
        carry: int | None,
        kwargs: Mapping[str, Any] | None = None,
    ):
        _check_arrays(args)
        if carry is not None and not 0 <= carry <= len(args):
            raise ValueError(f"carry={carry}: must be from 0 to the number of arguments, {len(args)}")
        self.step, self.jitted, self._kwargs = step, hasattr(step, "lower"), dict(kwargs or {})
        self._batches = None if batches is None else _endless(batches)
        self.last_batch = self._next()
        _check_call(step, (*args, *self.last_batch), self._kwargs)
        self.text, self.compile_seconds, self.why_not, self.reads_at = "", 0.0, "", list[str]()
        given = (*args, *self.last_batch)
        donates = self._compile(step if self.jitted else jax.jit(step), given)
        self.compiled: list[bool] = []
        self._seconds_again = 0.0
        self._calls = [described(given)]
        self._args = args if self.jitted and not donates else _copied(args)
        before = self._args
        self.out = self.step(*self._args, *self.last_batch, **self._kwargs)
        donates |= any(x.is_deleted() for x in jax.tree.leaves(before) if isinstance(x, jax.Array))
        # The output is a single carried value, not a tuple of results.
        self._is_whole = not isinstance(self.out, (tuple, list)) or (
            bool(args) and _signature(self.out) == _signature(args[0])
        )
        self.carry = carry if carry is not None else _alike(given, self._outs) if donates else 0
        if len(self._outs) < self.carry:
            raise ValueError(f"carry={self.carry} is more than the step's outputs, {len(self._outs)}")
        self._carry_on()
        self._check_alive()

    def _compile(self, whole: Any, args: tuple[Any, ...]) -> bool:
        """Compiles the whole step, and returns whether it donates arguments."""
        start = time.perf_counter()
        try:
            self._lowered = whole.lower(*args, **self._kwargs)
            executable = self._lowered.compile()
        except Exception as error:
            if self.jitted:
                raise
            self.why_not = reason(error)  # It needs values, or calls libraries other than JAX.
            if isinstance(error, _NO_VALUE) or (isinstance(error, AttributeError) and error.name == _READY):
                line = traceback_line(error)
                self.reads_at += [line] if line else []
                self.why_not = f"{line or 'a line of it'} needs the value of an array"
            return False
        self.compile_seconds = time.perf_counter() - start
        self.text = _hlo(executable)
        infos = jax.tree.leaves(getattr(self._lowered, "args_info", ()), is_leaf=lambda x: hasattr(x, "donated"))
        return any(getattr(info, "donated", False) for info in infos)

    def under_jit(self) -> Stepper:
        """The same step, compiled as a whole."""
        stepper = copy.copy(self)
        stepper.step, stepper.jitted = jax.jit(self.step), True
        return stepper

    def run(self, steps: int) -> None:
        """Enqueues steps without waiting between them, and waits for the last one."""
        self.compiled, self._seconds_again = [], 0.0
        with Compilations() as compilations:
            for _ in range(steps):
                self.last_batch = self._next()
                args, before, count = self._args, compilations.seconds, compilations.count
                with mark(DISPATCH):
                    self.out = self.step(*args, *self.last_batch, **self._kwargs)
                    self._carry_on()
                self.compiled.append(compilations.count > count)
                if self.compiled[-1]:
                    self._seconds_again += compilations.seconds - before
                    self._calls.append(described((*args, *self.last_batch)))
            with mark(WAIT):
                jax.block_until_ready((self.out, self._args))

    def warm_up(self) -> bool:
        """Runs steps until one is not recompiled, up to a limit. Returns whether there was one."""
        for _ in range(_MANY_SHAPES):
            with contextlib.nullcontext() if self.jitted else _noting_waits(self.reads_at):
                self.run(1)
            if not self.compiled[0]:
                return True
        return False

    def timed(self, steps: int) -> float:
        """The wall time of a step in a running loop; see `seconds_per_step`."""
        programs = len(self._calls)
        times = seconds_per_step(self.run, steps, alike=not self.changed)
        if len(self._calls) > programs and not all(self.compiled):
            times = seconds_per_step(self.run, steps, alike=not self.changed)
        return times

    @property
    def copied(self) -> int:
        """The bytes of NumPy arrays among the arguments, which each call copies to the device."""
        leaves = jax.tree.leaves((self._args, self.last_batch, self._kwargs))
        return sum(x.nbytes for x in leaves if isinstance(x, np.ndarray))

    @property
    def changed(self) -> dict[str, tuple[str, ...]]:
        """The arguments whose shapes or dtypes differ between compilations."""
        return changes(self._calls)

    @property
    def recompilation(self) -> Recompilation | None:
        """The compilations in the last `run`, except in its first step; None if there were none."""
        times, measured = sum(self.compiled[1:]), len(self.compiled) - 1
        if not times:
            return None
        before, again = self._calls[:-times], self._calls[-times:]
        causes = changes([before[-1], *(call for call in again if call not in before)])
        changed = {name: kinds for name, kinds in self.changed.items() if name in causes}
        return Recompilation(times, measured, self._seconds_again / sum(self.compiled), changed)

    def leave_cuda_graphs(self) -> None:
        """Recompiles the step without CUDA graphs and uses that from now on: each kernel is launched separately."""
        # JAX uses the same option for its profile-guided compilation (AutoPGLE).
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
        """Notes on how the step was run that the user may not expect."""
        if self.why_not:
            yield f"the step can't be compiled as a whole ({self.why_not}): its FLOPs and modules are not known"
        if self.changed and not any(self.compiled):
            yield (
                f"compiled for several shapes ({differences(self.changed)}): times are means over them, and kernels "
                "are named by the program of the first"
            )
        if self.carry:
            yield f"carry={self.carry}: the number of leading outputs that replace the next step's leading arguments"

    def _next(self) -> tuple[Any, ...]:
        if self._batches is None:
            return ()
        with mark(INPUT):
            return (next(self._batches),)

    def _carry_on(self) -> None:
        if self.carry:
            self._args = (*self._outs[: self.carry], *self._args[self.carry :])

    @property
    def _outs(self) -> tuple[Any, ...]:
        return (self.out,) if self._is_whole else tuple(self.out)


_READY = "block_until_ready"
_NO_VALUE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


@contextlib.contextmanager
def _noting_waits(lines: list[str]) -> Iterator[None]:
    """Adds the lines of the caller's code that wait for an array, as far as Python code of JAX does it for them."""

    def note(frame: types.FrameType, event: str, _: Any) -> None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if event == "call" and name in ("_value", _READY) and module.startswith("jax."):
            line = _caller_in_step(frame)
            lines.extend([line] if line and line not in lines else [])

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def _caller_in_step(frame: types.FrameType | None) -> str:
    """The nearest line outside of libraries, as `train.py:12`; empty if this module is nearer."""
    while frame is not None and frame.f_code.co_filename != __file__:
        if not is_library(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _check_call(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises a TypeError if the step does not take the arguments and a batch."""
    try:
        signature_of = inspect.signature(step)
    except (TypeError, ValueError):  # A library's own type.
        return
    try:
        signature_of.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"profile calls the step with {len(args)} arguments (the last one is a batch if there are batches), and it "
            f"takes {signature_of}: {error}. If a batch is a tuple of several arguments: "
            "profile(lambda state, batch: step(state, *batch), ...)"
        ) from None


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, again from the start when a collection ends."""
    given, before = 0, -1
    while given > before:
        before = given
        for batch in batches:
            given += 1
            yield batch
    raise ValueError(
        f"batches ended after {given}: a profile reads 2 * steps + 7, on a GPU up to steps + 2 more, "
        "and where their shapes change up to steps + 8 more. "
        "Pass a list or a data set that can be read again, itertools.cycle(...), or fewer steps"
    )


def seconds_per_step(
    run: Callable[[int], None], steps: int, clock: Callable[[], float] = time.perf_counter, alike: bool = True
) -> float:
    """The wall time of a step in a running loop: that of n + 1 steps minus that of a single step, over n.

    Both include filling the pipeline and waiting for the last step, so the difference cancels them.

    Args:
        run: Runs the given number of steps and waits for them.
        steps: Number of steps to time.
        clock: Returns the time in seconds.
        alike: Whether all steps run the same program. Otherwise the time to fill the pipeline can't be separated.
    """
    times = [clock()]
    for n in (1, steps + 1):
        run(n)
        times.append(clock())
    alone, whole = times[1] - times[0], times[2] - times[1]
    if not alike:
        return whole / (steps + 1)
    # With noise, a short loop may seem shorter than a single step. The second term of `max` is then the lower limit.
    return max(whole - alone, whole * steps / (steps + 1) ** 2) / steps


def _signature(tree: Any) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


def _alike(args: Sequence[Any], outs: Sequence[Any]) -> int:
    """The number of leading outputs with the structure, shapes and dtypes of the arguments."""
    alike = [_signature(x) == _signature(arg) for x, arg in zip(outs, args, strict=False)]
    return (*alike, False).index(False)


def _check_arrays(args: tuple[Any, ...]) -> None:
    for i, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise TypeError(f"argument {i} has {leaf}: profile runs the step, so it needs arrays")


def _hlo(compiled: Any) -> str:
    inner = getattr(compiled, "compiled", compiled)  # Equinox wraps JAX's object.
    return (inner.as_text() or "") if hasattr(inner, "as_text") else ""


def _copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the arguments, so that the caller's arrays survive a step that donates them."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args)
