"""The casting rules for a call of a layer, shared by Linen and NNX.

The class of a layer determines its kind, one of four. Normalisation and lookups compute in float32 and
return the compute dtype. Flax's linear layers multiply in the compute dtype and add their bias in
float32. A recurrent cell keeps the dtype of its carry, and Flax's own cells have float32 gates. The code of all other
layers computes in the dtypes of its values, and multiplies in the compute dtype.

A layer casts what its matmul, convolution or lookup reads. It does not cast its arguments: token ids, timesteps, masks
and carries keep the dtype that the model's author gave them, and so do float32 results.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mpjax.modules.matmuls import Reading, cast_halves, reads
from mpjax.policy import CASTABLE_DTYPES, HALF_DTYPES, Policy, _cast_leaf, is_castable, is_half, is_norm_class
from mpjax.program.tracing import body_of_loop

_LINEAR_NAMES = {
    *("Dense", "DenseGeneral", "Linear", "LinearGeneral", "Einsum"),
    *("Conv", "ConvTranspose", "ConvLocal"),
}

_HALF_WEIGHT = "mpjax_half_weight"


class Kind(enum.Enum):
    FLOAT32 = "computes in float32, returns the compute dtype"
    LINEAR = "multiplies in the compute dtype, adds its bias in float32"
    CELL = "keeps its carry's dtype, has float32 gates"  # Flax's own cells
    USER_CELL = "keeps its carry's dtype"
    PLAIN = "computes in the dtypes of its values, multiplies in the compute dtype"


def kind_of(cls: type, method: str) -> Kind:
    """The kind of a method of a layer class, by the names of the class and its bases."""
    ours = [base.__name__ for base in cls.__mro__ if base.__module__.startswith("flax.")]
    if is_norm_class(cls):
        return Kind.FLOAT32
    # A lookup in float32 converts only the gathered rows, not the whole table, and the gradients of
    # repeated tokens are summed in float32. `attend` is a matmul with the table.
    if "Embed" in ours and method != "attend":
        return Kind.FLOAT32
    if method == "__call__" and "RNNCellBase" in ours:
        return Kind.CELL if cls.__call__.__module__.startswith("flax.") else Kind.USER_CELL
    if not _LINEAR_NAMES.isdisjoint(ours) or is_flax_attend(cls, method):
        return Kind.LINEAR
    return Kind.PLAIN


def is_flax_attend(cls: type, method: str) -> bool:
    """Whether a method is Flax's `Embed.attend`, a matmul with the table."""
    return method == "attend" and getattr(getattr(cls, method), "__module__", "") in (
        nn.Embed.__module__,
        nnx.Embed.__module__,
    )


def reading_of(policy: Policy, kind: Kind, dtype: np.dtype, own: np.dtype | None) -> Reading | None:
    """How a layer that computes in `dtype`, perhaps its `own`, reads its parameters. None for a full dtype."""
    if kind is Kind.FLOAT32 or dtype not in HALF_DTYPES:
        return None
    return Reading(dtype, own is None and policy.reduce_dtype != dtype, kind is Kind.LINEAR)


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


# The attributes of Flax's layers that hold their matmul, with JAX's functions.
_MATMULS: dict[str, Callable[..., Any]] = {
    "dot_general": lax.dot_general,
    "conv_general_dilated": lax.conv_general_dilated,
    "einsum_op": jnp.einsum,
}


def _has_own_matmul(given: dict[str, Any]) -> bool:
    """Whether a layer multiplies by a function of the user's, which may expect a half kernel."""
    return any(given.get(name) not in (None, jaxs) or given.get(f"{name}_cls") for name, jaxs in _MATMULS.items())


def attributes_inside(
    kind: Kind, dtype: np.dtype, given: dict[str, Any], reading: Reading | None, in_cell: bool = False
) -> dict[str, Any]:
    """The attributes of a layer that change during a call, with their new values.

    Args:
        kind: The layer's kind.
        dtype: The dtype that it computes in.
        given: Its attributes.
        reading: As in `call`.
        in_cell: As in `call`.
    """
    # None for float32 computation: NNX's norms would cast their statistics to any other dtype.
    inside: dict[str, Any] = {"dtype": None if kind is Kind.FLOAT32 else dtype}
    if kind is Kind.LINEAR and "promote_dtype" in given:
        promote = given["promote_dtype"]
        keeps = reading and not in_cell and promote.__module__.startswith("flax.") and not _has_own_matmul(given)
        inside["promote_dtype"] = functools.partial(_promote_all_but_bias, promote, in_cell, bool(keeps))
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


def keeps_matmuls(primitive: Any, *_: Any, name: str = "", **__: Any) -> bool:
    """The rematerialisation policy of Flax's recurrent cells, for `jax.checkpoint`.

    They have several float32 gates for each feature and time step, which would be most of a model's residuals.
    They can be recomputed from half matmuls. A user's own cell may have side effects that must not happen twice.
    The policy saves matmuls, and the half copies of the weights, which are made once before a loop, not at each step.
    """
    return primitive.name in ("dot_general", "conv_general_dilated") or name == _HALF_WEIGHT


