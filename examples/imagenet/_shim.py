"""A stand-in for with_policy until it lands."""

import mpjax

if not hasattr(mpjax, "with_policy"):
    mpjax.with_policy = lambda model, policy: model  # type: ignore[attr-defined]
