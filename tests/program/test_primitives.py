"""The table of primitives against the primitives that the installed version of JAX registers."""

from __future__ import annotations

import re
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


def test_every_row_is_a_primitive_of_this_jax():
    # Pallas registers its primitive when it is imported; the fused attention is of mpjax.
    rows = {name for name, row in TABLE.items() if not row.some_versions} - {"pallas_call", "fused_attention"}
    removed = sorted(rows - compat.known_primitives())
    assert not removed, f"rows of primitives that this JAX lacks: {', '.join(removed)}"


def test_every_entered_primitive_has_its_rules():
    assert {name for name, row in TABLE.items() if row.op is Op.ENTER} == set(HIGHER_ORDER)


def test_unknown_primitive_is_opaque_and_named():
    assert primitive("of_somebody_else").op is Op.OPAQUE
    with pytest.raises(ValueError, match="'tanhh' is not a primitive of this JAX"):
        mpjax.Rules(deny=["tanhh"])


def test_no_other_file_has_a_set_of_primitive_names():
    names = "|".join(sorted(map(re.escape, TABLE), key=len, reverse=True))
    word = re.compile(rf"[\"' ](?:{names})(?=[\"' ])")
    for path in Path(mpjax.__file__).parent.rglob("*.py"):
        if path.name == "primitives.py" or path.name.startswith("hlo"):  # XLA has opcodes of its own.
            continue
        for found in re.findall(
            r"frozenset\(\s*(?:\"\"\"|\"|\{)(.*?)(?:\"\"\"|\"\s*\.split|\})", path.read_text(), re.S
        ):
            assert len(word.findall(f" {found} ")) < 3, f"{path}: {found}"
