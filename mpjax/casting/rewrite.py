"""Carries out a plan: issues the program again, equation by equation, with the casts of the plan.

It runs under any outer transformation (`grad`, `vmap`, `jit`, ...), so JAX differentiates the rewritten program.
First-order primitives are bound with their traced parameters;
higher-order primitives go through JAX's public functions (`higher_order`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from mpjax.casting.attention.division import AVERAGE, EXPONENTIALS
from mpjax.casting.attention.kernel import ATTENTION
from mpjax.casting.cross_entropy.head import CROSS_ENTROPY
from mpjax.casting.lattice import FULL, HALF, TRACED, Inferred, Level, Storage, storage_of
from mpjax.casting.plan import Action, Plan, Step
from mpjax.casting.recompute import is_repeated
from mpjax.casting.remat import RematRegion
from mpjax.casting.scaled import cotangents_of
from mpjax.casting.setting import FLOAT32, tracked
from mpjax.kernels import scaled_ragged, staging, weight_gradients
from mpjax.kernels.derivatives import same_axes
from mpjax.kernels.difference import scaled_difference
from mpjax.kernels.lookup import select, selects
from mpjax.kernels.packed import PACKINGS, Packed, Packing, Recomputed, pack, remembered_matmul, remembering, tangent_of
from mpjax.kernels.scaled_matmul import SCALINGS, Operand
from mpjax.kernels.softmax import unfused
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow
from mpjax.program.evaluator import evaluate
from mpjax.program.formats import Format
from mpjax.program.primitives import MATMULS, primitive
from mpjax.program.source import REMATTED

# By name: a softmax's maximum is issued in another form for a TPU.


class MixedValue:
    """A float32 value of the traced program: the array in each of its precisions, computed when first read."""

    __slots__ = ("_arrays", "_packed", "_scaled", "difference", "half", "in_loop", "recomputed")

    def __init__(self, half: np.dtype, full: Any = None, low: Any = None, in_loop: bool = False):
        self.half, self.in_loop = half, in_loop
        self.difference: Sequence[Any] | None = None  # the arrays whose difference it is, if the second is smaller
        self._arrays = [full, low]
        self._scaled: dict[Any, Operand] = {}
        self._packed: Packed | None = None
        self.recomputed: Recomputed | None = None

    def __getitem__(self, storage: Storage) -> Any:
        array = self._arrays[storage]
        if array is None:
            other, dtype = self._arrays[1 - storage], self.half if storage == HALF else FLOAT32
            cast = staging.cast if isinstance(other, jax.Array) or np.ndim(other) else _cast_literal
            array = self._arrays[storage] = cast(other, dtype)
        return array

    def has(self, storage: Storage) -> bool:
        """Whether the array of a storage dtype is computed."""
        return self._arrays[storage] is not None

    def quantised(self, storage: Storage, format: Format, dtype: np.dtype, axes: tuple[str, ...]) -> Operand:
        """The array of a storage dtype as an operand of scaled matmuls. All of its readers share one copy."""
        key = storage, format, dtype
        if key not in self._scaled:
            self._scaled[key] = SCALINGS[format.scaling].operand(self[storage], dtype, axes)
        return self._scaled[key]

    def packed(self, packing: Packing) -> Packed:
        """The half array in eight bits. All derivatives that read it share one copy."""
        if self._packed is None:
            self._packed = pack(self[HALF], packing)
        return self._packed

    def share(self, storage: Storage, format: Format, operand: Operand) -> None:
        """Sets the quantised copy of the array of a storage dtype."""
        self._scaled[storage, format, operand.q.dtype] = operand

    def add(self, storage: Storage, array: Any) -> None:
        """Sets the array of a storage dtype."""
        self._arrays[storage] = array


def _cast_literal(literal: Any, dtype: np.dtype) -> Any:
    with np.errstate(over="ignore"):  # A mask of -1e38 becomes -inf, as in a cast on the device.
        return np.asarray(literal).astype(dtype)[()]


def array_of(value: Any, storage: Storage) -> Any:
    """The array of a value in a storage dtype."""
    return value if storage == TRACED else value[storage]


def array_for(value: Any, storage: Storage, eqns: Iterator[Any], scopes: int = 0) -> Any:
    """`array_of`; a cast has the line and the module of the first of these equations.

    Args:
        value: The value.
        storage: The storage dtype.
        eqns: The equations that read the value; for a result, the equation that computes it.
        scopes: The number of their outermost named scopes that are already open.
    """
    if storage == TRACED or value.has(storage) or (eqn := next(eqns, None)) is None:
        return array_of(value, storage)
    with compat.EquationContext(eqn, scopes):
        return value[storage]


def value_of(array: Any, storage: Storage, half: np.dtype) -> Any:
    """The value of an array in a storage dtype."""
    if storage == TRACED:
        return array
    return MixedValue(half, full=array) if storage == FULL else MixedValue(half, low=array)


def values_of(arrays: Sequence[Any], inferred: Sequence[Inferred | None], half: np.dtype) -> list[Any]:
    """The values of the arrays of a sub-jaxpr, given its inferred dtypes."""
    return [value_of(array, storage_of(x), half) for array, x in zip(arrays, inferred, strict=True)]


def arrays_of(values: Sequence[Any], inferred: Sequence[Inferred | None]) -> list[Any]:
    """The arrays of the values that a sub-jaxpr takes or returns, given their inferred dtypes."""
    return [array_of(value, storage_of(x)) for value, x in zip(values, inferred, strict=True)]


def run_closed(plan: Plan, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Carries out the plan of a closed jaxpr, with the jaxpr's constants."""
    return run(plan, compat.open_jaxpr(jaxpr).consts, values)


