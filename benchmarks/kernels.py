"""Kernels of training steps compiled for an H200 that is not present: `python -m benchmarks.kernels`.

Each step is compiled at full size, by hand and with autocast. The table gives the time by
`mpjax.planning.kernel_time`, beside the measured time of those that were measured. `--alarm` needs no model: it looks
in steps of few layers for kernels of autocast that move more than 1% of the bytes and spill registers, or leave room
for 8 warps on a multiprocessor or fewer, unless a kernel of the same module by hand does too. Nothing runs. Needs JAX's
CUDA plugin; the times also need `nvidia-cuda-nvdisasm`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax

from benchmarks import RESULTS, commands
from benchmarks.training.cells import Cell, Results
from benchmarks.training.configurations import training
from benchmarks.training.dry_run import lowered
from mpjax.casting import remat, rewrite, streams, uses
from mpjax.casting.attention import division
from mpjax.inspection.profiling import hlo
from mpjax.inspection.profiling.hlo import HloModule
from mpjax.planning import kernel_time
from mpjax.planning.executable import launches
from mpjax.planning.target import NO_PLUGIN, TARGETS
from mpjax.planning.traffic import kernels
from perf.environment import commit, versions
from perf.memory import program_bytes
from testing.models.published import Workload

TARGET = TARGETS["h200"]
HAND, AUTO = "flax_bfloat16", "autocast_bfloat16"
FAIR, AS_MEASURED = f"{HAND}+float32_embeddings", " (as measured)"
ATTENTION = (f"{HAND}+cudnn_attention", f"{AUTO}_fused")
# The cells of each model, and the cell by hand that its autocast is compared with.
CELLS = {
    "gpt2_medium": ("tf32", HAND, AUTO, AUTO + AS_MEASURED, *ATTENTION, ATTENTION[1] + AS_MEASURED),
    "bert_base_128": ("tf32", HAND, FAIR, AUTO, AUTO + AS_MEASURED),
    "resnet50": ("tf32", HAND, AUTO, AUTO + AS_MEASURED),
    "vit_b16": (HAND, AUTO),
    "t5_base": (HAND, AUTO),
    "lstm_lm": (HAND, AUTO),
}
BASELINES = {"bert_base_128": FAIR}
# An alarm's least share of a step's bytes, and the warps of a multiprocessor that are too few.
SHARE, FEW = 0.01, 8
Row = dict[str, Any]


class Crowded(NamedTuple):
    """A kernel that takes too many registers.

    Args:
        name: Of its instruction.
        module: The module that it belongs to, without the numbers of layers, and whether it is of the backward pass.
        share: Of the bytes that the step's kernels move.
        stack: The bytes that each thread keeps in memory.
        warps: That fit on a multiprocessor.
    """

    name: str
    module: str
    share: float
    stack: int
    warps: int


def compiled(cell: Cell, workload: Workload) -> jax.stages.Compiled:
    """A cell's step, with a model of these sizes, for the target."""
    devices = TARGET.devices()
    if devices is None:
        raise SystemExit(NO_PLUGIN)
    return lowered(cell, training(workload, cell.settings()), TARGET, devices[0]).compile()


def crowded(step: jax.stages.Compiled) -> list[Crowded]:
    """The kernels of a step, other than matmuls, that move a share of its bytes and spill or leave few warps room."""
    assert TARGET.gpu is not None
    text, executable = step.as_text(), step.runtime_executable()
    program = HloModule(text or "")
    found = {launch.name: launch for launch in launches(executable.serialize() if executable else b"")}
    instructions = hlo.instructions(program)
    every = kernels(program, program.entry)
    total = sum(kernel.times * kernel.bytes for kernel in every)
    rows = []
    for kernel in every:
        instruction, launch = instructions[kernel.name], found.get(kernel.name)
        share = kernel.times * kernel.bytes / total
        if launch is None or instruction.kind in hlo.ON_TENSOR_CORES or share <= SHARE:
            continue
        warps = kernel_time.warps_per_core(launch, TARGET.gpu)
        if launch.stack or warps <= FEW:
            module = re.sub(r"\d+", "#", instruction.module) + (", backward" if instruction.backward else "")
            rows.append(Crowded(kernel.name, module, share, launch.stack, warps))
    return rows


