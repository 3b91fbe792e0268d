"""Runs JAX's and Flax's test files under autocast, and again without it, and in `jax.jit`, those that fail."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any

from testing.foreign.wrapping import BY_HAND, DTYPE, MODE, REPORT

CONTROL_FLOW = "control flow on values"
# Operations that a traced function does not support: `if x > 0`, `float(x)`, `np.asarray(x)`.
_CONCRETE = (
    "TracerBoolConversionError",
    "ConcretizationTypeError",
    "TracerIntegerConversionError",
    "TracerArrayConversionError",
    "NonConcreteBooleanIndexError",
)


def run_tests(path: pathlib.Path, tests: list[str], mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """The outcome and the cause of each named test of a file, or of all tests if none is named."""
    found = (entry for entry in _entries(path, tests, mode, options) if "outcome" in entry)
    return {entry["test"]: (entry["outcome"], entry["cause"]) for entry in found}


def _entries(path: pathlib.Path, tests: list[str], mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the plugin recorded."""
    root = pathlib.Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report"
        environment = os.environ | {MODE: mode, REPORT: str(report), DTYPE: options.dtype, "PYTHONPATH": str(root)}
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        environment["JAX_PLATFORMS"] = "cpu"
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # loading other installed plugins takes seconds
        command = [sys.executable, "-m", "pytest", "-q", "-p", "testing.foreign.wrapping", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=", "-W", "ignore", "--rootdir", str(path.parent)]
        command += ["-k", options.k] if options.k and not tests else []
        command += [f"{path}::{test.partition('::')[2]}" for test in tests] or [str(path)]
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, timeout=options.seconds, capture_output=True, text=True
            )
            if not report.exists():
                raise SystemExit(f"{path}: pytest ran no tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        except subprocess.TimeoutExpired:
            print(f"{path.name}, {mode}: stopped after {options.seconds:.0f} s", flush=True)
        return [*map(json.loads, report.read_text().splitlines())] if report.exists() else []


def limitation_of(cause: str) -> str:
    """Why a test that fails with its functions in `jax.jit` can't pass under autocast."""
    return CONTROL_FLOW if any(name in cause for name in _CONCRETE) else "another limitation of JAX"


def kind_of(cause: str) -> str:
    """A key that groups the causes of one fault: the exception and the line of mpjax."""
    where = cause.rpartition(" at ")[2] if re.search(" at (casting|kernels|program)", cause) else ""
    return f"{re.sub(r'[0-9]+|0x[0-9a-f]+', '_', cause)[:80]} {where}".strip()


def files_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """The test files in a folder."""
    folder = folder.resolve()  # Each file runs in a folder of its own.
    return sorted([*folder.rglob("*_test.py"), *folder.rglob("test_*.py")])


def examine(path: pathlib.Path, options: argparse.Namespace) -> dict[str, Any]:
    """The results of a file: counts, and the causes of the tests that only autocast fails, or `jax.jit` too."""
    wrapped = run_tests(path, [], "wrapped", options)
    failed = {test: cause for test, (outcome, cause) in wrapped.items() if outcome == "failed"}
    plain_passes = _with_outcome("plain", path, list(failed), options, "passed")
    jit_failures = _with_outcome("jitted", path, list(plain_passes), options, "failed")
    return {
        "passed": sum(outcome == "passed" for outcome, _ in wrapped.values()),
        "skipped": sum(outcome == "skipped" for outcome, _ in wrapped.values()),
        "also without autocast": len(failed) - len(plain_passes),
        "also in jax.jit": {test.partition("::")[2]: cause for test, cause in jit_failures.items()},
        "only under autocast": {
            test.partition("::")[2]: failed[test] for test in plain_passes if test not in jit_failures
        },
    }


def errors_by_hand(path: pathlib.Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """For each test, the errors of its programs' values and gradients, divided by those of casts by hand."""
    found: dict[str, list[float]] = {}
    for entry in _entries(path, [], BY_HAND, options):
        ratios = [entry[name] for name in ("values", "gradient") if entry.get(name) is not None]
        if ratios:
            found.setdefault(entry["test"].partition("::")[2], []).extend(ratios)
    return found


def _with_outcome(mode: str, path: pathlib.Path, tests: list[str], options: argparse.Namespace, outcome: str) -> Any:
    """The tests that have this outcome in another mode, with the cause."""
    found = run_tests(path, tests, mode, options) if tests else {}
    return {test: found[test][1] for test in tests if found.get(test, ("",))[0] == outcome}
