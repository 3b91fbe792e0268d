"""The instructions of kernels, as NVIDIA's disassembler prints them."""

from __future__ import annotations

import bisect
import functools
import importlib.util
import itertools
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

from mpjax.planning.executable import sections

NO_DISASSEMBLER = "nvdisasm is not installed (pip install nvidia-cuda-nvdisasm; it needs no GPU)"
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)([^;]*);", re.MULTILINE)
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


class Code(NamedTuple):
    """The instructions of a kernel.

    Args:
        opcodes: Each without its modifiers, such as `FFMA`.
        moved: The bytes of global memory that a thread reads and writes in one pass over them.
        loops: Whether some are repeated.
    """

    opcodes: tuple[str, ...]
    moved: int
    loops: bool


@functools.cache
def disassembler() -> str:
    """The path of `nvdisasm`, of NVIDIA's package or on the `PATH`; empty if it is not installed."""
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package else None
    found = [path for folder in folders or () for path in pathlib.Path(folder).glob("*/bin/nvdisasm*")]
    return str(found[0]) if found else shutil.which("nvdisasm") or ""


def codes(cubins: Iterable[bytes], capability: str) -> dict[bytes, Code]:
    """The instructions of the kernel of each cubin. The disassembler must be installed.

    It takes a second to start, so it reads the instructions of all of them, joined.

    Args:
        cubins: ELF files with one kernel each.
        capability: The compute capability of the device, as `"9.0"`.
    """
    every = [*dict.fromkeys(cubins)]
    texts = [b"".join(text for name, text, _ in sections(cubin) if name.startswith(".text.")) for cubin in every]
    ends = [*itertools.accumulate(map(len, texts))]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "kernels.bin"
        file.write_bytes(b"".join(texts))
        command = [disassembler(), "--binary", f"SM{capability.replace('.', '')}", str(file)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines: list[list[tuple[int, str, str]]] = [[] for _ in every]
    for place, name, operands in _INSTRUCTION.findall(printed):
        lines[bisect.bisect_right(ends, int(place, 16))].append((int(place, 16), name, operands))
    return {cubin: _code(found) for cubin, found in zip(every, lines, strict=True)}


def _code(lines: Iterable[tuple[int, str, str]]) -> Code:
    """The code of a kernel, from the address, the name and the operands of each instruction.

    Example:
        >>> lines = [(16, "LDG.E.128", "R4, desc[UR4][R2.64] "), (32, "BRA", "0x10 "), (48, "EXIT", " ")]
        >>> _code([*lines, (64, "BRA", "0x40"), (80, "NOP", "")])
        Code(opcodes=('LDG', 'BRA', 'EXIT', 'BRA'), moved=16, loops=True)
    """
    opcodes, moved, loops = [], 0, False
    for place, name, operands in lines:
        opcode, *modifiers = name.split(".")
        if opcode == "NOP":
            continue
        opcodes.append(opcode)
        if opcode == "BRA" and (target := re.search(r"0x[0-9a-f]+", operands)):
            loops |= int(target[0], 16) < place
        if opcode in ("LDG", "STG"):
            moved += next((_BYTES[width] for width in modifiers if width in _BYTES), 4)
    return Code(tuple(opcodes), moved, loops)
