"""Evidence on why a policy is worse: skipped steps, loss scale, lost gradients by module."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpjax.inspection.comparison.statistics import parted_at
from mpjax.inspection.comparison.training import Run, Training, make_training
from mpjax.inspection.layer_errors import LayerwiseReport, layerwise_error
from mpjax.inspection.ranges.numerics import NumericsReport, numerics
from mpjax.inspection.reports import Section, percent, scale_text


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
        ranges: `numerics` of the loss at these parameters and this scale: the gradients that half flushes to zero.
        errors: `layerwise_error` of the same; None if nothing is in half.
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
    ranges: NumericsReport | None = None
    errors: LayerwiseReport | None = None
    notes: tuple[str, ...] = ()


def explained(found: Evidence, baseline: str) -> Iterator[Section]:
    """The sections of a printed report: what happened, and the modules."""
    yield Section(f"Why {found.policy} is worse", "\n".join(_evidence_lines(found, baseline)))
    parts = [] if found.ranges is None else [found.ranges.by_module("gradients")]
    parts += [] if found.errors is None else [found.errors.by_module()]
    yield from (dataclasses.replace(part, shown=8) for part in parts)


def _evidence_lines(found: Evidence, baseline: str) -> Iterator[str]:
    if found.parted_at is None:
        yield f"the loss curves do not part from {baseline}'s beyond noise: check what the metric does after training"
    else:
        yield f"the loss curves part from {baseline}'s at step {found.parted_at}, beyond noise from there on"
    scales = [scale for _, scale in found.scales]
    if not scales:
        yield "no loss scaling"
    elif len(scales) == 1:
        yield f"loss scale {scale_text(scales[0])} throughout; {found.skipped} of {found.steps} steps skipped"
    else:
        yield (
            f"loss scale {scale_text(min(scales))} to {scale_text(max(scales))}, {len(scales) - 1} changes, finally "
            f"{scale_text(scales[-1])} (seed {found.seed}); {found.skipped} of {found.steps} steps skipped"
        )
    at = f"at {baseline}'s parameters after {found.step} steps of seed {found.seed}"
    if found.ranges is not None:
        flushed, scale = found.ranges.flushed_at(found.ranges.loss_scale), scale_text(found.ranges.loss_scale)
        yield f"{percent(flushed)} of the activation gradients are flushed to zero at loss scale {scale}, {at}"
    if found.errors is not None:
        worst = sorted(found.errors.parameters, key=lambda row: -row.error)[:3]
        shown = ", ".join(f"{row.name} {percent(row.error)}" for row in worst)
        yield f"error of the gradients of all parameters {percent(found.errors.gradient_error)}; the largest: {shown}"
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
        why = "give Training(loss=...), the loss in the precision of the policy"
    else:
        try:
            params, batch, found = _params_at(make_training(make, baseline, run.seed), found)
            return _measured(training.loss, params, batch, found)
        except Exception as error:  # The comparison is valid without this evidence.
            why = f"{type(error).__name__}: {error}"
    return dataclasses.replace(found, notes=(f"gradients were not inspected: {why}",))


def _loss_difference(run: Run, base: Run) -> float:
    difference = abs(run.metric - base.metric)
    return difference if math.isfinite(difference) else math.inf


def _params_at(base: Training, found: Evidence) -> tuple[Any, Any, Evidence]:
    """The baseline's parameters after `found.step` steps, and the next batch."""
    state, steps, batch = base.state, 0, None
    for batch in base.each_batch():
        if steps >= found.step:
            break
        state, loss = base.step(state, batch)
        steps += int(np.size(loss))
    return base.params_of(state), batch, dataclasses.replace(found, step=steps)


def _measured(loss: Callable[[Any, Any], Any], params: Any, batch: Any, found: Evidence) -> Evidence:
    scale, errors, notes = found.loss_scale or 1.0, None, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about rules; the training run has already warned
        try:
            errors = layerwise_error(loss, params, batch, loss_scale=scale)
        except ValueError:
            notes.append("Training.loss computes nothing in half: give the one that the policy's step differentiates")
        halves = [dtype for row in errors.modules for dtype in row.dtypes] if errors is not None else []
        dtype = max(("float16", "bfloat16"), key=halves.count)
        ranges = numerics(loss, params, batch, loss_scale=scale, dtype=dtype, verify=False)
    return dataclasses.replace(found, ranges=ranges, errors=errors, notes=tuple(notes))
