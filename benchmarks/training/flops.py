"""The FLOPs of a training step: the float32 model's matmuls and convolutions, forward and backward."""

from __future__ import annotations

import jax

from testing.measures import matmuls
from testing.models.published import Workload

from .configurations import CONFIGURATIONS, training


def flops_per_example(workload: Workload) -> float:
    """FLOPs of a step per example, without recomputation and dead code; a multiply-add counts as two."""
    made = training(workload, CONFIGURATIONS["tf32"])
    flops = sum(found.flops for found in matmuls(made.step, *made.abstract()))
    jax.clear_caches()
    return flops / workload.batch_size
