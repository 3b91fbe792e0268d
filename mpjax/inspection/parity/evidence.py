"""Evidence on why a policy is worse: skipped steps, loss scale, lost gradients by module."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.inspection.layerwise.layerwise import LayerwiseReport, layerwise_error
from mpjax.inspection.numerics.numerics import NumericsReport, numerics
from mpjax.inspection.parity.statistics import parted_at
from mpjax.inspection.parity.training import Run, Training, make_training
from mpjax.inspection.reports import Section, added_up
from mpjax.policy import get_policy


def power(scale: float) -> str:
    """A loss scale as text; large ones as powers of two.

    Example:
        >>> power(1.0), power(2.0**15), power(2.0**24)
        ('1', '32768', '2^24')
    """
    return f"2^{round(math.log2(scale))}" if scale > 2**16 else f"{scale:g}"


@dataclasses.dataclass(frozen=True)
class ModuleEvidence:
    """The effect of half precision on the gradients in a module.

    Args:
        name: The module path.
        flushed: The share of nonzero activation gradients that the half dtype flushes to zero at the loss scale.
        error: The module's own error, with exact operands: ‖half − float32‖ / ‖float32‖, the larger of forward and
            backward.
        total: The total error of the program's gradients in the module.
    """

    name: str
    flushed: float | None
    error: float | None
    total: float | None


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Evidence on why a policy is worse.

    Args:
        policy: The name of the policy.
        seed: The seed of the examined pair of runs, the one with the largest difference.
        parted_at: The first step from which on the loss curves differ beyond noise; None if they do not.
        step: The number of steps of the baseline's run before the gradients were measured.
        loss_scale: The loss scale of the policy's run at that step; None without loss scaling.
        scales: The history of the loss scale in the run of `seed`.
        skipped: The number of skipped steps over all seeds.
        steps: The number of steps over all seeds.
        flushed: The share of activation gradients that are flushed to zero at `loss_scale`.
        gradient_error: ‖half − float32‖ / ‖float32‖ of the gradients of all parameters.
        modules: The evidence by module, the largest flushed share first.
        parameters: `(tree path, relative error of its gradient)`, the largest error first.
        notes: Measurements that were not possible, and why.
    """

    policy: str
    seed: int
    parted_at: int | None
    step: int
    loss_scale: float | None
    scales: tuple[tuple[int, float], ...]
    skipped: int
    steps: int
    flushed: float | None = None
    gradient_error: float | None = None
    modules: tuple[ModuleEvidence, ...] = ()
    parameters: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()


def explained(found: Evidence, baseline: str) -> Iterator[Section]:
    """The sections of a printed report: what happened, and the modules."""
    yield Section(f"Why {found.policy} is worse", "\n".join(_evidence_lines(found, baseline)))
    rows = [(row.name or "-", *map(_percent, (row.flushed, row.error, row.total))) for row in found.modules]
    if rows:
        yield Section("By module", "", "module|>gradients flushed|>own error|>error of its gradients", rows, shown=8)


def _evidence_lines(found: Evidence, baseline: str) -> Iterator[str]:
    if found.parted_at is None:
        yield f"the loss curves do not part from {baseline}'s beyond noise: check what the metric does after training"
    else:
        yield f"the loss curves part from {baseline}'s at step {found.parted_at}, beyond noise from there on"
    scales = [scale for _, scale in found.scales]
    if not scales:
        yield "no loss scaling"
    elif len(scales) == 1:
        yield f"loss scale {power(scales[0])} throughout; {found.skipped} of {found.steps} steps skipped"
    else:
        yield (
            f"loss scale {power(min(scales))} to {power(max(scales))}, {len(scales) - 1} changes, finally "
            f"{power(scales[-1])} (seed {found.seed}); {found.skipped} of {found.steps} steps skipped"
        )
    at = f"at {baseline}'s parameters after {found.step} steps of seed {found.seed}"
    if found.flushed is not None:
        scale = power(found.loss_scale or 1.0)
        yield f"{_percent(found.flushed)} of the activation gradients are flushed to zero at loss scale {scale}, {at}"
    if found.gradient_error is not None:
        worst = ", ".join(f"{name} {_percent(error)}" for name, error in found.parameters[:3])
        yield f"error of the gradients of all parameters {_percent(found.gradient_error)}; the largest: {worst}"
    yield from found.notes


