"""The gradient of a loss function as one program, for inspections that run it, and its trial in half at any scale."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import Partial

from mpjax.casting.autocast import autocast
from mpjax.casting.rules import Rules
from mpjax.inspection.reports import array_text
from mpjax.loss_scale import static_loss_scale, value_and_grad
from mpjax.loss_scale.state import LossScaleState, find_loss_scale_state
from mpjax.policy import is_castable
from mpjax.program import compat, contexts
from mpjax.program.dtypes import is_half, is_low, narrowed, widened
from mpjax.program.graph import Block, Site, lay_out, walk
from mpjax.program.interpreter import COMPILER_OPTIONS, Arrays, Eager, Instrumented, Probe, bind_as_stored
from mpjax.program.objects import contains_nnx_object, filled, is_nnx_object
from mpjax.program.owners import owners_of
from mpjax.program.primitives import primitive
from mpjax.program.scopes import named_modules
from mpjax.program.source import function_name
from mpjax.program.tracing import TracedCall, traced_call


def trace_to_run(caller: str, fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> TracedCall:
    """Traces a call that will be run. Its arguments must be arrays, not shapes."""
    program = traced_call(fun, args, kwargs)
    for name, array in zip(program.names, program.arrays, strict=True):
        if isinstance(array, (jax.ShapeDtypeStruct, jax.core.Tracer)):
            raise TypeError(
                f"{caller}: the argument {argument_name(name)} is {array}, but the program is run to see its values: "
                f"give arrays, and call {caller} itself outside jit."
            )
    return program


def laid_out(program: TracedCall) -> Block:
    """The equations of a program, with the modules that own them."""
    return lay_out(program.jaxpr, owners=owners_of(program.jaxpr, program.names))


def below_root(path: str, paths: Collection[str]) -> str:
    """A module path relative to the whole model; that of the model itself is unchanged.

    Args:
        path: One of `paths`.
        paths: All module paths. If they have no common root, `path` is returned unchanged.

    Example:
        >>> below_root("Net/Dense_0", ["Net", "Net/Dense_0"]), below_root("up", ["up", "down"])
        ('Dense_0', 'up')
    """
    root, _, rest = path.partition("/")
    is_root = any("/" in other for other in paths) and all(f"{other}/".startswith(f"{root}/") for other in paths)
    return rest if is_root and rest else path


def argument_name(name: str) -> str:
    """Rewrites the tree path of a leaf of `(args, kwargs)` for users: `[0][1]['w']` as `args[1]['w']`."""
    return ("args" if name.startswith("[0]") else "kwargs") + name[3:]


def scale_state(loss_scale: Any) -> LossScaleState:
    """A loss scale state, made from a number or found in a tree."""
    if isinstance(loss_scale, (int, float, np.number)) or (hasattr(loss_scale, "shape") and loss_scale.shape == ()):
        return static_loss_scale(optax.identity(), float(loss_scale)).init({})
    return find_loss_scale_state(loss_scale)


@dataclasses.dataclass(frozen=True, eq=False)  # a function, which JAX hashes
class Loss:
    """A loss function and how it is differentiated.

    Args:
        fun: The loss function.
        argnums: Positions of the differentiated arguments, as in `jax.grad`.
        has_aux: Whether `fun` returns `(loss, aux)`.
        kwargs: Its keyword arguments.
    """

    fun: Callable[..., Any]
    argnums: int | Sequence[int] = 0
    has_aux: bool = False
    kwargs: Mapping[str, Any] | None = None

    def under(self, policy: Any, rules: Rules | None = None) -> Loss:
        """Returns a copy whose function runs under autocast."""
        return dataclasses.replace(self, fun=autocast(self.fun, policy, rules=rules))

    def __call__(self, *args: Any) -> Any:
        """The result of the function, with named scopes around NNX modules, even if autocast plans nothing.

        Raises:
            TypeError: It is not that of a loss.
        """
        modules = [x for x in jax.tree.leaves((args, self.kwargs), is_leaf=is_nnx_object) if is_nnx_object(x)]
        with named_modules(modules):
            out = self.fun(*args, **(self.kwargs or {}))
        loss = out[0] if self.has_aux and isinstance(out, (tuple, list)) and len(out) == 2 else out
        if getattr(loss, "shape", None) != () and not isinstance(loss, (int, float)):
            kinds = [array_text(x) if hasattr(x, "dtype") else type(x).__name__ for x in jax.tree.leaves(out)]
            returned = ", ".join(kinds[:4]) + (", …" if len(kinds) > 4 else "")
            raise TypeError(
                f"{function_name(self.fun)} is differentiated, so it must return a loss of shape (), and with "
                f"has_aux=True (--has-aux) a pair of that and aux. It returned {returned}. Give the loss function "
                "itself: not its gradient, and not a training step."
            )
        return out

    def gradient(self, state: LossScaleState | None, names: list[str]) -> Any:
        """Makes a function that returns gradients and loss. Tracing it fills `names` with the gradients' tree paths."""

        def gradient(*args: Any) -> Any:
            # One without a scale is unscaled on purpose, so it does not warn.
            with contextlib.nullcontext() if state is not None else contexts.scaled_losses(()):
                value, grads = self._differentiated(state, args)
            with_paths = jax.tree_util.tree_flatten_with_path(grads)[0]
            paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in with_paths]
            names[:] = [path.removesuffix("/value") for path in paths]  # of an NNX variable
            return [grad for _, grad in with_paths], value[0] if self.has_aux else value

        return gradient

    def _differentiated(self, state: LossScaleState | None, args: Sequence[Any]) -> tuple[Any, Any]:
        """The loss, with aux, and the gradients of the floating-point arrays at `argnums`."""
        positions = [i % len(args) for i in ([self.argnums] if isinstance(self.argnums, int) else self.argnums)]
        if any(contains_nnx_object(args[i]) for i in positions):
            return value_and_grad(self, state, argnums=self.argnums, has_aux=self.has_aux)(*args)
        # An Equinox model is a tree of arrays and functions. Its floating arrays are the parameters.
        leaves, tree = jax.tree.flatten([args[i] for i in positions])
        moving = [i for i, leaf in enumerate(leaves) if is_castable(leaf)]

        def of_leaves(params: Sequence[Any]) -> Any:
            return self(*filled(args, positions, jax.tree.unflatten(tree, filled(leaves, moving, params))))

        value, found = value_and_grad(of_leaves, state, has_aux=self.has_aux)([leaves[i] for i in moving])
        grads = jax.tree.unflatten(tree, filled([None] * len(leaves), moving, found))
        return value, grads[0] if isinstance(self.argnums, int) else grads

    def gradient_at_any_scale(self, names: list[str]) -> Any:
        """`gradient` with the loss scale as the keyword argument `mpjax_loss_scale`: shape (), float32."""

        def gradient(*args: Any, mpjax_loss_scale: Any) -> Any:
            state = static_loss_scale(optax.identity(), 1.0).init({})._replace(loss_scale=mpjax_loss_scale)
            return self.gradient(state, names)(*args)

        return gradient


