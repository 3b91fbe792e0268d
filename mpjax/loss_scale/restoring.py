"""Restores state outside the optimizer after a skipped step: batch statistics, EMAs, RNG state, caches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mpjax.loss_scale.cotangents import along_leading_axes
from mpjax.loss_scale.state import find_loss_scale_state
from mpjax.policy import path_string
from mpjax.program.objects import is_of_nnx

T = TypeVar("T")


def keep_if_finite(opt_state: Any, new: T, old: T) -> T:
    """Selects `new` if the last step was taken, `old` if it was skipped.

    Use it for state that the optimizer does not own, such as batch statistics, an EMA of the weights or RNG
    state. Otherwise a single skipped step with overflowed activations corrupts a running mean permanently.
    For NNX modules use `restore_if_skipped`, which takes the snapshot of the old values itself.

    Args:
        opt_state: State *after* `tx.update` or `apply_gradients`. Its `last_finite` has shape (). Outside the `vmap`
            or `pmap` that made it, it has one value for each member, and axis 0 of all leaves is mapped.
        new, old: Trees of arrays of the same structure, shapes and dtypes.

    Returns:
        A tree like `new`.

    Raises:
        ValueError: No (or more than one) `LossScaleState` in `opt_state`; the trees differ; a leaf lacks
            the mapped axis; `new` and `old` hold the same `nnx.Variable`.

    Example:
        >>> import jax, jax.numpy as jnp, optax, mpjax
        >>> tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
        >>> params = {"w": jnp.ones(2)}
        >>> _, opt_state = tx.update({"w": jnp.array([1.0, jnp.inf])}, tx.init(params), params)
        >>> float(mpjax.keep_if_finite(opt_state, new=jnp.nan, old=3.0))
        3.0
    """
    finite = jnp.asarray(find_loss_scale_state(opt_state).last_finite)
    _refuse_same_variables(new, old)
    return jax.tree_util.tree_map_with_path(lambda path, n, o: _select(finite, n, o, path=path_string(path)), new, old)


@contextlib.contextmanager
def restore_if_skipped(module: Any, optimizer: Any, *filters: Any) -> Iterator[None]:
    """Context manager for an NNX training step that restores the module's state if the step is skipped.

    It records the values of the variables on entry. On exit each variable keeps its new value if the
    optimizer took every step inside the context, and is restored if it skipped one. Works inside `nnx.jit`.

    Args:
        module: An NNX module, or a tree of them.
        optimizer: The `nnx.Optimizer` whose `update` is called inside the context.
        *filters: NNX filters of the variables, such as `nnx.BatchStat`. By default all variables except
            those that the optimizer updates: batch statistics, RNG state, caches.

    Raises:
        TypeError: `optimizer` is not an `nnx.Optimizer`.
        ValueError: `optimizer.update` was not called inside; no (or more than one) `LossScaleState` in it.

    Example:
        >>> import jax, jax.numpy as jnp, optax, mpjax
        >>> from flax import nnx
        >>> model = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
        >>> optimizer = nnx.Optimizer(model, mpjax.dynamic_loss_scale(optax.sgd(0.1)), wrt=nnx.Param)
        >>> with mpjax.restore_if_skipped(model, optimizer):
        ...     grads = mpjax.grad(lambda m: jnp.sum(m(jnp.full((2, 1), jnp.inf))), optimizer)(model)
        ...     _ = optimizer.update(model, grads)
        >>> float(model.mean[0])
        0.0
    """
    if not is_of_nnx(optimizer, "Optimizer"):
        raise TypeError(
            f"restore_if_skipped: expected an nnx.Optimizer, got {type(optimizer).__name__}. With a plain optax state "
            "use mpjax.keep_if_finite(opt_state, new, old) after the update."
        )
    from flax import nnx

    before = find_loss_scale_state(optimizer).skipped_steps
    wanted = filters or (nnx.Not(optimizer.wrt),)
    variables = jax.tree.leaves(nnx.state(module, nnx.Any(*wanted)), is_leaf=lambda x: isinstance(x, nnx.Variable))
    snapshot = [(variable, variable.get_raw_value()) for variable in variables]
    yield
    after = find_loss_scale_state(optimizer).skipped_steps
    if after is before:
        raise ValueError(
            "restore_if_skipped: optimizer.update was not called inside the context, so there is no step to check."
        )
    for variable, old in snapshot:
        new = variable.get_raw_value()
        if new is not old:
            select = functools.partial(_select, jnp.asarray(after == before), path=type(variable).__name__)
            variable.set_raw_value(jax.tree.map(select, new, old))


def _select(finite: jax.Array, new: Any, old: Any, *, path: str) -> jax.Array:
    """One leaf: `new` where `finite`, else `old`."""
    shapes, dtypes = (jnp.shape(new), jnp.shape(old)), (jnp.result_type(new), jnp.result_type(old))
    both_arrays = hasattr(new, "dtype") and hasattr(old, "dtype")
    if shapes[0] != shapes[1] or (both_arrays and dtypes[0] != dtypes[1]):
        raise ValueError(
            f"keep_if_finite: the leaf {path!r} is {dtypes[0]}{list(shapes[0])} in new, but "
            f"{dtypes[1]}{list(shapes[1])} in old."
        )
    # `where`, never a multiplication: 0 * NaN is NaN.
    return jnp.where(along_leading_axes(finite, new, "keep_if_finite: last_finite", path), new, old)


def _refuse_same_variables(new: Any, old: Any) -> None:
    """Raises if both trees hold the same mutable variable, whose old value is lost."""
    is_variable = functools.partial(is_of_nnx, names="Variable")

    def variables(tree: Any) -> dict[int, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)
        return {id(leaf): path_string(path) for path, leaf in leaves if is_variable(leaf)}

    olds = variables(old)
    for identity, path in variables(new).items():
        if identity in olds:
            raise ValueError(
                f"keep_if_finite: new and old hold the same nnx.Variable at {path!r}: nnx.state(model) returns the "
                "module's own variables, whose old values are gone after the step. Take a snapshot before the step, "
                "old = nnx.as_pure(nnx.state(model, nnx.BatchStat)), and pass new=nnx.as_pure(nnx.state(...)); or run "
                "the step inside `with mpjax.restore_if_skipped(model, optimizer):`, which does both."
            )
