"""One table of inspections: names, command line and documentation agree with it."""

import ast
import importlib
import pathlib

import pytest

import mpjax
from mpjax.inspection import tools

ROOT = pathlib.Path(mpjax.__file__).parent.parent


@pytest.mark.parametrize("tool", tools.TOOLS, ids=lambda tool: tool.function)
def test_each_name_is_public_and_the_module_defines_it(tool):
    for name in tool.names:
        assert (
            getattr(mpjax, name)
            is getattr(mpjax.inspection, name)
            is getattr(importlib.import_module(tool.module), name)
        )


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "mpjax" / "inspection" / "__init__.py").read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    named = {n.asname: i.module for i in checked.body if isinstance(i, ast.ImportFrom) for n in i.names}
    assert named == tools.HOMES


def test_the_documentation_has_each_tool_with_its_question():
    page = (ROOT / "docs" / "inspection.md").read_text()
    for tool in tools.TOOLS:
        assert f"| {tool.question} | `mpjax.{tool.function}`" in page, tool
    commands = "|".join(tool.command for tool in tools.TOOLS)
    assert f"python -m mpjax {commands} module:function" in page
