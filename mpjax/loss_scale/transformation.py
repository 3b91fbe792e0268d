"""Loss scaling as an optax transformation: skips steps that are not finite, and adapts the scale."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Layout, with_layout_constraint

from mpjax.kernels.unscaled import note_scaling_loop
from mpjax.loss_scale import applying, usage
from mpjax.loss_scale.applying import apply_gradients, as_transformation, same_structure
from mpjax.loss_scale.cotangents import unscale_by, widened
from mpjax.loss_scale.replicas import all_finite
from mpjax.loss_scale.state import LossScaleState, contains_state
from mpjax.policy import get_policy, is_half, path_string
from mpjax.program import compat
from mpjax.program.source import UPDATE

__all__ = ["dynamic_loss_scale", "loss_scale_for", "static_loss_scale"]

# A scale and its reciprocal must both be normal float32 numbers, or unscaling is not exact.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


class LossScaled(applying.Transformation):
    """An optimizer with loss scaling. For type checkers: its state has a `loss_scale`."""

    if TYPE_CHECKING:

        def init(self, params: Any) -> LossScaleState: ...
        def update(
            self, updates: Any, state: Any, params: Any = None, **extra_args: Any
        ) -> tuple[Any, LossScaleState]: ...


def dynamic_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    *,
    init_scale: float = 2.0**15,
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    min_scale: float = 2.0**-14,
    max_scale: float = 2.0**24,
    hysteresis: int = 1,
    axis_name: Any = None,
    grads_are_scaled: bool = False,
) -> LossScaled:
    """Wraps an optimizer so that it skips non-finite steps and adapts the loss scale.

    S is the scale. A step is finite if all gradients, and the loss if given, are finite.

        finite       update by `inner`;          after growth_interval finite steps in a row: S ← min(S·growth, max)
        overflow     zero updates, inner state untouched;                                     S ← max(S·backoff, min)
        loss not finite   zero updates, inner state untouched; S unchanged: the scale is not the cause

    Args:
        inner: The optimizer, or an `optax.MultiSteps`. To accumulate gradients, wrap in this order:
            `dynamic_loss_scale(optax.MultiSteps(tx, k))`. The other order doesn't work: `MultiSteps`
            masks by multiplying, so one NaN stays in its accumulator, and with
            `should_skip_update_fn` the scale never sees the overflow.
        init_scale: Initial scale. If it and the factors are powers of two, unscaling is exact.
        growth_interval: Number of consecutive finite steps before the scale grows.
        growth_factor: Factor by which the scale grows, at least 1.
        backoff_factor: Factor by which an overflow lowers the scale, above 0 and at most 1.
        min_scale, max_scale: Bounds of the scale. They also apply to a restored state.
        hysteresis: Number of consecutive steps that must be skipped before an overflow lowers the scale.
        axis_name: Name(s) of the mapped axes (`pmap`, `shard_map`, `vmap`) over which all replicas make one
            decision. Not needed in `shard_map` with `check_vma=True`, which knows the axes along which the gradients
            vary and the state does not. Required in `pmap` and in `shard_map` without that check. Give `()` if the
            gradients are the same on every replica, or if each replica trains its own model.
        grads_are_scaled: Whether the training loop multiplies the loss by the scale itself. The scaled gradients
            are then unscaled here, in float32. Leave it off with `scale_loss`,
            `value_and_grad` and `grad`, which return true gradients.

    Returns:
        An `optax.GradientTransformationExtraArgs` with a `LossScaleState`. Call
        `update(grads, state, params, value=loss, **extra)` to also detect a non-finite loss.
        Extra arguments are passed to `inner`.

    Raises:
        ValueError: An argument is out of range (checked when the transformation is built; the message quotes it), or
            `update` runs in a pmap, or a shard_map without `check_vma`, and `axis_name` is not given. In `init`,
            `inner` has a loss scale already.
        TypeError: `inner` is not an optax transformation.

    Warns:
        LossScaleWarning: in `init`, params are half and `inner` keeps no `master_weights` of them. Where the whole
            optimizer state is given (`value_and_grad`, `scale_loss`, `apply_gradients`, `check_progress`; a bare
            `update` sees only its own state), a transformation around this one (`optax.apply_if_finite`, another one
            in an `optax.chain`) hides overflows from it, or runs on skipped steps. In the first update, no gradient
            was scaled since the state was made.

    Example:
        >>> import jax.numpy as jnp, optax, mpjax
        >>> tx = mpjax.dynamic_loss_scale(optax.adam(1e-3), growth_interval=2)
        >>> params = {"w": jnp.ones(2)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.array([1.0, jnp.nan])}, state, params)
        >>> float(state.loss_scale), int(state.skipped_steps), float(updates["w"][0])
        (16384.0, 1, 0.0)

    Source: Micikevicius et al. 2018 (https://arxiv.org/abs/1710.03740); the names follow
    `torch.amp.GradScaler`, and the hysteresis follows Megatron-LM.
    """
    init_scale, growth_factor = _number("init_scale", init_scale), _number("growth_factor", growth_factor)
    min_scale, max_scale = _number("min_scale", min_scale), _number("max_scale", max_scale)
    backoff_factor = _number("backoff_factor", backoff_factor)
    in_order = _SMALLEST <= min_scale <= max_scale <= _LARGEST
    _check(in_order, "min_scale, max_scale", (min_scale, max_scale), "need 2**-126 <= min_scale <= max_scale <= 2**126")
    between = f"must lie between min_scale={min_scale!r} and max_scale={max_scale!r}"
    _check(min_scale <= init_scale <= max_scale, "init_scale", init_scale, between)
    _check(1.0 <= growth_factor < math.inf, "growth_factor", growth_factor, "must be at least 1 and finite")
    _check(0.0 < backoff_factor <= 1.0, "backoff_factor", backoff_factor, "must be above 0 and at most 1")
    growth_interval, hysteresis = _count("growth_interval", growth_interval), _count("hysteresis", hysteresis)

    rule = functools.partial(
        next_scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        min_scale=min_scale,
        max_scale=max_scale,
    )
    return _loss_scaled(inner, init_scale, rule, growth_interval, hysteresis, axis_name, grads_are_scaled)


def next_scale(
    scale: jax.Array,
    grow: Any,
    back_off: Any,
    *,
    growth_factor: float,
    backoff_factor: float,
    min_scale: float,
    max_scale: float,
) -> jax.Array:
    """The scale after a step that lets it grow, or makes it back off, or does neither."""
    changed = jnp.where(grow, scale * growth_factor, jnp.where(back_off, scale * backoff_factor, scale))
    # A NaN, for example from a foreign checkpoint, compares false and becomes the minimum.
    return jnp.minimum(jnp.where(changed >= min_scale, changed, min_scale), max_scale).astype(jnp.float32)


def static_loss_scale(
    inner: optax.GradientTransformation | optax.MultiSteps,
    scale: float,
    *,
    axis_name: Any = None,
    grads_are_scaled: bool = False,
) -> LossScaled:
    """Wraps an optimizer so that it skips non-finite steps, with a fixed loss scale.

    Args:
        inner, axis_name, grads_are_scaled: See `dynamic_loss_scale`.
        scale: The loss scale, positive and finite. Use 1 for bfloat16 or float32.

    Raises:
        ValueError: `scale` is not within [2**-126, 2**126].
        TypeError: `inner` is not an optax transformation.

    Example:
        >>> import jax.numpy as jnp, optax, mpjax
        >>> state = mpjax.static_loss_scale(optax.sgd(0.1), 128.0).init({"w": jnp.ones(2)})
        >>> float(state.loss_scale)
        128.0
    """
    applying.refuse_swapped("static_loss_scale", inner, scale)
    scale = _number("scale", scale)
    _check(_SMALLEST <= scale <= _LARGEST, "scale", scale, "must lie between 2**-126 and 2**126")
    return _fixed(inner, scale, axis_name, grads_are_scaled)


def loss_scale_for(inner: optax.GradientTransformation | optax.MultiSteps, policy: Any, **kwargs: Any) -> LossScaled:
    """Wraps an optimizer in the loss scaling that a policy needs. A script with a `--policy` flag needs no branch.

    Args:
        inner: The optimizer.
        policy: Anything that `get_policy` accepts. If it or one of its overrides computes in float16, the scale
            is dynamic. Otherwise it is 1, since bfloat16 has float32's range, and an update warns if its gradients
            come from a float16 backward pass.
        **kwargs: Arguments of `dynamic_loss_scale`. Those about the scale have no effect if it is 1.

    Raises:
        ValueError: The policy is unknown, or an argument is out of range.
        TypeError: An argument that `dynamic_loss_scale` does not have, or the policy comes first.

    Example:
        >>> import jax.numpy as jnp, optax, mpjax
        >>> [float(mpjax.loss_scale_for(optax.sgd(0.1), p).init({}).loss_scale)
        ...  for p in ("mixed_float16", "mixed_bfloat16", "float32")]
        [32768.0, 1.0, 1.0]
    """
    applying.refuse_swapped("loss_scale_for", inner, policy)
    policy = get_policy(policy)
    dynamic = dynamic_loss_scale(inner, **kwargs)  # always built, to check the arguments.
    dtypes = (policy.compute_dtype, *(override.compute_dtype for _, override in policy.overrides))
    if jnp.float16 in dtypes:
        return dynamic
    return _fixed(inner, 1.0, kwargs.get("axis_name"), kwargs.get("grads_are_scaled", False), allows_float16=False)


def _fixed(inner: Any, scale: float, axis_name: Any, grads_are_scaled: bool, allows_float16: bool = True) -> LossScaled:
    def fixed(present: jax.Array, grow: jax.Array, back_off: jax.Array) -> jax.Array:
        return jnp.full_like(present, scale)

    return _loss_scaled(inner, scale, fixed, 2**31 - 1, 1, axis_name, grads_are_scaled, allows_float16)


def _loss_scaled(
    inner: Any,
    init_scale: float,
    next_scale: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    growth_interval: int,
    hysteresis: int,
    axis_name: Any,
    grads_are_scaled: bool,
    allows_float16: bool = True,
) -> LossScaled:
    """The implementation of the public transformations, which differ in `next_scale`.

    Unless it `allows_float16`, an update without a scale warns of gradients of a float16 backward pass.
    """
    inner = as_transformation(inner)
    advance, finish = applying.update_in_parts(inner)
    expects_scaled = not grads_are_scaled and init_scale > 1

    def init(params: Any) -> LossScaleState:
        params = applying.without_overwritten(applying.trainable(params))
        inner_state = inner.init(params)
        if contains_state(inner_state):
            raise ValueError("loss scaling: the wrapped optimizer has a loss scale already. Wrap it once.")
        inner_state = settled(inner, inner_state, params)
        usage.warn_without_masters(inner_state, params)
        # Separate arrays: two leaves that share a buffer can't be donated.
        return LossScaleState(
            loss_scale=jnp.asarray(init_scale, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skips=jnp.zeros((), jnp.int32),
            last_finite=jnp.ones((), jnp.bool_),
            inner_state=inner_state,
            nonfinite_losses=jnp.zeros((), jnp.int32),
            consecutive_nonfinite_losses=jnp.zeros((), jnp.int32),
        )

    def next_state(state: LossScaleState, finite: jax.Array, loss_finite: jax.Array) -> LossScaleState:
        """The state with its counters and scale after a step, and still the old inner state."""
        add_one = optax.safe_increment
        skips = jnp.where(finite, 0, add_one(state.consecutive_skips))
        good = jnp.where(finite, add_one(state.good_steps), 0)
        grow = good >= growth_interval
        back_off = ~finite & loss_finite & (skips >= hysteresis)
        return state._replace(
            loss_scale=next_scale(state.loss_scale, grow, back_off),
            good_steps=jnp.where(grow, 0, good),
            skipped_steps=jnp.where(finite, state.skipped_steps, add_one(state.skipped_steps)),
            consecutive_skips=skips,
            last_finite=finite,
            nonfinite_losses=jnp.where(loss_finite, state.nonfinite_losses, add_one(state.nonfinite_losses)),
            consecutive_nonfinite_losses=jnp.where(loss_finite, 0, add_one(state.consecutive_nonfinite_losses)),
        )

    def decide(values: Any, state: LossScaleState, extra_args: dict[str, Any]) -> LossScaleState:
        """The next state, whose `last_finite` is the decision."""
        if grads_are_scaled:
            usage.warn_of_rules_outside()
            usage.warn_of_gradients_divided_twice(
                values, "an optimizer with grads_are_scaled=True", "Leave grads_are_scaled out."
            )
        elif expects_scaled:
            usage.warn_of_unscaled_gradients(values, init_scale)
        elif not allows_float16:
            usage.warn_of_float16(values)
        with jax.named_scope(UPDATE) if expects_scaled else contextlib.nullcontext():
            loss_finite = all_finite(extra_args.get("value"), state.loss_scale, axis_name)
            finite = all_finite(values, state.loss_scale, axis_name) & loss_finite
        return next_state(state, finite, loss_finite)

    def true(grads: Any, state: LossScaleState) -> Any:
        # Divides by the scale before this step, which the gradients carry. The branch that takes the step calls this
        # again, where it is fused into the update's own pass over the gradients.
        return unscale_by(grads, state.loss_scale) if grads_are_scaled else grads

    def take_or_skip(take: Any, skipped: Callable[[Any], Any], old: LossScaleState, new: LossScaleState) -> Any:
        result, inner_state = jax.eval_shape(take)
        return jax.lax.cond(new.last_finite, take, lambda: (skipped(result), cast_like(old.inner_state, inner_state)))

    def update(grads: Any, state: LossScaleState, params: Any = None, **extra_args: Any) -> tuple[Any, LossScaleState]:
        _check_state("tx.update(grads, state, params)", grads, state, params)
        if applying.overwritten(grads) is not None:
            raise ValueError(
                "loss scaling: the gradients have Flax's FP8 collection '_overwrite_with_gradient', which holds "
                "new values; adding an update can't reproduce them exactly. Use mpjax.apply_gradients(tx, grads, "
                "opt_state, params), flax.training.TrainState, or call tx with the parameters' gradients alone."
            )
        params = params if params is None else applying.trained(params, grads)

        def take() -> tuple[Any, Any]:
            return advance(true(grads, state), state.inner_state, params, **extra_args)

        grads = row_major(grads)
        new = decide(true(grads, state), state, extra_args)
        # `zeros_like` keeps the sharding and the varying axes, which are part of the shape's type.
        found = take_or_skip(take, lambda updates: jax.tree.map(jnp.zeros_like, updates), state, new)
        updates, inner_state = finish(*found, params, new.last_finite)
        _check_shapes(updates, params)
        return updates, new._replace(inner_state=inner_state)

    def apply(
        grads: Any, state: LossScaleState, params: Any, *, also_check: Any = None, **extra_args: Any
    ) -> tuple[Any, LossScaleState]:
        _check_state("apply_gradients(tx, grads, opt_state, params)", grads, state, params)

        def take() -> tuple[Any, Any]:
            return apply_gradients(inner, true(grads, state), state.inner_state, params, **extra_args)

        grads = row_major(grads)
        new = decide((true(grads, state), also_check), state, extra_args)
        params, inner_state = take_or_skip(take, lambda after: _check_shapes(after, params), state, new)
        return params, new._replace(inner_state=inner_state)

    if grads_are_scaled:
        note_scaling_loop(decide)
    return LossScaled.make(init, _compiled_once(update), _compiled_once(apply), decides=True)


def row_major(tree: Any) -> Any:
    """Constrains a tree to row-major layout, that of arguments, inside `jit`. Outside it is unchanged.

    A matmul may produce a transposed gradient. XLA can't fuse the transpose into an update inside a `cond`, and
    would hold a second copy of the gradients there.
    """
    if not compat.shards_layout_constraints():
        return tree

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer) or jnp.ndim(x) < 2 or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return jax.tree.map(leaf, tree)


def settled(inner: optax.GradientTransformationExtraArgs, state: Any, params: Any) -> Any:
    """The initial state of `inner`, in the dtypes that float32 params and gradients give it.

    Adam's moments would otherwise have the dtype of half params. The second one would flush to zero, and the first
    one would become float32, the gradients' dtype, at the first update. A state that changes dtype costs a retrace
    and can't be carried by `scan`. Dtypes that the transformation sets (`mu_dtype`, float32 masters) are kept.
    """
    if not any(map(is_half, jax.tree.leaves(params))):
        return state

    def update(state: Any, params: Any) -> Any:
        return inner.update(widened(params), state, params, value=jnp.float32(0))[1]

    with jax.numpy_dtype_promotion("standard"):
        state = cast_like(state, jax.eval_shape(lambda p: inner.init(widened(p)), params))
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


def _compiled_once(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step. Outside of `jit`, a `lax.cond` would compile its branches at every call."""
    compiled = jax.jit(step)

    @functools.wraps(step)
    def called(*args: Any, **extra_args: Any) -> Any:
        # A Python value among the extra arguments may be static for the inner transformation.
        arrays = all(isinstance(x, (jax.Array, np.ndarray)) for x in jax.tree.leaves((args, extra_args)))
        return step(*args, **extra_args) if compat.is_tracing() or not arrays else compiled(*args, **extra_args)

    return called


def _check_state(call: str, grads: Any, state: Any, params: Any) -> None:
    if not isinstance(state, LossScaleState):
        raise TypeError(
            f"{call}: the state is a {type(state).__name__}, not the LossScaleState of this transformation."
        )
    if jnp.ndim(state.loss_scale):
        raise ValueError(
            f"{call}: the state's loss_scale has shape {jnp.shape(state.loss_scale)}, one for each member of a vmap or "
            "pmap. Call the update inside of it, as tx.init was."
        )
    applying.check_arguments(call, grads, state, params)


def _check_shapes(new: Any, params: Any) -> Any:
    """Returns the params. Raises if updates or new params have other shapes, as moments of other params may cause."""
    if same_structure(new, params):
        for (path, x), p in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(params), strict=True):
            if jnp.shape(x) != jnp.shape(p):
                raise ValueError(
                    f"loss scaling: opt_state is of other params: the update of {path_string(path)!r} has shape "
                    f"{jnp.shape(x)}, not {jnp.shape(p)}."
                )
    return params


def _check(ok: bool, name: str, value: Any, rule: str) -> None:
    if not ok:
        raise ValueError(f"loss scale: {name}={value!r}: {rule}.")


def _number(name: str, value: Any) -> float:
    """Converts a real number of any type, also of a scalar array, to `float`. Raises for other values."""
    is_number = not isinstance(value, str | bool) and np.ndim(value) == 0
    try:
        return float(value if is_number else None)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"loss scale: {name}={value!r}: must be a number.") from None


def _count(name: str, value: Any) -> int:
    """Converts a positive integer of any type, including NumPy's, to `int`. Raises for other values."""
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    _check(0 < count < 2**31, name, value, "must be a positive integer")
    return count
