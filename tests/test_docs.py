"""The outputs in the documentation are those of the current program."""

from __future__ import annotations

import ast
import re

import jax
import pytest

from docs.make import FOLDER, MEASURED, PAGES, blocks, made

# Pages whose rows of equal weight come in another order before JAX 0.12.
OF_NEWEST = {"distributed.md"}


def text_of(page):
    """A page without its numbers and the widths of its columns: these differ between versions of JAX."""
    return re.sub(r"─+", "─", re.sub(r"[ …]+", " ", re.sub(r"\d[\d.,]*( [kMGT]?(FLOP|B)\b)?", "#", page)))


def numbers_of(page):
    """The numbers of a page, without those of library lines and inside words."""
    found = re.findall(r"(?<![\w.:])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", page)
    return [float(number.replace(",", "")) for number in found]


@pytest.mark.standard_promotion  # as readers have it
@pytest.mark.parametrize("name", PAGES)
def test_outputs_match_the_program(name):
    if name in OF_NEWEST and jax.__version_info__ < (0, 12):
        pytest.skip("an older JAX orders the rows of this page otherwise")
    page = (FOLDER / name).read_text()
    now = made(page, measured=False, folder=(FOLDER / name).parent)
    assert text_of(now) == text_of(page), f"run: python -m docs.make {name}"
    if jax.__version_info__ >= (0, 12):  # the pages are of the newest version
        assert numbers_of(page) == pytest.approx(numbers_of(now), rel=0.05), f"run: python -m docs.make {name}"


def test_measured_outputs_are_kept_unless_requested():
    page = f"{MEASURED}\n```python\nprint(1)\n```\n\n{MEASURED}\n```text\n2\n```\n"
    assert made(page, measured=False) == page
    assert made(page).endswith("```text\n1\n```\n")
    command = "```console\n$ python -c 'print(1 + 1)'\n"
    assert made(f"{MEASURED}\n{command}```\n").endswith(f"{command}2\n```\n")


def test_every_output_block_of_a_page_is_filled():
    for name in PAGES:
        for block in blocks((FOLDER / name).read_text()):
            assert block.text.strip(), (name, block)
            assert len(block.text.splitlines()) > 1 or block.language != "console", (name, block)


def test_all_code_of_a_page_is_tested():
    for path in FOLDER.rglob("*.md"):
        fences = re.findall(r"^([ \t]*)```(\w*)\n.*?^[ \t]*```$", path.read_text(), re.DOTALL | re.MULTILINE)
        assert {language for _, language in fences} <= {"python", "console", "text", "sh", "toml", "diff"}, path
        assert not [indent for indent, _ in fences if indent], f"{path}: an indented block is not run"


@pytest.mark.parametrize("name", PAGES)
def test_imports_of_measured_blocks_exist(name, monkeypatch):
    monkeypatch.syspath_prepend((FOLDER / name).parent)
    for block in blocks((FOLDER / name).read_text()):
        if block.language == "python" and block.mark == MEASURED:
            imports = [node for node in ast.parse(block.text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
            exec(compile(ast.Module(imports, []), name, "exec"), {})
