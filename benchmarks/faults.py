"""Known faults of mixed precision libraries, tested on each library: `python -m benchmarks.faults`.

Each cell is the result of running the library: "has it", "not", or "fails" with the error. "n.a." means that the
library lacks the feature concerned. `benchmarks/fault_probes/` holds the programs.
"""

from __future__ import annotations

import os
import warnings

# Before JAX starts: faults between replicas need at least two devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")


from benchmarks import commands
from benchmarks.fault_probes import FAULTS, Fault, Probe

HAS_IT, NOT, NOT_APPLICABLE = "has it", "not", "n.a."
LIBRARIES = ("mpjax", "Flax", "jmp", "mixed-precision-for-JAX", "jaxamp", "Keras 3", "optax alone")


def outcome(probe: Probe | None) -> str:
    """The cell of a probe; a probe returns whether the library has the fault."""
    if probe is None:
        return NOT_APPLICABLE
    try:
        return HAS_IT if probe() else NOT
    except ModuleNotFoundError as error:
        return f"not run: no module {error.name!r} here"
    except Exception as error:  # a peer's failure is a result
        return f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"


def run(faults: list[Fault] = FAULTS, libraries: tuple[str, ...] = LIBRARIES) -> dict[str, dict[str, str]]:
    """The cells of every fault, by library."""
    found = {}
    for fault in faults:
        unknown = set(fault.probes) - set(LIBRARIES)
        assert not unknown, f"{fault.name}: probes of {unknown}, which have no column"
        found[fault.name] = {library: outcome(fault.probes.get(library)) for library in libraries}
    return found


def table(results: dict[str, dict[str, str]]) -> str:
    """A Markdown table with a row for each fault and a column for each library."""

    def shown(cell: str) -> str:
        return f"**{cell}**" if cell == HAS_IT else cell.replace("|", "/")

    rows = ([name, *map(shown, cells.values())] for name, cells in results.items())
    return commands.markdown(["fault", *next(iter(results.values()))], rows)


def main() -> None:
    parser = commands.parser(__doc__)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Peers use deprecated JAX functions, which is not the fault in question.
    results = run()
    commands.publish("faults", results, table(results), args.out)
    print(table(results))


if __name__ == "__main__":
    main()
