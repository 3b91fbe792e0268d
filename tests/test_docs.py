"""The outputs in the documentation are those of the current program."""

from __future__ import annotations

import ast
import re

import jax
import jax.numpy as jnp
import pytest

import mpjax
from docs.make import FOLDER, MEASURED, NOT_RUN, PAGES, blocks, made

# Pages whose rows come in another order before JAX 0.12, or name what is kept by another operation (tanh's derivative
# has the primitive `one_minus_square` there, and a `sub` before), or that print what an older XLA plans otherwise.
OF_NEWEST = {"distributed.md", "inspection/audit.md", "inspection/plan.md", "troubleshooting/not_faster.md"}


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
        pytest.skip("an older JAX orders or names the rows of this page otherwise")
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


# Sentences that were false once, each with what it claims.


def page(name):
    return (FOLDER / name).read_text()


def test_the_override_for_norms_matches_in_every_library():
    (policy,) = re.findall(r'`"(p=bf16[^"`]*=>float32)"`', page("guides/inference.md"))
    params = {"LayerNorm_0": {"scale": jnp.ones(4)}, "layers": [{"norm": jnp.ones(4)}], "Dense_0": jnp.ones((4, 4))}
    cast = mpjax.get_policy(policy).cast_to_param(params)  # a pattern without a match is a warning, an error here
    assert {leaf.dtype.name for leaf in jax.tree.leaves((cast["LayerNorm_0"], cast["layers"]))} == {"float32"}
    assert cast["Dense_0"].dtype == jnp.bfloat16


def test_commands_for_scripts_without_an_optimizer_of_optax_cast_their_gradients():
    commands = re.findall(r"python -m mpjax run [^`]*keras[^`]*", page("quickstart/keras.md"))
    assert commands
    assert all("--any-gradient" in command and "mixed_bfloat16" in command for command in commands)


def test_the_calls_of_torch_are_those_of_its_current_interface():
    calls = re.findall(r"torch\.amp\.(?:custom_fwd|custom_bwd|autocast)\(([^)]*)\)", page("coming_from/torch.md"))
    assert calls
    assert all("device_type" in call for call in calls)


def test_every_block_runs():
    # The code for an exported file runs on an export, in tests/examples/imagenet/test_checkpoints.py.
    assert {path.name for path in FOLDER.rglob("*.md") if NOT_RUN in path.read_text()} == {"training_scripts.md"}
