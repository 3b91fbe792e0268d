"""The casting rules for a call of a layer, shared by Linen and NNX.

The class of a layer determines its kind, one of four. Normalisation and lookups compute in float32 and
return the compute dtype. Flax's linear layers multiply in the compute dtype and add their bias in
float32. A recurrent cell keeps the dtype of its carry and has float32 gates. All other layers compute
in the compute dtype: their inputs are cast, and their code determines the dtype of their outputs.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mpjax.modules.matmuls import matmul_attribute
from mpjax.policy import CASTABLE_DTYPES, HALF_DTYPES, Policy, _cast_leaf, is_castable, is_half, is_norm_class

_LINEAR_NAMES = {
    *("Dense", "DenseGeneral", "Linear", "LinearGeneral", "Einsum"),
    *("Conv", "ConvTranspose", "ConvLocal"),
}
_CELL_NAMES = {"LSTMCell", "OptimizedLSTMCell", "SimpleCell", "GRUCell", "MGUCell", "ConvLSTMCell"}


_HALF_WEIGHT = "mpjax_half_weight"


class Kind(enum.Enum):
    FLOAT32 = "computes in float32, returns the compute dtype"
    LINEAR = "multiplies in the compute dtype, adds its bias in float32"
    CELL = "keeps its carry's dtype"
    PLAIN = "computes in the compute dtype"


def kind_of(cls: type, method: str) -> Kind:
    """The kind of a method of a layer class, by the names of the class and its bases."""
    ours = [base.__name__ for base in cls.__mro__ if base.__module__.startswith("flax.")]
    if is_norm_class(cls):
        return Kind.FLOAT32
    # A lookup in float32 converts only the gathered rows, not the whole table, and the gradients of
    # repeated tokens are summed in float32. `attend` is a matmul with the table.
    if "Embed" in ours and method != "attend":
        return Kind.FLOAT32
    if method == "__call__" and not _CELL_NAMES.isdisjoint(ours):
        return Kind.CELL
    if not _LINEAR_NAMES.isdisjoint(ours) or is_flax_attend(cls, method):
        return Kind.LINEAR
    return Kind.PLAIN


def is_flax_attend(cls: type, method: str) -> bool:
    """Whether a method is Flax's `Embed.attend`, a matmul with the table."""
    return method == "attend" and getattr(getattr(cls, method), "__module__", "") in (
        nn.Embed.__module__,
        nnx.Embed.__module__,
    )


def has_wide_gradients(policy: Policy, dtype: np.dtype, cls: type) -> bool:
    """Whether a layer's matmul in `dtype` returns the gradient of its float32 kernel in float32, to be summed so."""
    # A ConvLocal has the attributes of a convolution, but is computed differently.
    has_matmul = all(base.__name__ != "ConvLocal" for base in cls.__mro__)
    return has_matmul and dtype in HALF_DTYPES and policy.reduce_dtype != dtype


def own_dtype(given: Any, policies: tuple[Policy, ...], *unset: Any) -> np.dtype | None:
    """The explicit dtype that a layer keeps, or None.

    It is None if the layer has no dtype, if its dtype is one of the `unset` values (defaults), or if one of the
    `policies` (the model's and the layer's) overrides explicit dtypes.
    """
    if given is None or any(np.dtype(given) == other for other in unset) or any(p.override_dtypes for p in policies):
        return None
    return np.dtype(given)


def stays_wide(kind: Kind, own: np.dtype | None, placed: Policy) -> bool:
    """Whether a layer's explicit dtype keeps its matmuls wider than its policy's compute dtype."""
    return own is not None and kind is not Kind.FLOAT32 and own.itemsize > placed.compute_dtype.itemsize


def is_real_float(dtype: Any) -> bool:
    """Whether a layer's `dtype` is None or one that policies cover: not complex or float8."""
    try:
        return dtype is None or np.dtype(dtype) in CASTABLE_DTYPES
    except TypeError:
        return False