def relative_error(found: Iterable[Any], exact: Iterable[Any]) -> float:
    """‖found − exact‖ / ‖exact‖ over all arrays; ‖found‖ if all of `exact` is zero; inf if the result is not finite."""
    pairs = [(np.asarray(f, np.float64), np.asarray(e, np.float64)) for f, e in zip(found, exact, strict=True)]
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = math.sqrt(sum(np.sum((f - e) ** 2) for f, e in pairs))
        size = math.sqrt(sum(np.sum(e**2) for _, e in pairs))
    error = difference / size if size else difference
    return error if math.isfinite(error) else math.inf


class Trial:
    """The gradient of a loss function at any loss scale.

    Args:
        caller: The tool, for error messages.
        loss: The loss function, under autocast or in float32.
        args: The arguments of the call.
        rounds: Whether results that the program stores in half are rounded: not in a reference.
    """

    def __init__(self, caller: str, loss: Loss, args: Sequence[Any], rounds: bool = True):
        self.names: list[str] = []
        gradient = loss.gradient_at_any_scale(self.names)
        self._program = trace_to_run(caller, gradient, args, {"mpjax_loss_scale": np.float32(1)})
        self._scale = next(i for i, name in enumerate(self._program.names) if "mpjax_loss_scale" in name)
        self._block = laid_out(self._program)
        self._evaluation = Eager(Probe(), wide=True, replace=Partial(_rounded) if rounds else None)

    @functools.cached_property
    def sites(self) -> list[Site]:
        """The program's equations."""
        return list(walk(self._program.jaxpr, owners=owners_of(self._program.jaxpr, self._program.names)))

    @property
    def half_share(self) -> float:
        """The share of the FLOPs of matmuls and convolutions with half operands."""
        flops = [(site.flops, all(map(is_half, site.eqn.invars[:2]))) for site in self.sites if site.flops]
        total = sum(n for n, _ in flops)
        return sum(n for n, half in flops if half) / total if total else 0.0

    def run(self, scale: float) -> list[Any]:
        """The gradients, in the order of `names`, at a loss scale."""
        arrays = [widened(x) for x in self._program.arrays]
        arrays[self._scale] = np.float32(scale)
        outs, _ = self._evaluation.block(self._block, arrays)
        return outs[: len(self.names)]

    def error(self, scale: float, exact: Sequence[Any]) -> float:
        """The relative error of the gradients against the exact ones; inf if they are not finite."""
        return relative_error(self.run(scale), exact)


