"""A run of the remedy that the evidence recommends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from mpjax.inspection.parity.evidence import Remedy
from mpjax.inspection.parity.statistics import Comparison
from mpjax.inspection.parity.training import takes
from mpjax.policy import get_policy


@dataclasses.dataclass(frozen=True)
class Fix:
    """The result of trying a remedy for a policy.

    Args:
        policy: The policy that was worse.
        comparison: The comparison of the policy with the remedy; None if the remedy was not tried.
        why_not: The reason why it was not tried.
    """

    policy: str
    comparison: Comparison | None
    why_not: str = ""


def given_to(make: Callable[..., Any], policy: str, remedy: Remedy) -> tuple[str, dict[str, Any]]:
    """The policy and the keyword arguments for `make` that apply a remedy.

    If `make` takes no `overrides` and the policy is an mpjax policy, the overrides become part of the policy string.

    Raises:
        ValueError: `make` has no argument for the remedy.
    """
    extras: dict[str, Any] = {}
    if remedy.loss_scale is not None:
        if not takes(make, "loss_scale"):
            raise ValueError(
                "make takes no keyword argument loss_scale=None: add one, the initial scale of dynamic_loss_scale"
            )
        extras["loss_scale"] = remedy.loss_scale
    if remedy.overrides and takes(make, "overrides"):
        extras["overrides"] = remedy.overrides
    elif remedy.overrides:
        try:
            get_policy(policy)
        except ValueError as error:
            raise ValueError(
                f"{policy!r} is not an mpjax policy to add overrides to, and make takes no keyword argument "
                "overrides=()"
            ) from error
        policy = ";".join([policy, *(f"{pattern}=>{dtype}" for pattern, dtype in remedy.overrides)])
    return policy, extras
