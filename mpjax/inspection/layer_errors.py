"""`layerwise_error`: the modules where a half program deviates from the same program in float32."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpjax.casting.classify import default_listing
from mpjax.inspection.lockstep import UNKNOWN, Group, Grouped, error_note
from mpjax.inspection.ranges.range_statistics import equations_of_gradients
from mpjax.inspection.reports import Report, Section, by_key, folded_rows, merged, percent, short_dtypes
from mpjax.inspection.trials import Loss, laid_out, scale_state, trace_to_run
from mpjax.program import compat
from mpjax.program.dataflow import dataflow
from mpjax.program.dtypes import is_half, is_low
from mpjax.program.formats import SCALED
from mpjax.program.graph import Site
from mpjax.program.primitives import Op, drops_axes, primitive
from mpjax.program.source import BACKWARD, FORWARD


@dataclasses.dataclass(frozen=True)
class LayerError:
    """The relative errors of one module: ‖half − float32‖ / ‖float32‖ of the arrays that it passes on.

    Args:
        name: The module path; where no module has a name, the user's function.
        path: The module path; empty for a function.
        dtypes: The dtypes of at most 16 bits in it.
        forward, backward: Its own error in each pass: its operands are exact, and only this module is in half. inf if
            it has an inf or NaN where float32 has none, or a NaN where float32 has one too.
        total_forward, total_backward: The program's error at this module, including that of all modules before it.
        op, source: The operation whose result has the largest own error, and its source line.
        denied: Its operations in half that need float32: those on autocast's deny list.
    """

    name: str
    path: str
    dtypes: tuple[str, ...]
    forward: float
    backward: float
    total_forward: float
    total_backward: float
    op: str
    source: str
    denied: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """The larger of its own errors in the two passes."""
        return max(self.forward, self.backward)


@dataclasses.dataclass(frozen=True)
class ParameterError:
    """The error of the gradient of one parameter.

    Args:
        name: Its tree path.
        error: ‖half − float32‖ / ‖float32‖.
        share: Its share of the squared error of all gradients.
    """

    name: str
    error: float
    share: float


@dataclasses.dataclass(frozen=True)
class Jump:
    """The first line of the forward pass where the program's error grows by a large factor.

    Args:
        module, source, op: The module path, the line and the primitive.
        before, after: The largest relative error of its operands, and that of its result.
    """

    module: str
    source: str
    op: str
    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class LayerwiseReport(Report):
    """The errors of a program in half, by module. Print it to read the report.

    Args:
        function: The function's name.
        loss_error: The relative error of the loss.
        gradient_error: ‖half − float32‖ / ‖float32‖ of the gradients of all parameters together.
        modules: The errors by module: those with half operations that need float32 first, then by own error.
        parameters: The errors of the parameters' gradients, the largest share first.
        unseen: Operations whose internals are not visible (Pallas kernels, callbacks).
        reference_is_finite: Whether loss and gradients are finite in float32.
        jump: Where the total error jumps; None if it stays that of rounding, or grows little by little.
    """

    function: str
    loss_error: float
    gradient_error: float
    modules: tuple[LayerError, ...]
    parameters: tuple[ParameterError, ...]
    unseen: tuple[str, ...] = ()
    reference_is_finite: bool = True
    jump: Jump | None = None

    heading = "Layerwise error of {0.function}"
    main = "modules"

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        parameters = [(row.name, percent(row.error), percent(row.share)) for row in self.parameters]
        return [
            Section("", "\n".join(self._finding())),
            self.by_module(),
            Section("Gradients of parameters", "", "parameter|%error|%of the whole", parameters, shown=10),
        ]

    def by_module(self) -> Section:
        """The section of `modules`."""
        rows = [
            (
                row.name or "-",
                short_dtypes(row.dtypes) or "f32",
                *map(percent, (row.forward, row.backward, row.total_forward, row.total_backward)),
                f"{row.op} {row.source}".strip(),
            )
            for row in folded_rows(self.modules, _together)
        ]
        text = (
            f"own: the error with exact operands, only this module in {self._precision}\n"
            "total: the error that the program has there; ← is the backward pass"
        )
        return Section("By module", text, "module|in|%own|%own ←|%total|%total ←|largest at", rows)

    @property
    def _precision(self) -> str:
        """The precisions below float32 in the program, in words."""
        dtypes = {dtype for row in self.modules for dtype in row.dtypes}
        scaled = [name for name in SCALED if any(dtype.startswith(name) for dtype in dtypes)]
        return " and ".join(("half", *scaled))

    def _finding(self) -> list[str]:
        lines = [
            f"{self.function} in {self._precision}: relative error of the gradients {percent(self.gradient_error)}, "
            f"of the loss {percent(self.loss_error)}"
        ]
        if not self.reference_is_finite:
            return [*lines, "loss or gradients are not finite in float32 either: mpjax.find_nonfinite shows where"]
        if self.jump is not None:
            where = f" ({self.jump.module})" if self.jump.module else ""
            lines.append(
                f"the total error jumps at {self.jump.source or 'an unknown line'}{where}: from "
                f"{percent(self.jump.before)} to {percent(self.jump.after)} by {self.jump.op}"
            )
        worst = [row for row in self.modules if row.error > 0][:1]
        for row in worst:
            where = f" ({row.op} at {row.source})" if row.source else ""
            found = f"runs in half, but needs float32 ({', '.join(row.denied)})" if row.denied else "largest own error"
            lines.append(
                f"{found}: {row.name or 'outside of modules'}, in {'/'.join(row.dtypes) or 'float32'}, own error "
                f"{percent(row.error)}{where}"
            )
        if not worst:
            lines.append("no module has an own error")
        lines += [f"not inspected: {place}" for place in self.unseen]
        return lines


_together = functools.partial(merged, largest="forward backward total_forward total_backward")


def layerwise_error(
    fun: Callable[..., Any],
    *args: Any,
    loss_scale: Any = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> LayerwiseReport:
    """Measures the relative errors of a loss function in half against float32, by module, forward and gradient.

    Evaluates the gradient's program three times in lockstep on the same batch, with each operation as written:

        exact    with float32 in place of half
        half     unchanged
        fresh    unchanged, each module on exact operands
        total = ‖half − exact‖ / ‖exact‖,    own = ‖fresh − exact‖ / ‖exact‖

    Each array that a module passes on has these errors. A module's row shows the largest in each pass; the gradients of
    its parameters count as one array. In a loop, a module starts from exact operands at each iteration. The report
    exposes a norm or a loss in bfloat16 even when all ranges are harmless: modules with an operation of autocast's deny
    list in half come first, then the others by their own error.

    Args:
        fun: A loss function that computes in half: under `autocast`, with a `with_policy` model, or by hand. It may
            use any library.
        args: Its arguments: arrays and trees of arrays.
        loss_scale: The scale in use: a number, a `LossScaleState` or an optimizer state that holds one; None for 1.
        argnums: Which arguments are differentiated, as in `jax.grad`.
        has_aux: Whether `fun` returns `(loss, aux)`.
        kwargs: Keyword arguments of `fun`.

    Returns:
        A `LayerwiseReport`. Print it, or read its `modules`.

    Raises:
        ValueError: Nothing in the program is half.
        TypeError: An argument is a shape without values, which the program can't run on.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     with jax.named_scope("dense"):
        ...         y = x @ w
        ...     with jax.named_scope("norm"):
        ...         y = y.astype(jnp.bfloat16)
        ...         y = y - y.mean(-1, keepdims=True)
        ...     return jnp.mean(y.astype(jnp.float32) ** 2)
        >>> w, x = jax.random.normal(jax.random.key(0), (2, 8, 8))
        >>> report = mpjax.layerwise_error(mpjax.autocast(loss, "mixed_float16"), w, x)
        >>> [row.name for row in report.modules][0], 0.001 < report.gradient_error < 0.02
        ('norm', True)

    Source: the per-layer comparison of accuracy debuggers, such as TensorRT's Polygraphy and PyTorch's numeric suite.
    """
    state, names = None if loss_scale is None else scale_state(loss_scale), list[str]()
    gradient = Loss(fun, argnums, has_aux, kwargs).gradient(state, names)
    program = trace_to_run("layerwise_error", gradient, args, {})
    found = Grouped(laid_out(program))
    if not any(is_half(v) for place in found.places.values() for v in (*place.invars, *place.outvars)):
        raise ValueError(
            "layerwise_error: nothing in this program is half, so it has no error to show. Give it under "
            "mpjax.autocast(fun, 'mixed_float16') (--policy mixed_float16 on the command line), or a model with a "
            "policy."
        )
    outs, notes = found.evaluated(program.arrays, found.passed_on)
    notes = jax.device_get(notes)
    *grads, loss = (jax.device_get(error_note(*out)) for out in outs[: len(names) + 1])
    squares = [float(size) ** 2 * sums.astype(float) for size, sums, _ in grads]
    whole = sum(float(each[1]) for each in squares)
    parameters = [
        ParameterError(name, _error([note], 1), float(each[1]) / whole if whole else 0.0)
        for name, note, each in zip(names, grads, squares, strict=True)
    ]
    loss_error, gradient_error = _error([loss], 1), _error(grads, 1)
    return LayerwiseReport(
        function=getattr(fun, "__name__", type(fun).__name__),
        loss_error=loss_error,
        gradient_error=gradient_error,
        jump=_jump(found, program.arrays, max(loss_error, gradient_error)),
        modules=tuple(_modules(found, notes, len(names))),
        parameters=tuple(sorted(parameters, key=lambda row: -row.share)),
        unseen=found.block.not_entered(),
        reference_is_finite=all(np.isfinite(np.asarray(out.exact)).all() for out in outs[: len(names) + 1]),
    )


def _passes_on(eqn: Any) -> bool:
    row = primitive(eqn.primitive.name)
    return row.moves or row.scales or row.op is Op.CONVERT or drops_axes(eqn)


def _modules(found: Grouped, notes: Mapping[Any, Any], parameters: int) -> list[LayerError]:
    """The rows: modules with half operations that need float32 first, then by their own error.

    Args:
        found: The program.
        notes: The errors of the results that its groups pass on.
        parameters: The number of gradients, which are the program's first results.
    """
    of_parameters = equations_of_gradients(found.block, parameters)
    groups, places = found.groups, found.places
    # The sum that is the gradient of a half bias is rounded once, as the gradient of a half weight is.
    graph = dataflow(found.block.jaxpr)
    of_biases = {id(graph.maker(graph.source(v, _passes_on))) for v in found.block.jaxpr.outvars[:parameters]}
    by_group = by_key((groups[number], place) for number, place in places.items())

    def is_denied(place: Site) -> bool:
        # The precision of a scaled matmul's backward pass says how it accumulates.
        is_scaled = any(is_low(v) and not is_half(v) for v in place.invars)
        is_sum_of_bias = id(place.eqn) in of_biases or drops_axes(place.eqn)
        if is_scaled or is_sum_of_bias or not any(map(is_low, place.outvars)):
            return False
        return default_listing(place.eqn).op is Op.DENY

    # A module's arrays, by pass. The gradients of its parameters count as one array, because a single gradient may be
    # pure rounding error: that of a bias before a normalisation is zero in exact arithmetic.
    arrays: dict[tuple[Group, bool], dict[Any, list[Any]]] = {}
    for (_, number, i), note in notes.items():
        backward = places[number].phase == BACKWARD
        together = "parameters" if backward and number in of_parameters else (number, i)
        arrays.setdefault((groups[number], backward), {}).setdefault(together, []).append((number, note))
    rows = []
    for group in dict.fromkeys(group for group, _ in arrays):
        passed_on = [arrays.get((group, backward), {}).values() for backward in (False, True)]
        own, total = ([_largest(each, which) for each in passed_on] for which in (2, 1))
        site, errors = places[max(own, key=_first)[1]], (own[0][0], own[1][0], total[0][0], total[1][0])
        dtypes = dict.fromkeys(v.aval.dtype.name for p in by_group[group] for v in p.outvars if is_low(v))
        denied = dict.fromkeys(place.name for place in by_group[group] if is_denied(place))
        where = site.name, site.source, tuple(denied)
        rows.append(LayerError(group.name, group.path, tuple(dtypes), *errors, *where))
    return sorted(
        rows, key=lambda row: (not (row.denied and row.error), -row.error, -row.total_forward - row.total_backward)
    )


# A program whose error is within this many times the rounding of its dtype has no jump. A line that multiplies its
# operands' error by the second number, and reaches a quarter of the program's error, is one.
_ROUNDINGS, _FACTOR, _SHARE = 16, 8, 0.25


def _jump(found: Grouped, arrays: Sequence[Any], error: float) -> Jump | None:
    """The first jump of the total error. Evaluates the program again, and measures each result of the forward pass."""
    lows = [v.aval.dtype for place in found.places.values() for v in place.outvars if is_half(v)]
    rounding = max((2.0 ** -(int(compat.finfo(dtype).nmant) + 1) for dtype in lows), default=math.inf)
    if not error > _ROUNDINGS * rounding:
        return None
    places = {n: place for n, place in found.places.items() if place.phase == FORWARD and not place.blocks}
    results = [(n, i) for n, place in places.items() for i in range(len(place.outvars))]
    notes = jax.device_get(found.evaluated(arrays, results)[1])
    errors = {(number, i): _error([note], 1) for (_, number, i), note in notes.items()}
    for number, place in places.items():
        reads = found.reads.get(number, (UNKNOWN,))  # none if it only moves
        if UNKNOWN in reads or any(found.places[n].phase == BACKWARD for n, _ in reads):
            continue  # It reads the state of a loop, whose error is that of all iterations, or unscales a gradient.
        before = max((errors.get(read, 0.0) for read in reads), default=0.0)
        after = max((errors.get((number, i), 0.0) for i in range(len(place.outvars))), default=0.0)
        if math.isfinite(before) and after >= max(_FACTOR * max(before, rounding), _SHARE * min(error, 1.0)):
            return Jump(place.path, place.source, place.name, before, after)
    return None


def _largest(arrays: Iterable[Sequence[tuple[int, Any]]], which: int) -> tuple[float, int]:
    """The largest error, and the equation that causes most of it."""

    def contribution(row: tuple[int, Any]) -> float:
        size, sums, bad = row[1]
        return math.inf if bad[which - 1] else float(size) ** 2 * float(sums[which])

    errors = [(_error([note for _, note in found], which), max(found, key=contribution)[0]) for found in arrays]
    return max(errors, default=(0.0, -1), key=_first)


def _first(row: tuple[float, int]) -> tuple[float, bool]:
    """An order in which the first equation of the largest error is the greatest; the number -1 is none."""
    return row[0], row[1] >= 0


def _error(notes: Iterable[Any], which: int) -> float:
    """The relative error of several arrays together: the program's if `which` is 1, the module's own if it is 2."""
    notes = list(notes)
    if any(bad[which - 1] for _, _, bad in notes):
        return math.inf
    unit = max((float(size) for size, _, _ in notes), default=0.0) or 1.0
    squares = [(float(size) / unit) ** 2 * sums.astype(float) for size, sums, _ in notes]
    exact, difference = (sum(float(each[i]) for each in squares) for i in (0, which))
    return math.sqrt(difference / exact) if exact else 0.0