def evidence_of(
    make: Callable[..., Any], policy: str, baseline: str, runs: Sequence[Run], base_runs: Sequence[Run]
) -> Evidence:
    """Collects evidence on why a policy is worse. It retrains the baseline up to the step of the measurement.

    Args:
        make: A `MakeTraining`.
        policy, baseline: Names that `make` interprets.
        runs, base_runs: The runs of both, by seed.
    """
    run, base = max(zip(runs, base_runs, strict=True), key=lambda pair: _loss_difference(*pair))
    parted = parted_at(runs, base_runs)
    step = min(parted, len(base.losses)) if parted is not None else len(base.losses) // 2
    found = Evidence(
        policy=policy,
        seed=run.seed,
        parted_at=parted,
        step=step,
        loss_scale=next((scale for at, scale in reversed(run.scales) if at <= max(step, 1)), None),
        scales=run.scales,
        skipped=sum(len(each.skipped) for each in runs),
        steps=sum(len(each.losses) for each in runs),
    )
    training = make_training(make, policy, run.seed)
    if training.loss is None:
        note = "gradients were not inspected: give Training(loss=...), the loss in the precision of the policy"
        return dataclasses.replace(found, notes=(note,))
    try:
        params, batch, found = _params_at(training, make_training(make, baseline, run.seed), found)
        return _measured(training.loss, params, batch, found)
    except Exception as error:  # The comparison is valid without this evidence.
        note = f"gradients were not inspected: {type(error).__name__}: {error}"
        return dataclasses.replace(found, notes=(note,))


def _loss_difference(run: Run, base: Run) -> float:
    difference = abs(run.metric - base.metric)
    return difference if math.isfinite(difference) else math.inf


def _params_at(training: Training, base: Training, found: Evidence) -> tuple[Any, Any, Evidence]:
    """The baseline's parameters after `found.step` steps, in the dtypes of the policy's, and the next batch."""
    state, steps, batch = base.state, 0, None
    for batch in base.each_batch():
        if steps >= found.step:
            break
        state, loss = base.step(state, batch)
        steps += int(np.size(loss))
    params = base.params_of(state)
    ours = training.params_of(training.state)
    if _same_structure(ours, params):
        params = jax.tree.map(_as, params, ours)
    return params, batch, dataclasses.replace(found, step=steps)


def _same_structure(a: Any, b: Any) -> bool:
    """Whether two trees have the same leaves at the same places."""
    return [path for path, _ in jax.tree.leaves_with_path(a)] == [path for path, _ in jax.tree.leaves_with_path(b)]


def _as(x: Any, like: Any) -> Any:
    dtype = getattr(like, "dtype", None)
    return x if dtype is None or x.dtype == dtype else jnp.asarray(x).astype(dtype)


def _measured(loss: Callable[[Any, Any], Any], params: Any, batch: Any, found: Evidence) -> Evidence:
    scale = found.loss_scale or 1.0
    errors, ranges, notes = None, None, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about rules; the training run has already warned
        try:
            errors = layerwise_error(loss, params, batch, loss_scale=scale)
        except ValueError:
            notes.append("Training.loss computes nothing in half: give the one that the policy's step differentiates")
        dtype = _half_dtype(found.policy, errors)
        ranges = numerics(loss, params, batch, loss_scale=scale, dtype=dtype, verify=False)
    return dataclasses.replace(
        found,
        flushed=ranges.flushed_at(scale),
        gradient_error=None if errors is None else errors.gradient_error,
        modules=tuple(_modules(ranges, errors)),
        parameters=tuple((row.name, row.error) for row in _by_error(errors)),
        notes=tuple(notes),
    )


def _by_error(errors: LayerwiseReport | None) -> list[Any]:
    return [] if errors is None else sorted(errors.parameters, key=lambda row: -row.error)


def _half_dtype(policy: str, errors: LayerwiseReport | None) -> str:
    if errors is not None:
        halves = [dtype for row in errors.modules for dtype in row.dtypes]
        return max(("float16", "bfloat16"), key=halves.count)
    try:
        return "bfloat16" if get_policy(policy).compute_dtype == jnp.bfloat16 else "float16"
    except ValueError:
        return "float16"


def _modules(ranges: NumericsReport, errors: LayerwiseReport | None) -> Iterator[ModuleEvidence]:
    nonzero = [(row, row.count * (1 - row.zeros)) for row in ranges.gradients]
    flushed = added_up((row.name, (row.flushed * count, count)) for row, count in nonzero)
    shares = {name: lost / count if count else 0.0 for name, (lost, count) in flushed.items()}
    own = {row.name: (row.error, row.total_backward) for row in reversed(errors.modules)} if errors is not None else {}
    rows = [
        ModuleEvidence(name, shares.get(name), *own.get(name, (None, None))) for name in dict.fromkeys([*own, *shares])
    ]
    yield from sorted(rows, key=lambda row: (-(row.flushed or 0.0), -(row.error or 0.0)))


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{share:.2%}" if math.isfinite(share) else "not finite"
