"""Matmuls in the code of a layer: in the compute dtype, with weight gradients in float32.

A layer's code reads its float32 parameters as arrays with a weak type, which yield to the dtype of what they meet. So
`x + bias` is half if `x` is, and float32 if `x` is float32. Only a matmul of a float32 activation with a parameter
would be in float32. While the code of a layer runs, its operations pass through `_bind`, which casts the operands of
such a matmul: those that a matmul reads, and nothing else.

Flax casts a kernel and then multiplies. The gradient is then that of the half copy, in half, and data parallelism sums
it in half. Here the matmul gets the float32 kernel, and returns its gradient in float32 (`kernels.weight_gradients`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.kernels import weight_gradients
from mpjax.policy import _cast_leaf, is_castable, is_half
from mpjax.program import compat, contexts
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import sub_jaxprs
from mpjax.program.primitives import MATMULS, Op, primitive
from mpjax.program.tracing import intercepted, retraced


@dataclasses.dataclass(frozen=True)
class Reading:
    """How the running code of a layer reads parameters and multiplies.

    Args:
        dtype: The half dtype of its matmuls.
        wide: Whether the gradients of its float32 parameters are float32.
        is_linear: Whether its code is a matmul with a kernel, of Flax's, which reads its parameters as they are.
    """

    dtype: np.dtype
    wide: bool
    is_linear: bool = False


@contextlib.contextmanager
def reads(how: Reading | None) -> Iterator[None]:
    """A context for the code of a layer. With None, it runs as it is written."""
    with contexts.layer_reading(how), intercepted(_concerns, _bind) if how else contextlib.nullcontext():
        yield


def read(parameter: Any, how: Reading | None) -> Any:
    """A parameter as the code of a layer reads it. Float32 arrays yield to the dtype of what they meet."""
    if how is None or how.is_linear:
        return parameter
    return jax.tree.map(lambda x: _yielding(x) if _is_float32(x) else x, cast_halves(parameter, how.dtype))


# The parameters that the code in the current traces reads: the yielding alias and the parameter, by the alias's id.
_parameters: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


def _yielding(parameter: Any) -> Any:
    alias = compat.yielding(parameter)
    if isinstance(alias, jax.core.Tracer) and isinstance(parameter, jax.core.Tracer):
        key = id(alias)
        _parameters[key] = weakref.ref(alias, lambda _: _parameters.pop(key, None)), weakref.ref(parameter)
    return alias


def _operand(x: Any, how: Reading) -> Any:
    """An operand of an operation, with its copies if it is a parameter."""
    if not (_is_float32(x) and (how.is_linear or compat.yields(x))):
        return x
    alias, parameter = (reference() for reference in _parameters.get(id(x), (lambda: None, lambda: None)))
    # Not the alias: the backward pass would keep it.
    full = parameter if alias is x and parameter is not None else x
    return _Copies(x, _cast_leaf(full, how.dtype), full)


def cast_halves(tree: Any, dtype: np.dtype, is_leaf: Any = None) -> Any:
    """Casts the half arrays of a tree. Float32 arrays keep their dtype."""
    return jax.tree.map(lambda x: _cast_leaf(x, dtype) if is_half(x) else x, tree, is_leaf=is_leaf)


def _is_float32(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray)) and x.dtype == np.float32


@dataclasses.dataclass
class _Copies:
    """The copies of one value in a program.

    Args:
        value: What the program holds.
        low: The same in half, for matmuls.
        full: The float32 parameter of which it is a copy, if it is one.
        explicit: Whether the program itself widened it.
        is_product: Whether it is the result of a matmul that was cast.
    """

    value: Any
    low: Any
    full: Any = None
    explicit: bool = False
    is_product: bool = False


def _concerns(operation: Any, args: Sequence[Any]) -> bool:
    """Whether `_bind` may cast operands of an operation."""
    if operation.name in MATMULS or operation.name in _ENTERED:
        return contexts.layer_reading.value is not None
    return len(args) > 1 and any(getattr(x, "weak_type", False) for x in args)


def _bind(operation: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Runs one operation of a layer's code."""
    how = contexts.layer_reading.value
    if how is None:
        return operation.bind(*args, **params)
    if operation.name not in MATMULS and not _is_inlined_matmul(operation, params):
        return operation.bind(*_same_dtype(operation, args), **_rewritten(operation, params, how))
    outs = _outputs(operation, [_operand(x, how) for x in args], params, how)
    found = [x.low if isinstance(x, _Copies) and x.is_product else _value(x) for x in outs]
    return found if operation.multiple_results else found[0]


def _is_inlined_matmul(operation: Any, params: dict[str, Any]) -> bool:
    """Whether an operation is a function of JAX's, such as `jnp.einsum`, that multiplies matrices."""
    return operation.name == "jit" and compat.is_inlined(params) and _multiplies(params["jaxpr"])


_multiplying: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _multiplies(jaxpr: Any) -> bool:
    """Whether a program has a matmul with a float32 operand."""
    if jaxpr not in _multiplying:
        eqns = compat.open_jaxpr(jaxpr).jaxpr.eqns
        inner = (sub.jaxpr for eqn in eqns for sub in sub_jaxprs(eqn))
        _multiplying[jaxpr] = any(map(_is_wide_matmul, eqns)) or any(map(_multiplies, inner))
    return _multiplying[jaxpr]


def _is_wide_matmul(eqn: Any) -> bool:
    return eqn.primitive.name in MATMULS and any(v.aval.dtype == np.float32 for v in eqn.invars[:2])


