"""The table of primitives against the primitives that the installed version of JAX registers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mpjax
from mpjax.casting.higher_order import HIGHER_ORDER
from mpjax.program import compat
from mpjax.program.primitives import TABLE, Op, primitive


def of_jax():
    """The primitives of JAX alone: other libraries register theirs when the tests import them."""
    program = "from mpjax.program import compat; print(*compat.known_primitives())"
    root = Path(mpjax.__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_every_primitive_of_this_jax_has_a_row():
    unknown = sorted(of_jax() - set(TABLE))
    assert not unknown, f"no row in mpjax/program/primitives.txt: {', '.join(unknown)}"


_ELSEWHERE = {"pallas_call", "fused_attention", "fused_cross_entropy", "softmax_exponentials", "softmax_product"}


def test_every_row_is_a_primitive_of_this_jax():
    # Pallas registers its primitive when it is imported; the others are of mpjax.
    rows = {name for name, row in TABLE.items() if not row.some_versions} - _ELSEWHERE
    removed = sorted(rows - compat.known_primitives())
    assert not removed, f"rows of primitives that this JAX lacks: {', '.join(removed)}"


def test_every_entered_primitive_has_its_rules():
    assert {name for name, row in TABLE.items() if row.op is Op.ENTER} == set(HIGHER_ORDER)


def test_unknown_primitive_is_opaque_and_named():
    assert primitive("of_somebody_else").op is Op.OPAQUE
    with pytest.raises(ValueError, match="'tanhh' is not a primitive of this JAX"):
        mpjax.Rules(deny=["tanhh"])


# Words of other vocabularies: options, statistics, parameters.
WORDS = {"attention", "cross_entropy", "call", "copy", "max", "unfused", "unscaled"}


def names_in(tree):
    """The primitive names that a syntax tree compares with, matches, or holds in a tuple, dict, list or set."""
    for node in ast.walk(tree):
        match node:
            case ast.Dict(keys=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                pass
            case ast.Compare(left=left, comparators=others):
                parts = [left, *others]
            case ast.MatchValue(value=value):
                parts = [value]
            case _:
                continue
        yield from (part.value for part in parts if isinstance(part, ast.Constant) and part.value in TABLE)


@pytest.mark.parametrize(
    "code",
    ['x in ("exp", "log")', 'x in ["exp"]', 'x in {"exp"}', '{"exp": f}', 'x == "exp"', 'frozenset({"exp", "log"})'],
)
def test_names_in_any_form_are_seen(code):
    assert "exp" in names_in(ast.parse(code))


def test_no_other_file_knows_primitives_by_name_without_a_reason():
    """What mpjax knows about a primitive stands in the table; a file that reads the form of one says so."""
    for path in Path(mpjax.__file__).parent.rglob("*.py"):
        if path.name == "primitives.py":
            continue
        text = path.read_text()
        found = set(names_in(ast.parse(text))) - WORDS
        reason = "\n# By name: " in text
        assert bool(found) == reason, f"{path}: {sorted(found)}: a trait in primitives.txt, or `# By name: why`"
