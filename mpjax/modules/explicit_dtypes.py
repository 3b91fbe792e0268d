"""The warning about layers whose explicit dtype is wider than the policy's compute dtype."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpjax.policy import ExplicitDtypeWarning, Policy
from mpjax.program import compat
from mpjax.program.graph import walk

# The warnings already issued for each model class: policies and layers.
_said: weakref.WeakKeyDictionary[type, set[Any]] = weakref.WeakKeyDictionary()


def warn_explicit_dtypes(
    model: type, policy: Policy, wide: Mapping[str, np.dtype], call: Callable[[], Any], stacklevel: int = 4
) -> None:
    """Warns once for a model class, a policy and a set of layers.

    Args:
        model: The model's original class.
        policy: The model's policy.
        wide: Dtypes, by module path, of the layers that are wider than the policy's compute dtype.
        call: Repeats the model's call without side effects on its state. It is traced to count FLOPs.
        stacklevel: As in `warnings.warn`.
    """
    said = _said.setdefault(model, set())
    layers = {path: dtype for path, dtype in wide.items() if not any(p.startswith(f"{path}/") for p in wide)}
    key = (policy, *sorted(layers))
    if not layers or key in said:
        return
    said.add(key)  # before the call, which runs the same layers
    share = _wide_share(call, policy.compute_dtype)
    if share == 0:
        return
    paths = sorted(layers)
    shown = ", ".join(f"{path or model.__name__} ({layers[path]})" for path in paths[:5])
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    stay = "matmuls stay" if share is None else f"{share:.0%} of the matmul FLOPs stay"
    warnings.warn(
        f"with_policy({model.__name__}): {stay} wider than {policy.compute_dtype}, in layers with an explicit dtype: "
        f"{shown}{more}. To let the policy decide, leave their dtype None or use "
        "dataclasses.replace(mpjax.get_policy(policy), override_dtypes=True); to keep them without this warning, add "
        f"overrides=(({paths[0]!r}, 'float32'), ...).",
        ExplicitDtypeWarning,
        stacklevel=stacklevel,
    )


def _wide_share(call: Callable[[], Any], compute_dtype: np.dtype) -> float | None:
    """The share of matmul FLOPs on operands wider than the compute dtype; None if the call can't be repeated."""
    try:
        program = compat.trace(call)
    except Exception:  # the user's code may fail in any way on a second call; then warn without the share
        return None
    matmuls = [site for site in walk(program) if site.flops]
    total = sum(site.flops for site in matmuls)
    wide = (x for x in matmuls if any(v.aval.dtype.itemsize > compute_dtype.itemsize for v in x.eqn.invars[:2]))
    return sum(site.flops for site in wide) / total if total else 0.0
