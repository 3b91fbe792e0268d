"""Warnings about how an optimizer is used: half params without masters, gradients that nothing scaled."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from mpjax.kernels.unscaled import note_scaling_loop
from mpjax.loss_scale.state import LossScaleWarning, roundings
from mpjax.policy import is_half, path_string

_MESSAGE = (
    "loss scaling: this optimizer has a loss scale of {scale:g}, but no gradient was scaled by it since its state was "
    "made: small float16 gradients are lost, as without loss scaling. Use mpjax.value_and_grad(loss_fn, opt_state) in "
    "place of jax.value_and_grad(loss_fn), or jax.grad, nnx.grad, eqx.filter_grad of mpjax.scale_loss(loss_fn, "
    "opt_state). If the loop multiplies the loss by the scale itself, give dynamic_loss_scale(tx, "
    "grads_are_scaled=True)."
)
_OUTSIDE = (
    "loss scaling: true_cotangents was differentiated in a function that neither mpjax.value_and_grad nor "
    "mpjax.scale_loss scales. If that loss is multiplied by the scale by hand, derivative rules in it see scaled "
    "cotangents: use mpjax.scale_loss(loss_fn, opt_state) in place of the product."
)


class _Seen:
    """Events in this process. They decide about warnings only."""

    rounding = False  # a state of master weights, Kahan or stochastic rounding
    rules_outside = False  # true_cotangents was differentiated outside of scaled losses
    gradients = 0  # calls that scale gradients by a state's scale
    updates: list[float] | None = None  # while they are recorded: initial scales of updates that expect such gradients


def note_rounding() -> None:
    """Notes an optimizer that makes up for the rounding of half params (master weights, Kahan, stochastic)."""
    _Seen.rounding = True


def has_rounding() -> bool:
    """Whether such an optimizer's state was made in this process."""
    return _Seen.rounding


def note_gradient() -> None:
    """Notes a function that scales its gradients by a state's scale."""
    _Seen.gradients += 1


def note_rule_outside() -> None:
    """Notes that `true_cotangents` is differentiated outside of scaled losses."""
    _Seen.rules_outside = True


def warn_of_rules_outside() -> None:
    """Warns if that happened, once. Called where gradients are used that a loop has scaled itself."""
    if _Seen.rules_outside:
        _Seen.rules_outside = False
        warnings.warn(_OUTSIDE, LossScaleWarning, stacklevel=3)


class Expectation:
    """Of an optimizer: that gradients are scaled between the making of its state and its updates.

    Args:
        scale: The initial scale; None if the training loop scales its gradients by hand.
    """

    def __init__(self, scale: float | None) -> None:
        self._scale = scale
        if scale is None:
            note_scaling_loop(self)
        self._when_made: int | None = None  # a restored state, made in another process, expects nothing

    def state_made(self) -> None:
        self._when_made = _Seen.gradients

    def at_update(self) -> None:
        """Warns if the update gets gradients that were not scaled, once for each state. Called while it is traced."""
        if self._scale is None:
            warn_of_rules_outside()
        if self._scale is None or self._scale <= 1:
            return
        if _Seen.updates is not None:
            _Seen.updates.append(self._scale)
        if self._when_made != _Seen.gradients:
            return
        self._when_made = None
        warnings.warn(_MESSAGE.format(scale=self._scale), LossScaleWarning, stacklevel=3)


@contextlib.contextmanager
def unscaled_updates() -> Iterator[list[float]]:
    """Collects the initial scales of the updates in a program while it is traced, unless it scales gradients."""
    found: list[float] = []
    gradients, outer, _Seen.updates = _Seen.gradients, _Seen.updates, []
    try:
        yield found
        found += _Seen.updates if _Seen.gradients == gradients else []
    finally:
        _Seen.updates = outer


def warn_without_masters(state: Any, params: Any) -> None:
    """Warns if params are half and nothing in the state makes up for their rounding errors."""
    half = [(path_string(path), p.dtype) for path, p in jax.tree_util.tree_leaves_with_path(params) if is_half(p)]
    if half and not roundings(state):
        path, dtype = half[0]
        warnings.warn(
            f"loss scaling: {len(half)} of the params (such as {path}) are half ({dtype}), and the optimizer keeps no "
            "float32 copy of them: updates below half a unit in the last place are lost. Use "
            "dynamic_loss_scale(mpjax.master_weights(tx, policy)) (or mpjax.kahan, mpjax.stochastic_rounding), or keep "
            "the params in float32.",
            LossScaleWarning,
            stacklevel=3,
        )
