"""How many FLOPs a training step needs: those of the float32 model's matmuls and convolutions, forward and backward."""

from __future__ import annotations

import jax

from benchmarks.models import Workload
from testing.measures import matmuls

from .configurations import CONFIGURATIONS, training


def flops_per_example(workload: Workload) -> float:
    """Of a step, without what is computed again or thrown away; a multiply and an add count two."""
    made = training(workload, CONFIGURATIONS["tf32"])
    flops = sum(found.flops for found in matmuls(made.step, *made.abstract()))
    jax.clear_caches()
    return flops / workload.batch_size
