"""The one evaluator of programs. Its values are arrays, pairs of arrays, or facts about arrays.

`evaluate` goes through the equations of a jaxpr, and a rule gives the results of each. Loops and branches are issued
again here, each in one place, for values that are pytrees of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax

from mpjax.program import compat


def evaluate(
    jaxpr: Any,
    env: dict[Any, Any],
    rule: Callable[[Any, list[Any]], Iterable[Any]],
    constant: Callable[[Any, Any], Any] = lambda literal, eqn: literal.val,
    last_uses: Sequence[Sequence[Any]] = (),
) -> list[Any]:
    """The values of the outputs of a program.

    Args:
        jaxpr: An open jaxpr, a `Block` or a `Plan`: `eqns`, each with `invars` and `outvars`, and `outvars`.
        env: The values of its constvars and inputs. Those of the other variables are added.
        rule: `rule(eqn, operands) → results`, values both.
        constant: `constant(literal, eqn) → value`, for a literal that an equation reads; for one that is an output, the
            equation is None.
        last_uses: For each equation, the variables to drop after it.
    """

    def read(v: Any, eqn: Any) -> Any:
        return constant(v, eqn) if isinstance(v, compat.Literal) else env[v]

    for i, eqn in enumerate(jaxpr.eqns):
        outs = rule(eqn, [read(v, eqn) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
        for v in last_uses[i] if last_uses else ():
            env.pop(v, None)
    return [read(v, None) for v in jaxpr.outvars]


def run(
    jaxpr: Any,
    ins: Iterable[Any],
    rule: Callable[[Any, list[Any]], Iterable[Any]],
    constant: Callable[[Any, Any], Any] = lambda literal, eqn: literal.val,
) -> list[Any]:
    """As `evaluate`, given the values of an open jaxpr's constvars and inputs in order."""
    return evaluate(jaxpr, dict(zip((*jaxpr.constvars, *jaxpr.invars), ins, strict=True)), rule, constant)


def bind(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates an equation on arrays."""
    outs = eqn.primitive.bind(*arrays, **compat.bind_params(eqn.primitive, eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def bind_in_context(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates an equation on arrays, with the named scopes, the line and the settings that it was traced under."""
    with compat.EquationContext(eqn):
        return bind(eqn, arrays)


def scan(eqn: Any, iteration: Callable[[Any, Any], Any], carry: Any, xs: Any) -> Any:
    """Issues a `scan` again, with another body on other trees."""
    return lax.scan(iteration, carry, xs, **{name: eqn.params[name] for name in ("length", "reverse", "unroll")})


def while_loop(
    eqn: Any,
    unfinished: Callable[[Any], Any],
    iteration: Callable[[Any, Any], Any],
    carry: Any,
    extra: Any = None,
    going: Callable[[Any], Any] = lambda extra: True,
) -> tuple[Any, Any]:
    """Issues a `while` again, on other trees.

    Under `vmap` each element has its own condition. The loop then runs until all elements are finished, and a finished
    element keeps its carry.

    Args:
        eqn: The equation.
        unfinished: The condition, `carry → bool`.
        iteration: `(carry, extra) → (carry, extra)`.
        carry: The carry of the loop.
        extra: Another tree to carry, on which the condition does not depend.
        going: A further condition, on `extra`.
    """
    batched = bool(compat.open_jaxpr(eqn.params["cond_jaxpr"]).jaxpr.outvars[0].aval.shape)

    def step(state: Any) -> Any:
        before, extra = state
        going = unfinished(before) if batched else None
        after, extra = iteration(before, extra)
        return jax.tree.map(lambda new, old: _select(going, new, old), after, before) if batched else after, extra

    def goes_on(state: Any) -> Any:
        return (unfinished(state[0]).any() if batched else unfinished(state[0])) & going(state[1])

    return lax.while_loop(goes_on, step, (carry, extra))


def _select(mask: Any, new: Any, old: Any) -> Any:
    return lax.select(lax.broadcast_in_dim(mask, new.shape, tuple(range(mask.ndim))), new, old)


def strong(tree: Any) -> Any:
    """A tree without weak types, on which branches must agree, and which a carry must keep."""
    return jax.tree.map(lambda x: lax.convert_element_type(x, jax.numpy.result_type(x)), tree)


def shard_map(eqn: Any, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    """A function that issues a `shard_map` again, with another body on other trees."""
    return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, **compat.shard_map_options(eqn.params))


def cond(eqn: Any, index: Any, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]) -> Any:
    """Issues a `cond`, `switch` or `platform_dependent` again, with other branches on other trees."""
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches, *operands)
    named = {name: body for names, body in zip(platforms, branches, strict=True) for name in names or ("default",)}
    return lax.platform_dependent(*operands, **named)
