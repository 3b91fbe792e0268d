"""`apply_gradients`, and the protocol by which a transformation of this library writes the new params itself."""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeVar, overload

import jax
import optax

from mpjax.loss_scale.cotangents import OVERWRITE_WITH_GRADIENT, is_differentiable
from mpjax.loss_scale.restoring import keep_if_finite
from mpjax.loss_scale.state import check_wiring, contains_state
from mpjax.policy import path_string
from mpjax.program.objects import held, is_of_nnx

State = TypeVar("State")
Params = TypeVar("Params")

Apply = Callable[..., tuple[Any, Any]]


class Transformation(optax.GradientTransformationExtraArgs):
    """A transformation of this library, whose new params `apply_gradients` gets from `apply`.

    Attributes:
        apply: `apply(grads, state, params, **extra)`, in place of `update` and `optax.apply_updates`.
        decides: Whether it skips steps. If so, its `apply` takes further values to check, as `also_check`.
        parts: `update` in two parts: `finish(*advance(grads, state, params, **extra), params, taken)`. The branch that
            takes the step need not store what `finish` can compute from the new state.
    """

    apply: Apply | None = None  # as in a copy with another `update` (`_replace`), which must not be bypassed
    decides: bool = False
    parts: tuple[Apply, Apply] | None = None

    @classmethod
    def make(cls, init: Callable[..., Any], update: Apply, apply: Apply, *, decides: bool, parts: Any = None) -> Self:
        """A transformation from its functions."""
        made = cls(init, update)
        made.apply, made.decides, made.parts = apply, decides, parts
        return made


def update_in_parts(tx: optax.GradientTransformationExtraArgs) -> tuple[Apply, Apply]:
    """`advance` and `finish` of a transformation. By default `advance` is its `update` and `finish` does nothing."""
    if isinstance(tx, Transformation) and tx.parts is not None:
        return tx.parts
    return tx.update, lambda updates, state, params, taken: (updates, state)


def _applies(tx: Any) -> bool:
    return isinstance(tx, Transformation) and tx.apply is not None


class TrainState(Protocol):
    """What `apply_gradients` uses of a `flax.training.train_state.TrainState`."""

    step: Any
    params: Any
    opt_state: Any

    @property
    def tx(self) -> Any: ...

    def replace(self, **changes: Any) -> Any: ...


AnyTrainState = TypeVar("AnyTrainState", bound=TrainState)


@overload
def apply_gradients(tx: AnyTrainState, grads: Any, **extra_args: Any) -> AnyTrainState: ...
@overload
def apply_gradients(
    tx: Any, grads: Any, opt_state: State, params: Params, **extra_args: Any
) -> tuple[Params, State]: ...
def apply_gradients(tx: Any, grads: Any, opt_state: Any = None, params: Any = None, **extra_args: Any) -> Any:
    """Computes the updates and applies them: returns the new params and the new optimizer state.

    Equivalent to `tx.update` followed by `optax.apply_updates`. With a loss-scaled `tx` both happen inside
    the `lax.cond` that skips steps, so the updates are never written to memory.

    Args:
        tx: An optax transformation, an `optax.MultiSteps`, or an `nnx.Optimizer`. Or, without `opt_state` and `params`,
            a Flax `TrainState`, which holds all three.
        grads: Gradients, with the tree structure of `params`. Those of an Equinox model have None at its static leaves.
        opt_state: State of `tx`, or an `nnx.Optimizer`, which is updated in place.
        params: A tree of arrays, an Equinox model or an `nnx.State`. With an `nnx.Optimizer`, the NNX model, which
            is updated in place. Values of Flax's FP8 collection are replaced by their "gradients".
        **extra_args: Passed to `tx.update`, such as `value=loss`.

    Returns:
        `(params, opt_state)`, or the new `TrainState`. A skipped step leaves the params and the inner state bitwise
        unchanged. `TrainState.step` counts it, as `TrainState.apply_gradients` does.

    Raises:
        TypeError: The arguments are in the wrong order, or some are missing.
        ValueError: `grads` and `params` differ in structure.

    Example:
        >>> import jax.numpy as jnp, optax, mpjax
        >>> tx = mpjax.dynamic_loss_scale(optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> params, state = mpjax.apply_gradients(tx, {"w": jnp.ones(2)}, tx.init(params), params)
        >>> params["w"].tolist()
        [0.5, 0.5]
    """
    if _is_train_state(tx):
        if opt_state is not None or params is not None:
            raise TypeError(f"{_OF_A_TRAIN_STATE}, without opt_state and params, which it holds.")
        return _apply_to_train_state(tx, grads, extra_args)
    if _is_train_state(opt_state):
        raise TypeError(f"{_OF_A_TRAIN_STATE}; got it as opt_state.")
    if opt_state is None or params is None:
        raise TypeError(
            "apply_gradients(tx, grads, opt_state, params): opt_state or params are missing. Only a Flax TrainState in "
            f"place of tx holds them; got a {type(tx).__name__}. (An nnx.Optimizer has its own: "
            "optimizer.update(model, grads, value=loss).)"
        )
    if is_of_nnx(opt_state, "Optimizer"):
        _apply_to_nnx(tx, grads, opt_state, params, extra_args)
        return params, opt_state
    tx = as_transformation(tx)
    check_arguments("apply_gradients(tx, grads, opt_state, params)", grads, opt_state, params)
    arrays = trained(params, grads)
    new, opt_state = _apply_to_arrays(tx, grads, opt_state, arrays, extra_args)
    return merge(new, params), opt_state


