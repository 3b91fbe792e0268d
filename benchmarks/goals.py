"""The goals for an H200 and their measurements: `python -m benchmarks.goals`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import RESULTS
from benchmarks.models import WORKLOADS
from benchmarks.training.tables import memory, peak_share, speedup

Content = dict[str, Any]
Rows = dict[str, dict[str, Any]]
PENDING = "pending"
WAYS = ("autocast", "with_policy")
HALVES = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound and the worst measurement under it.

    `measured` is None until there is a measurement. `planned` is the worst of XLA's plans, which need no GPU. A plan is
    not a measurement, and is omitted once there is one.
    """

    what: str
    model: str
    target: float
    measured: float | None
    at_most: bool = False
    planned: float | None = None

    @property
    def holds(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured <= self.target if self.at_most else self.measured >= self.target


def goals(training: Content, loss_scaling: Content, dry_run: Content | None = None) -> list[Goal]:
    """All goals. Only results from a GPU count as measurements."""
    plan: dict[str, Rows] = (dry_run or {}).get("results", {})
    on_gpu = training if training.get("environment", {}).get("platform") == "gpu" else {}
    found = [goal for model in WORKLOADS for goal in _of_model(on_gpu, model, plan.get(model, {}))]
    scaling = loss_scaling if loss_scaling.get("environment", {}).get("platform") == "gpu" else {}
    return [*found, _loss_scaling(scaling)]


def _of_model(training: Content, model: str, plan: Rows) -> Iterator[Goal]:
    rows: Rows = training.get("results", {}).get(model, {})

    def worst(base: Callable[[str], str], halves: tuple[str, ...] = HALVES) -> float | None:
        pairs = ((f"{way}_{half}", base(half)) for way in WAYS for half in halves)
        return min((s for s in (speedup(rows, *pair) for pair in pairs) if s), default=None)

    yield Goal("speed of hand-written Flax half", model, 0.99, worst(lambda half: f"flax_{half}"))
    reported = WORKLOADS[model].reported_speedup
    if reported is not None:
        yield Goal("times the speed of float32", model, reported, worst(lambda half: "float32"))
    yield Goal("times the speed of TF32", model, 1.6, worst(lambda half: "tf32"))
    yield Goal("speed of compiled PyTorch AMP", model, 1.0, worst(lambda half: f"torch_compiled_amp_{half}"))
    cost = speedup(rows, "flax_float16", "flax_float16_mpjax_scale")
    yield Goal("loss scaling's share of a step", model, 0.01, None if cost is None else cost - 1, at_most=True)
    used = _largest_memory_share(rows)
    planned = _largest_memory_share(plan) if used is None else None
    yield Goal("peak memory of float32's", model, 0.6, used, at_most=True, planned=planned)
    if model == "gpt2_medium":
        shares = [peak_share(training, model, name) for name in rows if name.startswith(WAYS)]
        yield Goal("of the measured matmul peak", model, 0.5, max((s for s in shares if s), default=None))


def _largest_memory_share(rows: Rows) -> float | None:
    used = (memory(rows.get(f"{way}_{half}", {}), rows.get("float32", {})) for way in WAYS for half in HALVES)
    return max((share for share in used if share), default=None)


def _loss_scaling(content: Content) -> Goal:
    ratios = [
        rows["mpjax: apply_gradients"]["ratio"]
        for kind, rows in content.get("results", {}).items()
        if kind.startswith("compute-bound") and "ratio" in rows.get("mpjax: apply_gradients", {})
    ]
    measured = max(ratios) - 1 if ratios else None
    return Goal("loss scaling's share of a step", "MLP, compute-bound", 0.01, measured, at_most=True)


def table(found: list[Goal]) -> str:
    """Markdown: measured goals first, then planned ones, then one line for all the models that have neither."""
    lines = [
        "| goal | model | target | measured on a GPU | holds | by XLA's plan, not measured |",
        "|---|---|---|---|---|---|",
    ]
    for goal in sorted(found, key=lambda goal: goal.measured is None):
        if goal.measured is not None or goal.planned is not None:
            measured = PENDING if goal.measured is None else f"{goal.measured:.3f}"
            holds = {None: "", True: "yes", False: "**no**"}[goal.holds]
            planned = "" if goal.planned is None else f"{goal.planned:.3f}"
            bound = _bound(goal, f"{goal.target:g}")
            lines.append(f"| {goal.what} | {goal.model} | {bound} | {measured} | {holds} | {planned} |")
    for what in dict.fromkeys(goal.what for goal in found):
        pending = [goal for goal in found if goal.what == what and goal.measured is None and goal.planned is None]
        if pending:
            targets = " / ".join(dict.fromkeys(f"{goal.target:g}" for goal in pending))
            models = ", ".join(goal.model for goal in pending)
            lines.append(f"| {what} | {models} | {_bound(pending[0], targets)} | {PENDING} | | |")
    return "\n".join(lines) + "\n"


def _bound(goal: Goal, target: str) -> str:
    return f"at {'most' if goal.at_most else 'least'} {target}"


def read(path: pathlib.Path) -> Content:
    """A results file's content; empty if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def from_folder(folder: pathlib.Path) -> list[Goal]:
    """The goals, with the measurements in a folder of results."""
    return goals(*(read(folder / f"{name}.json") for name in ("training_gpu", "loss_scaling_gpu", "training_dry_run")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    print(table(from_folder(parser.parse_args().out)))


if __name__ == "__main__":
    main()
