"""Gradients of the script's functions in half, scaled, and repeated at lower scales until they are finite."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.launcher import retrying
from mpjax.launcher.casts import CastCall
from mpjax.launcher.retrying import INNER_SCALE, Attempt, LastAttempt, all_finite, until_finite
from mpjax.launcher.session import NOT_LINEAR, SCALE, Gradient, Session, differentiating, enclosing_scale, frame
from mpjax.loss_scale.cotangents import is_differentiable, multiply, unscale_by
from mpjax.program import compat
from mpjax.program.fates import mark_gradient


def value_and_grad(
    session: Session, original: Callable[..., Any], fun: Callable[..., Any], has_aux: bool, argnums: Any, site: Gradient
) -> Callable[..., Any]:
    """`jax.value_and_grad(fun, argnums, has_aux)`, given as `original`, in the policy of the session."""

    def scaled(run: Callable[..., tuple[Any, Any]], scale: Any) -> Callable[..., Any]:
        """The gradients of a function that returns the result of `fun`, and a tree to return beside the gradients."""

        def loss_times_scale(*args: Any, **kwargs: Any) -> Any:
            out, rest = run(*args, **kwargs)
            return _times(out[0] if has_aux else out, scale), rest

        def both(*args: Any, **kwargs: Any) -> Any:
            (_, rest), grads = original(loss_times_scale, argnums=argnums, has_aux=True)(*args, **kwargs)
            return rest, _divided(grads, scale)

        return both

    def both(*args: Any, **kwargs: Any) -> Any:
        if (outer := enclosing_scale()) is not None:
            # The outer gradient casts it, and is repeated with all that it contains.
            outer.read = True
            return scaled(lambda *a, **k: (fun(*a, **k),) * 2, outer.value)(*args, **kwargs)
        places = _places(args, argnums)
        call = CastCall(session, fun, _as_arrays(args, places), kwargs)
        if not _is_cast(session, call, site, [args[i] for i in places]):
            with differentiating(None):
                return original(fun, argnums=argnums, has_aux=has_aux)(*args, **kwargs)

        def evaluate(scale: Any, given: Any) -> Attempt:
            def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
                outs = call.in_half(scale, args, kwargs)
                return call.rebuild(outs), outs

            outs, grads = scaled(run, scale)(*given[0], **given[1])
            finite = all_finite(grads)
            loss = call.rebuild(outs)[0] if has_aux else outs
            # A lower scale can't make the loss finite, unless it contains a gradient.
            return Attempt((outs, grads), finite, ~finite & (call.scope.read | all_finite(loss)))

        def finish(result: Any) -> Any:
            return call.finite(result[0]), result[1]

        outs, grads = gradients_of(session, evaluate, (_as_arrays(args, places), kwargs), site.number, finish)
        return call.rebuild(outs), grads

    return both


def _is_cast(session: Session, call: CastCall, site: Gradient, differentiated: Sequence[Any]) -> bool:
    """Whether a gradient is taken in half: no loss scale is needed, or it changes nothing. Records which."""
    present = frame()
    if session.scales and (rule := call.nonlinear_rule):
        session.keep(NOT_LINEAR, site.line, rule)
    elif present is not None:
        site.note = " (no matmul)" * (not call.has_matmul)
        site.nested, site.parameters = call.scope.lines, set().union(*map(session.parameters.described, differentiated))
        new = session.options.explain and site.line not in session.explained
        site.plan = call.explained(session) if new else ""
        present.gradients.append(site)
        return True
    return False


def _places(args: Sequence[Any], argnums: Any) -> set[int]:
    """The positions of the arguments with respect to which a call is differentiated. JAX finds those out of range."""
    return {i % len(args) for i in (argnums if isinstance(argnums, (tuple, list)) else (argnums,)) if args}


def _as_arrays(args: Sequence[Any], places: Collection[int]) -> tuple[Any, ...]:
    """The arguments, where the differentiated ones have arrays in place of Python numbers, as when JAX traces them."""

    def as_array(x: Any) -> Any:
        return jnp.asarray(x) if isinstance(x, (bool, int, float, complex)) else x

    return tuple(jax.tree.map(as_array, x) if i in places else x for i, x in enumerate(args))


def vjp(
    session: Session, original: Callable[..., Any], fun: Callable[..., Any], primals: Any, options: Any, site: Gradient
) -> Any:
    """`jax.vjp` or `jax.linearize` with a linear map that scales vectors, at lower scales until it is finite."""
    if enclosing_scale() is not None:
        out, linear, *aux = original(fun, *primals, **options)
    else:
        primals = _as_arrays(primals, range(len(primals)))
        call = CastCall(session, fun, primals, {})
        if not _is_cast(session, call, site, primals):
            with differentiating(None):
                return original(fun, *primals, **options)
        inner = jnp.full((), INNER_SCALE, jnp.float32)
        out, linear, *aux = original(lambda *given: call.rebuild(call.in_half(inner, given, {})), *primals, **options)
        outs = [x for x in jax.tree.leaves((out, *aux)) if isinstance(x, jax.Array)]
        values = call.rebuild(call.finite(outs)[0])
        out, *aux = values if aux else (values,)

    def evaluate(scale: Any, given: Any) -> Attempt:
        linear, vectors = given
        result = _divided(linear(*jax.tree.map(lambda x: _times(x, scale), vectors)), scale)
        finite = all_finite(result)
        return Attempt(result, finite, ~finite & all_finite(vectors))

    def applied(linear: Any, *vectors: Any) -> Any:
        return gradients_of(session, evaluate, (linear, vectors), site.number)

    return (out, jax.tree_util.Partial(applied, linear), *aux)


def gradients_of(
    session: Session, evaluate: Callable[..., Attempt], args: Any, number: int, finished: Any = None
) -> Any:
    """The result of the first evaluation with finite gradients, or of the last if no scale makes them finite.

    Args:
        session: The session of this process.
        evaluate: Called as `evaluate(scale, args)`. It returns unscaled gradients.
        args: The arguments of `evaluate`.
        number: The number of the gradient in its program.
        finished: Replaces nonfinite values of a result `(values, gradients)`. It returns `((values, whether it replaced
            any), gradients)`. Without it, the result is a tree of gradients.
    """
    if (outer := enclosing_scale()) is not None:
        outer.read = True
        return evaluate(outer.value, args).result
    present = frame()
    state = retrying.read_row(present)
    if session.scales:
        start = jnp.asarray(session.options.init_scale, jnp.float32) if state is None else state[SCALE]
        found = until_finite(evaluate, args, start)
    else:
        attempt = evaluate(jnp.ones((), jnp.float32), args)
        found = LastAttempt(attempt.result, attempt.finite, jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32))
    grads, reran = found.result, jnp.zeros((), jnp.bool_)
    if finished is not None:
        (values, reran), grads = finished(grads)
    grads = mark_gradient(number, grads)
    if present is not None:
        if not retrying.write_row(present, state, found, reran) and session.scales and not compat.is_differentiating():
            jax.debug.callback(session.counter(present.name), retrying.counted(found, reran))
        present.sites += 1
    return grads if finished is None else (values, grads)


def _times(x: Any, factor: Any) -> Any:
    return multiply(x, factor) if is_differentiable(x) else x


def _divided(grads: Any, scale: Any) -> Any:
    """Gradients divided by the scale, of the dtypes and weak types that the script expects."""

    def like(true: Any, g: Any) -> Any:
        return compat.with_weak_type(true.astype(g.dtype), jax.typeof(g)) if is_differentiable(g) else g

    return jax.tree.map(like, unscale_by(grads, scale), grads)
