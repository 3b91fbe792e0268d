"""The scripts of the documentation's quick starts run as users run them, in a process of their own, and learn."""

from __future__ import annotations

import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "quickstart"
# What `main` is called with, and the least that it must reach: guessing gives 10 % of the digits, or falls in 22 steps.
SCRIPTS = {
    "nnx": (1, 0.5),
    "linen": (1, 0.5),
    "batch_stats": (1, 0.3),
    "haiku": (1, 0.4),
    "equinox": (1, 0.3),
    "plain_jax": (1, 0.5),
    "keras": (1, 0.3),
    "sharded": (1, 0.2),
    "reinforcement": (60, 30.0),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_learns(name):
    if name == "keras":
        pytest.importorskip("keras")
    length, minimum = SCRIPTS[name]
    code = f"import runpy; print(runpy.run_path({str(FOLDER / f'train_{name}.py')!r})['main']({length}))"
    # Users have none of this process's flags and simulated devices.
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    ours |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiles quicker
    environment = ours | {"PYTHONPATH": str(FOLDER.parents[1])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert float(run.stdout.split()[-1]) > minimum
    assert "skipped steps 0" in run.stdout


@pytest.mark.standard_promotion
def test_the_changes_for_tpus_apply_to_the_sharded_script(tmp_path, capsys):
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", (FOLDER / "tpu.md").read_text(), re.DOTALL | re.MULTILINE)
    script = (FOLDER / "train_sharded.py").read_text()
    for hunk in re.findall(r"(?:^-.*\n|^\+.*\n)+", diff, re.MULTILINE):
        before, after = (
            re.sub(r"^.", "", "".join(re.findall(rf"^\{sign}.*\n", hunk, re.MULTILINE)), flags=re.MULTILINE)
            for sign in "-+"
        )
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    path = tmp_path / "train_tpu.py"
    path.write_text(script)
    assert runpy.run_path(str(path))["main"](1) > 0.2


def test_every_script_is_tested():
    assert {f"train_{name}" for name in SCRIPTS} == {path.stem for path in FOLDER.glob("*.py")}
