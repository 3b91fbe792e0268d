"""The flags `--policy`, `--compare` and `--amp`, which all scripts have."""

from __future__ import annotations

from collections.abc import Iterable

import mpjax
from examples.common.cli import UsageError


def check_policies(names: Iterable[str], flag: str, amp: str) -> None:
    """Refuses what is no policy, and what `--amp` can't apply.

    Args:
        names: policies.
        flag: that they are from, for the message.
        amp: `module` or `autocast`.

    Raises:
        UsageError: a name is no policy, or autocast would have to keep parameters in half.
    """
    for name in names:
        try:
            policy = mpjax.get_policy(name)
        except ValueError as error:
            raise UsageError(f"{flag} {name!r}: {error}") from error
        if amp == "autocast" and policy.param_dtype != "float32":
            raise UsageError(
                f"--amp autocast keeps the parameters in float32, and {flag} {name!r} asks for "
                f"{policy.param_dtype} ones; take --amp module, or a policy such as mixed_float16."
            )
