"""A user's script keeps its types: pyright (strict) finds the two planted errors, and no other.

mypy checks the same script when it checks the package, and here the code of the documentation's pages.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from docs.make import FOLDER, blocks

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


# Errors of mypy in pages that no page can avoid, with what is wrong.
UNTYPED = {
    r"FrozenDict\[str, Mapping": "Linen's `apply` is typed as its result or, for `mutable=`, a tuple",
    r"hk\.TransformedWithState\? has no attribute": "Haiku names its own types as strings",
    r"PyTreeDef\?": "JAX's stub names no class for a tree's structure",
    r'"JitWrapped" has no attribute "_cache_size"': "JAX's count of a step's programs is not public",
}


@pytest.mark.slow
def test_code_of_pages_is_typed(tmp_path):
    """The blocks of each page as one module, whose lines are those of the page, and the scripts beside the pages."""
    pytest.importorskip("mypy")
    for path in (*FOLDER.rglob("*.md"), ROOT / "README.md"):
        page = path.read_text()
        lines = [""] * page.count("\n")
        for block in blocks(page):
            if block.language == "python":
                begin, code = page.count("\n", 0, block.begin), block.text.splitlines()
                lines[begin : begin + len(code)] = code
        name = "_".join(path.relative_to(ROOT).with_suffix("").parts)
        # A page goes on under the same names: its batch is a shape in one block and an array in the next. (As an option
        # for all modules, mypy would check the package again instead of reading what it found before.)
        lines.append("# mypy: allow-redefinition")
        (tmp_path / f"{name}.py").write_text("\n".join(lines))
    scripts = sorted(FOLDER.glob("*/*.py"))
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache", "--no-error-summary"]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *scripts, *tmp_path.glob("*.py")],
        env=os.environ | {"MYPYPATH": os.pathsep.join(map(str, [ROOT, *{script.parent for script in scripts}]))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    errors = [line for line in found.stdout.splitlines() if ": note:" not in line]
    assert not [line for line in errors if not any(re.search(known, line) for known in UNTYPED)], found.stderr
    assert {known for known in UNTYPED for line in errors if re.search(known, line)} == {*UNTYPED}
