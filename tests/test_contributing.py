"""CONTRIBUTING.md: its eight walkthroughs give their stated results, and edit only the files that they name."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys

import mpjax

ROOT = pathlib.Path(mpjax.__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
WALKTHROUGHS = {
    title: re.findall("`([^`]+)`", files) for title, files in re.findall(r"^### ([^:\n]+): (.+)$", TEXT, re.M)
}

NEW_FILE, LAST_LINE = "", "$"
# For each walkthrough, the text to add to a file, after the line that begins with the first string; or a word of that
# line, and the word in its place.
EDITS = {
    "Add a primitive": {"mpjax/program/primitives.txt": ("exp2   ", "exp3   deny   outputs   risk=exp")},
    "Keep an output in half": {"mpjax/program/primitives.txt": ("logistic ", "saturating", "outputs")},
    "Add a primitive with a sub-jaxpr": {
        "mpjax/program/primitives.txt": ("composite  ", "noted_call   enter   -   call"),
        "mpjax/casting/higher_order/calls.py": (
            "CALLS = {",
            '    "noted_call": _call(lambda fun, params: __import__("noted").noted(fun, params["note"])),',
        ),
    },
    "Add a format of matmul operands": {
        "mpjax/program/formats.py": (
            "FORMATS = ",
            'WIDE8 = Format("wide8", "w8", E5M2, compute="bfloat16", scaling="tensor", cotangents={"e5m2": E5M2})\n'
            "FORMATS += (WIDE8,)",
        )
    },
    "Add an inspection": {
        "mpjax/inspection/tools.py": (
            "TOOLS = (",
            'Tool("count", "mpjax.inspection.counting.count", "How many?", CALL),',
        ),
        "mpjax/inspection/counting/__init__.py": (NEW_FILE, ""),
        "mpjax/inspection/counting/count.py": (
            NEW_FILE,
            "import jax\ndef count(fun, *args):\n    return len(jax.make_jaxpr(fun)(*args).eqns)\n",
        ),
    },
    "Add a model to the image script": {
        "examples/imagenet/models.py": ("KINDS: ", '    "resnet11": _small_resnet(1, 1, 2),')
    },
    "Add a loss-scale rule": {
        "mpjax/loss_scale/transformation.py": (
            LAST_LINE,
            '__all__ += ["growing_loss_scale"]\n'
            "def growing_loss_scale(inner, scale):\n"
            "    return _loss_scaled(inner, scale, lambda s, grow, back_off: s * 2, 2**31 - 1, 1, None, False)\n",
        ),
        "mpjax/__init__.py": ('        "loss_scale": ', "            growing_loss_scale"),
    },
}

# What a user sees after the walkthroughs.
OUTCOME = """
import sys, types
import jax, jax.numpy as jnp, optax, mpjax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from examples.imagenet.models import create_model

exp3 = Primitive("exp3")
exp3.def_abstract_eval(lambda x: x)
exp3.def_impl(jnp.exp)
mlir.register_lowering(exp3, mlir.lower_fun(jnp.exp, multiple_results=False))
plan = mpjax.explain(lambda x, w: exp3.bind(x @ w) @ w, jnp.ones((4, 4)), jnp.ones((4, 4)))
(row,) = [row for row in plan.rows if row.op == "exp3"]
assert "deny" in row.why, row

one = jnp.ones((4, 4))
gated = lambda operation: lambda x, w: (operation(x @ w) * (x @ w)) @ w
stored = {
    name: [row.dtypes_out for row in mpjax.explain(gated(getattr(jax.lax, name)), one, one).rows if row.op == name]
    for name in ("logistic", "tanh")
}
assert stored == {"logistic": [("float16",)], "tanh": [("float32",)]}, stored

# A library's primitive: it calls a function, with a note.
noted_call = Primitive("noted_call")
noted_call.multiple_results = True
noted_call.def_abstract_eval(lambda *avals, jaxpr, note: jaxpr.out_avals)
noted_call.def_impl(lambda *args, jaxpr, note: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args))

