"""Dtypes of an optimizer's state where params are half: fixed from `init` on, whatever dtype the gradients have."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax._loss_scale_state import LossScaleWarning
from mpjax._trees import same_structure
from mpjax.policy import is_half, path_string


def settled(inner: optax.GradientTransformationExtraArgs, state: Any, params: Any) -> Any:
    """The initial state of `inner` in the dtypes that it has for float32 params, and keeps under float32 gradients.

    Adam's moments, made like half params, would be half: the second one flushes to zero, and the first one turns
    into float32, the gradients' dtype, at the first update. A state that changes dtype costs a retrace and
    can't be carried by `scan`. What the transformation sets itself (`mu_dtype`, float32 masters) stays as it is.
    """
    if not any(map(is_half, jax.tree.leaves(params))):
        return state

    def wide(params: Any) -> Any:
        return jax.tree.map(lambda p: p.astype(jnp.float32) if is_half(p) else p, params)

    def update(state: Any, params: Any) -> Any:
        return inner.update(wide(params), state, params, value=jnp.float32(0))[1]

    with jax.numpy_dtype_promotion("standard"):
        state = cast_like(state, jax.eval_shape(lambda p: inner.init(wide(p)), params))
        try:
            return cast_like(state, jax.eval_shape(update, state, params))
        except Exception:
            # An update that can't be called yet, say one that needs further arguments: the first step settles dtypes.
            return state


def cast_like(state: Any, like: Any) -> Any:
    """The state in the dtypes of another one, where the structures agree."""
    if not same_structure(state, like):
        return state
    return jax.tree.map(lambda x, to: x if jnp.result_type(x) == to.dtype else jnp.asarray(x, to.dtype), state, like)


def warn_without_masters(state: Any, params: Any) -> None:
    """Warns if params are half and nothing in the state keeps what rounding to half loses."""
    # Here, as these are built on loss_scale.
    from mpjax.lean_state.half_params import KahanState, StochasticRoundingState
    from mpjax.master_weights import MasterWeightsState

    keeping = (MasterWeightsState, KahanState, StochasticRoundingState)
    half = [(path_string(path), p.dtype) for path, p in jax.tree_util.tree_leaves_with_path(params) if is_half(p)]
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, keeping))
    if half and not any(isinstance(leaf, keeping) for leaf in leaves):
        path, dtype = half[0]
        warnings.warn(
            f"loss scaling: {len(half)} of the params (such as {path}) are half ({dtype}), and the optimizer keeps no "
            "float32 copy of them: updates below half their spacing vanish. Wrap it, "
            "dynamic_loss_scale(mpjax.master_weights(tx, policy)) (or mpjax.kahan, mpjax.stochastic_rounding), or keep "
            "the params in float32.",
            LossScaleWarning,
            stacklevel=3,
        )
