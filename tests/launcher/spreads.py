"""Final losses of the scripts in float32 over three seeds: `python -m tests.launcher.spreads [SCRIPT ...]`."""

import json
import pathlib
import runpy
import sys

FOLDER = pathlib.Path(__file__).parent
FILE = FOLDER / "spreads.json"
SEEDS = (0, 1, 2)


def scripts():
    """The training scripts."""
    return sorted((FOLDER / "scripts").glob("*.py"))


def recorded():
    """The losses by script, in the order of the seeds."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def main():
    """Runs the scripts that are named, or all."""
    for path in scripts():
        if path.stem in sys.argv[1:] or not sys.argv[1:]:
            run = runpy.run_path(str(path))["main"]
            losses = [round(run(["--seed", str(seed)]), 5) for seed in SEEDS]
            FILE.write_text(json.dumps(recorded() | {path.stem: losses}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
