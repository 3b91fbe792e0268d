"""Stand-ins for devices that are not present."""

from __future__ import annotations

import contextlib
from typing import Any

import jax


def _traced_for(kind: str) -> contextlib.AbstractContextManager[Any]:
    device: Any = type("Device", (), {"device_kind": kind, "num_cores": 1})()  # JAX's is not public in 0.10
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def tpu() -> contextlib.AbstractContextManager[Any]:
    """A context in which programs are traced for a TPU."""
    return _traced_for("TPU v5 lite")


def gpu() -> contextlib.AbstractContextManager[Any]:
    """A context in which programs are traced for a GPU."""
    return _traced_for("NVIDIA H200")
