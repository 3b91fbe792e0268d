"""The package as a whole: what importing it does, its public names, its types."""

import ast
import builtins
import doctest
import graphlib
import inspect
import json
import pathlib
import subprocess
import sys

import pytest

import mpjax

ROOT = pathlib.Path(mpjax.__file__).parent.parent


# What a new process sees, step by step: each step imports more. (A process takes two seconds to import JAX.)
STEPS = """
import importlib, json, pkgutil, sys
seen = {}
import mpjax
seen["imported"] = [m for m in sys.modules if m.startswith("mpjax.inspection.") or m in ("jax", "flax")]
seen["offered"] = [name for name in ("autocast", "audit") if name in dir(mpjax)]

import jax, jax.numpy as jnp, optax
from jax._src import config, xla_bridge
importlib.reload(mpjax)  # as if it were imported after JAX
contexts = len(config.trace_context())
tx = mpjax.master_weights(mpjax.dynamic_loss_scale(optax.sgd(0.1)), "O2")
seen["computed"] = xla_bridge.backends_are_initialized()
p = jnp.ones(2, jnp.float16); s = tx.init(p)
mpjax.apply_gradients(tx, mpjax.grad(lambda p: p.sum(), s)(p), s, p)
seen["libraries"] = [m for m in ("flax", "haiku", "equinox") if m in sys.modules]

for module in pkgutil.walk_packages(mpjax.__path__, "mpjax."):
    if module.name != "mpjax.__main__":
        importlib.import_module(module.name)
seen["late contexts"] = len(config.trace_context()) - contexts
split = [(name.rpartition("."), module) for name, module in sys.modules.items() if name.startswith("mpjax.")]
seen["shadowed"] = [name for (parent, _, name), module in split if getattr(sys.modules[parent], name) is not module]
seen["functions"] = callable(mpjax.audit) and callable(mpjax.inspection.audit)
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_and_using_mpjax_does_no_more_than_needed(seen):
    # `python -m mpjax run` may not import JAX before the script sets its environment variables.
    assert seen["imported"] == ["mpjax.inspection.tools"]
    assert seen["offered"] == ["autocast", "audit"]
    assert seen["computed"] is False
    # JAX would trace and compile a function again that was traced before a context is made.
    assert seen["late contexts"] == 0
    assert seen["libraries"] == []  # Flax is not loaded.
    assert (ROOT / "mpjax" / "py.typed").exists()  # Type checkers look for it.


def test_no_name_means_a_module_and_something_else(seen):
    assert seen["shadowed"] == []
    assert seen["functions"]


def test_public_names_have_docstrings_with_examples():
    without_example = {"LossScaleState", "check_progress"}
    for name in dir(mpjax):
        value = getattr(mpjax, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        assert value.__doc__, name
        is_state = inspect.isclass(value) and issubclass(value, tuple) and name.endswith("State")
        if name in without_example or is_state or (inspect.isclass(value) and issubclass(value, Exception)):
            continue
        assert ">>>" in value.__doc__, f"{name} has no doctest example"


def test_examples_import_what_they_use():
    # Doctests see the names of their module; a reader who copies one does not.
    for name in (name for name in dir(mpjax) if not name.startswith("_")):
        examples = doctest.DocTestParser().get_examples(getattr(mpjax, name).__doc__ or "")
        nodes = [n for example in examples for n in ast.walk(ast.parse(example.source))]
        bound = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        bound |= {n.asname or n.name.partition(".")[0] for n in nodes if isinstance(n, ast.alias)}
        bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        bound |= {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        used = {n.id for n in nodes if isinstance(n, ast.Name)}
        assert not used - bound - {*vars(builtins)}, name


# The rooms of mpjax, from the ground floor up.
ROOMS = "program policy kernels casting modules loss_scale optimizer_state inspection launcher planning".split()


def names_imported(tree):
    """The names that code imports, also inside functions: `a.b` and `a.b.c` of `from a.b import c`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def rooms_imported_by(path):
    """The rooms that a file imports; in an `__init__`, not what type checkers alone see."""
    tree = ast.parse(path.read_text())
    if path.name == "__init__.py":
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECK" in ast.dump(node.test))
        ]
    return {name.split(".")[1] for name in names_imported(tree) if name.startswith("mpjax.")} & {*ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_imports_one_above_it(room):
    folder = ROOT / "mpjax" / room
    files = [*folder.rglob("*.py")] if folder.is_dir() else [folder.with_suffix(".py")]
    above = {*ROOMS[ROOMS.index(room) + 1 :]}
    assert not {str(path): found for path in files if (found := rooms_imported_by(path) & above)}


def files_imported_by(path):
    """The other files of mpjax that a file imports."""
    names = names_imported(ast.parse(path.read_text()))
    files = {ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("mpjax.")}
    return {file for file in files - {path} if file.exists()}


def test_no_file_is_imported_by_what_it_imports():
    folder = ROOT / "mpjax"
    graph = {file: files_imported_by(file) for file in folder.rglob("*.py")}
    assert sum(map(len, graph.values())) > 500
    # Flax's bridges put a Linen module into an NNX one, and the reverse.
    graph[folder / "modules" / "linen.py"].remove(folder / "modules" / "nnx.py")
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_only_code_for_modules_imports_flax():
    # Inside a function, where it handles a module.
    for path in (ROOT / "mpjax").rglob("*.py"):
        top_level = [n for n in ast.parse(path.read_text()).body if isinstance(n, (ast.Import, ast.ImportFrom))]
        names = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in top_level]
        assert path.parent.name == "modules" or not [n for n in names if n.startswith("flax")], path


def local_imports(path):
    """The packages of this repository that a file imports, also inside functions."""
    names = names_imported(ast.parse(path.read_text()))
    return {name.partition(".")[0] for name in names} & {*MAY_IMPORT, "tests"}


MAY_IMPORT = {
    "mpjax": set(),
    "perf": {"mpjax"},
    "testing": {"mpjax", "examples"},  # one ResNet, that of the image script
    "examples": {"mpjax", "perf"},
    "benchmarks": {"mpjax", "perf", "testing", "examples"},
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_of_the_repository_import_only_those_below(package):
    found = {path: local_imports(path) - MAY_IMPORT[package] - {package} for path in (ROOT / package).rglob("*.py")}
    assert found
    assert not {path: names for path, names in found.items() if names}
