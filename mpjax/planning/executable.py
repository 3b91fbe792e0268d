"""The kernel launches of a compiled GPU program, read from XLA's serialised executable.

An executable is a protocol buffer. Parts of it are Riegeli files, compressed by Snappy. The launch of a kernel that
XLA generated holds the kernel's cubin, an ELF file, which states the registers and the stack of a thread.

Sources: the descriptions of the formats of protocol buffers, Riegeli records and Snappy. Registers and stack agree with
`cuobjdump --dump-resource-usage`. NVIDIA's disassembler prints the instructions of kernels.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import importlib.util
import itertools
import pathlib
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_RIEGELI = bytes.fromhex("83af70d10d884a3f")
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 65536, 24, 40  # bytes
_ELF = b"\x7fELF\x02\x01"
# The fields of XLA's `ThunkProto` that are read: its description, and its kernel; of the kernel, the file, the blocks,
# the threads of each and the bytes of dynamic shared memory.
_INFO, _KERNEL, _LAUNCHED = 1, 36, 3
_CODE, _BLOCKS, _THREADS, _SHARED = 2, 3, 4, 6
# Attributes in a cubin's `.nv.info`, and the form in which their values are stored.
_FRAME_SIZE, _REGISTER_COUNT, _SIZED = 0x11, 0x2F, 4
NO_DISASSEMBLER = "nvdisasm is not installed (pip install nvidia-cuda-nvdisasm; it needs no GPU)"
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)([^;]*);", re.MULTILINE)
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launch of a kernel.

    Args:
        name: The instruction of HLO that it carries out.
        blocks, threads: Its blocks, and the threads of each.
        registers: The registers of a thread.
        stack: The bytes of a thread's stack: registers that are spilled, and arrays.
        shared: The bytes of shared memory of a block.
        cubin: The kernel's file.
    """

    name: str
    blocks: int
    threads: int
    registers: int
    stack: int
    shared: int
    cubin: bytes = dataclasses.field(repr=False)

    @property
    def warps(self) -> int:
        """The warps of all blocks."""
        return self.blocks * -(-self.threads // 32)


def launches(serialised: bytes) -> list[Launch]:
    """The launches of an executable, those in a loop once; empty for a version of XLA that lists them in another way.

    Args:
        serialised: `compiled.runtime_executable().serialize()` of a `jax.stages.Compiled` for a GPU.
    """
    try:
        return _found(serialised)
    except (LookupError, ValueError, TypeError, AttributeError, struct.error):  # The format is XLA's own.
        return []


def _found(serialised: bytes) -> list[Launch]:
    start = serialised.find(_RIEGELI)
    if start < 0:
        return []
    records = _records(serialised[start:])
    return [launch for record in records for launch in _found(record) or _launches(_fields(record))]


def _launches(message: list[tuple[int, Any]]) -> Iterator[Launch]:
    """The launches in the thunks of a message, at any depth."""
    parts = dict(message)
    for number, value in message:
        if not isinstance(value, bytes) or _ELF not in value:
            continue
        if number == _KERNEL and isinstance(parts.get(_INFO), bytes):
            yield _launch(dict(_fields(parts[_INFO]))[1].decode(), dict(_fields(value)))
        else:
            yield from _launches(_fields(value))


def _launch(name: str, thunk: dict[int, Any]) -> Launch:
    kernel = dict(_fields(thunk[_LAUNCHED]))
    cubin = kernel[_CODE][kernel[_CODE].index(_ELF) :]
    registers, stack, shared = _resources(cubin)
    shared += kernel.get(_SHARED, 0)
    return Launch(name, _count(kernel[_BLOCKS]), _count(kernel[_THREADS]), registers, stack, shared, cubin)


def _count(dimensions: bytes) -> int:
    ((_, sizes),) = _fields(dimensions)
    x, y, z = (dict(_fields(sizes)).get(axis, 1) for axis in (1, 2, 3))
    return int(x * y * z)


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """The registers and bytes of stack of a thread, and the bytes of static shared memory of a block, of one kernel."""
    found = {_REGISTER_COUNT: 0, _FRAME_SIZE: 0}
    shared = 0
    for name, content, size in sections(cubin):
        shared += size if name.startswith(".nv.shared.") else 0
        at = 0
        while name == ".nv.info" and at < len(content):
            form, attribute, length = struct.unpack_from("<BBH", content, at)
            if form == _SIZED and attribute in found:
                found[attribute] = max(found[attribute], *struct.unpack_from("<4xI", content, at + 4))
            at += 4 + length * (form == _SIZED)
    return found[_REGISTER_COUNT], found[_FRAME_SIZE], shared


def sections(elf: bytes) -> Iterator[tuple[str, bytes, int]]:
    """The name, the content and the size of each section of an ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<II16xQQ", elf, table + i * entry) for i in range(count)]
    strings = headers[names][2]
    for name, _, offset, size in headers:
        start = strings + name
        yield elf[start : elf.index(b"\0", start)].decode(), elf[offset : offset + size], size


def _fields(message: bytes) -> list[tuple[int, Any]]:
    """The number and the value of each field of a protocol buffer: an integer, or bytes."""
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value: Any
            value, at = _varint(message, at)
        else:
            length, at = (8 if tag & 7 == 1 else 4, at) if tag & 7 in (1, 5) else _varint(message, at)
            value, at = message[at : at + length], at + length
        found.append((tag >> 3, value))
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An integer in base 128, the least digit first, and the place after it."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def _records(file: bytes) -> Iterator[bytes]:
    """The records of each chunk of a Riegeli file, joined."""
    data = b"".join(file[at + _BLOCK_HEADER : at + _BLOCK] for at in range(0, len(file), _BLOCK))
    at = 0
    while at + _CHUNK_HEADER <= len(data):
        (size,) = struct.unpack_from("<Q", data, at + 8)
        kind, records = chr(data[at + 24]), int.from_bytes(data[at + 25 : at + 32], "little")
        chunk = data[at + _CHUNK_HEADER : at + _CHUNK_HEADER + size]
        if kind == "r":
            sizes, start = _varint(chunk, 1)
            values = chunk[start + sizes :]
            yield _unsnappy(values[_varint(values, 0)[1] :]) if chunk[0] == ord("s") else values
        elif kind not in "smp":
            return
        at += _CHUNK_HEADER + max(size, records)


def _unsnappy(data: bytes) -> bytes:
    """Decompresses Snappy's format."""
    length, at = _varint(data, 0)
    out = bytearray()
    while len(out) < length:
        tag, kind = data[at] >> 2, data[at] & 3
        at += 1
        if kind == 0:  # bytes as they are
            more = max(tag - 59, 0)
            size = (int.from_bytes(data[at : at + more], "little") if more else tag) + 1
            out += data[at + more : at + more + size]
            at += more + size
            continue
        # a copy of earlier bytes, which may include those that it writes
        size, back = ((tag & 7) + 4, tag >> 3 << 8) if kind == 1 else (tag + 1, 0)
        width = (1, 2, 4)[kind - 1]
        back += int.from_bytes(data[at : at + width], "little")
        at += width
        start = len(out) - back
        if not 0 <= start < len(out):
            raise ValueError("not in Snappy's format")
        while size > 0:
            piece = out[start : start + size]
            out += piece
            size -= len(piece)
    return bytes(out)


# The instructions of kernels.


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
