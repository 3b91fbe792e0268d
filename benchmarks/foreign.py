"""JAX's and Flax's own tests under autocast: which fail only when JAX's entry points are wrapped.

    python -m benchmarks.foreign --tests FOLDER
    python -m benchmarks.foreign --tests FOLDER --by-hand

FOLDER holds test files of JAX and Flax (`custom_api_test.py`, `lax_control_flow_test.py`, `shard_map_test.py`,
`nn_test.py`, `linen_transforms_test.py`, `tests/nnx/nn`), of the installed versions; they are not part of this
repository. Every file runs in its own process with the functions given to `jax.jit`, `jax.grad`,
`jax.value_and_grad` and `jax.vmap`, `nn.Module.apply` and calls of NNX layers in `mpjax.autocast`, and with comparisons
as loose as half precision needs. Failing tests run again without autocast. Those that then pass run a third time with
the same functions in `jax.jit` instead. Tests that also fail there are listed separately: they use values in Python's
control flow, or JAX can't trace them for another reason.

`--by-hand` compares the values and gradients of the same functions, on the tests' own arguments, with float64, and
divides their errors by those of careful casts by hand.
"""

from __future__ import annotations

import collections
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import commands
from perf.results import previous
from testing.foreign.running import errors_by_hand, examine, files_in, kind_of, limitation_of

LIMIT = 2.0  # times the error of casts by hand


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each file, and the tests that fail only under autocast."""
    header = ("file", "pass", "fail only under autocast", "fail in `jax.jit` too")
    rows: list[tuple[Any, ...]] = []
    for name, found in results.items():
        counts = (len(found["only under autocast"]), len(found["also in jax.jit"]), found["also without autocast"])
        rows.append((name, found["passed"], *counts, found["skipped"]))
    rows.append(("**all**", *map(sum, zip(*(row[1:] for row in rows), strict=True))))
    faults = [(name, *fault) for name, found in results.items() for fault in found["only under autocast"].items()]
    listed = "".join(f"\n- {name}, `{test}`: {cause}" for name, test, cause in faults)
    return commands.markdown((*header, "fail without autocast too", "skipped"), rows) + (
        f"{listed}\n" if listed else ""
    )


def table_by_hand(results: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: a row for each file, and the tests whose error is more than twice that of casts by hand."""
    ratios = {name: [ratio for found in of_tests.values() for ratio in found] for name, of_tests in results.items()}
    ratios["**all**"] = [ratio for found in ratios.values() for ratio in found]
    rows = [(name, len(x), f"{statistics.median(x):.2f}", f"{max(x):.2f}") for name, x in ratios.items() if x]
    tests = [(name, test, max(found)) for name, of_tests in results.items() for test, found in of_tests.items()]
    above = "".join(f"\n- {name}, `{test}`: {worst:.2f}" for name, test, worst in tests if worst > LIMIT)
    header = ("file", "values and gradients", "error / by hand (median)", "worst")
    return commands.markdown(header, rows) + (f"{above}\n" if above else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs from the command line."""
    parser = commands.parser(__doc__)
    parser.add_argument("--tests", type=pathlib.Path, required=True, help="folder of JAX's and Flax's test files")
    parser.add_argument("--only", default="", help="run only files whose path contains this; the other results stay")
    parser.add_argument("-k", default="", help="run only tests that match this pytest expression")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--by-hand", action="store_true", help="errors against casts by hand, instead of outcomes")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of a file in seconds")
    options = parser.parse_args(arguments)
    name = f"foreign_{options.dtype}" + "_by_hand" * options.by_hand
    results = previous(name, options.out) if options.only else {}
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    limitations: dict[str, list[str]] = collections.defaultdict(list)
    for path in files_in(options.tests):
        if options.only not in str(path):
            continue
        if options.by_hand:
            results[path.name] = errors_by_hand(path, options)
            commands.publish(name, results, table_by_hand(results), options.out)
            print(table_by_hand({path.name: results[path.name]}), flush=True)
            continue
        found = results[path.name] = examine(path, options)
        print(f"{path.name}:\n{table({path.name: found})}", flush=True)
        for test, cause in found["only under autocast"].items():
            kinds[kind_of(cause)].append(f"{test}: {cause}")
        for test, cause in found["also in jax.jit"].items():
            limitations[limitation_of(cause)].append(f"{test}: {cause}")
        commands.publish(name, results, table(results), options.out)
    if options.by_hand:
        return
    print("\nFail only under autocast:")
    _print_groups(kinds)
    print("\nAlso fail in jax.jit:")
    _print_groups(limitations)


def _print_groups(kinds: dict[str, list[str]]) -> None:
    for kind, tests in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(f"\n## {len(tests)} × {kind}")
        print("\n".join(f"  {test}" for test in tests))


if __name__ == "__main__":
    main()