def rounding_scores(caller: str, loss: Loss, args: Sequence[Any]) -> list[tuple[Site, float]]:
    """For each operation that rounds to half, the change of the loss that its rounding makes, relative, to first order.

        score = ‖∂loss/∂y ⊙ (half(y) − y)‖ / |loss|

    One gradient of the forward pass, evaluated in float32: with respect to s in y + s ⊙ (half(y) − y), at s = 0. In a
    loop, the products of all iterations add up. The score of a value that overflows is inf.

    Args:
        caller: The tool, for error messages.
        loss: The loss function under autocast.
        args: The arguments of the call.
    """
    program = trace_to_run(caller, loss, args, {})
    block = laid_out(program)
    sites = (place for place in block.places() if not place.blocks and _stores_rounded(place))
    places = {place.number: place for place in sites if any(map(is_low, place.outvars))}
    lows = {n: next(i for i, v in enumerate(p.outvars) if is_low(v)) for n, p in places.items()}
    first = next(i for i, v in enumerate(block.outvars) if compat.is_inexact(v.aval) and not v.aval.shape)
    arrays, consts = [widened(x) for x in program.arrays], [widened(x) for x in block.consts]

    def nudge(steps: Mapping[str, Any], place: Site, iteration: Arrays, ins: Arrays, outs: Arrays) -> Arrays:
        if str(place.number) not in steps:
            return outs
        at = lows[place.number]
        rounded = _rounded(place, iteration, lax.stop_gradient(ins), lax.stop_gradient(outs))[at]
        error, step = lax.stop_gradient(rounded - outs[at]), steps[str(place.number)]
        held, overflows = jnp.isfinite(rounded), jnp.isfinite(outs[at]) & ~jnp.isfinite(rounded)
        nudged = outs[at] + step * jnp.where(held, error, 0)
        # The derivative of a root at 0 is infinite, and so is the score.
        nudged += jnp.where(overflows, jnp.sqrt(jnp.where(overflows, step, 1)), 0)
        return [nudged if i == at else out for i, out in enumerate(outs)]

    @functools.partial(jax.jit, compiler_options=COMPILER_OPTIONS)
    @jax.value_and_grad
    def scored(steps: Any, arrays: Any, consts: Any) -> Any:
        evaluation = _Differentiable(Probe(), wide=True, replace=Partial(nudge, steps))
        return evaluation.block(block, arrays, consts=consts)[0][first].astype(np.float32)

    steps = {str(n): jnp.zeros(p.outvars[lows[n]].aval.shape, np.float32) for n, p in places.items()}
    value, found = jax.device_get(scored(steps, arrays, consts))
    size = abs(float(value)) or 1.0

    def score(number: int) -> float:
        norm = float(np.linalg.norm(np.asarray(found[str(number)], np.float64))) / size
        return norm if math.isfinite(norm) else math.inf

    return [(place, score(number)) for number, place in places.items()]


class _Differentiable(Instrumented):
    """Evaluates a planned program so that JAX differentiates what it computes, in place of what it was planned from."""

    def _with(self, probe: Probe) -> Instrumented:
        return _Differentiable(probe, self.wide, self.replace)

    def _bound(self, place: Site, ins: Sequence[Any]) -> list[Any]:
        return [widened(ins[0])] if primitive(place.name).identity else super()._bound(place, ins)


def _stores_rounded(place: Site) -> bool:
    """Whether an equation rounds: its result to half or float8, which its operands are not already, or its operands."""
    row = primitive(place.name)
    moved = (row.moves or row.keeps_values) and all(map(is_half, [*place.invars[:1], *place.outvars]))
    return not moved and (any(map(is_low, place.outvars)) or row.contracts)


def _rounded(place: Site, iteration: Sequence[Any], ins: Sequence[Any], outs: Sequence[Any]) -> Sequence[Any]:
    """An equation's results. Those in half or float8 are rounded to it and cast back to float32."""
    if not _stores_rounded(place):
        return outs
    if primitive(place.name).contracts:  # a matmul that quantises its operands
        return bind_as_stored(place.eqn, ins)
    pairs = zip(outs, place.outvars, strict=True)
    return [narrowed(x, v.aval.dtype).astype(np.float32) if is_low(v) else x for x, v in pairs]
