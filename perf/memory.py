"""Device memory: the plan of a program, the peak of a process, and the errors of a full device."""

from __future__ import annotations

import jax

from mpjax.planning.traffic import program_bytes as program_bytes


def peak_bytes() -> int | None:
    """Peak bytes allocated on the first device by this process; None if its allocator does not count them (a CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a JAX error reports that the device is out of memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