def noted(fun, note):
    return lambda *args: noted_call.bind(*args, jaxpr=jax.make_jaxpr(fun)(*args), note=note)

sys.modules["noted"] = types.SimpleNamespace(noted=noted)
fun = lambda x: noted(lambda x: (jnp.exp(x @ x),), "kept")(x)[0]
assert mpjax.explain(fun, jnp.ones((4, 4))).half_share == 1
(eqn,) = [e for e in jax.make_jaxpr(mpjax.autocast(fun))(jnp.ones((4, 4))).eqns if e.primitive is noted_call]
assert eqn.params["note"] == "kept" and "f16[4,4] = dot_general" in str(eqn)
fault = mpjax.find_nonfinite(fun, jnp.full((4, 4), 1e9))
assert fault.primitive == "exp" and not fault.unseen

policy = mpjax.get_policy("mixed_wide8")
assert mpjax.get_policy(str(policy)) == policy == mpjax.get_policy("p=f32,c=bf16,m=w8,o=f32")
wide8 = mpjax.autocast(lambda w, x: ((x @ w) @ w) @ w, policy, rules=mpjax.Rules(float8=mpjax.Float8(min_size=(0, 0))))
rows = [row for row in mpjax.explain(wide8, jnp.ones((16, 16)), jnp.ones((16, 16))).rows if row.flops]
assert [row.dtypes_in[0] for row in rows] == ["bfloat16", "float8_e5m2", "bfloat16"], rows
assert ["wide8" in row.why for row in rows] == [True] * 3 and "float8" not in rows[0].why, rows

assert mpjax.count(lambda x: x + 1, 1.0) == 1

assert create_model("resnet11", num_classes=10).stage_sizes == (1, 1, 2)

tx = mpjax.growing_loss_scale(optax.sgd(0.1), 4.0)
_, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))
assert state.loss_scale == 8 and state.last_finite
print("done")
"""


def test_every_walkthrough_of_the_page_is_tested():
    assert set(WALKTHROUGHS) == {*EDITS, "Support a JAX version"}
    for walkthrough, edits in EDITS.items():
        edited = {re.sub("inspection/counting/.*", "inspection/<tool>/", path) for path in edits}
        assert edited == set(WALKTHROUGHS[walkthrough]), walkthrough
    assert all(len(files) <= 2 for files in WALKTHROUGHS.values())
    assert len(TEXT.split()) < 750  # one page


def test_the_walkthroughs_give_their_stated_results(tmp_path):
    for folder in ("mpjax", "examples", "perf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for edits in EDITS.values():
        for name, (after, *added) in edits.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            lines = [] if after == NEW_FILE else path.read_text().splitlines()
            places = [i + 1 for i, line in enumerate(lines) if line.startswith(after)]
            (place,) = [len(lines)] if after in (NEW_FILE, LAST_LINE) else places
            if len(added) == 1:
                lines.insert(place, *added)
            else:
                lines[place - 1] = lines[place - 1].replace(*added)
            path.write_text("\n".join(lines) + "\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", OUTCOME]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


def depends_on_versions(node):
    """Whether a piece of code imports the private part of JAX, or reads its version."""
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("jax._src") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("jax._src")
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("jax.__version__", "jax.__version_info__")


def test_only_compat_depends_on_jax_versions():
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "mpjax").rglob("*.py")
        if any(map(depends_on_versions, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == set(WALKTHROUGHS["Support a JAX version"])


def test_the_layout_is_the_one_that_imports_are_checked_against():
    from tests.test_package import MAY_IMPORT

    table = dict(re.findall(r"^\| `(\w+)/` \|[^|]*\|([^|]*)\|$", TEXT, re.M))
    for folder, may in MAY_IMPORT.items():
        assert set(re.findall(r"`(\w+)`", table[folder])) == may, folder
