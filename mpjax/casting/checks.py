"""Autocast's warnings: programs, inputs and devices for which it is of little use, and what to do about them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.casting.attention.kernel import ATTENTION
from mpjax.casting.classify import BY_PRECISION, EXACT, OPAQUE
from mpjax.casting.cross_entropy.find import DIFFERENTIATED, RETURNED
from mpjax.casting.cross_entropy.head import CROSS_ENTROPY
from mpjax.casting.plan import Plan
from mpjax.casting.policies import origin_of, scaled_origin_of
from mpjax.casting.rows import Row, rows_of
from mpjax.casting.rules import Rules, UnusedRuleWarning
from mpjax.casting.setting import Setting
from mpjax.kernels.packed import PACKINGS
from mpjax.policy import HALF_DTYPES, Policy
from mpjax.program import compat
from mpjax.program.dataflow import dataflow
from mpjax.program.formats import format_of
from mpjax.program.linearity import passes_of
from mpjax.program.source import BACKWARD, user_stacklevel
from mpjax.program.tracing import TracedCall


class AutocastWarning(UserWarning):
    """Autocast ran, but the program, its inputs or the device keep it from being useful.

    Example:
        >>> import warnings, jax.numpy as jnp, mpjax
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = mpjax.autocast(jnp.exp)(jnp.ones(3))
        >>> str(caught[0].message)
        'autocast found no matmul or convolution of float32 arrays to run in float16. See mpjax.explain...'
    """


def _warn(message: str, category: type[Warning] = AutocastWarning) -> None:
    warnings.warn(message, category, stacklevel=user_stacklevel())


def check_inputs(program: Any, policy: Policy) -> None:
    """Warns about half and float64 inputs."""
    halves, doubles = [], []
    for name, x in zip(program.names, program.arrays, strict=True):
        if x.dtype in HALF_DTYPES:
            halves.append((name, x))
        elif jax.typeof(x).dtype == np.float64:  # Without jax_enable_x64, JAX reads a float64 of NumPy as float32.
            doubles.append((name, x))
    halves = [(name, x) for name, x in halves if compat.is_differentiated(x)]  # frozen parameters need no masters
    floats = [x for x in program.arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    # A half batch with float32 parameters is legitimate, and so are half parameters where nothing is trained.
    of_params = [pair for pair in halves if pair[0].startswith("[0][0]")]
    if halves and (of_params or len(halves) == len(floats)) and policy.param_dtype not in HALF_DTYPES:
        half = policy.compute_dtype
        _warn(
            f"autocast: {_shown(of_params or halves)} of the inputs are half already. If they are parameters, their "
            "float32 master weights are missing, and updates smaller than a rounding step are lost: keep parameters in "
            "float32 (autocast casts them where it pays), or give the optimizer mpjax.master_weights, mpjax.kahan or "
            f"mpjax.stochastic_rounding, and autocast a policy of half params: 'params={half},compute={half},"
            f"output={policy.output_dtype}'."
        )
    if doubles:
        _warn(
            f"autocast: {_shown(doubles)} of the inputs are float64. Autocast leaves them, and all values "
            "computed from them, in float64. Cast them to float32, or unset jax_enable_x64."
        )


def _shown(pairs: list[tuple[str, Any]]) -> str:
    names = ", ".join(f"{_argument(name)} ({x.dtype})" for name, x in pairs[:3])
    return names + (f" and {len(pairs) - 3} more" if len(pairs) > 3 else "")


def _argument(name: str) -> str:
    """`[0][1]['w']` as `args[1]['w']`."""
    return ("args" + name[3:]) if name.startswith("[0]") else ("kwargs" + name[3:])


def check_device(setting: Setting) -> None:
    """Warns if the device has no fast units for the formats of a plan."""
    formats = [format_of(setting.half)]
    if setting.scaled is not None:
        formats += [setting.scaled.format, *(format for _, format in setting.scaled.entries)]
    for format in dict.fromkeys(formats):
        if format is not None and (why := format.slow_on(compat.device())):
            _warn(f"autocast: {why}")


def check_options(program: TracedCall, plan: Plan, rules: Rules | None) -> None:
    """Warns about options of the caller's `Rules` that change nothing in a program."""
    rules, counts = rules or Rules(), plan.counts
    if rules.residuals in PACKINGS and _takes_gradient(program):
        _warn(
            f"autocast: Rules(residuals={rules.residuals!r}) is for what derivatives of this function keep, but it "
            "takes its gradient itself, and what that keeps stays in half. Differentiate what autocast returns: "
            "jax.grad(mpjax.autocast(loss_fn, policy, rules=rules)).",
            UnusedRuleWarning,
        )
    elif rules.residuals in PACKINGS and not counts.packed:
        _warn(
            f"autocast: Rules(residuals={rules.residuals!r}) keeps nothing of this program in eight bits. Rows of "
            "fewer than 16 elements stay in half, and so does what a jax.checkpoint with a policy or a jax.custom_vjp "
            "saves, and what a derivative would amplify the rounding of. See mpjax.audit(fun, *args).",
            UnusedRuleWarning,
        )
    for option, primitive in (("attention", ATTENTION), ("cross_entropy", CROSS_ENTROPY)):
        choice = getattr(rules, option)
        if choice not in ("auto", "unfused") and primitive.name not in counts.primitives:
            reasons = sorted(why for kind, why in counts.unfused if kind == option) or ["none was found"]
            if RETURNED in reasons and _takes_gradient(program):  # by a loop, for its derivative
                reasons = sorted({*reasons, DIFFERENTIATED} - {RETURNED})
            _warn(
                f"autocast: Rules({option}={choice!r}) fuses nothing of this program: {'; '.join(reasons)}. "
                "See mpjax.explain(fun, *args).",
                UnusedRuleWarning,
            )