def _apply_to_arrays(tx: Any, grads: Any, opt_state: Any, params: Any, extra_args: dict[str, Any]) -> tuple[Any, Any]:
    values = overwritten(grads)
    if not _applies(tx):
        check_wiring(opt_state)
        if not contains_state(opt_state):
            updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
            return overwrite(optax.apply_updates(params, updates), values), opt_state
    optimized = without_overwritten(params)
    optimized, opt_state = _optimize(tx, without_overwritten(grads), opt_state, optimized, values, extra_args)
    return optimized if values is None else _with_values(params, optimized, values, opt_state), opt_state


def _optimize(
    tx: Any, grads: Any, opt_state: Any, params: Any, values: Any, extra_args: dict[str, Any]
) -> tuple[Any, Any]:
    """The new params and state. `values`, those of the FP8 collection, must be finite too."""
    if _applies(tx):
        extra_args = {**extra_args, "also_check": values} if tx.decides else extra_args
        return tx.apply(grads, opt_state, params, **extra_args)
    updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
    return optax.apply_updates(params, updates), opt_state


def _with_values(params: Any, optimized: Any, values: Any, opt_state: Any) -> Any:
    """The params after a step: optimized ones, and the new values of the FP8 collection if the step was taken."""
    kept = keep_if_finite(opt_state, values, overwritten(params)) if contains_state(opt_state) else values
    return overwrite(type(params)({**params, **optimized}), kept)


_OF_A_TRAIN_STATE = "apply_gradients: a TrainState comes first, apply_gradients(state, grads, value=loss)"


def _is_train_state(x: Any) -> bool:
    return all(hasattr(x, name) for name in ("step", "params", "opt_state", "tx", "replace"))


def _apply_to_train_state(state: Any, grads: Any, extra_args: dict[str, Any]) -> Any:
    tx, values = as_transformation(state.tx), overwritten(grads)
    if values is None:
        params, opt_state = apply_gradients(tx, grads, state.opt_state, state.params, **extra_args)
    else:  # The optimizer state of such a TrainState is that of the collection "params" alone.
        old = state.params["params"]
        new, opt_state = _optimize(tx, grads["params"], state.opt_state, old, values, extra_args)
        params = _with_values(state.params, {"params": new}, values, opt_state)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state)


def _apply_to_nnx(tx: Any, grads: Any, optimizer: Any, model: Any, extra_args: dict[str, Any]) -> None:
    """`nnx.Optimizer.update`, implemented with `apply_gradients`."""
    from flax import nnx

    tx = optimizer.tx if is_of_nnx(tx, "Optimizer") else tx
    params, state = nnx.as_pure(nnx.state(model, optimizer.wrt)), nnx.as_pure(optimizer.opt_state)
    grads = nnx.as_pure(nnx.state(grads, optimizer.wrt)) if isinstance(grads, nnx.State) else grads
    params, state = apply_gradients(tx, grads, state, params, **nnx.as_pure(extra_args))
    nnx.update(model, params)
    nnx.update(optimizer.opt_state, nnx.state(state))
    optimizer.step[...] += 1


