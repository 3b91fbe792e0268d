"""`apply_gradients`, and what lets a transformation of this library write the new params itself."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import optax

from mpjax._cotangents import OVERWRITE_WITH_GRADIENT, is_differentiable
from mpjax._keep_if_finite import keep_if_finite
from mpjax._loss_scale_state import contains_state
from mpjax._trees import same_structure
from mpjax.policy import path_string

State = TypeVar("State")
Params = TypeVar("Params")

_FUSED = "_mpjax_fused"


@dataclasses.dataclass(frozen=True)
class Fused:
    """What a transformation of this library can do beside `init` and `update`."""

    update: Callable[..., Any]
    # `apply(grads, state, params, **extra)`, in place of `update` and `optax.apply_updates`.
    apply: Callable[..., tuple[Any, Any]]
    # Whether it skips steps; its `apply` then takes more values to check, as `also_check`.
    decides: bool
    # `update` in two parts: `finish(*advance(grads, state, params, **extra), params, taken)`. What `finish` computes
    # from the new state needs not be stored by the branch that takes the step.
    parts: tuple[Callable[..., tuple[Any, Any]], Callable[..., tuple[Any, Any]]] | None = None


def transformation(
    init: Callable[..., Any],
    update: Callable[..., Any],
    apply: Callable[..., Any],
    decides: bool,
    parts: tuple[Callable[..., tuple[Any, Any]], Callable[..., tuple[Any, Any]]] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """A transformation that `apply_gradients` runs by `apply`."""
    setattr(update, _FUSED, Fused(update, apply, decides, parts))
    return optax.GradientTransformationExtraArgs(init, update)


def update_in_parts(tx: optax.GradientTransformationExtraArgs) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`advance` and `finish` of a transformation; of most, its `update` and nothing more."""
    found = fused(tx)
    if found is not None and found.parts is not None:
        return found.parts
    return tx.update, lambda updates, state, params, taken: (updates, state)


def fused(tx: Any) -> Fused | None:
    found = getattr(tx.update, _FUSED, None)
    # `functools.wraps` copies attributes: an update that wraps ours must not be bypassed.
    return found if isinstance(found, Fused) and found.update is tx.update else None


def apply_gradients(tx: Any, grads: Any, opt_state: State, params: Params, **extra_args: Any) -> tuple[Params, State]:
    """Updates and applies in one: the new params and the new optimizer state.

    The same as `tx.update` followed by `optax.apply_updates`, but with a loss-scaled `tx` both happen
    inside the one `lax.cond` that skips, so no array of updates is written and read again.

    Args:
        tx: an optax transformation, an `optax.MultiSteps`, or an `nnx.Optimizer`.
        grads: tree of the params; an Equinox model's gradients have None where it is static.
        opt_state: state of `tx`; or an `nnx.Optimizer`, which is then updated in place.
        params: tree of arrays, an Equinox model, an `nnx.State`; with an `nnx.Optimizer` the NNX model, which
            is then updated in place. Values of Flax's FP8 collection are replaced by their "gradients".
        **extra_args: passed to `tx.update`, such as `value=loss`.

    Returns:
        `(params, opt_state)`; on a skipped step the params and the inner state are bitwise the old.

    Raises:
        TypeError: the arguments are in another order.
        ValueError: `grads` and `params` differ in structure.

    Example:
        >>> import optax, mpjax
        >>> import jax.numpy as jnp
        >>> tx = mpjax.dynamic_loss_scale(optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> params, state = mpjax.apply_gradients(tx, {"w": jnp.ones(2)}, tx.init(params), params)
        >>> params["w"].tolist()
        [0.5, 0.5]
    """
    if _is_nnx_optimizer(opt_state):
        _apply_to_nnx(tx, grads, opt_state, params, extra_args)
        return params, opt_state
    tx = as_transformation(tx)
    check_arguments("apply_gradients(tx, grads, opt_state, params)", grads, opt_state, params)
    arrays = trained(params, grads)
    new, opt_state = _apply_to_arrays(tx, grads, opt_state, arrays, extra_args)
    return merge(new, params), opt_state


