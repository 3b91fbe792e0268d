"""What the backward pass keeps in eight bits, and what that costs in accuracy: `python -m benchmarks.packed_residuals`.

For each program of the zoo, in bfloat16: residual bytes as a share of float32's, and the error of the gradient against
float32, over that of `residuals="half"`. The memory of a compiled step is `python -m mpjax plan`'s to tell.
"""

from __future__ import annotations

import functools
import os
import statistics
import warnings
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # some programs have several devices

import jax

import mpjax
from benchmarks import commands
from perf.results import previous
from testing.models.zoo import harness
from testing.models.zoo.program import REGISTRY

HALF = "half"
KINDS = (HALF, "int8", "int8_stochastic", "float8", "float8_stochastic")
NAME, DTYPE = "packed_residuals", "bfloat16"


def cast(fun: Any, policy: str, *, kind: str) -> Any:
    """The program with what it keeps stored in some kind."""
    return mpjax.autocast(fun, policy, rules=mpjax.Rules(residuals=kind))  # type: ignore[arg-type]


def measured(name: str) -> dict[str, dict[str, float]] | None:
    """The share of float32's residual bytes and the error of each kind; None for a program that keeps nothing."""
    in_float32 = harness.residuals(name, harness.identity, DTYPE)
    casters = {kind: functools.partial(cast, kind=kind) for kind in KINDS}
    return in_float32 and {
        kind: {
            "bytes": harness.residuals(name, caster, DTYPE) / in_float32,
            "error": harness.gradient_error(name, caster, DTYPE),
        }
        for kind, caster in casters.items()
    }  # type: ignore[return-value]


def table(rows: dict[str, Any]) -> str:
    """Markdown: each kind over all programs."""
    lines = []
    for kind in KINDS:
        shares = [row[kind]["bytes"] for row in rows.values()]
        ratios = {name: row[kind]["error"] / row[HALF]["error"] for name, row in rows.items() if row[HALF]["error"]}
        worst = max(ratios, key=lambda name: ratios[name])
        errors = (f"{statistics.median(ratios.values()):.2f}", f"{ratios[worst]:.2f} (`{worst}`)")
        lines.append((f"`{kind}`", f"{statistics.median(shares):.3f}", *(errors if kind != HALF else ("1", "1"))))
    header = ("residuals", "bytes of float32, median", "error over half's, median", "worst")
    return commands.markdown(header, lines)


def main() -> None:
    args = commands.parser(__doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    warnings.simplefilter("ignore")
    rows: dict[str, Any] = previous(NAME, args.out)
    for name in sorted(REGISTRY):
        if name not in rows and (row := measured(name)):
            rows[name] = row
            commands.publish(NAME, rows, table(rows), args.out)
            print(name, row, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
