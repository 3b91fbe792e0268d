"""Describes an H200 to XLA's compiler: JAX's CUDA plugin compiles for a device that is not present.

Autotuning tries matmul tiles and cuDNN's algorithms on the device itself, so these programs are not autotuned.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import topologies

DEVICE = "NVIDIA H200"
NO_PLUGIN = """JAX's CUDA plugin is not installed (pip install "jax[cuda12]"; it needs no GPU)"""
# NVIDIA's data sheet of the H200 (SXM).
MEMORY_BYTES = 141_000_000_000
BANDWIDTH = 4_800_000_000_000
# XLA's `GpuTargetConfigProto`. The multiprocessors, their cores and the L2 cache are those of NVIDIA's H100 white paper
# (SXM; an H200 has the same chip), and at this clock 132 of them give the data sheet's 989.4 TFLOP/s in half. The
# limits are those of compute capability 9.0 in the CUDA C++ programming guide. Without a version of CUDA (that of the
# plugin's libraries), XLA takes it for too old for some kernels.
_DESCRIPTION = f"""
platform_name: "CUDA"
device_description_str: "{DEVICE}"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  driver_version: "12.9.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.83
  l2_cache_size: 52428800
  memory_bandwidth: {BANDWIDTH}
  device_memory_size: {MEMORY_BYTES}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
"""


def h200() -> jax.sharding.Sharding | None:
    """A sharding for argument shapes that makes XLA compile for an H200; None without the plugin."""
    found = h200s(1)
    return jax.sharding.SingleDeviceSharding(found[0]) if found else None


def h200s(count: int) -> list[jax.Device] | None:
    """`count` H200s in one host, as compilation targets; None without the plugin."""
    try:
        return topologies.get_topology_desc("h200", "cuda", target_config=_DESCRIPTION, topology=f"1x1x{count}").devices
    except NotImplementedError:  # no CUDA plugin is registered
        return None


def placed(shapes: Any, sharding: jax.sharding.Sharding) -> Any:
    """The shapes, placed on a device."""
    return jax.tree.map(lambda x: x.update(sharding=sharding), shapes)
