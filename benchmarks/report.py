"""All results on one page, with plots: `python -m benchmarks.report` writes `benchmarks/results/README.md`.

A suite is a JSON file with its environment and a Markdown table beside it. Results of versions of mpjax or JAX
other than the installed ones say of which versions they are. The page leads with measurements; plans without a device
follow.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from benchmarks import commands, headlines
from benchmarks.training.tables import memory, speedup
from perf.environment import versions

Content = dict[str, Any]
TITLES = {
    "training_gpu": "Training steps on a GPU",
    "loss_scaling_gpu": "Loss scaling on a GPU",
    "casting_float16_cpu": "Casting",
    "faults_cpu": "Known faults, library by library",
    "loss_scaling_cpu": "Loss scaling on a CPU",
    "loss_scaling_sharded_cpu": "Loss scaling of a sharded step",
    "loss_scaling_system_malloc_cpu": "Loss scaling on a CPU with the system's malloc",
    "foreign_float16_cpu": "JAX's and Flax's own tests under autocast",
    "foreign_float16_by_hand_cpu": "Accuracy of JAX's and Flax's own tests in float16",
    "foreign_bfloat16_by_hand_cpu": "Accuracy of JAX's and Flax's own tests in bfloat16",
    "compiled_bfloat16_cpu": "The compiled program",
    "communication_float16_cpu": "What a sharded training step sends between devices",
    "lean_state_cpu": "Lean optimizer state: bytes, time and final losses",
    "launcher_cpu": "The launcher",
    "launcher_foreign_cpu": "Scripts of other authors under the launcher",
    "parity_cpu": "Parity: half precision against float32, family by family",
    "inspection_cpu": "What the inspections cost",
    "planning_cpu": "What plans choose, against an exhaustive search",
    "planted_cpu": "What the inspections answer to planted causes",
    "kernels_h200": "The modelled time of training steps on an H200",
    "training_dry_run": "Training steps compiled for an H200 without a GPU",
    **{f"training_dry_run_{c}": f"Training steps compiled for a TPU {c} without a TPU" for c in ("v5e", "v6e", "v5p")},
    "training_dry_run_b200": "Training steps compiled for a B200 without a GPU",
    "communication_float16_h200_cpu": "What a sharded training step sends between H200s",
    "communication_bfloat16_v5e_cpu": "What a sharded training step sends between TPU chips",
    "fused_attention_cpu": "Fused attention compiled for an H200 without a GPU",
    "float8_h200_cpu": "Float8 steps compiled for an H200 without a GPU",
    "mxfp8_b200_cpu": "MXFP8 steps compiled for a B200 without a GPU",
    "parity_float8_cpu": "Parity: float8 against float32",
    "parity_residuals_cpu": "Parity: residuals in float8 against float32",
}
PLOTTED = ("tf32", "flax_float16", "autocast_float16", "with_policy_float16")


def earlier(content: Content) -> str:
    """A sentence that says of which versions the results are; empty if all are of those that are installed."""
    now = versions()
    rows = content.get("results", {})
    # Each cell of the training results has its own versions.
    cells = [
        (f"{model} {name}", row["versions"])
        for model, of_model in rows.items()
        if isinstance(of_model, dict)
        for name, row in of_model.items()
        if isinstance(row, dict) and "versions" in row
    ]
    found = cells or [("all", content.get("environment", {}))]
    old = [
        (name, {key: made[key] for key in now if key in made})
        for name, made in found
        if any(made.get(key, now[key]) != now[key] for key in now)
    ]
    if not old:
        return ""
    made = dict.fromkeys(", ".join(f"{key} {value}" for key, value in made_with.items()) for _, made_with in old)
    which = "all" if len(old) == len(found) else ", ".join(name for name, _ in old)
    return f"Made with {'; '.join(made)} ({which}); this page with jax {now['jax']}, mpjax {now['mpjax']}."


def page(folder: pathlib.Path, plots: list[str]) -> str:
    """The page of a folder of results."""
    files = {path.stem: path for path in sorted(folder.glob("*.json"))}
    ordered = [*(name for name in TITLES if name in files), *(name for name in files if name not in TITLES)]
    lines = [
        "# Results of the benchmarks",
        "",
        "Made by `python -m benchmarks.report` from the JSON files and tables of this folder; each section names the "
        "command that measured it.",
        "",
        headlines.table(headlines.headlines(folder)),
        "",
        *(f"![{plot.removesuffix('.png').replace('_', ' ')}]({plot})\n" for plot in plots),
    ]
    for name in ordered:
        if section := _section(name, files[name]):
            lines += section
    return "\n".join(lines).rstrip() + "\n"


def origin(environment: dict[str, Any]) -> str:
    """The command, the versions and the commit that made a file of results."""
    command = f"`{environment['command']}`: " if environment.get("command") else ""
    known = (
        f"{key} {environment[key]}" for key in ("device", "driver", "jax", "mpjax", "commit") if key in environment
    )
    return f"{command}{', '.join(known)}."


def _section(name: str, path: pathlib.Path) -> list[str]:
    table = path.with_suffix(".md")
    content = json.loads(path.read_text())
    if not table.exists():
        return []
    lines = [f"## {TITLES.get(name, name.replace('_', ' ').capitalize())}", "", origin(content["environment"]), ""]
    if sentence := earlier(content):
        lines += [sentence, ""]
    return [*lines, table.read_text().rstrip(), ""]


def read(path: pathlib.Path) -> Content:
    """A results file's content; empty if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def plot_all(folder: pathlib.Path) -> list[str]:
    """Draws the plots for which there are results, and returns their file names."""
    names: list[str] = []
    for name, source, draw in (
        ("speedup.png", "training_gpu.json", _speedups),
        ("memory.png", "training_gpu.json", _memory),
        ("planned_memory.png", "training_dry_run.json", _planned_memory),
    ):
        if names and draw is _planned_memory:  # a plan stands in for measurements only
            break
        content = read(folder / source)
        bars, label = draw(content) if content else ({}, "")
        if any(value is not None for group in bars.values() for value in group.values()):
            _bars(folder / name, bars, label, content.get("environment", {}).get("device", ""))
            names.append(name)
    return names


