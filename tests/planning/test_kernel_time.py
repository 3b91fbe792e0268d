"""The kernels of a program that was compiled for a GPU: launches, registers, instructions and modelled time."""

from __future__ import annotations

import struct

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax.planning import executable, kernel_time
from mpjax.planning.executable import Launch, codes, disassembler, launches
from mpjax.planning.target import TARGETS, Gpu, Target, placed, traced_for

H200 = TARGETS["h200"]


def field(number, value):
    """A field of a protocol buffer."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value):
    digits = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])


def elf():
    """An ELF file with the sections of a cubin that are read, longer than a block of a Riegeli file."""
    info = b"".join(struct.pack("<BBHII", 4, attribute, 8, 1, value) for attribute, value in ((0x2F, 40), (0x11, 16)))
    names = b"\0.nv.info\0.text.fusion\0.names\0"
    contents = {"": b"", ".nv.info": info, ".text.fusion": bytes(70_000), ".names": names}
    offset, headers, body = 64, b"", b""
    for name, content in contents.items():
        place = names.index(name.encode())
        headers += struct.pack("<II16xQQ24x", place, 1, offset + len(body), len(content))
        body += content
    start = struct.pack("<6s34xQ", b"\x7fELF\x02\x01", offset + len(body)).ljust(58, b"\0")
    return start + struct.pack("<HHH", 64, len(contents), len(contents) - 1) + body + headers


def serialised(compress):
    """A serialised executable of one kernel, in a loop."""
    sizes = field(1, 3) + field(2, 2) + field(3, 1)
    kernel = field(2, field(1, elf())) + field(3, field(2, sizes)) + field(4, field(1, field(1, 256))) + field(6, 9)
    thunk = field(1, field(1, b"loop_fusion.5")) + field(36, field(3, kernel))
    record = field(13, field(1, field(1, b"while.7")) + field(7, field(3, field(1, thunk))))
    inner = varint(len(record)) + compress(record) if compress else record
    values = (varint(len(record)) if compress else b"") + inner
    chunk = (b"s" if compress else b"\0") + varint(1) + b"x" + values
    chunks = b"".join(
        bytes(8) + struct.pack("<Q8x", len(content)) + kind + records.to_bytes(7, "little") + bytes(8) + content
        for kind, records, content in ((b"s", 0, b""), (b"r", 1, chunk))
    )
    blocks = [chunks[at : at + 65512] for at in range(0, len(chunks), 65512)]
    return b"ifrt" + b"".join(
        (executable._RIEGELI if block is blocks[0] else bytes(8)) + bytes(16) + block for block in blocks
    )


def literal(data):
    """Snappy's format, without any compression."""
    pieces = [data[at : at + 60_000] for at in range(0, len(data), 60_000)]
    return b"".join(b"\xf4" + struct.pack("<H", len(piece) - 1) + piece for piece in pieces)


@pytest.mark.parametrize("compress", [None, literal])
def test_launches_are_read_from_a_serialised_executable(compress):
    (launch,) = launches(serialised(compress))
    assert (launch.name, launch.blocks, launch.threads) == ("loop_fusion.5", 6, 256)
    assert (launch.registers, launch.stack, launch.shared) == (40, 16, 9)
    assert launch.cubin == elf()
    assert launch.warps == 48


def test_an_executable_that_lists_no_launches_has_none():
    assert launches(b"pjrt_ifrt") == []
    assert launches(b"ifrt" + executable._RIEGELI + bytes(56)) == []


@pytest.mark.parametrize("at", range(40, 400, 7))
def test_an_executable_of_another_format_has_no_launches_or_those_that_are_left(at):
    given = bytearray(serialised(literal))
    given[at] ^= 0xFF
    assert all(isinstance(launch, Launch) for launch in launches(bytes(given)))


def test_a_device_that_the_disassembler_does_not_know_has_no_times(monkeypatch):
    monkeypatch.setattr("mpjax.planning.executable.disassembler", lambda: "false")
    assert kernel_time.timed("", serialised(literal), H200) == []


