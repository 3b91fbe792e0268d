"""Pallas's flash attention for TPUs, with the arguments of `jax.nn.dot_product_attention`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from mpjax.program import compat

_BLOCK = 128


def flash_attention(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, *, scale: float, is_causal: bool, local_window_size: Any
) -> Any:
    """Attention of q, k, v [batch, tokens, heads, features] in one TPU kernel.

    Raises:
        NotImplementedError: The kernel does not compute it, or not without an element for each score.
    """
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    if bias is not None or mask is not None or local_window_size is not None:
        raise NotImplementedError("it would store a mask, a bias or a window for each score")
    if compat.is_partitioned():
        raise NotImplementedError(
            "XLA can't split it over devices: call the function in a shard_map, or in jax.set_mesh of one device"
        )
    if q.shape[1] % _BLOCK or k.shape[1] % _BLOCK:
        raise NotImplementedError(f"{q.shape[1]} × {k.shape[1]} tokens are not multiples of {_BLOCK}")
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return pallas.flash_attention(q, k, v, causal=is_causal, sm_scale=scale).swapaxes(1, 2)
