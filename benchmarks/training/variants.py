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
        fields: The fields that change, which the workload must have: their values, or a function of the workload and
            the configuration that returns these.
        needs_half: Whether it has no float32 form.
        by_hand: Whether only the hand-written form has it.
    """

    why: str
    fields: dict[str, Any] | Callable[[Workload, Configuration], dict[str, Any]]
    needs_half: bool = False
    by_hand: bool = False

    def changes(self, workload: Workload, configuration: Configuration) -> dict[str, Any]:
        """The new values of the fields."""
        return self.fields if isinstance(self.fields, dict) else self.fields(workload, configuration)

    def applies(self, workload: Workload, configuration: Configuration) -> bool:
        """Whether the model, under this configuration, has this variant."""
        names = {field.name for field in dataclasses.fields(workload)}
        has_form = configuration.way == "flax" or not self.by_hand
        has_fields = self.changes(workload, configuration).keys() <= names
        return has_fields and has_form and not (self.needs_half and configuration.half is None)


VARIANTS = {
    "cudnn_attention": Variant(
        "cuDNN's fused attention keeps no scores in memory",
        lambda workload, configuration: {"fused": configuration.half},
        needs_half=True,
    ),
    "float32_embeddings": Variant(
        "gradients of embeddings summed in float32, as by autocast: XLA adds in half by compare-and-swap, and in a "
        "table of few rows each addition waits for others",
        {"wide_embeddings": True},
        needs_half=True,
        by_hand=True,
    ),
    "remat": Variant("blocks recomputed in the backward pass: less memory for more FLOPs", {"remat": True}),
    "scan": Variant("blocks in one loop: a program as small as one block", {"loop": True}),
    "scan_remat": Variant("one loop whose iterations are recomputed", {"loop": True, "remat": True}),
    "no_loop": Variant("the steps of a recurrence written out", {"unroll": 10**6}),
    "unroll": Variant("eight steps of a recurrence in one loop iteration", {"unroll": 8}),
    "double_batch": Variant(
        "the memory that half precision saves, spent on a batch twice the size",
        lambda workload, configuration: {"batch_size": 2 * workload.batch_size},
        needs_half=True,
    ),
}
