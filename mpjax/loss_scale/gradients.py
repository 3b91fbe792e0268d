"""`value_and_grad` and `grad`: true float32 gradients for the parameters of any library."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.loss_scale.applying import merge, same_structure, trainable
from mpjax.loss_scale.boundary import checked_aux, one_scale
from mpjax.loss_scale.cotangents import is_differentiable, is_overwritten, level, multiply, unscale_by, widened
from mpjax.policy import is_half, path_string
from mpjax.program import contexts
from mpjax.program.objects import contains_nnx_object, functional, with_values

if TYPE_CHECKING:
    from flax import nnx

    Argnums = int | nnx.DiffState | Sequence[int | nnx.DiffState]
    Module = TypeVar("Module", bound=nnx.Pytree)

Arg = TypeVar("Arg")
Aux = TypeVar("Aux")
Rest = ParamSpec("Rest")
T = TypeVar("T")


@overload
def value_and_grad(  # type: ignore[overload-overlap]
    fun: Callable[Concatenate[Module, Rest], T],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: Literal[0] = 0,
    has_aux: bool = False,
) -> Callable[Concatenate[Module, Rest], tuple[T, nnx.State[Any, Any]]]: ...
@overload
def value_and_grad(  # type: ignore[overload-overlap]
    fun: Callable[Concatenate[Arg, Rest], T],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: Literal[0] = 0,
    has_aux: bool = False,
) -> Callable[Concatenate[Arg, Rest], tuple[T, Arg]]: ...
@overload
def value_and_grad(
    fun: Callable[Rest, T], opt_state: Any = None, *, policy: Any = None, argnums: Argnums, has_aux: bool = False
) -> Callable[Rest, tuple[T, Any]]: ...
def value_and_grad(
    fun: Callable[..., Any], opt_state: Any = None, *, policy: Any = None, argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes the true value and true float32 gradients of a loss, using loss scaling.

    Like `jax.value_and_grad(scale_loss(fun, opt_state))`, except that a half-precision leaf of a differentiated
    argument (policies O2, O3) is differentiated at a float32 copy, which is rounded back for `fun`. Its gradient
    is therefore unscaled and returned in float32. Only the arguments at `argnums` are inside the scaled backward
    pass, so a derivative of the gradient by anything else (hypergradients, penalties, MAML) is true as well.

    Args:
        fun: A function that returns a scalar, or `(scalar, aux)` with `has_aux`. The differentiated leaves are the
            `nnx.Param`s of an NNX module, as in `nnx.value_and_grad`, or the float arrays of an Equinox model,
            as in `eqx.filter_value_and_grad`.
        opt_state: A state that holds the loss scale, or `None` for no scaling.
        policy: Anything that `get_policy` accepts. `fun` then runs under `mpjax.autocast(fun, policy)`, on float32
            copies of half params. With `None` it runs unchanged (a model may get its policy from `with_policy`).
        argnums: Positions to differentiate, as in `jax.value_and_grad`, or `nnx.DiffState`s.
        has_aux: Whether `fun` returns `(loss, aux)`.

    Returns:
        A function with `fun`'s signature that returns `(value, gradients)`.

    Raises:
        ValueError: No (or more than one) `LossScaleState` in `opt_state`; `argnums` out of range;
            unknown policy.

    Example:
        >>> import jax.numpy as jnp, optax, mpjax
        >>> opt_state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init({})
        >>> value, grads = mpjax.value_and_grad(lambda w, x: jnp.sum(w * x), opt_state)(
        ...     jnp.ones(2, jnp.float16), jnp.full(2, 3e-8, jnp.float16))
        >>> grads.dtype, float(grads[0])
        (dtype('float32'), 5.96...e-08)
    """
    if not callable(fun):
        raise TypeError(
            f"value_and_grad(loss_fn, opt_state): a {type(fun).__name__} came first; give the loss function itself."
        )
    run = fun
    if policy is not None:
        from mpjax.casting.autocast import autocast  # imported here, so that loss scaling does not depend on it

        run = autocast(fun, policy)
    run = checked_aux("value_and_grad", run) if has_aux else run
    if opt_state is not None:
        one_scale("value_and_grad", opt_state)  # reports a state without a scale here, not at the first step

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        chosen = _chosen(argnums, len(args))
        # In place of an NNX module, a list of its params' values is differentiated.
        variables = {i: _variables(args[i], chosen[i]) for i in chosen if contains_nnx_object(args[i])}
        given = {i: [v.get_raw_value() for v in variables[i]] if i in variables else trainable(args[i]) for i in chosen}

        def loss_at(at: tuple[dict[int, Any], Any], scale: Any) -> tuple[Any, Any]:
            """The scaled loss, and the result of `fun` with a function that completes it outside of this trace."""
            (wide, mark), own = at, list(args)
            parts = wide if policy is not None else {i: _narrow(wide[i], given[i]) for i in chosen}
            for i in chosen:
                if i not in variables:
                    own[i] = merge(parts[i], args[i])
            call, inputs, keywords, completed = functional(run, own, kwargs)
            for i in variables:
                inputs = with_values(inputs, variables[i], parts[i], (tuple(own), kwargs))
            with contextlib.nullcontext() if scale is None else level(scale, mark, around):
                out = call(*inputs, **keywords)
            finish.append(completed)
            loss = next(iter(jax.tree.leaves(out)), None)
            if loss is None:
                raise TypeError("Gradient only defined for scalar-output functions. The loss function returned None.")
            if scale is not None and is_differentiable(loss):
                loss = multiply(loss, scale, jnp.float32 if is_half(loss) else loss.dtype)
            return loss, out  # `out` holds the true loss

        finish: list[Callable[[Any], Any]] = []
        around = contexts.scaled_losses.value
        scale = None if opt_state is None else one_scale("value_and_grad", opt_state)
        _check_differentiable(given)
        wide = {i: widened(given[i]) for i in chosen}
        mark = np.zeros((), np.float32)
        with contextlib.nullcontext() if scale is None else contexts.scaled_losses(contexts.IN_RULE):
            (_, out), (grads, _) = jax.value_and_grad(loss_at, has_aux=True)((wide, mark), scale)
        if scale is not None:
            grads = unscale_by(grads, scale)
            float8 = jax.tree_util.tree_map_with_path(_is_float8, wide)
            if any(jax.tree.leaves(float8)):
                # A scaled cotangent does not fit in float8, whose largest number is 448.
                with contexts.scaled_losses(()):
                    (unscaled, _), _ = jax.grad(loss_at, has_aux=True)((wide, mark), None)
                grads = jax.tree.map(lambda is_float8, g, u: u if is_float8 else g, float8, grads, unscaled)
        out = finish[0](out)
        if not has_aux and not same_structure(out, 0.0):
            raise TypeError(
                "Gradient only defined for scalar-output functions. With has_aux=True, value_and_grad takes a function "
                f"that returns (loss, aux). Output was: {out}."
            )
        found = tuple(_like_state(grads[i], args[i], chosen[i]) if i in variables else grads[i] for i in chosen)
        return out, found if isinstance(argnums, Sequence) else found[0]

    return value_and_grad_fun