@pytest.mark.parametrize(
    ("compressed", "data"),
    [
        (b"\x05\x10hello", b"hello"),
        (b"\x0c\x04ab\x19\x02", b"ab" * 6),  # ten bytes from two back: they overlap
        (b"\x08\x0cabcd\x0e\x04\x00", b"abcdabcd"),
    ],
)
def test_snappy(compressed, data):
    assert executable._unsnappy(compressed) == data


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "warps"),
    [
        (32, 128, 0, 64),
        (168, 256, 0, 8),
        (255, 256, 0, 8),
        (40, 128, 0, 48),
        (32, 1024, 1156, 64),
        (63, 128, 17408, 32),
    ],
)
def test_warps_are_limited_by_registers_threads_and_shared_memory(registers, threads, shared, warps):
    launch = Launch("fusion", 1000, threads, registers, 0, shared, b"")
    assert kernel_time.warps_per_core(launch, H200.gpu) == warps


def test_a_device_without_rates_or_multiprocessors_has_no_model():
    mine = Target("RTX 4080", 16 * 2**30, "the card", Gpu("8.9", 76, 2.51, 64 * 2**20), bandwidth=717e9)
    for target in (None, TARGETS["v5e"], mine):
        assert kernel_time.unavailable(target) == "there is no model of the time of kernels for this device"


def test_without_the_disassembler_a_plan_says_what_to_install(monkeypatch):
    monkeypatch.setattr(kernel_time, "disassembler", lambda: "")
    assert "pip install nvidia-cuda-nvdisasm" in kernel_time.unavailable(H200)


def compiled(fun, *shapes):
    """A function compiled for an H200, with what the model reads; skips where it can't be."""
    devices = H200.devices()
    if devices is None:
        pytest.skip(H200.missing)
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    with traced_for(devices[0]):
        step = jax.jit(fun).trace(*placed(shapes, sharding)).lower(lowering_platforms=("cuda",)).compile()
    serialised = step.runtime_executable().serialize()
    if not launches(serialised):
        pytest.skip(kernel_time.UNREADABLE)
    if not disassembler():
        pytest.skip(kernel_time.NO_DISASSEMBLER)
    return step.as_text(), serialised


def test_an_addition_takes_the_time_of_its_bytes():
    x = jax.ShapeDtypeStruct((2**26,), jnp.float32)
    (row,) = kernel_time.timed(*compiled(lambda x: x + 1, x), H200)
    assert row.kernel.bytes == 2**29
    assert row.seconds == pytest.approx(2**29 / (0.75 * 4.8e12) + 3e-6)


def test_work_in_registers_takes_longer_than_its_bytes():
    x = jax.ShapeDtypeStruct((2**24,), jnp.float32)

    def fun(x):
        for _ in range(20):
            x = jnp.tanh(x)
        return x

    (row,) = kernel_time.timed(*compiled(fun, x), H200)
    assert row.seconds > 2 * row.kernel.bytes / (0.75 * 4.8e12)
    code = codes([row.launch.cubin], "9.0")[row.launch.cubin]
    assert code.opcodes.count("MUFU") >= 20
    assert code.opcodes[-1] != "NOP"


def test_a_loop_counts_each_iteration():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    once = kernel_time.timed(*compiled(lambda x: jnp.tanh(x), x), H200)
    many = kernel_time.timed(*compiled(lambda x: jax.lax.fori_loop(0, 50, lambda _, x: jnp.tanh(x), x), x), H200)
    assert kernel_time.seconds_of(many) > 40 * kernel_time.seconds_of(once)


def test_a_plan_has_the_modelled_time():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    compiled(jnp.tanh, x)
    report = mpjax.plan(lambda w, x: jnp.mean(jnp.tanh(x @ w)), x, x, target="h200")
    assert all(row.modelled >= row.seconds > 0 for row in report.options)
    assert kernel_time.ACCURACY in report.notes
    assert "modelled" in str(report)
