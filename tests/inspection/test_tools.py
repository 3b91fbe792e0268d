"""One table of inspections: names, command line and documentation agree with it."""

import ast
import importlib
import inspect
import pathlib

import pytest

import mpjax
from mpjax.inspection import tools

ROOT = pathlib.Path(mpjax.__file__).parent.parent


@pytest.mark.parametrize("tool", tools.TOOLS, ids=lambda tool: tool.name)
def test_each_name_is_public_and_the_module_defines_it(tool):
    module = importlib.import_module(tool.module)
    assert getattr(mpjax, tool.name) is getattr(mpjax.inspection, tool.name) is getattr(module, tool.name)
    for name in tool.classes:
        assert getattr(mpjax.inspection, name) is getattr(module, name)
        assert not hasattr(mpjax, name)


@pytest.mark.parametrize("tool", tools.TOOLS[:-1], ids=lambda tool: tool.name)
def test_tools_have_one_signature(tool):
    first, args, *options = inspect.signature(getattr(mpjax, tool.name)).parameters.values()
    assert (first.kind, args.kind) == (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    assert {option.kind for option in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert "kwargs" in [option.name for option in options]


def test_star_imports_have_all_public_names():
    names = {*tools.FUNCTIONS, *tools.CLASSES}
    assert names == set(mpjax.inspection.__all__)
    assert {*tools.FUNCTIONS, "autocast", "Policy", "value_and_grad", "with_policy"} <= set(mpjax.__all__)
    assert not set(tools.CLASSES) & set(mpjax.__all__)


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "mpjax" / "inspection" / "__init__.py").read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    named = {n.asname: i.module for i in checked.body if isinstance(i, ast.ImportFrom) for n in i.names}
    assert named == tools.FUNCTIONS | tools.CLASSES
    tree = ast.parse((ROOT / "mpjax" / "__init__.py").read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = (i for i in checked.body if isinstance(i, ast.ImportFrom))
    named = {n.asname for i in imports if i.module == "mpjax.inspection" for n in i.names}
    assert named == set(tools.FUNCTIONS)


def test_the_documentation_has_each_tool_with_its_question():
    page = (ROOT / "docs" / "inspection" / "index.md").read_text()
    for tool in tools.TOOLS:
        assert f"| {tool.question} | [`mpjax.{tool.name}`](" in page, tool
    commands = "|".join(tool.name for tool in tools.TOOLS)
    assert f"python -m mpjax {commands} module:function" in page
