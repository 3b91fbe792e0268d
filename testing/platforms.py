"""A stand-in for a device that is not present."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

_TPU: Any = type("Device", (), {"device_kind": "TPU v5 lite", "num_cores": 1})()  # JAX's is not public in 0.10


def tpu() -> contextlib.AbstractContextManager[Any]:
    """A context in which programs are traced for a TPU."""
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=_TPU)
    return jax.sharding.use_abstract_mesh(mesh)