def _takes_gradient(program: TracedCall) -> bool:
    """Whether an array that a program returns follows from a backward pass in it."""
    flow = dataflow(program.jaxpr)
    arrays = [v for v in flow.returned if getattr(v.aval, "shape", ())]
    return BACKWARD in passes_of(flow.before(arrays))


def check_plan(plan: Plan, policy: Policy, rules: Rules | None) -> None:
    """Warns about a program with little to cast, matmuls that are half already, and rules that match nothing."""
    counts, setting = plan.counts, plan.setting
    hidden = _hidden(counts.hidden)
    in_float32 = _InFloat32.of(rows_of(plan)) if counts.left else _InFloat32()
    if not counts.cast and counts.written:
        _warn(
            f"autocast: all {counts.written} matmuls and convolutions that it may cast are in half already (the model "
            "sets a dtype or a policy itself, for example by mpjax.with_policy). Nothing is cast twice, but autocast "
            "adds nothing: use only one of the two."
        )
    elif not counts.cast and not counts.loops:
        left = f" Left in float32: {in_float32}." if in_float32.causes else ""
        _warn(
            f"autocast found no matmul or convolution of float32 arrays to run in {setting.half}.{left}{hidden} "
            "See mpjax.explain(fun, *args)."
        )
    elif in_float32.share > _MUCH and not counts.loops:
        _warn(
            f"autocast: {in_float32.share:.0%} of the FLOPs of matmuls and convolutions stay in float32. "
            f"{in_float32}.{hidden} See mpjax.explain(fun, *args)."
        )
    elif hidden:
        _warn(f"autocast:{hidden}")
    if in_float32.exact > _MUCH_EXACT:
        _warn(
            f"autocast: {in_float32.exact:.0%} of the FLOPs of matmuls and convolutions stay in float32, because "
            f"indices, counts or a decomposition depend on all of their bits. {in_float32}. Where half is accurate "
            "enough, mpjax.half_function around them chooses it. See mpjax.explain(fun, *args)."
        )
    if counts.loops:
        _warn(
            f"autocast keeps the loop at {' and at '.join(sorted(counts.loops))} in float32: values that its matmuls "
            f"compute decide when it ends, and rounded to {setting.half} they may never meet its tolerance. "
            "mpjax.float_function around the loop says that this is intended; Rules(infer=['while']) casts it like the "
            "rest of the program."
        )
    if setting.scaled is not None and counts.why_not_scaled and not counts.scaled:
        formats = (setting.scaled.format, *(format for _, format in setting.scaled.entries))
        name = next(format.name for format in formats if format is not None)
        _warn(
            f"the policy's {name} matmuls: no matmul of this program is eligible, so it runs in {setting.half} alone "
            f"({'; '.join(sorted(counts.why_not_scaled))}). Rules(float8=mpjax.Float8(...)) takes smaller ones "
            "(min_size) or chosen modules (allow). See mpjax.explain(fun, *args).",
            UnusedRuleWarning,
        )
    patterns: list[tuple[Any, str]] = []
    if setting.scaled is not None:
        patterns = [(entry, scaled_origin_of(entry, setting.scaled, policy)) for entry, _ in setting.scaled.entries]
    patterns += [(entry, origin_of(entry, op, policy, rules)) for entry, op in setting.rules.entries]
    for entry, shown in patterns:
        if entry not in counts.entries:
            _warn(
                f"{shown} matched no operation of this program; fix or remove it. "
                "mpjax.explain(fun, *args) lists primitives and module paths.",
                UnusedRuleWarning,
            )


def _hidden(places: Iterable[str]) -> str:
    """The sentences about primitives that are not entered and may hold matmuls, after a space."""
    if not places:
        return ""
    return (
        f" Not entered: {', '.join(sorted(places))}; matmuls inside run with the dtypes that they were traced with. "
        "mpjax.half_function around the call casts its arguments; mpjax.float_function says that this is intended."
    )


_MUCH = 0.2  # of the FLOPs of a program's matmuls
_MUCH_EXACT = 0.05


@dataclasses.dataclass
class _InFloat32:
    """The matmuls and convolutions that stay in float32: their number by primitive and reason.

    Args:
        causes: For each primitive and reason, the number of runs.
        share: The share of all FLOPs that neither the user's rules and regions nor their size explain.
        exact: The share of all FLOPs of those whose result must be exact.
    """

    causes: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    share: float = 0.0
    exact: float = 0.0

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _InFloat32:
        causes: dict[tuple[str, str], int] = {}
        unasked = exact = total = 0
        for row in rows:
            if row.rule or not row.flops:
                continue
            total += row.flops
            if "float32" in row.dtypes_in:
                causes[row.op, row.why] = causes.get((row.op, row.why), 0) + row.count
                unasked += row.flops * row.why.startswith((OPAQUE, BY_PRECISION))
                exact += row.flops * row.why.startswith(EXACT)
        return cls(causes, unasked / max(total, 1), exact / max(total, 1))

    def __str__(self) -> str:
        return "; ".join(f"{count} {op} ({_reason(op, why)})" for (op, why), count in self.causes.items())


def _reason(op: str, why: str) -> str:
    way_out = f", which Rules(allow=[{op!r}]) overrides" if why.startswith(BY_PRECISION) else ""
    return why.removeprefix(f"{OPAQUE} ").removeprefix(f"{EXACT} ") + way_out
