"""Half precision against float32 for each family of models: `python -m benchmarks.parity`.

Each family is a small real task, trained under every policy with the same seeds, batches and hyperparameters;
`mpjax.parity` runs and compares. Finished runs are kept below --runs and not repeated, so the command can be
interrupted, and called again with more seeds, policies or families. `benchmarks.parity.training` lists the policies.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import pathlib
import sys
from types import ModuleType

import mpjax
from benchmarks import commands
from benchmarks.parity import results, training
from benchmarks.parity.families import FAMILIES, get, module
from perf.results import previous

DEFAULT_RUNS = pathlib.Path.home() / ".cache" / "mpjax" / "parity"


def fingerprint(name: str) -> str:
    """A hash of the code that determines a family's results: its module and the suite's modules that it uses."""
    package = __package__ or ""
    found: dict[str, ModuleType] = {}

    def visit(used: ModuleType) -> None:
        if not used.__name__.startswith(package) or used.__name__ in found:
            return
        found[used.__name__] = used
        for value in vars(used).values():
            owner = value if isinstance(value, ModuleType) else inspect.getmodule(value) if callable(value) else None
            if owner is not None:
                visit(owner)

    visit(module(name))
    visit(training)
    code = [_without_docstrings(inspect.getsource(found[name])) for name in sorted(found)]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:12]


def _without_docstrings(source: str) -> str:
    """The code alone: comments and docstrings change no result."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def compare(name: str, policies: list[str], seeds: int, runs: pathlib.Path) -> results.Row:
    """Trains a family under each policy, except for finished runs, and compares."""
    family = get(name)
    report = mpjax.parity(
        functools.partial(training.make, name), policies, seeds, output=runs / f"{name}-{fingerprint(name)}"
    )
    return results.row(family, report)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, separated by commas (default: all)")
    parser.add_argument(
        "--policies", default=",".join(training.AUTOCAST), help="names, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each policy (default: %(default)s)")
    parser.add_argument("--runs", type=pathlib.Path, default=DEFAULT_RUNS, help="folder of finished runs")
    parser.add_argument("--name", default="parity", help="name of the result file (default: %(default)s)")
    args = parser.parse_args()
    names, policies = args.families.split(","), args.policies.split(",")
    for name in names:
        get(name)
    if unknown := set(policies) - set(training.POLICIES):
        parser.error(f"unknown policy {', '.join(sorted(unknown))}; choose from {', '.join(training.POLICIES)}")
    found: dict[str, results.Row] = previous(args.name, args.out)
    for name in names:
        found[name] = results.merged(found.get(name), compare(name, policies, args.seeds, args.runs))
        # In the table's order. An interrupted run keeps its results so far.
        found = {family: found[family] for family in FAMILIES if family in found}
        commands.publish(args.name, found, results.table(found), args.out)
        for policy, comparison in found[name]["policies"].items():
            print(f"{name}, {policy}: {comparison['verdict']}", file=sys.stderr, flush=True)
    print(results.table(found))


if __name__ == "__main__":
    main()
