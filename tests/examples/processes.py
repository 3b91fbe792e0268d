"""Runs scripts in separate processes and kills them, and interrupts those of this process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from examples.common import loop
from tests.quick_kernels import FLAGS

REPOSITORY = Path(__file__).parents[2]
KILLS = int(os.environ.get("MPJAX_KILLS", "1"))  # of each script


def start(program: str, *flags: str, devices: int = 1, **variables: str) -> subprocess.Popen[str]:
    """Starts a Python program in a process that loads what this one compiled, and writes none: tests kill it."""
    environment = (
        os.environ
        | variables
        | {
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}{FLAGS}",
            "PYTHONPATH": str(REPOSITORY),
            "JAX_COMPILATION_CACHE_DIR": jax.config.values["jax_compilation_cache_dir"],
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1000",
        }
    )
    command = [sys.executable, "-c", program, *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_two(program: str, *flags: str, **of_second: str) -> list[subprocess.Popen[str]]:
    """Starts a training of two processes with two devices each; `of_second` are variables of the second one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    joined = [*flags, "--coordinator", address, "--num-processes", "2", "--process-id"]
    return [start(program, *joined, str(number), devices=2, **(of_second if number else {})) for number in (0, 1)]


def ends(started: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """The exit code and the outputs of each process."""
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def newest(output: Path) -> int:
    """The step of the last finished checkpoint; Orbax renames a checkpoint when it is complete."""
    return max((int(path.name) for path in (output / "checkpoints").glob("*") if path.name.isdecimal()), default=0)


def start_and_kill(program: str, flags: Sequence[str], output: Path, number: int) -> None:
    """Kills a training: number 0 after its first checkpoint, the others at random moments."""
    process = start(program, *flags, "--output", str(output), "--save-every", "0", devices=len(jax.devices()))
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None and newest(output) < (number == 0):
        time.sleep(0.05)
    if number:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(np.random.default_rng(number).uniform(0, 20))
    process.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGKILL, 0 if number else -signal.SIGKILL), errors


def interrupt_at(patch: pytest.MonkeyPatch, call: int, number: int = signal.SIGTERM) -> None:
    """Sends a signal at a check for signals: one before each step and each test step."""
    calls, real = iter(range(100)), loop._Run._save_or_stop

    def check(self):
        if next(calls) == call:
            signal.raise_signal(number)
        real(self)

    patch.setattr(loop._Run, "_save_or_stop", check)
