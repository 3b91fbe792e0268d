"""Half matmuls of layers that return the gradient of a float32 kernel in float32, as under `autocast`.

Flax casts a kernel and then multiplies. The gradient is then that of the half copy, in half, and data
parallelism sums it in half. Here a layer passes its float32 kernel to the matmul (`_jaxpr.weight_gradients`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._jaxpr import compat, weight_gradients
from mpjax._jaxpr.evaluator import bind, evaluate
from mpjax._jaxpr.primitives import MATMULS, Op, primitive
from mpjax.policy import is_half

# The attributes of Flax's layers that hold their matmul: its default, and the position of its (inputs, kernel).
_MATMULS: dict[str, tuple[Callable[..., Any], int]] = {
    "dot_general": (lax.dot_general, 0),
    "conv_general_dilated": (lax.conv_general_dilated, 0),
    "einsum_op": (jnp.einsum, 1),
}


def matmul_attribute(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attribute of a layer that holds its matmul, with a replacement. Empty if the matmul is not JAX's own.

    Args:
        attributes: The layer's attributes. A matmul of None means JAX's function, as in Linen.
    """
    for name, (default, first) in _MATMULS.items():
        if name in attributes and attributes[name] in (None, default) and attributes.get(f"{name}_cls") is None:
            return {name: functools.partial(wide_gradients, default, first)}
    return {}


def wide_gradients(matmul: Callable[..., Any], first: int, *args: Any, **kwargs: Any) -> Any:
    """Multiplies half inputs with a float32 kernel, in half. The gradient of the kernel is float32.

    Args:
        matmul: A JAX function such as `lax.dot_general`.
        first: Position of the inputs among its arguments. The kernel comes next.
        args, kwargs: Arguments of `matmul`.
    """
    inputs, kernel = args[first : first + 2]
    if not is_half(inputs) or kernel.dtype != np.float32:
        return matmul(*args, **kwargs)
    low = lax.convert_element_type(kernel, inputs.dtype)
    fun = functools.partial(_of_operands, matmul, args[:first], args[first + 2 :], kwargs)
    (out,) = _run(compat.trace(fun, inputs, low), [inputs, _Kernel(low, kernel)])
    return out


def _of_operands(matmul: Callable[..., Any], before: Any, after: Any, kwargs: Any, x: Any, kernel: Any) -> Any:
    return matmul(*before, x, kernel, *after, **kwargs)


class _Kernel:
    """A kernel in half and in float32, which are transposed and reshaped together."""

    def __init__(self, low: Any, full: Any) -> None:
        self.low, self.full = low, full


def _run(jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates the jaxpr of a matmul function, with the matmul itself replaced."""
    jaxpr, consts = compat.open_jaxpr(jaxpr)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))
    return [*map(_low, evaluate(jaxpr, env, _bind))]


def _bind(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    holds_kernel = any(isinstance(x, _Kernel) for x in values)
    if holds_kernel and eqn.primitive.name == "jit":
        return _run(compat.call_jaxpr(eqn.params), values)
    low = [_low(x) for x in values]
    params = eqn.primitive.get_bind_params(eqn.params)
    if holds_kernel and eqn.primitive.name in MATMULS:
        full = [x.full if isinstance(x, _Kernel) else x for x in values]
        pointwise = eqn.primitive.name != "conv_general_dilated" or weight_gradients.is_pointwise(
            eqn.params, jnp.shape(low[1])
        )
        return [weight_gradients.matmul(eqn.primitive, params, low, full[:2], pointwise)]
    if holds_kernel and primitive(eqn.primitive.name).op is Op.MOVE and not eqn.primitive.multiple_results:
        return [_Kernel(*bind(eqn, low), *bind(eqn, [values[0].full, *low[1:]]))]
    return bind(eqn, low)


def _low(x: Any) -> Any:
    return x.low if isinstance(x, _Kernel) else x


def attend(table: jax.Array, dtype: np.dtype, query: jax.Array, **kwargs: Any) -> jax.Array:
    """Flax's `Embed.attend` for a float32 table: the logits of a query, in `dtype`."""
    # Not `jnp.dot(query, table.T)`: XLA's CPU compiler can't run a bfloat16 matmul whose float32 result is transposed.
    numbers = (((query.ndim - 1,), (1,)), ((), ()))
    return wide_gradients(lax.dot_general, 0, query.astype(dtype), table, numbers, **kwargs)
