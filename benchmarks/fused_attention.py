"""Training steps with fused attention, compiled for an H200 or a TPU: `python -m benchmarks.fused_attention`.

Each model under autocast in bfloat16 has three forms: attention as the model writes it, fused by
`Rules(attention="fused")`, and a model that calls cuDNN's kernel by hand. Nothing runs: the figures are XLA's plan of
its temporary memory, the bytes that its kernels move, the calls of the attention kernel, and the arrays with an element
for each score. Models have one layer, or all of them in a `scan`. Rows that are known are kept; `--only` compiles some
of them again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from typing import Any

import jax

from benchmarks import commands
from benchmarks.training.configurations import CONFIGURATIONS, training
from mpjax import Rules
from mpjax.casting.rules import Attention
from mpjax.planning import target
from mpjax.planning.traffic import bytes_moved
from perf.results import previous
from testing.models.published import WORKLOADS, Workload

# The workload of each row and the shape of its largest scores: batch × heads, queries, keys.
_GPT, _LONG = WORKLOADS["gpt2_medium"], WORKLOADS["gpt2_medium_4096"]
_replaced: Any = dataclasses.replace


def _short(name: str) -> Workload:
    workload: Workload = _replaced(WORKLOADS[name], layers=1)
    return workload


ROWS: dict[str, tuple[Workload, tuple[int, int, int]]] = {
    "GPT-2 medium, 1,024 tokens": (_short("gpt2_medium"), (8 * 16, 1024, 1024)),
    "GPT-2 medium, 1,024 tokens, `scan` and checkpoint": (_replaced(_GPT, loop=True, remat=True), (8 * 16, 1024, 1024)),
    "GPT-2 medium, 4,096 tokens, `scan`": (_replaced(_LONG, loop=True), (2 * 16, 4096, 4096)),
    "BERT-large, 512 tokens, padding": (_short("bert_large_512"), (32 * 16, 512, 512)),
    "ViT-L/16": (_short("vit_l16"), (64 * 16, 196, 196)),
    "T5-base, 512 to 128 tokens": (_short("t5_base"), (32 * 12, 512, 512)),
}
# The implementation by name, and its call in the compiled program.
KERNELS: dict[str, tuple[Attention, str]] = {"gpu": ("cudnn", "__cudnn$fmha"), "tpu": ("pallas", "tpu_custom_call")}
FORMS = {"gpu": ("as written", "fused", "by hand"), "tpu": ("as written", "fused")}


def measure(row: str, form: str, device: jax.Device) -> dict[str, Any]:
    """XLA's plan of the training step of one form."""
    workload: Any
    workload, scores = ROWS[row]
    configuration = CONFIGURATIONS["autocast_bfloat16"]
    kernel, call = KERNELS[device.platform]
    if form == "fused":
        configuration = dataclasses.replace(configuration, rules=Rules(attention=kernel))
    elif form == "by hand":
        workload = _replaced(workload, fused=configuration.half)
    made = training(workload, configuration)
    shapes = target.placed(made.abstract(), jax.sharding.SingleDeviceSharding(device))
    with target.traced_for(device):
        traced = jax.jit(made.step, donate_argnums=0).trace(*shapes)
    platform = "tpu" if device.platform == "tpu" else "cuda"
    compiled = traced.lower(lowering_platforms=(platform,)).compile()
    text = compiled.as_text() or ""
    return {
        "layers": workload.layers,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "bytes_moved": bytes_moved(text),
        "kernel_calls": text.count(f'custom_call_target="{call}'),
        "scores_arrays": arrays_of_scores(text, scores),
    }


def arrays_of_scores(text: str, scores: tuple[int, int, int]) -> int:
    """The arrays in a compiled program with an element for each pair of tokens, in any head or example.

    An array of the sizes of queries and keys next to each other counts if all its elements are as many as those of the
    scores of one head or more: (4096, 4096) and (32, 1024, 1024), but not the weights (1024, 1024).

    Example:
        >>> arrays_of_scores("bf16[8,512,512]{2,1,0} f32[512,512]{1,0} bf16[8,512,64]{2,1,0}", (8, 512, 512))
        1
    """
    count, queries, keys = scores
    found = 0
    for shape in re.findall(r"\b\w+\[([\d,]+)\]", text):
        sizes = [int(size) for size in shape.split(",")]
        found += math.prod(sizes) == count * queries * keys and {queries, keys} <= set(sizes)
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each model."""
    forms = list(next(iter(results.values())))
    header = ["model", "layers", *(f"{form}, GB" for form in forms), "fused / by hand"]
    header += ["bytes moved, fused / as written", "kernel calls, fused", "arrays of scores, as written", "fused"]
    lines = []
    for row, found in results.items():
        sizes = [f"{found[form]['temporary_bytes'] / 1e9:.2f}" for form in forms]
        fused, written, by_hand = found["fused"], found["as written"], found.get("by hand")
        ratio = f"{fused['temporary_bytes'] / by_hand['temporary_bytes']:.2f}" if by_hand else ""
        moved = f"{fused['bytes_moved'] / written['bytes_moved']:.2f}"
        counts = [str(x) for x in (fused["kernel_calls"], written["scores_arrays"], fused["scores_arrays"])]
        lines.append([row, fused["layers"], *sizes, ratio, moved, *counts])
    return commands.markdown(header, lines)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--target", default="h200", choices=list(target.TARGETS), help="default: h200")
    parser.add_argument("--only", metavar="TEXT", help="compile only the rows whose names contain this, again")
    args = parser.parse_args()
    chosen = target.TARGETS[args.target]
    devices = chosen.devices()
    if devices is None:
        raise SystemExit(chosen.missing)
    name = "fused_attention" + f"_{args.target}" * (args.target != "h200")
    known = previous(name, args.out)
    for row in ROWS:
        if (args.only in row) if args.only else (row not in known):
            measured = functools.partial(measure, row, device=devices[0])
            known[row] = {form: measured(form) for form in FORMS[devices[0].platform]}
            print(f"{row}: {known[row]}", file=sys.stderr, flush=True)
            jax.clear_caches()
            known = {row: known[row] for row in ROWS if row in known}
            commands.publish(name, known, table(known), args.out)
    print(table(known))


if __name__ == "__main__":
    main()
