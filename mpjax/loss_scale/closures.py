"""A call as a function of all the arrays by which it can be differentiated: its arguments, and what it closes over."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax.loss_scale.cotangents import is_differentiable
from mpjax.policy import is_half, path_string
from mpjax.program import compat, contexts
from mpjax.program.evaluator import bind_in_context, run
from mpjax.program.graph import replaced
from mpjax.program.linearity import check_scaled_rule
from mpjax.program.objects import filled, functional, split_arrays
from mpjax.program.source import TRUE, scopes
from mpjax.program.tracing import intercepted

# By name: only a `jit` can be inlined by its parameters.


class Call:
    """A call of any function. Its arguments may hold NNX objects, and values that are not arrays.

    Attributes:
        arrays: The arguments by which the call can be differentiated (tracers), and half ones.
        names: The tree path of each.
    """

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._call, args, kwargs, self._finish = functional(fun, args, kwargs)
        leaves, self._tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        self._leaves = [leaf for _, leaf in leaves]
        self._where = [i for i, x in enumerate(self._leaves) if is_half(x) or _is_perturbed(x)]
        self.arrays = [self._leaves[i] for i in self._where]
        self.names = [path_string(leaves[i][0][1:]) for i in self._where]

    def results(self, *arrays: Any) -> list[Any]:
        """The arrays among the results of the call with other `arrays`."""
        args, kwargs = jax.tree.unflatten(self._tree, filled(self._leaves, self._where, arrays))
        results, self._rebuild = split_arrays(self._call(*args, **kwargs))
        return results

    def finish(self, arrays: Sequence[Any]) -> Any:
        """The result of the call from its arrays. NNX objects among the arguments get their new state."""
        return self._finish(self._rebuild(arrays))


# The jaxprs of scaled losses and of `true_cotangents`, each with its replacement: derivative rules in it know whether
# their cotangents are scaled.
_rules_of: dict[str, weakref.WeakKeyDictionary[Any, Any]] = {
    name: weakref.WeakKeyDictionary() for name in ("scale_loss", "true_cotangents")
}


def _with_rule(eqn: Any, is_scaled: bool) -> Any:
    """An equation whose backward rule, if it has one, knows whether its cotangents are scaled."""
    if "bwd" not in eqn.params or TRUE in scopes(eqn):
        return eqn

    def run(rule: Callable[..., Any], *args: Any) -> Any:
        with contexts.scaled_losses(contexts.IN_RULE if is_scaled else ()):
            if is_scaled:
                _check(rule, args, eqn)
            return rule(*args)

    wrapped = compat.with_backward_rule(eqn, run)
    return wrapped if is_scaled else compat.in_scope(wrapped, TRUE)


def _check(rule: Callable[..., Any], args: Sequence[Any], eqn: Any) -> None:
    """Warns if the backward rule of an equation is not linear in its cotangents, the last of its arguments."""
    if not all(isinstance(x, jax.Array) for x in args):
        return
    try:
        program = compat.trace(lambda *args: [x for x in jax.tree.leaves(rule(*args)) if is_differentiable(x)], *args)
    except Exception:  # The rule raises it when JAX calls it.
        return
    check_scaled_rule(eqn, program, len(args) - len(eqn.outvars), len(compat.open_jaxpr(program).jaxpr.outvars))


def closed(
    caller: str, fun: Callable[..., Any], arrays: Sequence[Any]
) -> tuple[Callable[[Sequence[Any]], list[Any]], list[Any]]:
    """A function of `arrays` and of the arrays that `fun(*arrays)` closes over, and these arrays.

    `fun` is traced, the only way to find everything that it closes over: parameters of modules, variables of
    enclosing functions. JAX's own functions, such as `jnp.tanh`, stay calls of shared programs, whose derivatives JAX
    caches.
    """
    inlined: dict[int, Any] = {}

    def call(operation: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        if compat.is_inlined(params):
            inlined[id(params["jaxpr"])] = params["inline"]
            params = compat.kept_as_call(params)
        return operation.bind(*args, **params)

    def traced(*arrays: Any) -> list[Any]:
        with intercepted(lambda operation, args: operation.name == "jit", call):
            return fun(*arrays)

    def rule(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        key = id(eqn.params.get("jaxpr"))
        if key not in inlined:
            return bind_in_context(eqn, operands)
        with compat.EquationContext(eqn):
            return eqn.primitive.bind(*operands, **{**eqn.params, "inline": inlined[key]})

    try:
        program = compat.open_jaxpr(compat.trace(traced, *arrays))
        with_rule = functools.partial(_with_rule, is_scaled=caller == "scale_loss")
        program = program._replace(jaxpr=replaced(program.jaxpr, with_rule, _rules_of[caller]))
    except Exception as error:
        _explain(caller, error)
        raise
    where = [i for i, x in enumerate(program.consts) if _is_perturbed(x)]

    def inside(given: Sequence[Any]) -> list[Any]:
        consts = filled(program.consts, where, given[len(arrays) :])
        return run(program.jaxpr, (*consts, *given[: len(arrays)]), rule)

    return inside, [program.consts[i] for i in where]


def _is_perturbed(x: Any) -> bool:
    # A mutable reference has the dtype of its array.
    return isinstance(x, jax.core.Tracer) and compat.is_shaped(jax.typeof(x)) and is_differentiable(x)


_NEEDS_A_VALUE = (
    "mpjax.{caller} traces the function, as jax.jit does, to bring what it closes over inside of the scaled backward "
    "pass. A line of it needs the value of an array: use jax.lax.cond or jnp.where there, or mpjax.value_and_grad, "
    "which does not trace."
)
_CHANGES_A_MODULE = (
    "mpjax.{caller} traces the function, to bring what it closes over inside of the scaled backward pass, and it "
    "changes a Flax module that it closes over (batch statistics, random numbers, new params). Give an NNX module as "
    "an argument, or as the function itself. Leave a Linen layer that draws random numbers or changes a collection "
    "outside of it."
)


def _explain(caller: str, error: Exception) -> None:
    """Adds a note to an error that only tracing caused."""
    flax = sys.modules.get("flax")
    of_flax = (flax.errors.JaxTransformError, flax.errors.TraceContextError) if flax is not None else ()
    if isinstance(error, jax.errors.ConcretizationTypeError):
        error.add_note(_NEEDS_A_VALUE.format(caller=caller))
    elif isinstance(error, of_flax):
        error.add_note(_CHANGES_A_MODULE.format(caller=caller))
