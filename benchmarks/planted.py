"""What each inspection answers to the causes of `testing.planted`: `python -m benchmarks.planted`."""

from __future__ import annotations

import time

from benchmarks import commands
from perf.results import previous
from testing.planted import AS_PLANTED, cases, run


def table(results: dict[str, dict[str, str]]) -> str:
    """A Markdown table with a row for each case, and the number of answers that are as planted."""
    cells = [cell for row in results.values() for cell in row.values()]
    rows = []
    for name, row in results.items():
        right = ", ".join(tool for tool, cell in row.items() if cell == AS_PLANTED)
        wrong = "; ".join(f"{tool} {cell}" for tool, cell in row.items() if cell != AS_PLANTED)
        rows.append((name, right, wrong.replace("|", "/")))
    count = f"{cells.count(AS_PLANTED)} of {len(cells)} answers as planted, {len(results)} programs.\n\n"
    return count + commands.markdown(("planted", "answers as planted", "other answers"), rows)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--only", default="", help="only the cases whose name contains this text")
    parser.add_argument("--missing", action="store_true", help="only the cases that are not in the results")
    args = parser.parse_args()
    before = previous("planted", args.out) if args.missing or args.only else {}
    names = [name for name in cases() if args.only in name and not (args.missing and name in before)]
    results: dict[str, dict[str, str]] = dict(before)
    for name in names:
        start = time.process_time()
        results |= run([name])
        print(f"{name}, {time.process_time() - start:.0f} s of CPU: {results[name]}", flush=True)
        ordered = {name: results[name] for name in cases() if name in results}
        commands.publish("planted", ordered, table(ordered), args.out)
    print(table({name: results[name] for name in names}))


if __name__ == "__main__":
    main()
