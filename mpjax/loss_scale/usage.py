"""Warnings about how an optimizer is used: half params without masters, gradients that nothing scaled."""

from __future__ import annotations

from typing import Any

import jax

from mpjax.loss_scale.state import roundings, warn
from mpjax.policy import is_half, path_string
from mpjax.program import compat
from mpjax.program.linearity import FLOAT16, passes_of
from mpjax.program.source import BACKWARD, DIVIDED, OUTSIDE, SCALED

_MESSAGE = (
    "this optimizer has a loss scale of {scale:g}, but mpjax did not scale the gradient in this program: "
    "small float16 gradients are lost. Use mpjax.value_and_grad(loss_fn, opt_state) in place of "
    "jax.value_and_grad(loss_fn), or jax.grad, nnx.grad, eqx.filter_grad of mpjax.scale_loss(loss_fn, opt_state). If "
    "the loop multiplies the loss by the scale itself, nothing divides the gradient again, and it is {scale:g} times "
    "too large: give dynamic_loss_scale(tx, grads_are_scaled=True), or leave the product out."
)
_SCALE_OF_1 = (
    "the backward pass of this program is in float16, but loss_scale_for got a policy without float16. "
    "The loss scale is 1, so small gradients are lost. Give loss_scale_for the policy of the loss."
)
_TWICE = (
    "{caller} divides gradients by the loss scale, but mpjax.value_and_grad or "
    "mpjax.scale_loss has divided them already: they are too small by the scale. {instead}"
)
_OUTSIDE = (
    "true_cotangents was differentiated in a function that neither mpjax.value_and_grad nor "
    "mpjax.scale_loss scales. If that loss is multiplied by the scale by hand, derivative rules in it see scaled "
    "cotangents: use mpjax.scale_loss(loss_fn, opt_state) in place of the product."
)


def warn_of_rules_outside() -> None:
    """Warns of gradients that a loop has scaled itself, if rules in the program that is traced saw them scaled."""
    if OUTSIDE in passes_of(compat.traced_equations()):
        warn(_OUTSIDE)


def warn_of_unscaled_gradients(grads: Any, scale: float) -> None:
    """Warns of gradients that a backward pass computes in which nothing is scaled.

    Only the program that is traced can be read: not one in which the gradients are arguments.

    Args:
        grads: The gradients of an update.
        scale: The initial loss scale.
    """
    passes = passes_of(compat.equations_behind(grads))
    if BACKWARD in passes and SCALED not in passes:
        warn(_MESSAGE.format(scale=scale))


def warn_of_float16(grads: Any) -> None:
    """Warns of gradients of a float16 backward pass."""
    if FLOAT16 in passes_of(compat.equations_behind(grads)):
        warn(_SCALE_OF_1)


def warn_of_gradients_divided_twice(grads: Any, caller: str, instead: str) -> None:
    """Warns of a division of gradients by the loss scale if mpjax has made them true.

    Args:
        grads: The gradients.
        caller: What divides.
        instead: The way out.
    """
    if DIVIDED in passes_of(compat.equations_behind(grads)):
        warn(_TWICE.format(caller=caller, instead=instead))


def warn_without_masters(state: Any, params: Any) -> None:
    """Warns if params are half and nothing in the state makes up for their rounding errors."""
    half = [(path_string(path), p.dtype) for path, p in jax.tree_util.tree_leaves_with_path(params) if is_half(p)]
    if half and not roundings(state):
        path, dtype = half[0]
        warn(
            f"{len(half)} of the params (such as {path}) are half ({dtype}), and the optimizer keeps no "
            "float32 copy of them: updates below half a unit in the last place are lost. Use "
            "dynamic_loss_scale(mpjax.master_weights(tx, policy)) (or mpjax.kahan, mpjax.stochastic_rounding), or keep "
            "the params in float32."
        )