Bars = dict[str, dict[str, float | None]]


def _speedups(content: Content) -> tuple[Bars, str]:
    bars = {
        model: {name: speedup(rows, name, "float32") for name in PLOTTED} for model, rows in content["results"].items()
    }
    return bars, "speed / float32"


def _memory(content: Content, ways: tuple[str, ...] = PLOTTED) -> tuple[Bars, str]:
    bars = {
        model: {name: memory(rows.get(name, {}), rows.get("float32", {})) for name in ways}
        for model, rows in content["results"].items()
    }
    return bars, "peak memory / float32"


def _planned_memory(content: Content) -> tuple[Bars, str]:
    # Without loss scaling, which the hand-written form does not have.
    bars, _ = _memory(content, ("flax_bfloat16", "autocast_bfloat16", "with_policy_bfloat16"))
    known = {model: group for model, group in bars.items() if any(group.values())}
    return known, "memory in XLA's plan / float32"


def _bars(path: pathlib.Path, bars: Bars, label: str, device: str) -> None:
    """Groups of bars, one colour for each kind; bars without a measurement are omitted."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(kind for group in bars.values() for kind, value in group.items() if value is not None))
    figure, axes = plt.subplots(figsize=(max(6.0, 0.25 * len(bars) * (len(kinds) + 1)), 4.0), layout="constrained")
    width = 1 / (len(kinds) + 1)
    for i, kind in enumerate(kinds):
        heights = {x + i * width: group[kind] or 0.0 for x, group in enumerate(bars.values()) if kind in group}
        axes.bar(list(heights), list(heights.values()), width, label=kind)
    axes.axhline(1.0, color="black", linewidth=0.8)
    middles = [x + width * (len(kinds) - 1) / 2 for x in range(len(bars))]
    axes.set_xticks(middles, [re.sub("(?<=-)|, |_", "\n", name) for name in bars], fontsize=8)
    axes.set_ylabel(label)
    axes.set_title(device, fontsize=9)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write(folder: pathlib.Path, plot: Callable[[pathlib.Path], list[str]] = plot_all) -> pathlib.Path:
    """Writes the page and its plots into the folder."""
    path = folder / "README.md"
    path.write_text(page(folder, plot(folder)))
    return path


def main() -> None:
    print(write(commands.parser(__doc__).parse_args().out))


if __name__ == "__main__":
    main()
