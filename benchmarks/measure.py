"""How every benchmark here measures and records: interleaved rounds in one process, medians, the environment."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

import mpjax

RESULTS = pathlib.Path(__file__).parent / "results"
# Of compiled programs, for runs on a GPU, where they take minutes.
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "mpjax-benchmarks"


def interleaved(runs: dict[str, Callable[[], Any]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of each run in each round; a round times every run once, so that drift hits all alike.

    The order turns from round to round: what ran before leaves its traces in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(warmup + rounds):
        names = names[1:] + names[:1] if i % 2 else names[::-1]
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(runs[name]())
            if i >= warmup:
                times[name].append(time.perf_counter() - start)
    return times


def ratios(times: dict[str, list[float]], base: str) -> dict[str, dict[str, Any]]:
    """For each run its median milliseconds, and the median and quartiles of its per-round ratio to `base`."""
    out: dict[str, dict[str, Any]] = {}
    for name, values in times.items():
        per_round = [a / b for a, b in zip(values, times[base], strict=True)]
        low, middle, high = statistics.quantiles(per_round, n=4)
        out[name] = {
            "milliseconds": round(statistics.median(values) * 1e3, 3),
            "ratio": round(middle, 3),
            "ratio_quartiles": [round(low, 3), round(high, 3)],
        }
    return out


def environment() -> dict[str, Any]:
    """What a figure depends on beside the code: device, versions, the command."""
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind if device.platform != "cpu" else f"CPU, {os.cpu_count()} cores",
        "platform_version": device.client.platform_version.splitlines()[0],
        "jax": jax.__version__,
        "mpjax": mpjax.__version__,
        "python": platform.python_version(),
        "command": f"python -m {_module_name()} {' '.join(_arguments())}".strip(),
    }


def save(name: str, results: Any, folder: pathlib.Path = RESULTS) -> pathlib.Path:
    """Writes `NAME_PLATFORM.json` in the folder of the results, with the environment beside the results."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{jax.default_backend()}.json"
    path.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")
    return path


def previous(name: str, folder: pathlib.Path = RESULTS) -> Any:
    """The results that `save` would replace, for a run that adds to them; empty if they are of other versions."""
    path = folder / f"{name}_{jax.default_backend()}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    now = environment()
    same = all(found.get("environment", {}).get(key) == now[key] for key in ("device", "jax", "mpjax"))
    return found["results"] if same else {}


# Where results go, and what part of them a run adds, changes no figure.
_PARTS = {"--out": 1, "--programs": None, "--missing": 0, "--bound": None, "--dtypes": None}


def _arguments() -> list[str]:
    """The arguments of this process without `_PARTS`, which take so many values (None: all up to an option)."""
    kept, skipped = [], 0
    for argument in sys.argv[1:]:
        if argument.startswith("--"):
            values = _PARTS.get(argument, 0)
            skipped = len(sys.argv) if values is None else values
            if argument in _PARTS:
                continue
        elif skipped:
            skipped -= 1
            continue
        kept.append(argument)
    return kept


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else pathlib.Path(sys.argv[0]).stem
