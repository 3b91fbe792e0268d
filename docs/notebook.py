"""Runs a notebook and stores its outputs: `python -m docs.notebook [examples/half_precision.ipynb]`.

Cells run in one namespace, in order. A cell's outputs are what it prints, and its last expression as Jupyter shows it:
HTML where it has some, else text.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import pathlib
import sys
from typing import Any

NOTEBOOK = pathlib.Path(__file__).parents[1] / "examples" / "half_precision.ipynb"
Cell = dict[str, Any]


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with new outputs."""
    space: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = {id(cell): _outputs(cell, number, space) for number, cell in enumerate(code, 1)}
    cells = [{**cell, **outputs.get(id(cell), {})} for cell in notebook["cells"]]
    return {**notebook, "cells": cells}


def _outputs(cell: Cell, number: int, space: dict[str, Any]) -> Cell:
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, name = io.StringIO(), f"cell {number}"
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), space)
        value = eval(compile(ast.Expression(last.value), name, "eval"), space) if last is not None else None
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        shown = {"text/plain": _lines(repr(value))}
        shown |= {"text/html": _lines(value._repr_html_())} if hasattr(value, "_repr_html_") else {}
        found.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": shown})
    return {"execution_count": number, "outputs": found}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    path = pathlib.Path(sys.argv[1]) if sys.argv[1:] else NOTEBOOK
    made = executed(json.loads(path.read_text()))
    path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