def attributes_inside(
    kind: Kind, dtype: np.dtype, given: dict[str, Any], in_cell: bool = False, wide: bool = False
) -> dict[str, Any]:
    """The attributes of a layer that change during a call, with their new values.

    Args:
        kind: The layer's kind.
        dtype: The dtype that it computes in.
        given: Its attributes.
        in_cell: As in `call`.
        wide: Whether its kernel's gradient should be float32, if its matmul supports it.
    """
    # None for float32 computation: NNX's norms would cast their statistics to any other dtype.
    inside: dict[str, Any] = {"dtype": None if kind is Kind.FLOAT32 else dtype}
    if kind is Kind.LINEAR and "promote_dtype" in given:
        promote = given["promote_dtype"]
        matmul = matmul_attribute(given) if wide and not in_cell and promote.__module__.startswith("flax.") else {}
        inside |= matmul
        inside["promote_dtype"] = functools.partial(_promote_all_but_bias, promote, in_cell, bool(matmul))
    if dtype in HALF_DTYPES and given.get("attention_fn") is nnx.dot_product_attention:
        inside["attention_fn"] = _attend_in_half
    if given.get("force_fp32_for_softmax") and given.get("attention_fn") is nn.dot_product_attention:
        inside["attention_fn"] = _attend_after_float32_softmax
    return {name: value for name, value in inside.items() if name in given}