def alarms(model: str, **sizes: int) -> list[Crowded]:
    """The crowded kernels of a model under autocast without a counterpart by hand.

    Args:
        model: Of `CELLS`.
        sizes: Fields of its workload.
    """
    pair = [Cell(model, name) for name in (HAND, AUTO)]
    by_hand, found = (crowded(compiled(cell, dataclasses.replace(cell.workload(False), **sizes))) for cell in pair)
    spills = {each.module for each in by_hand if each.stack}
    crowds = {each.module for each in by_hand}
    return [each for each in found if each.module not in (spills if each.stack else crowds)]


@contextlib.contextmanager
def _as(name: str) -> Iterator[str]:
    """The cell's name, in a context with what the version measured did otherwise."""
    with contextlib.ExitStack() as version:
        if name.endswith(AS_MEASURED):
            version.enter_context(mock.patch.object(rewrite, "_LONG_ROW_OF_GPU", 1025))
            version.enter_context(mock.patch.object(rewrite, "selects", return_value=False))
            version.enter_context(mock.patch.object(division, "SHORTEST", math.inf))
            version.enter_context(mock.patch.object(remat.Window, "bytes_read", 0))
            version.enter_context(mock.patch.object(streams, "DEEP", 49))
            version.enter_context(mock.patch.object(uses, "_is_recomputed", return_value=False))
        yield name.removesuffix(AS_MEASURED)


def modelled(model: str, name: str) -> Row:
    """The modelled time of a cell's step."""
    with _as(name) as plain:
        cell = Cell.parse(model, plain)
        step = compiled(cell, cell.workload(False))
    text, executable = step.as_text() or "", step.runtime_executable()
    assert executable is not None
    rows = kernel_time.timed(text, executable.serialize(), TARGET)
    instructions = hlo.instructions(HloModule(text))
    on_cores = [row for row in rows if instructions[row.kernel.name].kind in hlo.ON_TENSOR_CORES]
    return {
        "milliseconds": round(1e3 * kernel_time.seconds_of(rows), 2),
        "tensor_core_milliseconds": round(1e3 * kernel_time.seconds_of(on_cores), 2),
        "planned_bytes": program_bytes(step),
        "kernels": sum(row.kernel.times for row in rows),
        "versions": versions(),
        **commit(),
    }


def table(results: dict[str, dict[str, Row]], measured: dict[str, dict[str, Row]]) -> str:
    """The modelled times as Markdown."""
    text = (
        "**Modelled, not measured**, but for the columns that say so: XLA compiled each step at full size for an H200 "
        "that was not there, and `mpjax.planning.kernel_time` gave the time of each kernel. `(as measured)` keeps the "
        "statistics of rows of more than 1,024 elements and the terms of the sum that a norm reads, divides a softmax "
        "before its product, scatters the gradient of labels, and leaves GELUs and GPT-2's residual stream in half, "
        "as the version did that was measured; this one keeps the statistics of more than 128 and the sum, divides "
        "after the product, compares, and computes both in float32. Contended atomics are not modelled: by hand, BERT "
        "sums the gradient of its segment table, `bf16[2,768]`, by 25 million of them. With `float32_embeddings` it "
        "does not: that is the fair baseline.\n\n"
    )
    header = ["model", "step", "modelled", "/ by hand", "of it matmuls", "other kernels", "measured step"]
    header += ["modelled / measured", "measured other kernels", "modelled / measured"]
    header += ["planned memory", "/ by hand", "kernels"]
    lines = (
        _line(model, name, row, rows, measured.get(model, {}))
        for model, rows in results.items()
        for name, row in rows.items()
    )
    return text + commands.markdown(header, lines)