def half_weight(x: Any) -> Any:
    """Marks a weight of a matmul in a recurrent cell, for `keeps_matmuls`."""
    return checkpoint_name(x, _HALF_WEIGHT)


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


def leave(out: Any, kind: Kind, dtype: np.dtype) -> Any:
    """The result of an overridden module in the override's output dtype. User code's float32 results stay."""
    return cast_halves(out, dtype, _is_object) if kind in (Kind.PLAIN, Kind.USER_CELL) else cast(out, dtype)


def cast(tree: Any, dtype: np.dtype) -> Any:
    """Casts the real floating arrays of a tree. NNX objects in it (an Rngs, a module) are unchanged."""
    return jax.tree.map(lambda x: _cast_leaf(x, dtype), tree, is_leaf=_is_object)


def call(
    fun: Callable[..., Any],
    kind: Kind,
    dtype: np.dtype,
    reading: Reading | None,
    in_cell: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a layer's method by the rules of its kind.

    The linear layers of Flax's recurrent cells (`in_cell`) return float32, because their gates are sums of two of them.
    """
    if kind is Kind.FLOAT32:
        args, kwargs = cast_halves((args, kwargs), np.dtype(np.float32), _is_object)
        with reads(reading):
            return _cast_array(fun(*args, **kwargs), dtype)
    if kind is Kind.LINEAR:
        with reads(reading), _implicit_promotion(True):
            out = fun(*args, **kwargs)
        return _cast_array(out, np.dtype(np.float32) if in_cell else dtype)
    carry = args[0] if args else kwargs.get("carry")
    if kind is Kind.CELL:  # Its matmuls read the input, and nothing else does.
        args, kwargs = (carry, *cast(args[1:], dtype)), {k: cast(x, dtype) for k, x in kwargs.items() if k != "carry"}
    else:  # An override may set another dtype than that of the module above. Float32 values keep theirs.
        args, kwargs = cast_halves((args, kwargs), dtype, _is_object)
    with reads(reading), _implicit_promotion(reading is not None):
        out = fun(*args, **kwargs)
    if kind in (Kind.CELL, Kind.USER_CELL):
        new_carry, y = out
        return _cast_like(new_carry, carry), _cast_array(y, dtype) if kind is Kind.CELL else y
    return out


def _implicit_promotion(when: bool) -> contextlib.AbstractContextManager[Any]:
    """Lets half and float32 values meet even under strict promotion.

    The policy mixes these dtypes on purpose: in the float32 model there is nothing to promote.
    """
    if when and jax.config.jax_numpy_dtype_promotion == "strict":
        return jax.numpy_dtype_promotion("standard")
    return contextlib.nullcontext()


def _is_object(x: Any) -> bool:
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def _cast_array(out: Any, dtype: np.dtype) -> Any:
    """Casts the result of a layer. The code of a user's subclass may return more, which is not cast."""
    return _cast_leaf(out, dtype) if is_castable(out) else out


# The loop body that the running module is called in.
_body: contextvars.ContextVar[Any] = contextvars.ContextVar("mpjax_body", default=None)


def keep_loop_variables(fun: Callable[..., Any], args: Any, kwargs: Any, narrow: bool) -> Any:
    """Calls a module. If it is the body of a loop, the loop variables keep their dtype, as JAX requires.

    The body maps `x` to its next value, or (carry, x) to (carry, y), and no other module in the loop calls it.

    Args:
        fun: The module, which follows the rules of its kind.
        args, kwargs: Its arguments.
        narrow: Whether such a call can only be the whole body, as in Linen. In NNX, an author may call a module in a
            loop of JAX's and use its result otherwise. Then a float32 result is not rounded to a half loop variable.
    """
    body = body_of_loop()
    if body is None or body is _body.get() or not args:
        return fun(*args, **kwargs)
    token = _body.set(body)
    try:
        out = fun(*args, **kwargs)
    finally:
        _body.reset(token)

    def kept(new: Any) -> Any:
        forms = [(jax.tree.structure(x), [*map(jnp.shape, jax.tree.leaves(x))]) for x in (args[0], new)]
        if forms[0] != forms[1]:
            return new
        return jax.tree.map(lambda x, r: _cast_like(x, r) if narrow or is_half(x) else x, new, args[0])

    return (kept(out[0]), out[1]) if type(out) is tuple and len(out) == 2 and len(args) > 1 else kept(out)


def _cast_like(tree: Any, reference: Any) -> Any:
    return jax.tree.map(lambda x, r: _cast_leaf(x, r.dtype) if is_castable(r) else x, tree, reference)


def cast_parameter(value: Any, dtype: np.dtype) -> Any:
    """Casts a parameter to a policy's param dtype. Only float32 is cast: other dtypes were chosen by the author."""
    return jax.tree.map(lambda x: _cast_leaf(x, dtype) if is_castable(x) and x.dtype == np.float32 else x, value)