@overload
def grad(
    fun: Callable[Concatenate[Module, Rest], Any],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
) -> Callable[Concatenate[Module, Rest], nnx.State[Any, Any]]: ...
@overload
def grad(
    fun: Callable[Concatenate[Arg, Rest], Any],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: Literal[0] = 0,
    has_aux: Literal[False] = False,
) -> Callable[Concatenate[Arg, Rest], Arg]: ...
@overload
def grad(
    fun: Callable[Concatenate[Module, Rest], tuple[Any, Aux]],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: Literal[0] = 0,
    has_aux: Literal[True],
) -> Callable[Concatenate[Module, Rest], tuple[nnx.State[Any, Any], Aux]]: ...
@overload
def grad(
    fun: Callable[Concatenate[Arg, Rest], tuple[Any, Aux]],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: Literal[0] = 0,
    has_aux: Literal[True],
) -> Callable[Concatenate[Arg, Rest], tuple[Arg, Aux]]: ...
@overload
def grad(
    fun: Callable[Rest, Any], opt_state: Any = None, *, policy: Any = None, argnums: Argnums = 0, has_aux: bool = False
) -> Callable[Rest, Any]: ...
def grad(
    fun: Callable[..., Any], opt_state: Any = None, *, policy: Any = None, argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns a function that computes the true float32 gradients, or `(gradients, aux)` with `has_aux`.

    See `value_and_grad`.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> mpjax.grad(lambda w: w**2)(jnp.float16(3.0)).dtype
        dtype('float32')
    """
    which: Any = argnums  # the overloads of value_and_grad distinguish 0
    both: Any = value_and_grad(fun, opt_state, policy=policy, argnums=which, has_aux=has_aux)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def _chosen(argnums: Argnums, count: int) -> dict[int, int | nnx.DiffState]:
    """Maps each differentiated position to itself, or to the `nnx.DiffState` given for it."""
    chosen: dict[int, int | nnx.DiffState] = {}
    for given in argnums if isinstance(argnums, Sequence) else (argnums,):
        argnum: Any = getattr(given, "argnum", given)
        position = operator.index(argnum)  # also NumPy's integers
        if not -count <= position < count:
            raise ValueError(
                f"argnums={argnums!r} is out of range: the function was called with {count} positional arguments."
            )
        position %= count
        if position in chosen:
            raise ValueError(f"argnums={argnums!r} names an argument twice.")
        chosen[position] = position if argnum is given else given
    return chosen


def _check_differentiable(given: dict[int, Any]) -> None:
    for i, tree in given.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not jnp.issubdtype(dtype := jax.typeof(x).dtype, jnp.inexact):
                raise TypeError(
                    f"grad requires real- or complex-valued inputs, but {path_string(path) or 'all'} of argument {i} "
                    f"is {dtype}. Give it in another argument (argnums says which are differentiated)."
                )


def _is_float8(path: Any, x: Any) -> bool:
    return is_differentiable(x) and x.dtype.itemsize == 1 and not is_overwritten(path_string(path))


def _narrow(wide: Any, original: Any) -> Any:
    return jax.tree.map(lambda w, x: w.astype(x.dtype) if is_half(x) else w, wide, original)


# Helpers for NNX modules.


def _params(module: Any, given: int | nnx.DiffState) -> Any:
    """The differentiated state of an NNX module, or of a tree of them."""
    from flax import nnx

    return nnx.state(module, nnx.Param if isinstance(given, int) else given.filter)


def _variables(module: Any, given: int | nnx.DiffState) -> list[Any]:
    from flax import nnx

    return jax.tree.leaves(_params(module, given), is_leaf=lambda x: isinstance(x, nnx.Variable))


def _like_state(grads: list[Any], module: Any, given: int | nnx.DiffState) -> Any:
    """The gradients in the structure that `nnx.grad` returns."""
    return jax.tree.unflatten(jax.tree.structure(_params(module, given)), jax.tree.leaves(grads))
