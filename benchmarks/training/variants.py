"""Named changes to settings other than the precision (sizes, layouts, compiler options), and the models of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.models import Workload

from .configurations import Configuration


@dataclasses.dataclass(frozen=True)
class Variant:
    """A change, compared with the same configuration without it.

    Args:
        why: The possible gain.
        change: Maps the workload and the configuration to the changed workload.
        fields: Fields that the workload must have.
        compiler_options: XLA's flags.
        auto_layout: Whether XLA chooses the layouts of the carry.
        needs_half: Whether it has no float32 form.
    """

    why: str
    change: Callable[[Workload, Configuration], Workload] = lambda workload, configuration: workload
    fields: frozenset[str] = frozenset()
    compiler_options: dict[str, bool | int | str] = dataclasses.field(default_factory=dict)
    auto_layout: bool = False
    needs_half: bool = False

    def applies(self, workload: Workload, configuration: Configuration) -> bool:
        """Whether the model, under this configuration, has this variant."""
        names = {field.name for field in dataclasses.fields(workload)}
        return self.fields <= names and not (self.needs_half and configuration.half is None)


def _set(**fields: Any) -> Callable[[Workload, Configuration], Workload]:
    return lambda workload, configuration: dataclasses.replace(workload, **fields)


VARIANTS = {
    "cudnn_attention": Variant(
        "cuDNN's fused attention keeps no scores in memory",
        lambda workload, configuration: dataclasses.replace(workload, **{"fused": configuration.half}),
        frozenset({"fused"}),
        needs_half=True,
    ),
    "remat": Variant(
        "blocks recomputed in the backward pass: less memory for more FLOPs", _set(remat=True), frozenset({"remat"})
    ),
    "scan": Variant("blocks in one loop: a program as small as one block", _set(loop=True), frozenset({"loop"})),
    "scan_remat": Variant(
        "one loop whose iterations are recomputed", _set(loop=True, remat=True), frozenset({"loop", "remat"})
    ),
    "no_loop": Variant("the steps of a recurrence written out", _set(unroll=10**6), frozenset({"unroll"})),
    "unroll": Variant("eight steps of a recurrence in one loop iteration", _set(unroll=8), frozenset({"unroll"})),
    "double_batch": Variant(
        "the memory that half precision saves, spent on a batch twice the size",
        lambda workload, configuration: dataclasses.replace(workload, batch_size=2 * workload.batch_size),
        needs_half=True,
    ),
    "auto_layout": Variant(
        "parameters and state in the layouts of matmuls and convolutions: no transposes", auto_layout=True
    ),
    "triton_gemm_any": Variant(
        "matmuls of any shape as Triton kernels, fused with the operations around them",
        compiler_options={"xla_gpu_triton_gemm_any": True},
    ),
    "latency_hiding": Variant(
        "the scheduler that overlaps copies and kernels",
        compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True},
    ),
    "autotuning_exhaustive": Variant(
        "all algorithms tried for matmuls and convolutions", compiler_options={"xla_gpu_exhaustive_tiling_search": True}
    ),
}
