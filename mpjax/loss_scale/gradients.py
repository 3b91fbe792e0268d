"""`value_and_grad` and `grad`: true float32 gradients for the parameters of any library."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from mpjax.loss_scale.applying import merge, trainable
from mpjax.loss_scale.boundary import one_scale, scale_loss
from mpjax.modules.boundary import contains_nnx_object
from mpjax.policy import is_half

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
    fun: Callable[Rest, T],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: Argnums,
    has_aux: bool = False,
) -> Callable[Rest, tuple[T, Any]]: ...
def value_and_grad(
    fun: Callable[..., Any],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: Argnums = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the true value and true float32 gradients of a loss, using loss scaling.

    Like `jax.value_and_grad(scale_loss(fun, opt_state))`, except that a half-precision leaf of a differentiated
    argument (policies O2, O3) is differentiated at a float32 copy, which is rounded back for `fun`. Its gradient
    is therefore unscaled and returned in float32.

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
        >>> import optax, mpjax
        >>> opt_state = mpjax.dynamic_loss_scale(optax.sgd(0.1)).init({})
        >>> value, grads = mpjax.value_and_grad(lambda w, x: jnp.sum(w * x), opt_state)(
        ...     jnp.ones(2, jnp.float16), jnp.full(2, 3e-8, jnp.float16))
        >>> grads.dtype, float(grads[0])
        (dtype('float32'), 5.96...e-08)
    """
    cast_fun = fun if policy is None else _autocast(fun, policy)
    if opt_state is not None:
        one_scale("value_and_grad", opt_state)  # reports a state without a scale here, not at the first step

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        chosen = _chosen(argnums, len(args))
        with_nnx = {i for i in chosen if contains_nnx_object(args[i])}
        # For NNX modules with half params, a list of the params' values is differentiated in their place.
        params = {i: [v.get_raw_value() for v in _variables(args[i], chosen[i])] for i in with_nnx}
        half = [i for i in sorted(with_nnx) if any(map(is_half, jax.tree.leaves(params[i])))]
        inputs = list(args)
        for i in chosen:
            if i in half:
                inputs[i] = _wide(params[i])
            elif i not in with_nnx:
                inputs[i] = _wide(trainable(args[i]))

        def at_wide(*given: Any) -> Any:
            """`fun` at the wide inputs, followed by the modules with half params and the keyword arguments."""
            modules, keywords = dict(zip(half, given[len(args) : -1], strict=True)), given[-1]
            own = [modules.get(i, x) for i, x in enumerate(given[: len(args)])]
            with contextlib.ExitStack() as values:
                for i in chosen:
                    if i in half:
                        # The module is the trace's own copy. Other threads may use the caller's, which stays half.
                        variables = _variables(own[i], chosen[i])
                        values.enter_context(_holding(variables, given[i], narrow=policy is None))
                    elif i not in with_nnx:
                        part = given[i] if policy is not None else _narrow(given[i], trainable(args[i]))
                        own[i] = merge(part, args[i])
                return cast_fun(*own, **keywords)

        scaled = at_wide if opt_state is None else scale_loss(at_wide, opt_state, has_aux)
        transform: Any = sys.modules["flax.nnx"].value_and_grad if with_nnx else jax.value_and_grad
        which = tuple(i if i in half or isinstance(given, int) else given for i, given in chosen.items())
        value, grads = transform(scaled, argnums=which, has_aux=has_aux)(*inputs, *(args[i] for i in half), kwargs)
        grads = tuple(
            _like_state(found, args[i], chosen[i]) if i in half else found
            for i, found in zip(chosen, grads, strict=True)
        )
        return value, grads if isinstance(argnums, Sequence) else grads[0]

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
    fun: Callable[Rest, Any],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: Argnums = 0,
    has_aux: bool = False,
) -> Callable[Rest, Any]: ...
def grad(
    fun: Callable[..., Any],
    opt_state: Any = None,
    *,
    policy: Any = None,
    argnums: Argnums = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes the true float32 gradients, or `(gradients, aux)` with `has_aux`.

    See `value_and_grad`.

    Example:
        >>> import mpjax
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
        position = given if isinstance(given, int) else given.argnum
        if not -count <= position < count:
            raise ValueError(
                f"argnums={argnums!r} is out of range: the function was called with {count} positional arguments."
            )
        chosen[position % count] = position % count if isinstance(given, int) else given
    return chosen


def _autocast(fun: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    from mpjax.casting import autocast  # imported here, so that loss scaling does not depend on it

    return autocast(fun, policy)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_half(x) else x, tree)


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


@contextlib.contextmanager
def _holding(variables: list[Any], wide: list[Any], narrow: bool) -> Iterator[None]:
    """Sets the values of variables, and restores those that the call did not change."""
    changes = []
    for variable, value in zip(variables, wide, strict=True):
        old = variable.get_raw_value()
        new = _narrow(value, old) if narrow else value
        variable.set_raw_value(new)
        changes.append((variable, new, old))
    try:
        yield
    finally:
        for variable, new, old in changes:
            if variable.get_raw_value() is new:
                variable.set_raw_value(old)
