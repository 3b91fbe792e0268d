"""What `mpjax.plan` chooses against an exhaustive search, and its peaks against models: `-m benchmarks.planning`.

For ten programs of the zoo, with Adam, every combination of the changes that have an effect is compiled for this
machine's CPU. The plan compiles few of them. Its choice is compared with the best of all: at a budget that nothing
meets, by its peak; at budgets between the least peak and that of the step as it is, by its price (see
`mpjax.planning.search.cheapest`).

With `--models`, the peaks of full-size training steps of `benchmarks.training` are compared instead: those of a plan,
and those that XLA plans for the same step, made by hand and compiled for an H200 (needs JAX's CUDA plugin, no GPU).
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import optax

import mpjax
from benchmarks import commands
from benchmarks.training.cells import Cell
from benchmarks.training.configurations import training
from mpjax.planning.plan import _Planner
from mpjax.planning.search import Combination, cheapest, combinations
from mpjax.planning.step import Change, Place, Step
from testing.models.zoo import REGISTRY, harness

PROGRAMS = (
    "linen_mlp",
    "linen_cnn_batchnorm",
    "linen_resnet",
    "haiku_attention",
    "scan_lstm",
    "equinox_recurrent",
    "embedding_tied",
    "nnx_scanned_attention",
    "linen_transformer",
    "switch_experts",
)
SHARES = (0.75, 0.5, 0.25)  # of the way from the least peak to that of the step under autocast
MODELS = ("resnet50", "bert_base_128", "gpt2_medium", "vit_b16", "lstm_lm", "deep_speech_2")
# The configuration to plan, the changes of the plan, and the configuration of the same step by hand.
BY_HAND = {
    "autocast_bfloat16": ((), "autocast_bfloat16"),
    'residuals="full"': ((Change("residuals", "full"),), "autocast_bfloat16_full"),
    'attention="fused"': ((Change("attention", "cudnn"),), "autocast_bfloat16_fused"),
}
Row = dict[str, Any]


def planner_of(name: str) -> _Planner:
    """The planner of a program's training step."""
    loss_fn, params, batch = harness.abstract(name)
    tx = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn, has_aux=REGISTRY[name].has_aux)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    args = params, jax.eval_shape(tx.init, params), batch
    jitted = jax.jit(step, donate_argnums=(0, 1))
    return _Planner(Step(jitted, args, {}, Place.of(None, None), mpjax.get_policy("mixed_bfloat16")), quiet=True)


def compared(name: str) -> Row:
    """A program's choices against those of an exhaustive search."""
    with REGISTRY[name].context():
        planner = planner_of(name)
        base = planner.measure(())
        options = [each for each in planner.options if planner.measure((each,)).program != base.program]
        peaks = {each: planner.measure(each) for each in combinations(options)}
        least = min(found.peak for found in peaks.values())

        def price(changes: Combination) -> float:
            return peaks[changes].work / base.work + sum(change.price for change in changes)

        asked: set[Combination] = set()

        def measure(changes: Combination) -> Any:
            asked.add(changes)
            return planner.measure(changes)

        found = cheapest(planner.options, measure, 1)
        row: Row = {
            "combinations": len(peaks),
            "compiled": len({planner.measure(each).program for each in asked}),
            "peak": base.peak,
            "least_peak": least,
            "least_found": planner.measure(found.chosen).peak,
            "prices": {},
        }
        for share in SHARES:
            budget = least + share * (base.peak - least)
            chosen = cheapest(planner.options, planner.measure, budget)
            best = min(price(each) for each in peaks if peaks[each].peak <= budget)
            row["prices"][str(share)] = price(chosen.chosen) / best if chosen.fits else None
    return row


def summary(rows: dict[str, Row]) -> str:
    """A Markdown table of `compared`."""
    lines = []
    for name, row in rows.items():
        prices = [f"{price:.3f}" if price is not None else "-" for price in row["prices"].values()]
        ratio = f"{row['least_found'] / row['least_peak']:.3f}"
        lines.append([f"`{name}`", str(row["combinations"]), str(row["compiled"]), ratio, *prices])
    header = ["program", "combinations", "compiled by a plan", "least peak found / least of all"]
    return commands.markdown([*header, *(f"price at {share:.0%} / cheapest of all" for share in SHARES)], lines)


def models(names: list[str]) -> str:
    """A Markdown table: planned peaks of full-size steps over those of the same steps by hand."""
    from benchmarks.training.dry_run import dry_run
    from mpjax.planning.target import TARGETS

    target, lines = TARGETS["h200"], []
    devices = target.devices()
    if devices is None:
        raise SystemExit(f"--models: {target.missing}")
    for name in names:
        made = training(Cell(name, "autocast_bfloat16").workload(False), Cell(name, "autocast_bfloat16").settings())
        step = Step(jax.jit(made.step, donate_argnums=0), made.abstract(), {}, Place.of("h200", None), None)
        for form, (changes, configuration) in BY_HAND.items():
            if Cell(name, configuration).applies():
                found = step.compile(changes).peak
                by_hand = dry_run(Cell(name, configuration), False, target, devices[0])["planned_bytes"]
                lines.append([name, form, f"{found / 1e9:.3f}", f"{by_hand / 1e9:.3f}", f"{found / by_hand:.4f}"])
                print(*lines[-1], file=sys.stderr, flush=True)
    return commands.markdown(["model", "change", "plan, GB", "by hand, GB", "ratio"], lines)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--programs", nargs="*", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--models", nargs="*", choices=MODELS, help="compare the peaks of these models instead")
    args = parser.parse_args()
    if args.models is not None:
        print(models(list(args.models or MODELS)))
        return
    rows: dict[str, Row] = {}
    for name in args.programs:
        rows[name] = compared(name)
        jax.clear_caches()  # The programs of all together would take more memory maps than Linux gives a process.
        print(name, rows[name], file=sys.stderr, flush=True)
    commands.publish("planning", rows, summary(rows), args.out)
    print(summary(rows))


if __name__ == "__main__":
    main()
