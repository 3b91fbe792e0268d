"""Dtypes of an optimizer's state for half params: fixed from `init` on, whatever the gradients' dtype."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.loss_scale.state import LossScaleWarning
from mpjax.loss_scale.trees import same_structure
from mpjax.policy import is_half, path_string


def settled(inner: optax.GradientTransformationExtraArgs, state: Any, params: Any) -> Any:
    """The initial state of `inner`, in the dtypes that float32 params and gradients give it.

    Adam's moments would otherwise have the dtype of half params. The second one would flush to zero, and the first
    one would become float32, the gradients' dtype, at the first update. A state that changes dtype costs a retrace
    and can't be carried by `scan`. Dtypes that the transformation sets (`mu_dtype`, float32 masters) are kept.
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
            # The update can't be called yet, for example because it needs further arguments. The first step casts.
            return state


def cast_like(state: Any, like: Any) -> Any:
    """Casts a state to the dtypes of another one. States of different structure are returned unchanged."""
    if not same_structure(state, like):
        return state
    return jax.tree.map(lambda x, to: x if jnp.result_type(x) == to.dtype else jnp.asarray(x, to.dtype), state, like)


def warn_without_masters(state: Any, params: Any) -> None:
    """Warns if params are half and nothing in the state makes up for their rounding errors."""
    # Imported here, because these modules import loss_scale.
    from mpjax.optimizer_state.half_params import KahanState, StochasticRoundingState
    from mpjax.optimizer_state.masters import MasterWeightsState

    keeping = (MasterWeightsState, KahanState, StochasticRoundingState)
    half = [(path_string(path), p.dtype) for path, p in jax.tree_util.tree_leaves_with_path(params) if is_half(p)]
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, keeping))
    if half and not any(isinstance(leaf, keeping) for leaf in leaves):
        path, dtype = half[0]
        warnings.warn(
            f"loss scaling: {len(half)} of the params (such as {path}) are half ({dtype}), and the optimizer keeps no "
            "float32 copy of them: updates below half a unit in the last place are lost. Use "
            "dynamic_loss_scale(mpjax.master_weights(tx, policy)) (or mpjax.kahan, mpjax.stochastic_rounding), or keep "
            "the params in float32.",
            LossScaleWarning,
            stacklevel=3,
        )
