"""Matmul and convolution FLOPs by dtype, counted in HLO text: not by the code that the launcher reports with."""

from __future__ import annotations

import hashlib
import math
import pathlib
import re

_COMPUTATION = re.compile(r"(?ms)^(ENTRY )?%?([\w.\-]+) (?:\(.*?\) -> .*?)?\{\n(.*?)^\}")
_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\) |\S+)")
_TYPE = re.compile(r"(\w+)\[([\d,]*)\]")
_PRODUCT = re.compile(r" (dot|convolution)\(([^)]*)\)")
_OPERAND = re.compile(r"(?:\w+\[[\d,]*\](?:\{[^}]*\})? )?%?([\w.\-#]+)(?:, |$)")  # with its type, or without


def half_share(folder: pathlib.Path) -> float | None:
    """The share of FLOPs with half operands in the programs of an XLA dump that hold a backward pass; None without.

    The body of a loop counts once. What runs only after an overflow does not count, where the HLO names it.
    """
    half = total = 0
    for path in folder.glob("*before_optimizations.txt"):
        text = path.read_text()
        if "transpose(jvp(" not in text:
            continue
        for flops, dtypes in products(text):
            total += flops
            half += flops * dtypes.issubset({"f16", "bf16"})
    return half / total if total else None


def digest(folder: pathlib.Path) -> str:
    """A hash of the programs of an XLA dump that compute in half, without their metadata (the lines of the source).

    Others may have come from a cache of compiled programs, which the dump does not have.
    """
    programs = set()
    for path in folder.glob("*before_optimizations.txt"):
        text = "\n".join(line.partition(", metadata=")[0] for line in path.read_text().splitlines())
        if "f16[" in text:
            programs.add("\n".join(lines for *_, lines in _COMPUTATION.findall(text)))
    return hashlib.sha256("\n".join(sorted(programs)).encode()).hexdigest()[:12]


def products(text: str) -> list[tuple[int, set[str]]]:
    """The FLOPs and operand dtypes of each product in a module."""
    blocks = _COMPUTATION.findall(text)
    computations = {name: lines.splitlines() for _, name, lines in blocks}
    found, waiting = [], [name for entry, name, _ in blocks if entry]
    for name in waiting:
        lines = [line for line in computations[name] if "mpjax_in_float32" not in line]
        called = (
            set(re.findall(r"[\w.\-]+", " ".join(line.partition(" metadata=")[0] for line in lines)))
            & computations.keys()
        )
        waiting += sorted(called.difference(waiting))
        found += _products_of(lines)
    return found


def _products_of(lines: list[str]) -> list[tuple[int, set[str]]]:
    types: dict[str, tuple[str, list[int]]] = {}
    found = []
    for line in lines:
        defined = _DEFINED.match(line)
        if defined is None:
            continue
        name, kinds = defined.groups()
        found_types = [(dtype, [int(d) for d in dims.split(",") if d]) for dtype, dims in _TYPE.findall(kinds)]
        # `%name#1` is the second element of a tuple.
        types.update({f"{name}#{i}" if kinds.startswith("(") else name: kind for i, kind in enumerate(found_types)})
        product = _PRODUCT.search(line)
        if product is None:
            continue
        operands = [types[operand] for operand in _OPERAND.findall(product.group(2))]
        size = math.prod(types[name][1]) * _terms(product.group(1), line, operands)
        found.append((2 * size, {dtype for dtype, _ in operands}))
    return found


def _terms(kind: str, line: str, operands: list[tuple[str, list[int]]]) -> int:
    """The number of products in one element of the result."""
    (_, left), (_, right) = operands
    if kind == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)
        return math.prod(left[int(d)] for d in dims.group(1).split(",") if d) if dims else 1
    labels = re.search(r"dim_labels=\w+_(\w+)->", line)
    assert labels is not None, line
    return math.prod(right) // right[labels.group(1).index("o")]