def _line(model: str, name: str, row: Row, rows: dict[str, Row], measured: dict[str, Row]) -> list[str]:
    plain = name.removesuffix(AS_MEASURED)
    base = rows.get(ATTENTION[0] if plain in ATTENTION else BASELINES.get(model, HAND), {})
    # What autocast does has changed since it was measured.
    was = measured.get(plain, {}) if plain != name or not plain.startswith(AUTO) else {}
    other = row["milliseconds"] - row["tensor_core_milliseconds"]
    was_other = was["milliseconds"] * (1 - was["tensor_core_share"]) if was else 0.0
    return [
        model,
        name,
        f"{row['milliseconds']:.1f} ms",
        f"{row['milliseconds'] / base['milliseconds']:.2f}" if base else "-",
        f"{row['tensor_core_milliseconds']:.1f} ms",
        f"{other:.1f} ms",
        *([f"{was['milliseconds']:.1f} ms", f"{row['milliseconds'] / was['milliseconds']:.2f}"] if was else ["-", "-"]),
        *([f"{was_other:.1f} ms", f"{other / was_other:.2f}"] if was else ["-", "-"]),
        f"{row['planned_bytes'] / 1e9:.2f} GB",
        f"{row['planned_bytes'] / base['planned_bytes']:.3f}" if base else "-",
        f"{row['kernels']:,}",
    ]


def main() -> None:
    parser = commands.parser(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=[*CELLS], default=[*CELLS], help="only these models")
    add("--alarm", action="store_true", help="look for crowded kernels; the exit status is 1 if there are any")
    add("--layers", type=int, default=1, help="layers of the models, with --alarm (default: 1)")
    add("--lengths", type=int, nargs="+", help="lengths of the text models, with --alarm")
    add("--widths", type=int, nargs="+", help="widths of the transformers, with --alarm")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    if args.alarm:
        found = [_report(model, sizes) for model in args.only for sizes in _sizes(model, args)]
        raise SystemExit(int(any(found)))
    if missing := kernel_time.unavailable(TARGET):
        raise SystemExit(missing)
    results = Results(args.out / "kernels_h200.json")
    device, command = "NVIDIA H200 (compiled for, not run on)", "python -m benchmarks.kernels"
    results.content["environment"] = {"device": device, "command": command, **versions(), **commit()}
    for model in args.only:
        for name in CELLS[model]:
            row = modelled(model, name)
            results.content["results"].setdefault(model, {})[name] = row
            results.write()
            print(model, name, row, flush=True)
            jax.clear_caches()
    measured = json.loads((RESULTS / "training_gpu.json").read_text())["results"]
    results.path.with_suffix(".md").write_text(table(results.content["results"], measured))


def _sizes(model: str, args: argparse.Namespace) -> Iterator[dict[str, int]]:
    """The sizes of a model to look at; the tokens of a batch stay as many."""
    workload: Any = Cell(model, HAND).workload(False)
    fields = {field.name for field in dataclasses.fields(workload)}
    layers = {"layers": args.layers} if "layers" in fields else {}
    for length in args.lengths if args.lengths and "length" in fields else [None]:
        for width in args.widths if args.widths and "features" in fields else [None]:
            text = {"length": length, "batch_size": max(1, 8192 // length)} if length else {}
            yield layers | text | ({"features": width, "heads": width // 64} if width else {})


def _report(model: str, sizes: dict[str, int]) -> bool:
    """Prints the crowded kernels of a model; returns whether there are any."""
    found = alarms(model, **sizes)
    print(model, " ".join(f"{name}={size}" for name, size in sizes.items()), f"{len(found)} crowded", flush=True)
    for each in found:
        print(
            f"  {each.name}: {each.module}, {each.share:.1%} of the bytes, {each.stack} B of stack, {each.warps} warps"
        )
    jax.clear_caches()
    return bool(found)


if __name__ == "__main__":
    main()