# Flax's FP8 collection, which is next to the parameters at the top level of the tree.


def overwritten(tree: Any) -> Any:
    """The values of the FP8 collection, which replace the old ones, or None."""
    return tree.get(OVERWRITE_WITH_GRADIENT) if isinstance(tree, Mapping) else None


def without_overwritten(tree: Any) -> Any:
    """The tree without the FP8 collection."""
    if overwritten(tree) is None:
        return tree
    return {key: value for key, value in tree.items() if key != OVERWRITE_WITH_GRADIENT}


def overwrite(tree: Any, values: Any) -> Any:
    """The tree with the values of its FP8 collection replaced."""
    return tree if values is None else type(tree)({**tree, OVERWRITE_WITH_GRADIENT: values})


# Models with static leaves (Equinox), where their gradients have None.


def trainable(tree: Any) -> Any:
    """An Equinox model with None for leaves that `eqx.filter_grad` does not differentiate; other trees unchanged."""
    if not _is_equinox(tree):
        return tree
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) and is_differentiable(x) else None, tree)


def same_structure(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure."""
    structure: Any = jax.tree.structure(a)
    return structure == jax.tree.structure(b)


def trained(params: Any, grads: Any) -> Any:
    """The params with None where the gradients have None."""
    if same_structure(params, grads):
        return params
    try:
        return jax.tree.map(lambda g, p: None if g is None else p, grads, params, is_leaf=lambda x: x is None)
    except ValueError:
        return params  # `check_arguments` accepted it: the transformation handles such params


def merge(new: Any, params: Any) -> Any:
    """The leaves of `new`, or those of `params` where `new` has None."""
    return jax.tree.map(lambda n, p: p if n is None else n, new, params, is_leaf=lambda x: x is None)


def _is_equinox(tree: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and bool(held(tree, lambda x: isinstance(x, equinox.Module)))


def as_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation with an `update` that accepts any extra arguments and drops unknown ones."""
    if isinstance(inner, optax.MultiSteps):
        inner = inner.gradient_transformation()
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"expected an optax gradient transformation to wrap, got {reprlib.repr(inner)} "
            "(give the transformation itself, such as optax.adam(1e-3))."
        )
    if not isinstance(inner, optax.GradientTransformationExtraArgs):
        return optax.with_extra_args_support(inner)
    parameters = inspect.signature(inner.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return inner
    # Such as optax.contrib.sam, whose update takes only `grad_fn`.
    names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        return inner.update(grads, state, params, **{k: v for k, v in extra_args.items() if k in names})

    return optax.GradientTransformationExtraArgs(inner.init, update)


def refuse_swapped(call: str, inner: Any, second: Any) -> None:
    """Raises if the optimizer is the second argument of a factory."""
    if callable(getattr(second, "update", None)):
        raise TypeError(f"{call}: the optimizer comes first: {call}(tx, {inner!r}).")


def check_arguments(call: str, grads: Any, opt_state: Any, params: Any) -> None:
    """Raises if the arguments of an update are in the wrong order, or differ in structure."""
    for name, tree in (("grads", grads), ("params", params)):
        if contains_state(tree):
            raise TypeError(f"{call}: got the optimizer state as {name}; check the order of the arguments.")
    if type(grads) is tuple and len(grads) == 2 and same_structure(grads[1], params):
        raise TypeError(f"{call}: grads is a pair. value_and_grad returns (loss, grads): give the second.")
    # Some transformations define params of another type than the gradients (optax.LookaheadParams).
    if type(grads) is not type(params) or same_structure(grads, params):
        return
    paths = [{path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)} for tree in (grads, params)]
    unknown = sorted(paths[0] - paths[1])
    if unknown:
        raise ValueError(
            f"{call}: grads and params differ in structure: {', '.join(unknown[:3])} of grads "
            f"{'is' if len(unknown) == 1 else 'are'} not in params."
        )