def run(plan: Plan, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Carries out a plan.

    Args:
        plan: The plan.
        consts: An array for each constvar.
        values: A value for each input.

    Returns:
        The values of the outputs.
    """
    storages = (FULL if tracked(v) else TRACED for v in plan.constvars)
    constants = (value_of(const, storage, plan.setting.half) for const, storage in zip(consts, storages, strict=True))
    env = dict(zip((*plan.constvars, *plan.invars), (*constants, *values), strict=True))
    return _run(plan, env, plan)


def _run(program: Plan | RematRegion, env: dict[Any, Any], plan: Plan, scopes: int = 0) -> list[Any]:
    """Carries out a plan or a region of it, whose `scopes` outermost named scopes are already open."""
    half, higher_order = plan.setting.half, plan.setting.higher_order

    def rule(step: Step | RematRegion, operands: list[Any]) -> Sequence[Any]:
        if isinstance(step, RematRegion):
            return _run_region(step, operands, plan)
        with compat.EquationContext(step.eqn, scopes):
            if step.action is Action.BIND:
                return _bind(step, operands, plan)
            if step.action is Action.ALIAS:
                if step.outs[0] is None:
                    return [operands[0][HALF]]
                return operands if tracked(step.eqn.invars[0]) else values_of(operands, step.outs, half)
            return higher_order[step.eqn.primitive.name].issue(step, operands, plan)

    def constant(literal: Any, step: Step | None) -> Any:
        return MixedValue(half, full=literal.val) if tracked(literal) else literal.val

    return evaluate(program, env, rule, constant)


def _run_region(region: RematRegion, operands: Sequence[Any], plan: Plan) -> Sequence[Any]:
    """Issues a rematerialisation region. Only its inputs are stored for the backward pass."""
    half, model = plan.setting.half, region.model or region
    if model.body is None:
        model.body = _body(model, plan)
    readers = _flow(region).readers
    arrays = [
        _without_weak_type(array_for(value, storage, iter(readers.get(v, ()))))
        for value, (v, storage) in zip(operands, region.ins, strict=True)
    ]
    barriers = _barriers(region, plan)
    packs: dict[int, Any] = {}
    with compat.in_scopes(region.scopes):
        repeats = any(is_repeated(step.eqn) for step in region.eqns)
        if repeats and isinstance(barriers, tuple) and not compat.under_jet():
            # Part of a backward pass already: without the barrier that JAX would add, XLA would undo the repetition.
            computed = [i for i, flag in enumerate(barriers) if flag]
            with jax.named_scope(REMATTED):
                held = lax.optimization_barrier([arrays[i] for i in computed])
            for i, array in zip(computed, held, strict=True):
                arrays[i] = array
        if region.packs and not compat.under_jet():
            packs = kept(region.packs, operands)
            outs = _remembering(model, plan, barriers)(arrays, packs)
        else:
            outs = compat.checkpoint(model.body, arrays, barriers, _large_reductions)
    values: dict[Any, Any] = {}
    for (v, storage), array in zip(region.outs, outs, strict=True):
        if v in values:
            values[v].add(storage, array)
        else:
            values[v] = value_of(array, storage, half)
    for k, (v, storage) in enumerate(region.outs if region.recomputed else ()):
        if v in region.recomputed and storage == HALF:
            from_kept = [packs.get(i, x) for i, x in enumerate(arrays)], tuple(x.dtype for x in arrays)
            values[v].recomputed = Recomputed(*from_kept, model.body, k)
    return list(values.values())


def _body(region: RematRegion, plan: Plan) -> Callable[..., tuple[Any, ...]]:
    """A region as a function of its input arrays."""
    half = plan.setting.half

    def body(*arrays: Any) -> tuple[Any, ...]:
        inside = {v: value_of(array, storage, half) for (v, storage), array in zip(region.ins, arrays, strict=True)}
        scopes = len(region.scopes.stack)
        _run(region, inside, plan, scopes)
        flow = _flow(region)
        return tuple(array_for(inside[v], storage, iter([flow.maker(v)]), scopes) for v, storage in region.outs)

    return body


def kept(packs: Mapping[int, str], operands: Sequence[MixedValue]) -> dict[int, Any]:
    """What is kept of some operands, by index: their half copies, these in eight bits, or what they follow from."""

    def of(value: MixedValue, format: str) -> Any:
        return value.recomputed or (value.packed(PACKINGS[format]) if format in PACKINGS else (value[HALF],))

    return {i: of(operands[i], format) for i, format in packs.items()}


def _remembering(model: RematRegion, plan: Plan, barriers: bool | tuple[bool, ...]) -> Callable[..., Any]:
    """A region as a function whose derivative reads packed inputs. Made once for a model, for JAX's caches."""
    assert model.body is not None
    if model.remembering is None:
        of_arrays = list(barriers) if isinstance(barriers, tuple) else barriers
        flags = of_arrays, barriers is not False, False

        def checkpoint(fun: Callable[..., Any], *args: Any) -> Any:
            return compat.checkpoint(fun, args, flags, None)

        model.remembering = remembering(model.body, tangent_of(model.body, checkpoint))
    return model.remembering


def _flow(region: RematRegion) -> Dataflow:
    return Dataflow(step.eqn for step in region.eqns)


def _barriers(region: RematRegion, plan: Plan) -> bool | tuple[bool, ...]:
    """Whether each input gets a barrier, which keeps the backward pass from sharing values with the forward pass.

    Only computed inputs need one. For parameters that are updated in place it would make copies. In a scan, the two
    passes are two loops, so a barrier would only prevent fusion. XLA for TPUs recomputes cheap values by itself, in the
    kernels that read them, which barriers would prevent. The backward pass of the last region begins at once: a barrier
    would defer nothing, and keep a second copy of the logits.
    """
    if region.is_last or plan.setting.looped or (plan.setting.rules.residuals == "auto" and compat.platform() == "tpu"):
        return False
    return tuple(not is_input for is_input in region.is_input)


_LONG_ROW_OF_GPU = 129  # elements


def _large_reductions(prim: Any, *avals: Any, axes: tuple[int, ...] = (), **_: Any) -> bool:
    """A checkpoint policy that stores the outputs of large reductions, which are negligible in size.

    Recomputing the statistics of a batch would read the whole batch again. Those of a short row can be recomputed in
    the kernel that reads the row anyway. On a GPU that takes registers: XLA keeps whole rows in them, padded to a power
    of two. A backward softmax with three reductions leaves room for 8 warps on a multiprocessor, and spills from rows
    of 512 on; with the statistics stored, XLA reduces rows of more than 128 in several kernels of 64 warps.
    """
    if not prim.name.startswith("reduce_"):
        return False
    shape = avals[0].shape
    shortest = 1025 if compat.platform() in ("cpu", "tpu") else _LONG_ROW_OF_GPU
    return all(isinstance(n, int) for n in shape) and math.prod(shape[axis] for axis in axes) >= shortest


def _without_weak_type(x: Any) -> Any:
    """The array without its weak type, which a remat's input loses in its cotangent, and a cast's input keeps."""
    weak = getattr(jax.typeof(x), "weak_type", False)
    return staging.cast(x, x.dtype) if weak and jax.numpy.issubdtype(x.dtype, np.floating) else x


def _bind(step: Step, operands: Sequence[Any], plan: Plan) -> Sequence[Any]:
    eqn, half = step.eqn, plan.setting.half
    args = [array_of(value, storage) for value, storage in zip(operands, step.reads, strict=True)]
    if eqn.primitive is CROSS_ENTROPY:
        return values_of(eqn.params["options"](*args), step.outs, half)
    if eqn.primitive is EXPONENTIALS:
        return values_of(eqn.params["fun"](*args), step.outs, half)
    if eqn.primitive is AVERAGE:
        return values_of([_average(step, operands, args)], step.outs, half)
    if eqn.primitive is ATTENTION:
        return values_of([eqn.params["options"](*args)], step.outs, half)
    params = compat.bind_params(eqn.primitive, eqn.params)
    if step.half_move:
        low, full = weight_gradients.half_move(eqn.primitive, params, args, half)
        (out,) = step.outs
        return [MixedValue(half, full if out is not None and out.storage == FULL else None, low)]
    if step.is_scaled:
        return [MixedValue(half, low=_scaled_matmul(step, operands, params, args[2:]))]
    if step.broadcast:
        shape = eqn.outvars[0].aval.shape
        if primitive(eqn.primitive.name).multiplies and len(step.broadcast) == 1:
            (i,) = step.broadcast
            low = operands[i][FULL if step.rounded_once else HALF]
            return [value_of(_scaled(args[1 - i], args[i], low), HALF, half)]
        if step.rounded_once:
            return [value_of(_added(step, args, shape, params), HALF, half)]
        for i in step.broadcast:
            args[i] = staging.cast(_broadcast(args[i], shape), half)
    if step.biases and not compat.under_jet():
        shape = eqn.outvars[0].aval.shape
        for i in step.biases:
            args[i] = weight_gradients.rounded_cotangent.bind(_broadcast(args[i], shape), half=half)
    if step.half:
        params = _half_params(eqn.primitive.name, params, half)
    if compat.in_named_axes():
        # JAX's own derivatives leave tangents that vary along fewer axes than what they are multiplied with.
        count = 2 if eqn.primitive.name in MATMULS else len(args) if primitive(eqn.primitive.name).pointwise else 0
        args[:count] = same_axes(args[:count])
    if (arrays := _scaled_difference(step, operands, args)) is not None:
        return values_of([scaled_difference(*arrays)], step.outs, half)
    if _selects_activations(step, args):
        return values_of([select(args[0], args[1], params)], step.outs, half)
    avals = _results(step, args, half)
    if step.parameters:
        full = [operands[i][FULL] if i in step.parameters else args[i] for i in range(2)]
        in_loop = [operands[i].in_loop if i in step.parameters else False for i in range(2)]
        how = eqn.primitive, params, args, full, step.wide_gradients, avals, in_loop
        if step.packs and not compat.under_jet():
            outs = remembered_matmul(*how, kept(step.packs, operands), not plan.setting.looped)
        else:
            outs = weight_gradients.matmul(*how)
    elif step.packs and not compat.under_jet():
        packs = kept(step.packs, operands)
        outs = remembered_matmul(
            eqn.primitive, params, args, args, False, avals, (False, False), packs, not plan.setting.looped
        )
    else:
        outs = staging.bind(eqn.primitive, args, params, avals)
    if not eqn.primitive.multiple_results:
        outs = (outs,)
    if eqn.primitive.name == "reduce_max" and not step.half and not compat.under_jet():
        outs = [unfused.bind(outs[0], long=False)]
    if step.rounded_once:
        rounded = zip(outs, step.outs, strict=True)
        outs = [staging.cast(x, half) if storage_of(inferred) == HALF else x for x, inferred in rounded]
    values = values_of(outs, step.outs, half)
    if eqn.primitive.name == "sub" and _is_repeated(args[0], args[1]):
        values[0].difference = args
    return values


def _is_repeated(x: Any, small: Any) -> bool:
    """Whether an operation of float32 arrays repeats the second one."""
    wide = all(getattr(each, "dtype", None) == FLOAT32 for each in (x, small))
    return wide and 0 < np.ndim(small) == np.ndim(x) and small.shape != x.shape


def _scaled_difference(step: Step, operands: Sequence[Any], args: Sequence[Any]) -> list[Any] | None:
    """The arguments of `scaled_difference`, if a step is such a product, whose shift and factor have one shape."""
    if not primitive(step.eqn.primitive.name).multiplies or compat.under_jet():
        return None
    for value, x, factor in zip(operands, args, args[::-1], strict=True):
        if isinstance(value, MixedValue) and value.difference is not None and _is_repeated(x, factor):
            whole, shift = value.difference
            if shift.shape == factor.shape:
                return same_axes([whole, shift, factor, x])
    return None


def _average(step: Step, operands: Sequence[Any], args: Sequence[Any]) -> Any:
    """An average of values, whose derivative for a parameter is float32."""
    full = [operands[i][FULL] if i in step.parameters else args[i] for i in range(2)]
    return step.eqn.params["options"](args[:2], full, *args[2:])


def _selects_activations(step: Step, args: Sequence[Any]) -> bool:
    """Whether a step selects an activation of each row, on a GPU or TPU; any other array is in memory anyway."""
    if not primitive(step.eqn.primitive.name).lookup or step.outs[0] is None or step.outs[0].level < Level.HALF:
        return False
    return compat.platform() != "cpu" and not compat.under_jet() and selects(args[1], step.eqn.params)


def _scaled_matmul(step: Step, operands: Sequence[MixedValue], params: dict[str, Any], sizes: Sequence[Any]) -> Any:
    """The result of a matmul in a format with scales; a ragged one has sizes of groups."""
    assert step.scaled is not None
    format, dtypes, _, _, backward, options = step.scaled
    read = zip(operands[:2], step.reads[:2], dtypes, strict=True)
    return (scaled_ragged.multiply if sizes else SCALINGS[format.scaling].matmul)(
        params,
        [value.quantised(storage, format, dtype, options.axes) for value, storage, dtype in read],
        operands[0].half,
        *sizes,
        parameters=[i in step.parameters for i in (0, 1)],
        cotangents=cotangents_of(format, options),
        half_gradients=options.weight_gradients == "half",
        axes=options.axes,
        backward=backward,
    )


def _results(step: Step, args: Sequence[Any], half: np.dtype) -> Sequence[Any] | None:
    """The abstract results of an equation that runs as traced, in float32 or in half; None if they must be computed."""
    eqn = step.eqn
    stored = {s for s in (*step.reads, *(x.storage for x in step.outs if x is not None)) if s != TRACED}
    if eqn.effects or len(stored) > 1 or not compat.is_staging():
        return None

    def aval(v: Any) -> Any:
        return staging.in_dtype(v.aval, half) if HALF in stored and tracked(v) else v.aval

    if any(jax.typeof(x) != aval(v) for x, v in zip(args, eqn.invars, strict=True)):
        return None
    return [aval(v) for v in eqn.outvars]


_scalar_functions: weakref.WeakKeyDictionary[Any, dict[np.dtype, Any]] = weakref.WeakKeyDictionary()


def _of_scalars(jaxpr: Any, dtype: np.dtype) -> Any:
    """The open jaxpr of a function of scalars for another dtype. Cached, so that JAX's caches hit."""
    known = _scalar_functions.setdefault(jaxpr, {})
    if dtype not in known:
        scalars = [jax.ShapeDtypeStruct((), dtype)] * len(jaxpr.invars)
        traced = compat.trace(lambda *args: jax.core.eval_jaxpr(jaxpr, (), *args), *scalars)
        known[dtype] = compat.open_jaxpr(traced).jaxpr
    return known[dtype]


def _half_params(name: str, params: dict[str, Any], half: np.dtype) -> dict[str, Any]:
    """The parameters of an operation that runs in half."""
    if params.get("update_jaxpr") is not None:  # The function with which a scatter combines two elements.
        return {**params, "update_jaxpr": _of_scalars(params["update_jaxpr"], half)}
    if name not in MATMULS:
        return params
    changed: dict[str, Any] = {}
    if params.get("preferred_element_type") is not None:
        changed["preferred_element_type"] = half
    if compat.is_algorithm(params.get("precision")):
        changed["precision"] = None  # An algorithm for float32, which the user's rule overrides.
    return {**params, **changed} if changed else params


def _broadcast(x: Any, shape: tuple[int, ...]) -> Any:
    """Broadcasts in float32, so that the derivative sums in float32."""
    offset = len(shape) - np.ndim(x)  # `x` may be the literal that a function is called with.
    return lax.broadcast_in_dim(x, shape, tuple(range(offset, len(shape))))


def _added(step: Step, args: Sequence[Any], shape: tuple[int, ...], params: dict[str, Any]) -> Any:
    """The sum of an activation and a bias, rounded to half once."""
    wide = [_broadcast(x, shape) if i in step.broadcast else staging.cast(x, FLOAT32) for i, x in enumerate(args)]
    half = next(x.dtype for i, x in enumerate(args) if i not in step.broadcast)
    return staging.cast(step.eqn.primitive.bind(*wide, **params), half)


@jax.custom_jvp
def _scaled(x: Any, factor: Any, low: Any) -> Any:
    """`x * low`, rounded once. `low` is `factor`, in half if it is an activation; its gradient is summed in float32.

    Broadcasting the factor before the product would also work, but would store it at full size for the backward pass.
    If the program itself is linear, JAX transposes this function, not its JVP rule.
    """
    return _times(x, staging.cast(_broadcast(factor, x.shape), low.dtype))


def _times(x: Any, low: Any) -> Any:
    return lax.mul(x, low) if x.dtype == low.dtype else staging.cast(lax.mul(staging.cast(x, low.dtype), low), x.dtype)


def _scaled_jvp(primals: Any, tangents: Any) -> Any:
    (x, _, low), (dx, dfactor, _) = primals, tangents
    parts = []
    if type(dx) is not SymbolicZero:
        parts.append(_times(dx, low))
    if type(dfactor) is not SymbolicZero:
        parts.append(lax.mul(x, staging.cast(_broadcast(dfactor, x.shape), x.dtype)))
    out = _times(x, low)
    if not parts:
        return out, jax.custom_derivatives.zero_from_primal(out, symbolic_zeros=True)
    return out, parts[0] if len(parts) == 1 else lax.add(*parts)


_scaled.defjvp(_scaled_jvp, symbolic_zeros=True)