def default_arguments(
    cls: type, method: str, dtype: np.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The keyword arguments of a call, with the policy's dtype instead of Flax's default of float32.

    This concerns the decoding cache of NNX's attention, whose keys and values have the compute dtype.
    """
    if method == "init_cache" and issubclass(cls, nnx.MultiHeadAttention) and len(args) < 2:
        return {"dtype": dtype, **kwargs}
    return kwargs


def recomputes(kind: Kind, method: Callable[..., Any]) -> bool:
    """Whether the backward pass recomputes a method's elementwise operations. True for Flax's own recurrent cells.

    They have several float32 gates for each feature and time step, which would be most of a model's residuals.
    They can be recomputed from half matmuls. A user's own cell may have side effects that must not happen twice.
    """
    return kind is Kind.CELL and method.__module__.startswith("flax.")


def keeps_matmuls(primitive: Any, *_: Any, name: str = "", **__: Any) -> bool:
    """The rematerialisation policy of recurrent cells, for `jax.checkpoint`.

    It saves matmuls, and the half copies of the weights, so that they are made once before a loop, not at each step.
    """
    return primitive.name in ("dot_general", "conv_general_dilated") or name == _HALF_WEIGHT


def half_weight(x: Any) -> Any:
    """Marks a weight of a matmul in a recurrent cell, for `keeps_matmuls`."""
    return checkpoint_name(x, _HALF_WEIGHT)


def casts_parameters(kind: Kind) -> bool:
    """Whether a layer's code gets its parameters in the compute dtype, because it does not cast them itself."""
    return kind in (Kind.PLAIN, Kind.CELL)


def _promote_all_but_bias(
    promote: Callable[..., Any], in_cell: bool, keep_kernel: bool, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """Flax's `promote_dtype` of (inputs, kernel, bias), except for the bias.

    The gradient of a half bias would be a half-precision sum over all examples and positions. With `keep_kernel`
    the kernel is not cast either: the matmul casts it.
    """
    one_tuple = len(args) == 1  # as NNX passes them
    inputs, kernel, *bias = args[0] if one_tuple else args
    if keep_kernel:
        (inputs,) = promote((inputs,), **kwargs) if one_tuple else promote(inputs, **kwargs)
        return inputs, kernel, *bias
    inputs, kernel = promote((inputs, kernel), **kwargs) if one_tuple else promote(inputs, kernel, **kwargs)
    return inputs, half_weight(kernel) if in_cell else kernel, *bias


def _attend_in_half(*args: Any, module: Any = None, **kwargs: Any) -> Any:
    """NNX's attention, by its code path that records the attention weights.

    The other path, `jax.nn.dot_product_attention`, has float32 logits. In the backward pass its matmuls
    mix float32 with half, and float16 does not compile on a CPU.
    """
    recorder: Any = module or _Unrecorded()
    attend: Callable[..., Any] = nnx.dot_product_attention
    return attend(*args, module=recorder, **kwargs)


@functools.wraps(nn.dot_product_attention)  # keeps its signature, by which Flax chooses the arguments to pass
def _attend_after_float32_softmax(
    *args: Any, precision: Any = None, einsum_dot_general: Any = None, **kwargs: Any
) -> Any:
    """Linen's attention with `force_fp32_for_softmax`, its weights cast to half before they multiply the values.

    Flax leaves them in float32, which keeps that matmul, and two of the backward pass, off the Tensor Cores.
    """
    einsum = functools.partial(jnp.einsum, precision=precision, _dot_general=einsum_dot_general or jax.lax.dot_general)
    scores = kwargs.pop("qk_attn_weights_einsum", None) or einsum
    values = kwargs.pop("attn_weights_value_einsum", None) or einsum
    attend: Callable[..., Any] = nn.dot_product_attention
    return attend(
        *args,
        qk_attn_weights_einsum=scores,
        attn_weights_value_einsum=lambda spec, weights, value: values(spec, weights.astype(value.dtype), value),
        **kwargs,
    )


class _Unrecorded:
    """A dummy for the module that attention weights are sown into."""

    def sow(self, *args: Any, **kwargs: Any) -> None:
        pass


def cast(tree: Any, dtype: np.dtype) -> Any:
    """Casts the real floating arrays of a tree. NNX objects in it (an Rngs, a module) are unchanged."""
    return jax.tree.map(lambda x: _cast_leaf(x, dtype), tree, is_leaf=_is_object)


def call(fun: Callable[..., Any], kind: Kind, dtype: np.dtype, args: Any, kwargs: Any, in_cell: bool = False) -> Any:
    """Calls a layer's method by the rules of its kind.

    The linear layers of a recurrent cell (`in_cell`) return float32, because its gates are sums of two of them.
    """
    if kind is Kind.FLOAT32:
        args, kwargs = _widen((args, kwargs))
        return cast(fun(*args, **kwargs), dtype)
    if kind is Kind.CELL:
        return _call_cell(fun, dtype, args, kwargs)
    if kind is Kind.LINEAR:
        with _implicit_promotion():
            out = fun(*args, **kwargs)
        return cast(out, np.dtype(np.float32) if in_cell else dtype)
    # An RNN passes its initial carry on to the cell, which keeps its dtype.
    held = {k: v for k, v in kwargs.items() if k == "initial_carry"}
    out = fun(*cast(args, dtype), **{**cast(kwargs, dtype), **held})
    if args and _is_carry_pair(args[0], out):
        return _cast_like(out[0], args[0]), out[1]
    return out


def _implicit_promotion() -> contextlib.AbstractContextManager[Any]:
    """Lets a Flax layer add its float32 bias or state to half even under strict promotion.

    The policy mixes these dtypes on purpose: the bias's gradient is summed in float32.
    """
    if jax.config.jax_numpy_dtype_promotion == "strict":
        return jax.numpy_dtype_promotion("standard")
    return contextlib.nullcontext()


def _call_cell(fun: Callable[..., Any], dtype: np.dtype, args: Any, kwargs: Any) -> Any:
    """(carry, x) → (carry, y). The state keeps its dtype (float32 by Flax's default).

    The matmuls are still half, because the cell's layers cast the state when they read it.
    """
    carry = args[0] if args else kwargs["carry"]
    rest = {k: v if k == "carry" else cast(v, dtype) for k, v in kwargs.items()}
    with _implicit_promotion():
        new_carry, y = fun(*args[:1], *cast(args[1:], dtype), **rest)
    return _cast_like(new_carry, carry), cast(y, dtype)


def _widen(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(np.float32) if is_half(x) else x, tree, is_leaf=_is_object)


def _is_object(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def _is_carry_pair(carry: Any, out: Any) -> bool:
    """Whether a call maps (carry, ...) to (carry, y), the form of a scan's body.

    A scan requires a carry of constant dtype, so the cast of the input must be undone in the output.
    """
    if not (type(out) is tuple and len(out) == 2):
        return False
    old_tree: Any = jax.tree.structure(carry)
    old, new = jax.tree.leaves(carry), jax.tree.leaves(out[0])
    return (
        old_tree == jax.tree.structure(out[0])
        and all(is_castable(a) and is_castable(b) for a, b in zip(old, new, strict=True))
        and all(a.shape == b.shape for a, b in zip(old, new, strict=True))
    )


def _cast_like(tree: Any, reference: Any) -> Any:
    return jax.tree.map(lambda x, r: _cast_leaf(x, r.dtype) if is_castable(r) else x, tree, reference)


def cast_parameter(value: Any, dtype: np.dtype) -> Any:
    """Casts a parameter to a policy's param dtype. Only float32 is cast: other dtypes were chosen by the author."""
    return jax.tree.map(lambda x: _cast_leaf(x, dtype) if is_castable(x) and x.dtype == np.float32 else x, value)
