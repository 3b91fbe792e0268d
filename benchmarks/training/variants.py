"""Named changes to settings other than the precision, and the models of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from testing.models.published import Workload

from .configurations import Configuration


@dataclasses.dataclass(frozen=True)
class Variant:
    """A change, compared with the same configuration without it.

    Args:
        why: The possible gain.
        change: Maps the workload and the configuration to the changed workload.
        fields: Fields that the workload must have.
        needs_half: Whether it has no float32 form.
        by_hand: Whether only the hand-written form has it.
    """

    why: str
    change: Callable[[Workload, Configuration], Workload] = lambda workload, configuration: workload
    fields: frozenset[str] = frozenset()
    needs_half: bool = False
    by_hand: bool = False

    def applies(self, workload: Workload, configuration: Configuration) -> bool:
        """Whether the model, under this configuration, has this variant."""
        names = {field.name for field in dataclasses.fields(workload)}
        has_form = configuration.way == "flax" or not self.by_hand
        return self.fields <= names and has_form and not (self.needs_half and configuration.half is None)


def _set(**fields: Any) -> Callable[[Workload, Configuration], Workload]:
    return lambda workload, configuration: dataclasses.replace(workload, **fields)


VARIANTS = {
    "cudnn_attention": Variant(
        "cuDNN's fused attention keeps no scores in memory",
        lambda workload, configuration: dataclasses.replace(workload, **{"fused": configuration.half}),
        frozenset({"fused"}),
        needs_half=True,
    ),
    "float32_embeddings": Variant(
        "gradients of embeddings summed in float32, as by autocast: XLA adds in half by compare-and-swap, and in a "
        "table of few rows each addition waits for others",
        _set(wide_embeddings=True),
        frozenset({"wide_embeddings"}),
        needs_half=True,
        by_hand=True,
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
}