def _apply_to_arrays(tx: Any, grads: Any, opt_state: Any, params: Any, extra_args: dict[str, Any]) -> tuple[Any, Any]:
    found = fused(tx)
    if found is None and not contains_state(opt_state):
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
        return overwrite(optax.apply_updates(params, updates), overwritten(grads)), opt_state
    values = overwritten(grads)
    grads, optimized = without_overwritten(grads), without_overwritten(params)
    if found is not None:
        extra_args = {**extra_args, "also_check": values} if found.decides else extra_args
        optimized, opt_state = found.apply(grads, opt_state, optimized, **extra_args)
    else:
        updates, opt_state = tx.update(grads, opt_state, optimized, **extra_args)
        optimized = optax.apply_updates(optimized, updates)
    if values is None:
        return optimized, opt_state
    kept = keep_if_finite(opt_state, values, overwritten(params)) if contains_state(opt_state) else values
    return overwrite(type(params)({**params, **optimized}), kept), opt_state


def _is_nnx_optimizer(x: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Optimizer)


def _apply_to_nnx(tx: Any, grads: Any, optimizer: Any, model: Any, extra_args: dict[str, Any]) -> None:
    """What `nnx.Optimizer.update` does, by `apply_gradients`."""
    from flax import nnx

    tx = optimizer.tx if _is_nnx_optimizer(tx) else tx
    params, state = nnx.as_pure(nnx.state(model, optimizer.wrt)), nnx.as_pure(optimizer.opt_state)
    grads = nnx.as_pure(nnx.state(grads, optimizer.wrt)) if isinstance(grads, nnx.State) else grads
    params, state = apply_gradients(tx, grads, state, params, **nnx.as_pure(extra_args))
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(state))
    optimizer.step[...] += 1


# Flax's FP8 collection: beside the parameters, at the top of the tree.


def overwritten(tree: Any) -> Any:
    """The values that replace the old ones, or None."""
    return tree.get(OVERWRITE_WITH_GRADIENT) if isinstance(tree, Mapping) else None


def without_overwritten(tree: Any) -> Any:
    """The tree without them."""
    if overwritten(tree) is None:
        return tree
    return {key: value for key, value in tree.items() if key != OVERWRITE_WITH_GRADIENT}


def overwrite(tree: Any, values: Any) -> Any:
    """The tree with them replaced."""
    return tree if values is None else type(tree)({**tree, OVERWRITE_WITH_GRADIENT: values})


# Models with static leaves (Equinox): their gradients have None there.


def trainable(tree: Any) -> Any:
    """An Equinox model with None in place of what `eqx.filter_grad` does not differentiate; else the tree itself."""
    if not _is_equinox(tree):
        return tree
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) and is_differentiable(x) else None, tree)


def trained(params: Any, grads: Any) -> Any:
    """The params with None where the gradients have None."""
    if same_structure(params, grads):
        return params
    try:
        return jax.tree.map(lambda g, p: None if g is None else p, grads, params, is_leaf=lambda x: x is None)
    except ValueError:
        return params  # `check_arguments` has let it pass: the transformation knows what it is about


def merge(new: Any, params: Any) -> Any:
    """The params with `new` where that is not None."""
    if same_structure(new, params):
        return new
    return jax.tree.map(lambda n, p: p if n is None else n, new, params, is_leaf=lambda x: x is None)


def _is_equinox(tree: Any) -> bool:
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return False
    is_module = lambda x: isinstance(x, equinox.Module)  # noqa: E731
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation, taking any extra arguments: those that it does not know are dropped."""
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"expected an optax gradient transformation to wrap, got {inner!r} "
            "(give the transformation itself, such as optax.adam(1e-3))."
        )
    if not isinstance(inner, optax.GradientTransformationExtraArgs):
        return optax.with_extra_args_support(inner)
    parameters = inspect.signature(inner.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return inner
    # Such as optax.contrib.sam, whose update takes `grad_fn` and nothing else.
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        return inner.update(grads, state, params, **{k: v for k, v in extra_args.items() if k in names})

    return optax.GradientTransformationExtraArgs(inner.init, update)


def check_arguments(call: str, grads: Any, opt_state: Any, params: Any) -> None:
    """Raises where the arguments of an update are in another order, or of different structure."""
    for name, tree in (("grads", grads), ("params", params)):
        if contains_state(tree):
            raise TypeError(f"{call}: got the optimizer state as {name}; are the arguments in another order?")
    # Params of another kind than the gradients (optax.LookaheadParams) are the transformation's own affair.
    if type(grads) is not type(params) or same_structure(grads, params):
        return
    paths = [{path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)} for tree in (grads, params)]
    unknown = sorted(paths[0] - paths[1])
    if unknown:
        raise ValueError(
            f"{call}: grads and params differ in structure: {', '.join(unknown[:3])} of grads "
            f"{'is' if len(unknown) == 1 else 'are'} not in params."
        )