# The primitives whose sub-jaxprs run with the dtypes of their operands.
_ENTERED = ("jit", "checkpoint", "remat", "remat2", "scan", "while", "cond")
_programs: weakref.WeakKeyDictionary[Any, dict[Reading, Any]] = weakref.WeakKeyDictionary()


def _rewritten(operation: Any, params: dict[str, Any], how: Reading) -> dict[str, Any]:
    """The parameters of a loop, branch or jitted function, with matmuls cast in its sub-jaxprs. Their types stay."""
    if operation.name not in _ENTERED:
        return params

    def visit(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(visit, value))
        if not compat.is_jaxpr(value) or not _multiplies(value):
            return value
        known = _programs.setdefault(value, {})
        if how not in known:
            known[how] = retraced(value, functools.partial(_values, value, how))
        return known[how]

    return {name: visit(value) for name, value in params.items()}


def _values(jaxpr: Any, how: Reading, *args: Any) -> list[Any]:
    return [_value(x) for x in _run(jaxpr, [_operand(x, how) for x in args], how)]


def _same_dtype(operation: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The operands of a function of `lax`, which does not promote: parameters are cast to the dtype of the others."""
    halves = {x.dtype for x in args if is_half(x)}
    if operation.multiple_results or len(halves) != 1:
        return args
    return [_cast_leaf(x, *halves) if compat.yields(x) and is_castable(x) else x for x in args]


def _outputs(operation: Any, operands: Sequence[Any], params: dict[str, Any], how: Reading) -> Sequence[Any]:
    """The results of an operation, with their copies."""
    copies = [x for x in operands if isinstance(x, _Copies)]
    if _is_inlined_matmul(operation, params):
        return _run(params["jaxpr"], operands, how)
    if operation.name in MATMULS:
        return _matmul(operation, operands, params, how)
    first = operands[0] if operands else None
    if operation.name == "convert_element_type":
        return [_converted(first, params, operation, how)]
    if len(copies) == 1 and copies[0] is first and primitive(operation.name).op is Op.MOVE:
        parts = {id(x): x for x in (first.value, first.low, first.full) if x is not None}
        moved = {key: operation.bind(x, *operands[1:], **params) for key, x in parts.items()}
        value, low, full = (moved.get(id(x)) for x in (first.value, first.low, first.full))
        return [dataclasses.replace(first, value=value, low=low, full=full)]
    outs = operation.bind(*map(_value, operands), **_rewritten(operation, params, how))
    return outs if operation.multiple_results else (outs,)


def _run(jaxpr: Any, operands: Sequence[Any], how: Reading) -> list[Any]:
    def rule(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        with compat.EquationContext(eqn):
            return _outputs(eqn.primitive, operands, compat.bind_params(eqn.primitive, eqn.params), how)

    jaxpr, consts = compat.open_jaxpr(jaxpr)
    return evaluate(jaxpr, dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True)), rule)


def _converted(x: Any, params: dict[str, Any], operation: Any, how: Reading) -> Any:
    """A cast: of a half value, which a matmul may read before the cast, or of a parameter."""
    out = operation.bind(_value(x), **params)
    if params["weak_type"] and _is_float32(out):
        return _Copies(out, _cast_leaf(out, how.dtype), out)
    if is_half(x) and out.dtype == np.float32:
        return _Copies(out, x, explicit=True)
    if isinstance(x, _Copies) and out.dtype in (np.float32, how.dtype):
        is_low = out.dtype != np.float32
        return dataclasses.replace(x, value=x.low if is_low else out, explicit=not is_low, is_product=False)
    return out


def _matmul(operation: Any, operands: Sequence[Any], params: dict[str, Any], how: Reading) -> Sequence[Any]:
    factors = [_operand(x, how) if compat.yields(x) else x for x in operands[:2]]
    rest = [_value(x) for x in operands[2:]]
    values = [_value(x) for x in factors]
    explicit = all(isinstance(x, _Copies) and x.explicit for x in factors)
    mixed = any(isinstance(x, _Copies) or is_half(x) for x in factors)
    if explicit or not mixed or not all(is_half(x) or x.dtype == np.float32 for x in values):
        return (operation.bind(*values, *rest, **params),)
    lows = [x.low if isinstance(x, _Copies) else _cast_leaf(x, how.dtype) for x in factors]
    fulls = [x.full if how.wide and isinstance(x, _Copies) else None for x in factors]
    known = [low if full is None else full for low, full in zip(lows, fulls, strict=True)]
    is_product, result = not any(map(is_half, values)), params.get("preferred_element_type")
    has_parameter = any(x is not None for x in fulls)
    if result is not None and (has_parameter or any(x.dtype == np.float32 for x in values)):
        params = {**params, "preferred_element_type": how.dtype}
    if has_parameter:
        pointwise = operation.name != "conv_general_dilated" or weight_gradients.is_pointwise(
            params, jnp.shape(lows[1])
        )
        out = weight_gradients.matmul(operation, params, [*lows, *rest], known, pointwise)
    else:
        out = operation.bind(*lows, *rest, **params)
    if is_product:
        return [_Copies(lax.convert_element_type(out, np.float32), out, is_product=True)]
    return [out if result in (None, out.dtype) else lax.convert_element_type(out, result)]


def _value(x: Any) -> Any:
    return x.value if isinstance(x, _Copies) else x


def attend(embed: Any, dtype: np.dtype, query: jax.Array, **kwargs: Any) -> jax.Array:
    """The logits of a query: Flax's `Embed.attend`."""
    # Not `jnp.dot(query, table.T)`: XLA's CPU compiler can't run a bfloat16 matmul whose float32 result is transposed.
    numbers = (((query.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(query.astype(dtype), embed.embedding[...], numbers, **kwargs)
