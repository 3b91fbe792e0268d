"""Heads of language models with their loss, compiled without a device: `python -m benchmarks.cross_entropy`.

The gradient of 8 × 1,024 tokens of width 1,024 with a vocabulary of 50,304 (GPT-2 medium), or of width 2,304 with one
of 256,000 (`--head gemma`: Gemma 2), with careful casts by hand, and under autocast in bfloat16 with the loss as it is
written and without its logits. Nothing runs: the figures are XLA's plan of temporary memory, the bytes that kernels
move, and whether an array of tokens × vocabulary is left.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks import commands
from mpjax.casting.rules import CrossEntropy
from mpjax.planning import target
from mpjax.planning.traffic import bytes_moved

TOKENS = 8 * 1024
HAND = "by hand"
HEADS = {"gpt2": (1024, 50304), "gemma": (2304, 256000)}  # width and vocabulary


def _at_labels(values: Any, labels: Any) -> Any:
    return jnp.take_along_axis(values, labels[:, None], -1)[:, 0]


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "`log_softmax` and `take_along_axis`": lambda z, y: -jnp.mean(_at_labels(jax.nn.log_softmax(z), y)),
    "optax, integer labels": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y).mean(),
    "optax, one-hot": lambda z, y: optax.softmax_cross_entropy(z, jax.nn.one_hot(y, z.shape[-1])).mean(),
    "`logsumexp` minus the label's logit": lambda z, y: jnp.mean(jax.nn.logsumexp(z, -1) - _at_labels(z, y)),
}


def measure(
    loss: Callable[[Any, Any], Any],
    head: tuple[int, int],
    choice: CrossEntropy | None,
    device: jax.Device,
    platform: str,
) -> tuple[Any, ...]:
    """The temporary bytes, the bytes moved, and whether an array of tokens × vocabulary is left; None is by hand."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes: list[Any] = [(head, jnp.float32), ((TOKENS, head[0]), jnp.float32), ((TOKENS,), jnp.int32)]
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]

    def by_hand(w: Any, x: Any, y: Any) -> Any:
        return loss((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32), y)

    rules = mpjax.Rules(cross_entropy=choice) if choice else None
    fun = mpjax.autocast(lambda w, x, y: loss(x @ w, y), "mixed_bfloat16", rules=rules) if rules else by_hand
    with target.traced_for(device):
        traced = jax.jit(jax.grad(fun, (0, 1))).trace(*args)
    compiled = traced.lower(lowering_platforms=(platform,)).compile()
    text = compiled.as_text() or ""
    return compiled.memory_analysis().temp_size_in_bytes, bytes_moved(text), has_logits(text, head[1])


def has_logits(text: str, vocabulary: int) -> bool:
    """Whether a compiled program has an array of tokens × vocabulary.

    Example:
        >>> has_logits("f32[8192,50304]{1,0} fusion", 50304), has_logits("bf16[8192,8384]{1,0} fusion", 50304)
        (True, False)
    """
    arrays = re.findall(r"\w+\[([\d,]+)\]", text)
    return any({str(TOKENS), str(vocabulary)} <= set(sizes.split(",")) for sizes in arrays)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--target", default="h200", choices=list(target.TARGETS), help="default: h200")
    parser.add_argument("--head", default="gpt2", choices=list(HEADS), help="default: gpt2")
    args = parser.parse_args()
    chosen, head = target.TARGETS[args.target], HEADS[args.head]
    devices = chosen.devices()
    if devices is None:
        sys.exit(chosen.missing)
    choices: list[Any] = [HAND, "unfused", "fused"]
    header = ["loss as written", *(f"{choice}, GB" for choice in choices)]
    header += [*(f"bytes moved, {choice} / {HAND}" for choice in choices[1:]), "logits left"]
    lines = []
    for name, loss in LOSSES.items():
        found = {
            name: measure(loss, head, None if name == HAND else name, devices[0], chosen.platform) for name in choices
        }
        planned = [f"{temporary / 1e9:.2f}" for temporary, _, _ in found.values()]
        moved = [f"{found[choice][1] / found[HAND][1]:.2f}" for choice in choices[1:]]
        lines.append([name, *planned, *moved, ", ".join(choice for choice in choices if found[choice][2])])
    print(commands.markdown(header, lines))


if __name__ == "__main__":
    main()
