"""How the error of a gradient's sum grows with the number of replicas: `python -m benchmarks.reduction_error`.

Simulates in NumPy how an all-reduce adds one number per replica: in a ring, one after the other; in a tree, pairs and
pairs of pairs. Each addition is rounded to the dtype of the reduction, like each hop of an all-reduce. The
replicas' gradients are drawn from a normal distribution with mean 1 and standard deviation 1, divided by the number of
replicas (the loss is a mean) and scaled by 2¹⁰, so that nothing overflows or underflows. The error is the root mean
square over elements of the sum's relative error, against float64.
"""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
ORDERS = ("ring", "tree")
REPLICAS = (16, 256, 4096, 65536)
SCALE = 2.0**10
FIGURE = pathlib.Path(__file__).parent.parent / "docs" / "reduction_error.png"


def reduced(values: np.ndarray, order: str) -> np.ndarray:
    """The sum over the first axis (a power of two long), every addition rounded to the dtype of the values."""
    if order == "ring":
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def error(dtype: np.dtype, order: str, replicas: int, elements: int = 64) -> float:
    """The relative error of a sum over a number of replicas."""
    draws = np.random.default_rng(0).normal(1.0, 1.0, (replicas, elements)) * (SCALE / replicas)
    exact = draws.sum(0)
    found = reduced(draws.astype(dtype), order).astype(np.float64)
    return float(np.sqrt(np.mean(((found - exact) / exact) ** 2)))


def measure(replicas: tuple[int, ...] = REPLICAS) -> dict[str, dict[str, dict[str, float]]]:
    """Errors by dtype, order and number of replicas."""
    return {
        name: {order: {str(n): error(dtype, order, n) for n in replicas} for order in ORDERS}
        for name, dtype in DTYPES.items()
    }


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: a row for each dtype and order."""
    replicas = [f"{int(n):,}" for n in next(iter(results["float32"].values()))]
    lines = [f"| sums in | order | {' | '.join(replicas)} |", "|---" * (len(replicas) + 2) + "|"]
    for dtype, orders in results.items():
        for order, errors in orders.items():
            lines.append(f"| {dtype} | {order} | {' | '.join(f'{e:.1e}' for e in errors.values())} |")
    return "\n".join(lines) + "\n"


def plot(results: dict[str, dict[str, dict[str, float]]], path: pathlib.Path) -> None:
    """Errors over the number of replicas, both axes logarithmic."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for (dtype, orders), colour in zip(results.items(), ("tab:red", "tab:orange", "tab:blue"), strict=True):
        for order, errors in orders.items():
            style: Any = {"color": colour, "linestyle": "-" if order == "ring" else "--", "marker": "o"}
            axes.loglog([int(n) for n in errors], list(errors.values()), label=f"{dtype}, {order}", **style)
    axes.set(xlabel="replicas", ylabel="relative error of the sum", title="Error of a gradient's sum over replicas")
    axes.grid(alpha=0.3)
    axes.legend(ncols=3, fontsize="small", loc=(0.27, 0.4))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    from benchmarks import RESULTS
    from perf.results import save

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()
    results = measure()
    print(table(results))
    save("reduction_error", results, args.out)
    (args.out / "reduction_error_cpu.md").write_text(table(results))
    plot(results, FIGURE)


if __name__ == "__main__":
    main()
