"""A user's script keeps its types: pyright (strict) finds the two planted errors, and no other.

mypy checks the same script when it checks the package.
"""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "user_script.py"
ROOT = SCRIPT.parents[1]
# Types that JAX and optax lack, which a user cannot change.
OF_OTHERS = {"reportMissingTypeStubs": False, "reportUnknownMemberType": False}
# The planted errors are ignored for mypy.
SEEN = {"enableTypeIgnoreComments": False}


def planted():
    return {i + 1 for i, line in enumerate(SCRIPT.read_text().splitlines()) if "# error:" in line}


@pytest.mark.slow
def test_pyright_strict(tmp_path):
    pytest.importorskip("pyright")
    settings = {
        "typeCheckingMode": "strict",
        "include": ["user_script.py"],
        "extraPaths": [str(ROOT)],
        **OF_OTHERS,
        **SEEN,
    }
    (tmp_path / "user_script.py").write_text(SCRIPT.read_text())
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable, "--outputjson"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    if not run.stdout.startswith("{"):
        pytest.skip(f"pyright does not run here: {run.stderr[-200:]}")  # it fetches Node.js where there is none
    found = json.loads(run.stdout)["generalDiagnostics"]
    assert {d["range"]["start"]["line"] + 1 for d in found} == planted(), found
