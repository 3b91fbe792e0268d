"""Half precision against float32 for each family of models: `python -m benchmarks.parity`.

Each family is a small real task, trained under every policy with the same seeds, batches and hyperparameters;
`mpjax.parity` runs and compares. The results of a family are written when it ends, so an interrupted command can be
called again with `--families` of the others. `benchmarks.parity.training` lists the policies.
"""

from __future__ import annotations

import functools
import sys

import mpjax
from benchmarks import commands
from benchmarks.parity import results, training
from benchmarks.parity.families import FAMILIES, get
from perf.results import previous


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, separated by commas (default: all)")
    parser.add_argument(
        "--policies", default=",".join(training.AUTOCAST), help="names, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each policy (default: %(default)s)")
    parser.add_argument("--name", default="parity", help="name of the result file (default: %(default)s)")
    args = parser.parse_args()
    names, policies = args.families.split(","), args.policies.split(",")
    for name in names:
        get(name)
    if unknown := set(policies) - set(training.POLICIES):
        parser.error(f"unknown policy {', '.join(sorted(unknown))}; choose from {', '.join(training.POLICIES)}")
    found: dict[str, results.Row] = previous(args.name, args.out)
    for name in names:
        report = mpjax.parity(functools.partial(training.make, name), policies, args.seeds)
        found[name] = results.merged(found.get(name), results.row(get(name), report))
        # In the table's order. An interrupted run keeps its results so far.
        found = {family: found[family] for family in FAMILIES if family in found}
        commands.publish(args.name, found, results.table(found), args.out)
        for policy, comparison in found[name]["policies"].items():
            print(f"{name}, {policy}: {comparison['verdict']}", file=sys.stderr, flush=True)
    print(results.table(found))


if __name__ == "__main__":
    main()
