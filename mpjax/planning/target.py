"""Describes devices to XLA's compilers, which compile for a device that is not present.

JAX's CUDA plugin compiles for a described GPU. Autotuning tries matmul tiles and cuDNN's algorithms on the device
itself, so these programs are not autotuned. libtpu describes TPUs by itself, and compiles as on the chip.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from mpjax.inspection.devices import DEVICES, Device

NO_PLUGIN = """JAX's CUDA plugin is not installed (pip install "jax[cuda12]"; it needs no GPU)"""
NO_LIBTPU = """libtpu is not installed (pip install "jax[tpu]"; it needs no TPU)"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for; its peak rates are in `DEVICES`.

    Args:
        key: Its name in `DEVICES`.
        memory_bytes: Its memory.
        source: The document that states this memory.
        gpu: For a GPU, the values of its description in `_GPU`.
        chips: For a TPU, the topology with fewest chips that libtpu describes.
    """

    key: str
    memory_bytes: int
    source: str
    gpu: Mapping[str, Any] | None = None
    chips: str = ""

    @property
    def rates(self) -> Device:
        """Its published peak rates."""
        return DEVICES[self.key]

    @property
    def name(self) -> str:
        """Its name in results."""
        return self.key if self.chips else f"NVIDIA {self.key}"

    @property
    def platform(self) -> str:
        """The platform to lower for."""
        return "tpu" if self.chips else "cuda"

    @property
    def missing(self) -> str:
        """Why nothing can be compiled for it, if its compiler is not installed."""
        return NO_LIBTPU if self.chips else NO_PLUGIN

    def versions(self) -> dict[str, str]:
        """The version of its compiler, if that is not part of jaxlib."""
        return {"libtpu": importlib.metadata.version("libtpu")} if self.chips else {}

    def devices(self, count: int = 1, topology: str = "") -> list[jax.Device] | None:
        """Devices as compilation targets; None without the compiler.

        Args:
            count: How many. GPUs are in one host.
            topology: For TPUs, the shape of the pod, such as `"16x16"`; the default holds at least one chip.
        """
        if self.gpu is None:
            return _chips(f"{self.key.removeprefix('TPU ')}:{topology or self.chips}", count)
        description = _GPU.format(name=self.name, memory=self.memory_bytes, **self.gpu)
        try:
            name = self.key.lower()
            return topologies.get_topology_desc(
                name, "cuda", target_config=description, topology=f"1x1x{count}"
            ).devices
        except NotImplementedError:  # no CUDA plugin is registered
            return None


def _chips(topology: str, count: int) -> list[jax.Device] | None:
    found = importlib.util.find_spec("libtpu")
    if found is None or not found.submodule_search_locations:
        return None
    os.environ.setdefault("TPU_LIBRARY_PATH", os.path.join(found.submodule_search_locations[0], "libtpu.so"))
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # It asks Google's metadata server for the host's TPUs.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # Two processes may compile, though not run, at once.
    devices = topologies.get_topology_desc(topology, "tpu").devices
    return devices if math.prod(map(int, topology.partition(":")[2].split("x"))) == count else devices[:count]


# XLA's `GpuTargetConfigProto`. The limits are those of compute capability 9.0 and 10.0 in the CUDA C++ programming
# guide. Without a version of CUDA (that of the plugin's libraries), XLA takes it for too old for some kernels.
_GPU = """
platform_name: "CUDA"
device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {capability} minor: 0 }}
  driver_version: "12.9.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  core_count: {cores}
  fpus_per_core: 128
  clock_rate_ghz: {clock}
  l2_cache_size: {cache}
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
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
# The multiprocessors and the L2 cache of an H200 are those of NVIDIA's H100 white paper (SXM; the same chip); those of
# a B200 are in XLA's description of it. The clocks are those at which the multiprocessors give the data sheet's rate in
# half.
_H200 = {"capability": 9, "cores": 132, "clock": 1.83, "cache": 52428800, "bandwidth": 4_800_000_000_000}
_B200 = {"capability": 10, "cores": 148, "clock": 1.85, "cache": 132644864, "bandwidth": 8_000_000_000_000}

TARGETS = {
    "h200": Target("H200", 141_000_000_000, "NVIDIA H200 datasheet (SXM)", gpu=_H200),
    "b200": Target("B200", 180_000_000_000, "NVIDIA HGX B200 datasheet (one of its eight GPUs)", gpu=_B200),
    "v5e": Target("TPU v5e", 16_000_000_000, "Google Cloud documentation, TPU v5e", chips="2x2"),
    "v6e": Target("TPU v6e", 32_000_000_000, "Google Cloud documentation, TPU v6e", chips="2x2"),
    "v5p": Target("TPU v5p", 95_000_000_000, "Google Cloud documentation, TPU v5p", chips="2x2x1"),
}


def traced_for(device: jax.Device) -> contextlib.AbstractContextManager[Any]:
    """A context in which programs are traced for a device that is not present."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(np.array([device]), ("device",), axis_types=auto)
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def placed(shapes: Any, sharding: jax.sharding.Sharding) -> Any:
    """The shapes, placed on a device."""
    return jax.tree.map(lambda x: x.update(sharding=sharding), shapes)
