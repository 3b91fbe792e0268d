"""Describes devices to XLA's compilers, which compile for a device that is not present.

JAX's CUDA plugin compiles for a described GPU. Autotuning tries matmul tiles and cuDNN's algorithms on the device
itself, so these programs are not autotuned. libtpu describes TPUs by itself, and compiles as on the chip.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.resources
import importlib.util
import math
import os
from string import Template
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from mpjax.inspection.devices import DEVICES, Device

NO_PLUGIN = """JAX's CUDA plugin is not installed (pip install "jax[cuda12]"; it needs no GPU)"""
NO_LIBTPU = """libtpu is not installed (pip install "jax[tpu]"; it needs no TPU)"""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What XLA's compiler asks of an NVIDIA GPU.

    Args:
        capability: Its compute capability, as `"9.0"`.
        cores: The number of its multiprocessors.
        clock: GHz.
        cache: Bytes of its L2 cache.
    """

    capability: str
    cores: int
    clock: float
    cache: int

    @property
    def threads(self) -> int:
        """The threads that a multiprocessor holds."""
        return _THREADS.get(self.capability, 2048)

    @property
    def shared(self) -> int:
        """The bytes of shared memory that a block may ask for; a multiprocessor has 1 KiB more."""
        return _SHARED.get(self.capability, 227) * 1024


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for, present or not; its peak rates are in `mpjax.inspection.devices.DEVICES`.

    A GPU that is not in `TARGETS` is described by its numbers.

    Args:
        key: Its name in `DEVICES`, or any other name.
        memory_bytes: Its memory.
        source: The document that states this memory.
        gpu: For a GPU, its description.
        chips: For a TPU, the topology with fewest chips that libtpu describes.
        bandwidth: Bytes per second of its memory, for a GPU that is not in `DEVICES`.

    Example:
        >>> from mpjax.planning.target import Gpu, Target
        >>> mine = Target("RTX 4080", 16 * 2**30, "the card", Gpu("8.9", 76, 2.51, 64 * 2**20), bandwidth=717e9)
        >>> mine.name, mine.platform
        ('NVIDIA RTX 4080', 'cuda')
    """

    key: str
    memory_bytes: int
    source: str
    gpu: Gpu | None = None
    chips: str = ""
    bandwidth: float = 0.0

    @property
    def rates(self) -> Device | None:
        """Its published peak rates, if they are known."""
        return DEVICES.get(self.key)

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
            return _chips(f"{self.key.removeprefix('TPU ')}:{topology or _topology(self.chips, count)}", count)
        gpu, (major, minor) = self.gpu, self.gpu.capability.split(".")
        # XLA's `GpuTargetConfigProto`. Without a version of CUDA (that of the plugin's libraries), XLA takes it for too
        # old for some kernels.
        described = Template(importlib.resources.files(__package__).joinpath("gpu.textproto").read_text("utf-8"))
        filled = described.substitute(
            name=self.name,
            memory=self.memory_bytes,
            major=major,
            minor=minor,
            fpus=64 if gpu.capability in ("7.0", "7.5", "8.0") else 128,
            bandwidth=int(self.bandwidth or DEVICES[self.key].bandwidth),
            **{name: getattr(gpu, name) for name in ("cores", "clock", "cache", "threads", "shared")},
        )
        options = {"target_config": filled, "topology": f"1x1x{count}"}
        try:
            return topologies.get_topology_desc(self.key.lower(), "cuda", **options).devices
        except NotImplementedError:  # no CUDA plugin is registered
            return None


def _topology(least: str, count: int) -> str:
    """The shape of a pod with at least as many chips, in powers of two.

    Example:
        >>> _topology("2x2", 3), _topology("2x2", 8), _topology("2x2x1", 32)
        ('2x2', '2x4', '2x4x4')
    """
    sizes = [*map(int, least.split("x"))]
    while math.prod(sizes) < count:
        sizes = sorted([2 * min(sizes), *sorted(sizes)[1:]])
    return "x".join(map(str, sizes))


def _chips(topology: str, count: int) -> list[jax.Device] | None:
    found = importlib.util.find_spec("libtpu")
    if found is None or not found.submodule_search_locations:
        return None
    os.environ.setdefault("TPU_LIBRARY_PATH", os.path.join(found.submodule_search_locations[0], "libtpu.so"))
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # It asks Google's metadata server for the host's TPUs.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # Two processes may compile, though not run, at once.
    devices = topologies.get_topology_desc(topology, "tpu").devices
    return devices if math.prod(map(int, topology.partition(":")[2].split("x"))) == count else devices[:count]


# By compute capability, from the CUDA C++ programming guide: threads of a multiprocessor, and KiB of shared memory that
# a block may ask for; for others 2048 and 227.
_THREADS = {"7.5": 1024, "8.6": 1536, "8.9": 1536, "12.0": 1536}
_SHARED = {"7.0": 96, "7.5": 64, "8.0": 163, "8.6": 99, "8.9": 99, "12.0": 99}
# Multiprocessors and L2 caches are those of NVIDIA's white papers of each architecture; those of a B200 are in XLA's
# description of it. The clocks are those at which the multiprocessors give the data sheet's rate in half.
_MIB = 2**20
_GH100 = Gpu("9.0", 132, 1.83, 50 * _MIB)
_GA100 = Gpu("8.0", 108, 1.41, 40 * _MIB)
_SHEET = "NVIDIA {} datasheet"

TARGETS = {
    "h200": Target("H200", 141_000_000_000, _SHEET.format("H200") + " (SXM)", _GH100),
    "h100": Target("H100", 80_000_000_000, _SHEET.format("H100") + " (SXM)", _GH100),
    "b200": Target(
        "B200",
        180_000_000_000,
        _SHEET.format("HGX B200") + " (one of its eight GPUs)",
        Gpu("10.0", 148, 1.85, 132644864),
    ),
    "a100": Target("A100", 80_000_000_000, _SHEET.format("A100"), _GA100),
    "a100-40gb": Target("A100 40GB", 40_000_000_000, _SHEET.format("A100"), _GA100),
    "l40s": Target("L40S", 48_000_000_000, _SHEET.format("L40S"), Gpu("8.9", 142, 2.52, 96 * _MIB)),
    "l4": Target("L4", 24_000_000_000, _SHEET.format("L4"), Gpu("8.9", 58, 2.04, 48 * _MIB)),
    "rtx4090": Target(
        "RTX 4090", 24_000_000_000, "NVIDIA Ada GPU architecture whitepaper", Gpu("8.9", 128, 2.52, 72 * _MIB)
    ),
    "rtx3090": Target(
        "RTX 3090", 24_000_000_000, "NVIDIA Ampere GA102 GPU architecture whitepaper", Gpu("8.6", 82, 1.70, 6 * _MIB)
    ),
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
