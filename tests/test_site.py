"""The parts of the documentation that are generated from the program, and the site as a whole."""

from __future__ import annotations

import re
import sys

import pytest
import yaml

import mpjax
from docs import hooks
from mpjax.program.primitives import TABLE

ROOT = hooks.ROOT
DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """YAML without the tags of MkDocs."""


def nav():
    """The pages of the site: those in the navigation, and those that only other pages link to."""

    def pages(node):
        if isinstance(node, str):
            return [node]
        children = node.values() if isinstance(node, dict) else node
        return [page for child in children for page in pages(child)]

    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    return [*pages(settings["nav"]), *settings["not_in_nav"].split()]


@pytest.mark.skipif(sys.version_info < (3, 13), reason="argparse prints help texts otherwise before Python 3.13")
@pytest.mark.parametrize("page", [p for p in sorted(DOCS.rglob("*.md")) if hooks.MADE.search(p.read_text())], ids=str)
def test_generated_parts_of_pages_are_current(page):
    assert hooks.filled(page.read_text()) == page.read_text(), f"run: python -m docs.make {page.relative_to(DOCS)}"


def test_every_public_name_is_on_a_page_of_the_reference():
    pages = [hooks.filled(p.read_text(), hooks.PARTS | hooks.ON_SITE) for p in (DOCS / "reference").glob("*.md")]
    shown = re.findall(r"^::: mpjax\.(\w+)$", "\n".join(pages), re.MULTILINE)
    assert sorted(shown) == hooks.public_names()
    assert {*mpjax.__all__} <= {*shown}
    inspections = re.findall(r"^::: mpjax\.inspection\.(\w+)$", "\n".join(pages), re.MULTILINE)
    assert {*inspections} | {*mpjax.__all__} >= {*mpjax.inspection.__all__}


def test_rules_table_has_each_primitive_once_in_its_list():
    table, _, _ = hooks.rules().partition("| risk")
    rows = {op: re.findall(r"`([a-z][\w-]*)`", cells) for op, cells in re.findall(r"\*\*(\w+)\*\*(.*)", table)}
    found = {name: op for op, names in rows.items() for name in names if name in TABLE}
    assert found == {name: row.op.value for name, row in TABLE.items()}


def test_command_line_page_has_every_command_and_option():
    from mpjax.inspection.tools import TOOLS

    text = hooks.commands()
    for tool in TOOLS:
        assert f"## `python -m mpjax {tool.name}`" in text
        assert all(option.flag in text for option in tool.options)
    assert "--dry-run" in text


def test_versions_page_has_every_dependency():
    assert all(name in hooks.versions() for name in ("| jax | `>=0.10` | 0.10.0 |", "| flax |", "| optax |", "`plot`"))


def test_every_page_is_in_the_navigation():
    assert sorted(nav()) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_links_have_targets(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path = target.partition("#")[0]
        if not path or re.match(r"\w+:", path) or path.startswith("figures/results/"):
            continue
        assert (page.parent / path).exists(), target


def test_links_out_of_the_documentation_lead_somewhere_on_the_site():
    pages = {hooks._anchor(title) for title in hooks._sections()}
    for path in DOCS.rglob("*.md"):
        depth = len(path.relative_to(DOCS).parts) - 1
        text = hooks.with_links_of_site(hooks.filled(path.read_text(), hooks.PARTS | hooks.ON_SITE), depth)
        assert f"]({'../' * (depth + 1)}" not in text, path
        assert {*re.findall(rf"\]\({'../' * depth}results/([\w-]+)\.md\)", text)} <= pages, path


def test_every_page_starts_with_its_title_and_a_paragraph():
    for page in DOCS.rglob("*.md"):
        title, blank, first, *_ = page.read_text().splitlines()
        assert re.match(r"# \S", title), page
        assert not blank, page
        assert first, page


def right_column(page):
    """The code of the right column of a page's table, in order."""
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row.rsplit(" | ", 1)[1])]


@pytest.mark.standard_promotion
def test_every_call_of_the_table_of_loss_scaling_runs():
    page = (DOCS / "guides" / "loss_scaling.md").read_text()
    table = page[: page.index("```python")]
    namespace = {}
    exec(re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1], namespace)
    namespace |= {"new": namespace["params"], "old": namespace["params"], "grads": namespace["params"]}
    ran = right_column(table)
    for code in ran:
        exec(compile(code, code, "exec"), namespace)
    assert len(ran) == 7


COMING_FROM = sorted((DOCS / "coming_from").glob("*.md"))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("path", COMING_FROM, ids=lambda path: path.stem)
def test_every_mpjax_line_beside_another_librarys_runs(path):
    page = path.read_text()
    namespace = {}
    exec(re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1], namespace)
    ran = right_column(page)
    for code in ran:
        exec(compile(code, f"{path.name}: {code}", "exec"), namespace)
    assert len(ran) >= 8
    assert "apply_gradients" in " ".join(ran)
