"""Memory of attention, fused and as written: `python -m benchmarks.fused_attention [--target v5e]`.

Compiles the gradient of a small causal transformer, under autocast in bfloat16, for an H200 or a TPU that is not
there, and reads XLA's temporary memory, the calls of the kernel, and whether a buffer has an element for each pair of
tokens.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import mpjax
from benchmarks import RESULTS
from benchmarks.training import target
from mpjax._jaxpr import compat
from perf.results import save

WIDTH, HEADS, LAYERS, BATCH, TOKENS = 512, 8, 2, 4, 1024
LOOPS = {
    "layers in a Python loop": (False, False),
    "layers in a `scan`": (True, False),
    "a `jax.checkpoint` for each layer": (False, True),
    "both": (True, True),
}
# The implementation by name and its call in the compiled program.
KERNELS = {"gpu": ("cudnn", "__cudnn$fmha"), "tpu": ("pallas", "tpu_custom_call")}
FORMS = ("as written", "fused", "by hand")


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, written out. Arrays [batch, tokens, heads, width]."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def by_hand(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same by cuDNN's kernel, or on a TPU by Pallas's."""
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    if compat.platform() == "tpu":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out: jax.Array = flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5)
        return out.swapaxes(1, 2).astype(jnp.float32)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").astype(jnp.float32)


def _normalised(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def _layer(attend: Callable[..., jax.Array], x: jax.Array, p: Any) -> jax.Array:
    q, k, v = (a.reshape(BATCH, TOKENS, HEADS, -1) for a in jnp.split(_normalised(x) @ p["qkv"], 3, axis=-1))
    x = x + attend(q, k, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(_normalised(x) @ p["up"]) @ p["down"]


def loss_fn(params: Any, x: jax.Array, attend: Callable[..., jax.Array], scan: bool, checkpoint: bool) -> jax.Array:
    """The loss of a transformer whose parameters are stacked over layers."""
    layer: Callable[..., jax.Array] = functools.partial(_layer, attend)
    layer = jax.checkpoint(layer) if checkpoint else layer
    if scan:
        x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)
    else:
        for i in range(LAYERS):
            x = layer(x, jax.tree.map(lambda a, i=i: a[i], params))
    return jnp.mean(_normalised(x) ** 2)


def measure(loop: tuple[bool, bool], form: str, device: jax.Device) -> dict[str, Any]:
    """XLA's plan of one form."""
    kernel, call = KERNELS[device.platform]
    rules = mpjax.Rules(attention=kernel if form == "fused" else "unfused")
    attend = by_hand if form == "by hand" else attention
    scan, checkpoint = loop
    loss = functools.partial(loss_fn, attend=attend, scan=scan, checkpoint=checkpoint)
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=sharding)
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = {name: array((LAYERS, *shape)) for name, shape in shapes.items()}
    gradient = jax.jit(jax.grad(mpjax.autocast(loss, "mixed_bfloat16", rules=rules)))
    with target.traced_for(device):
        traced = gradient.trace(params, array((BATCH, TOKENS, WIDTH)))
    platform = "tpu" if device.platform == "tpu" else "cuda"
    compiled = traced.lower(lowering_platforms=(platform,)).compile()
    text = compiled.as_text() or ""
    return {
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kernel_calls": text.count(f'custom_call_target="{call}'),
        "stores_scores": re.search(rf"\w\[[\d,]*{TOKENS},{TOKENS}[\d,]*\]", text) is not None,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each loop."""
    lines = [f"| model | {' | '.join(FORMS)} | kernel calls, fused |", "|---" * (len(FORMS) + 2) + "|"]
    for loop, forms in results.items():
        stored = [", scores" * forms[form]["stores_scores"] for form in FORMS]
        sizes = [f"{forms[form]['temporary_bytes'] / 1e6:.0f} MB{s}" for form, s in zip(FORMS, stored, strict=True)]
        lines.append(f"| {loop} | {' | '.join(sizes)} | {forms['fused']['kernel_calls']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--target", default="h200", choices=list(target.TARGETS), help="default: h200")
    args = parser.parse_args()
    chosen = target.TARGETS[args.target]
    devices = chosen.devices()
    if devices is None:
        raise SystemExit(chosen.missing)
    results = {name: {form: measure(loop, form, devices[0]) for form in FORMS} for name, loop in LOOPS.items()}
    print(table(results))
    name = "fused_attention" + f"_{args.target}" * (args.target != "h200")
    save(name, results | {"versions": chosen.versions()}, args.out).with_suffix(".md").write_text(table(results))


if __name__ == "__main__":
    main()
