"""What the evidence says to try, tried."""

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
    """A policy with what the evidence says to try.

    Args:
        policy: the policy that was worse.
        comparison: of the policy with the remedy; None if it was not tried.
        why_not: why it was not.
    """

    policy: str
    comparison: Comparison | None
    why_not: str = ""


def given_to(make: Callable[..., Any], policy: str, remedy: Remedy) -> tuple[str, dict[str, Any]]:
    """The policy and the keyword arguments to call `make` with.

    Overrides become part of the policy's text where `make` has no argument for them and the policy is one of mpjax's.

    Raises:
        ValueError: `make` can't be told.
    """
    extras: dict[str, Any] = {}
    if remedy.loss_scale is not None:
        if not takes(make, "loss_scale"):
            raise ValueError(
                "make takes no keyword argument loss_scale=None: give it one, where dynamic_loss_scale is to start"
            )
        extras["loss_scale"] = remedy.loss_scale
    if remedy.overrides and takes(make, "overrides"):
        extras["overrides"] = remedy.overrides
    elif remedy.overrides:
        try:
            get_policy(policy)
        except ValueError as error:
            raise ValueError(
                f"{policy!r} is no policy of mpjax's to add overrides to, and make takes no keyword argument "
                "overrides=()"
            ) from error
        policy = ";".join([policy, *(f"{pattern}=>{dtype}" for pattern, dtype in remedy.overrides)])
    return policy, extras
