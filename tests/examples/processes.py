"""Runs scripts in separate processes, alone or several that train together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

REPOSITORY = Path(__file__).parents[2]


def start(program: str, *flags: str) -> subprocess.Popen[str]:
    """Starts a Python program in a process with one device and the compilation cache of this process."""
    environment = os.environ | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONPATH": str(REPOSITORY),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"]),
    }
    command = [sys.executable, "-c", program, *flags]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_together(programs: Sequence[str], flags: Sequence[str]) -> list[tuple[int, str, str]] | None:
    """Runs programs that train together, one process each; returns exit code, output and errors of each.

    Returns None if they did not connect, because another test took their port.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    shared = [*flags, "--coordinator", address, "--processes", str(len(programs))]
    processes = [start(program, *shared, "--process-id", str(index)) for index, program in enumerate(programs)]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]
