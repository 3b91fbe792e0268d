"""The state of loss scaling: what it holds, how to find it, and what to do after a step with it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")

_WHERE = (
    "Which operation it is: print(mpjax.find_nonfinite(train_step, params, opt_state, batch)) with the step's own "
    "arguments, those of a step that was skipped."
)


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale` and `static_loss_scale`: arrays of fixed dtype from `init` on.

    Source: Mixed Precision Training, Micikevicius et al. 2018 (https://arxiv.org/abs/1710.03740).
    """

    loss_scale: chex.Array  # shape=(), dtype=jnp.float32; positive and finite, always.
    good_steps: chex.Array  # shape=(), dtype=jnp.int32; finite steps in a row since the last change.
    skipped_steps: chex.Array  # shape=(), dtype=jnp.int32; all skipped steps, saturating.
    consecutive_skips: chex.Array  # shape=(), dtype=jnp.int32; skipped steps in a row up to now.
    last_finite: chex.Array  # shape=(), dtype=jnp.bool_; whether the last step was taken.
    inner_state: Any  # the wrapped transformation's state.
    # Steps skipped because the loss itself was not finite (told by `update(..., value=loss)`).
    nonfinite_losses: chex.Array  # shape=(), dtype=jnp.int32; all of them, saturating.
    consecutive_nonfinite_losses: chex.Array  # shape=(), dtype=jnp.int32; in a row up to now.


class LossScaleError(RuntimeError):
    """Training makes no progress: too many steps in a row were skipped.

    Attributes:
        cause: `"loss"`, the loss itself was not finite (forward overflow, divergence, bad data);
            `"gradients"`, gradients are not finite although the scale no longer enlarges them;
            `"scale"`, the loss scale is still too high: unlucky, not diverged.
    """

    def __init__(self, message: str, cause: Literal["loss", "gradients", "scale"]):
        super().__init__(message)
        self.cause = cause


def find_loss_scale_state(opt_state: Any) -> LossScaleState:
    """The one `LossScaleState` in an optimizer state, a `TrainState` or an `nnx.Optimizer`.

    Raises:
        ValueError: there is none, or there are several.
    """
    tree = getattr(opt_state, "opt_state", opt_state)
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LossScaleState))
    found = [leaf for leaf in leaves if isinstance(leaf, LossScaleState)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"found no LossScaleState in the given {type(tree).__name__}: wrap the optimizer with "
            "mpjax.dynamic_loss_scale or mpjax.static_loss_scale (mpjax.loss_scale_for chooses by policy) and "
            "pass the state that its init or last update returned."
        )
    raise ValueError(
        f"found {len(found)} LossScaleStates in the given {type(tree).__name__}: which one scales this loss? "
        "Pass the one itself, or wrap the whole optimizer once."
    )


def loss_scale_of(opt_state: Any) -> jax.Array:
    """The present loss scale, float32."""
    return jnp.asarray(find_loss_scale_state(opt_state).loss_scale)


def keep_if_finite(opt_state: Any, new: T, old: T) -> T:
    """Chooses `new` if the last step was taken, `old` if it was skipped.

    For what the optimizer does not own (batch statistics, an EMA of the weights, RNG state): one
    skipped step with overflown activations would otherwise poison a running mean for ever.

    Args:
        opt_state: state *after* `tx.update` or `apply_gradients`.
        new, old: trees of arrays, same structure, shapes and dtypes.

    Raises:
        ValueError: no (or more than one) `LossScaleState` in `opt_state`, or the trees differ.

    Example:
        >>> import optax, mpjax
        >>> tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
        >>> params = {"w": jnp.ones(2)}
        >>> _, opt_state = tx.update({"w": jnp.array([1.0, jnp.inf])}, tx.init(params), params)
        >>> float(keep_if_finite(opt_state, new=jnp.nan, old=3.0))
        3.0
    """
    finite = jnp.asarray(find_loss_scale_state(opt_state).last_finite)
    # `where`, never a multiplication: 0 * NaN is NaN.
    return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def check_progress(opt_state: Any, max_consecutive_skips: int = 50) -> None:
    """Raises if the last steps were all skipped; to be called on the host, say once an epoch.

    The default lets a dynamic scale come down from its highest to its lowest value (38 halvings).

    Args:
        opt_state: optimizer state (concrete arrays; of several replicas the worst one counts).
        max_consecutive_skips: so many skipped steps in a row are still taken for bad luck.

    Raises:
        LossScaleError: more were skipped; its text and `cause` tell diverged from unlucky.
        ValueError: no (or more than one) `LossScaleState` in `opt_state`.
    """
    state = find_loss_scale_state(opt_state)
    skips = int(np.max(state.consecutive_skips))
    if skips <= max_consecutive_skips:
        return
    scale = float(np.min(state.loss_scale))
    bad_losses = int(np.max(state.consecutive_nonfinite_losses))
    head = f"the last {skips} steps were skipped (loss scale {scale:g}, {int(np.max(state.skipped_steps))} in all): "
    if bad_losses:
        raise LossScaleError(
            f"{head}the loss itself was inf or NaN in the last {bad_losses} of them, an overflow of the forward "
            "pass, so the loss scale is not at fault and was kept. Either training has diverged (lower the learning "
            "rate, clip gradients), or the data hold inf or NaN, or an activation leaves float16's range "
            "(65504): keep that module in float32 by a policy override, or use mixed_bfloat16. "
            f"{_WHERE}",
            "loss",
        )
    if scale <= 1.0:
        raise LossScaleError(
            f"{head}the gradients are inf or NaN although a scale of {scale:g} does not enlarge them: the backward "
            "pass itself makes them. Training has diverged, or a derivative is infinite (sqrt or norm at 0, "
            "log of 0, 0/0). Run the step in float32; if that fails too, look at the model and the data. "
            f"(If the loop passes value=loss to update, a non-finite loss is told apart here.) {_WHERE}",
            "gradients",
        )
    raise LossScaleError(
        f"{head}the gradients overflow at this scale, which still enlarges them: unlucky rather than diverged. "
        "Lower init_scale (or the static scale), use dynamic_loss_scale, lower hysteresis or min_scale, or allow more "
        f"with max_consecutive_skips. {_WHERE}",
        "scale",
    )
