"""What runs an attention on each platform: cuDNN's kernel, Pallas's for TPUs, or the formulas.

A library's kernel is a function with a derivative of its own. Its forward pass keeps the logsumexp, and its backward
pass reads it. So the backward pass here is JAX's trace of that derivative, without the equation of the forward kernel:
the results of that one are operands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from mpjax.kernels import attention
from mpjax.kernels.attention import Form, Operands, band
from mpjax.program import compat
from mpjax.program.evaluator import bind, run
from mpjax.program.objects import filled

# JAX adds these numbers to masked scores in cuDNN's kernel, which computes NaN from larger ones.
_LEAST = {"bfloat16": -(2.0**41), "float16": -(2.0**14)}
_OF_PLATFORM = {"cuda": "cudnn", "tpu": "pallas"}


def kernel_of(form: Form, platform: str) -> str:
    """The kernel of a form on a platform: "cudnn", "pallas", "tokamax" or "xla"."""
    return _OF_PLATFORM.get(platform, "xla") if form.kernel == "fused" else form.kernel


def refusal(operands: Operands, form: Form, kernel: str) -> str:
    """Why a kernel does not compute an attention with its gradient; empty if it does.

    Args:
        operands: The operands, or their shapes and dtypes.
        form: What to compute.
        kernel: The kernel's name.
    """
    if kernel == "xla":
        return ""
    x = Operands(*(None if y is None else jax.ShapeDtypeStruct(y.shape, y.dtype) for y in operands))
    forward, backward = _PROGRAMS[kernel]
    try:
        out, logsumexp = jax.eval_shape(lambda x: forward(x, form), x)
        jax.eval_shape(lambda *args: backward(*args, form), x, out, logsumexp, out)
    except Exception as error:  # The kernels refuse with several types of errors.
        return f"{kernel} refuses it: {str(error).splitlines()[0]}"
    return ""


# cuDNN.


def _cudnn(form: Form, q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    left, right = form.window
    if form.cap:
        raise NotImplementedError("it does not cap scores")
    return jax.nn.dot_product_attention(
        -q if form.scale < 0 else q, k, v, bias, mask, scale=abs(form.scale), is_causal=right == 0,
        local_window_size=None if left is None else (left, 0), implementation="cudnn",
    )  # fmt: skip


def _of_cudnn(x: Operands, form: Form) -> tuple[Operands, Callable[..., Any]]:
    """The operands as cuDNN takes them, biases in half, and its kernel."""
    shape, mask = (x.q.shape[1], x.k.shape[1]), x.mask
    bias = None if x.bias is None else jnp.broadcast_to(in_half(x, form), (*x.bias.shape[:2], *shape))
    if form.window != (None, None) and form.window[1] != 0:  # Its own windows end at the query's position.
        visible = band(form, 0, *shape)
        mask = visible[None, None] if mask is None else mask & visible
        form = dataclasses.replace(form, window=(None, None))
    mask = None if mask is None else jnp.broadcast_to(mask, (*mask.shape[:2], *shape))
    return x._replace(bias=bias, mask=mask), functools.partial(_cudnn, form)


def in_half(x: Operands, form: Form) -> Any:
    """The bias of an attention in half, less each row's largest number of a key that is read.

    A softmax ignores such a shift. It leaves small numbers where the probabilities are large, and half represents
    these closely. A finite number stays finite.
    """
    visible = band(form, 0, x.q.shape[1], x.k.shape[1])
    visible = visible if x.mask is None else visible & x.mask
    largest = jnp.max(x.bias if visible is True else jnp.where(visible, x.bias, -jnp.inf), -1, keepdims=True)
    bias = x.bias - jnp.where(jnp.isfinite(largest), largest, 0)
    least = np.float32(_LEAST[x.q.dtype.name])
    return jnp.clip(bias, least, -least).astype(x.q.dtype)


def _cudnn_forward(x: Operands, form: Form) -> Sequence[Any]:
    low, kernel = _of_cudnn(x, form)
    return _Traced(kernel, low, x.q).forward(*low)


def _cudnn_backward(x: Operands, out: Any, logsumexp: Any, ct: Any, form: Form) -> Operands:
    low, kernel = _of_cudnn(x, form)
    found = Operands(*_Traced(kernel, low, ct).backward(*low, out, logsumexp, ct))
    if x.bias is not None:
        found = found._replace(bias=attention.summed_as(found.bias.astype(np.float32), x.bias))
    return found


class _Traced:
    """A library's attention with its gradient, apart: what makes the result and the logsumexp, and what reads them.

    Args:
        kernel: A function of q, k, v, bias and mask.
        x: Its operands.
        ct: A cotangent of its result.
    """

    def __init__(self, kernel: Callable[..., Any], x: Operands, ct: Any):
        self._given = [i for i, y in enumerate(x) if y is not None]
        floats = [i for i in self._given if i < 4]

        def gradients(*arrays: Any) -> Any:
            operands = filled([None] * len(x), self._given, arrays[:-1])

            def of_floats(*chosen: Any) -> Any:
                return kernel(*filled(operands, floats, chosen))

            out, pullback = jax.vjp(of_floats, *(operands[i] for i in floats))
            found = dict(zip(floats, pullback(arrays[-1]), strict=True))
            return out, *(found[i] for i in floats)

        self._floats = floats
        self._opened = compat.open_jaxpr(compat.trace(gradients, *(x[i] for i in self._given), ct))
        self._kernel = next(e for e in self._opened.jaxpr.eqns if "attention_fwd" in e.primitive.name)

    def forward(self, *operands: Any) -> Sequence[Any]:
        """The result and the logsumexp."""
        jaxpr, kernel = self._opened.jaxpr, self._kernel
        until = list(jaxpr.eqns[: jaxpr.eqns.index(kernel) + 1])
        part = jaxpr.replace(eqns=until, outvars=list(kernel.outvars[:2]), invars=jaxpr.invars[:-1])
        return run(part, (*self._opened.consts, *(operands[i] for i in self._given)), bind)

    def backward(self, *arrays: Any) -> list[Any]:
        """The cotangents of q, k, v and the bias, from the operands, the results and the cotangent."""
        *operands, out, logsumexp, ct = arrays
        jaxpr, kernel = self._opened.jaxpr, self._kernel
        eqns = [eqn for eqn in jaxpr.eqns if eqn is not kernel]
        invars = [*jaxpr.invars, *kernel.outvars[:2]]
        part = jaxpr.replace(eqns=eqns, invars=invars, outvars=jaxpr.outvars[1:])
        found = run(part, (*self._opened.consts, *(operands[i] for i in self._given), ct, out, logsumexp), bind)
        by_index = dict(zip(self._floats, found, strict=True))
        return [by_index.get(i) for i in range(4)]


# Pallas's flash attention for TPUs.

_BLOCK = 128


def _of_pallas(x: Operands, form: Form) -> tuple[Any, Any]:
    """The queries, keys and values as the kernel takes them [batch, heads, tokens, features], and its blocks."""
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes

    if x.bias is not None or x.mask is not None or (form.window != (None, None) and not form.is_causal):
        raise NotImplementedError("it would store a mask, a bias or a window for each score")
    if form.cap:
        raise NotImplementedError("it does not cap scores")
    if compat.is_partitioned():
        raise NotImplementedError(
            "XLA can't split it over devices: call the function in a shard_map, or in jax.set_mesh of one device"
        )
    queries, keys = x.q.shape[1], x.k.shape[1]
    if queries % _BLOCK or keys % _BLOCK:
        raise NotImplementedError(f"{queries} × {keys} tokens are not multiples of {_BLOCK}")
    arrays = [jnp.repeat(y, x.q.shape[2] // y.shape[2], axis=2).swapaxes(1, 2) for y in x[:3]]
    batch, heads, _, width = arrays[0].shape
    return arrays, BlockSizes.get_default(batch, heads, queries, keys, width)


def _pallas_forward(x: Operands, form: Form) -> Sequence[Any]:
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    arrays, blocks = _of_pallas(x, form)
    out, total, largest = pallas._flash_attention(*arrays, None, None, True, form.is_causal, form.scale, blocks, False)
    return out.swapaxes(1, 2), largest + jnp.log(total)


def _pallas_backward(x: Operands, out: Any, logsumexp: Any, ct: Any, form: Form) -> Operands:
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    arrays, blocks = _of_pallas(x, form)
    out, ct = out.swapaxes(1, 2), ct.swapaxes(1, 2)
    residuals = (*arrays, None, None, out, jnp.ones_like(logsumexp), logsumexp)
    found = pallas._flash_attention_bwd(False, form.is_causal, form.scale, blocks, False, residuals, ct)
    q, k, v = (y.swapaxes(1, 2) for y in found[:3])
    return Operands(q, *(_unrepeated(y, like) for y, like in ((k, x.k), (v, x.v))))


def _unrepeated(y: Any, like: Any) -> Any:
    """The sum over heads that share keys."""
    if y.shape[2] == like.shape[2]:
        return y
    return jnp.sum(y.reshape(*y.shape[:2], like.shape[2], -1, y.shape[3]).astype(np.float32), 3)


# tokamax's kernels, for GPUs and TPUs. It keeps what its backward pass reads to itself, so that one runs forward again.


def _tokamax(form: Form, q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
    try:
        import tokamax
    except ImportError as error:
        raise ImportError(f"pip install tokamax, for Python 3.12 and JAX 0.11.1 ({error})") from None
    if form.cap and bias is not None:
        raise NotImplementedError("it adds a bias before it caps")
    if form.window != (None, None) and not form.is_causal:
        visible = band(form, 0, q.shape[1], k.shape[1])
        mask = visible[None, None] if mask is None else mask & visible
    return tokamax.dot_product_attention(
        q, k, v, bias=bias, mask=mask, scale=form.scale, is_causal=form.is_causal, logits_soft_cap=form.cap or None
    )


def _tokamax_forward(x: Operands, form: Form) -> Sequence[Any]:
    out = _tokamax(form, *x)
    return out.astype(x.q.dtype), jnp.zeros((x.q.shape[0], x.q.shape[2], x.q.shape[1]), np.float32)


def _tokamax_backward(x: Operands, out: Any, logsumexp: Any, ct: Any, form: Form) -> Operands:
    floats = [y for y in x[:4] if y is not None]

    def kernel(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return _tokamax(form, q, k, v, bias, x.mask).astype(ct.dtype)

    _, pullback = jax.vjp(kernel, *floats)
    return Operands(*pullback(ct))


_PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cudnn": (_cudnn_forward, _cudnn_backward),
    "pallas": (_pallas_forward, _pallas_backward),
    "tokamax": (_tokamax_forward, _tokamax_backward),
    "xla": (attention.in_blocks, attention.gradients_in_blocks),
}


# The choice, when a program is lowered.


def _programs(ctx: Any, form: Form, x: Operands, platform: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    kernel = kernel_of(form, platform)
    # `jax.export` doesn't let the call of cuDNN's kernel leave the process.
    at_hand = not (kernel == "cudnn" and compat.is_exported(ctx)) and all(isinstance(n, int) for n in x.q.shape)
    chosen = form.kernel != "fused" or (at_hand and not refusal(x, form, kernel))
    return _PROGRAMS[kernel if chosen else "xla"]


def _lower(primitive: Any, platform: str | None) -> None:
    def rule(ctx: Any, *values: Any, **params: Any) -> Any:
        form, given = params["form"], params["given"]
        shapes = attention.operands_of(given, ctx.avals_in[: len(given)])
        forward, backward = _programs(ctx, form, shapes, platform or "")

        def program(*arrays: Any) -> list[Any]:
            x, rest = attention.operands_of(given, arrays[: len(given)]), arrays[len(given) :]
            if primitive is attention.forward_p:
                return list(forward(x, form))
            found = backward(x, *(rest if len(rest) == 3 else (None, *rest)), form)
            return [getattr(found, name).astype(getattr(x, name).dtype) for name in params["wrt"]]

        return mlir.lower_fun(program, multiple_results=True)(ctx, *values)

    mlir.register_lowering(primitive, rule, platform=platform)


for _primitive in (attention.forward_p, attention.backward_p):
    compat.lowers_for_devices(_primitive)  # cuDNN's kernel in JAX partitions itself.
    for _platform in (None, *_OF_PLATFORM):
        _lower(_primitive, _platform)
