"""The results of `benchmarks.training` as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.commands import markdown, number
from mpjax.inspection.devices import DEVICES
from mpjax.planning.target import Target

Row = dict[str, Any]


def ratio(row: Row, base: Row, key: str) -> float | None:
    """`row[key] / base[key]`, if both were measured."""
    if not row.get(key) or not base.get(key):
        return None
    return row[key] / base[key]


def speedup(rows: dict[str, Row], name: str, base: str) -> float | None:
    """Examples per second of one cell over those of another cell of the model."""
    return ratio(rows.get(name, {}), rows.get(base, {}), "examples_per_second")


def memory(row: Row, base: Row) -> float | None:
    """Peak bytes over those of another cell: the allocator's, or XLA's plan if there are no allocator statistics."""
    return ratio(row, base, "peak_bytes") or ratio(row, base, "planned_bytes")


def peak_share(content: dict[str, Any], model: str, name: str) -> float | None:
    """FLOP/s of a cell over those of a large matmul in its dtype on the same device."""
    row = content["results"].get(model, {}).get(name, {})
    flops = content.get("flops_per_example", {}).get(model)
    peak = content["matmul_peak"].get("bfloat16" if "bfloat16" in name else "float16")
    if not row.get("examples_per_second") or not flops or not peak:
        return None
    return flops * row["examples_per_second"] / peak


# What a reader of a model's rows must know.
NOTES = {
    "bert_base_128": "By hand in half, the gradient of the segment table is a scatter-add into `bf16[2,768]`: 25 "
    "million compare-and-swaps. Autocast adds in float32. The fair baseline is `flax_bfloat16+float32_embeddings`; "
    "where it has no row, it was not measured.",
}


def table(content: dict[str, Any]) -> str:
    """A table for each model."""
    lines: list[str] = []
    if content.get("toy"):
        lines += ["**Toy sizes on a CPU: this shows that everything runs. Its times and memory say nothing.**"]
    header = ["configuration", "batch", "examples/s", "ms/step", "× float32", "× TF32", "memory", "/ float32"]
    header += ["compile", "Tensor Core time", "of matmul peak"]
    for model, rows in content["results"].items():
        lines += ["", f"### {model}", "", markdown(header, (_line(content, model, name) for name in rows)).rstrip()]
        lines += ["", NOTES[model]] if model in NOTES else []
    return "\n".join(lines) + "\n"


def _line(content: dict[str, Any], model: str, name: str) -> list[str]:
    rows = content["results"][model]
    row, float32 = rows[name], rows.get("float32", {})
    if "error" in row:
        return [name, f"fails: {_escaped(row['error'])}", *[""] * 9]
    bytes_used = row.get("peak_bytes") or row.get("planned_bytes")
    return [
        name,
        str(row.get("batch_size", "-")),
        number(row.get("examples_per_second"), "{:,.0f}"),
        number(row.get("milliseconds"), "{:.2f}"),
        number(speedup(rows, name, "float32"), "{:.2f}"),
        number(speedup(rows, name, "tf32"), "{:.2f}"),
        number(bytes_used and bytes_used / 1e6, "{:,.4g} MB"),
        number(memory(row, float32), "{:.2f}"),
        number(row.get("compile_seconds"), "{:.1f} s"),
        number(row.get("tensor_core_share"), "{:.0%}"),
        number(peak_share(content, model, name), "{:.0%}"),
    ]


def _escaped(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:120]


_COMPILED = """XLA compiled each step {size} for {an} without a device: the programs{tuned}
never ran, so nothing here says how fast they are. Memory is XLA's plan. Bytes moved are what the kernels of a step read
and write if each reads what it needs of an operand once. A kernel inside a loop counts once per iteration, with its
bytes; a matmul (a convolution and fused attention included) counts once. {memory} The least time is a bound and was
not measured: each kernel takes{launch} the longer of two times: that of its bytes at the published bandwidth
({rates.bandwidth:.3g} bytes/s), and that of the FLOPs of its matmuls and convolutions at the peak rate of their dtype
({rates.float16:.4g} FLOP/s in half, {rates.tfloat32:.4g} for float32 at JAX's default precision, {rates.float32:.3g} in
full float32). {sources}."""
_LOWERED = "Lowered and not compiled: {missing}."


def _compiled(target: Target) -> str:
    gpu = target.platform == "cuda"
    return _COMPILED.format(
        an=f"an {target.key}" if target.key[0] == "H" else f"a {target.key}",
        size="at full size" if gpu else "with fewer layers",
        tuned=" were not autotuned and" if gpu else "",
        memory="No plan includes cuDNN's workspaces, because\ncuDNN chooses its algorithms on the device."
        if gpu
        else "Values in the\nchip's vector memory cost no bandwidth.",
        launch=" 3 µs for its launch, and" if gpu else "",
        rates=target.rates,
        sources=_sources(DEVICES[target.key].source, target.source),
    )


def _sources(*named: str) -> str:
    once = list(dict.fromkeys(named))
    return f"Source{'s' * (len(once) > 1)}: {'; '.join(once)}"


def dry_run_table(content: dict[str, Any], target: Target) -> str:
    """A table for each model that was compiled without a device, then the cells that were not compiled."""
    of_models = content["results"].values()
    lines = []
    header = ["cell", "planned memory", "/ float32", "/ hand-written", "bytes moved", "/ float32", "/ hand-written"]
    header += ["least time (bound)", "/ float32", "/ TF32", "/ hand-written", "kernels", "matmuls in half", "compile"]
    if any("planned_bytes" in row for rows in of_models for row in rows.values()):
        lines += [_compiled(target), ""]
    for model, rows in content["results"].items():
        compiled = [name for name, row in rows.items() if "planned_bytes" in row]
        if not compiled:
            continue
        batch_sizes = [str(row["batch_size"]) for row in rows.values() if "batch_size" in row]
        cells = (_dry_line(rows, name, "tf32" if target.chips else "float32") for name in compiled)
        lines += [f"### {model}{f', batch of {batch_sizes[0]}' if batch_sizes else ''}", "", markdown(header, cells)]
    lines += _not_compiled(content["results"], target)
    return "\n".join(lines).rstrip() + "\n"


def _not_compiled(results: dict[str, dict[str, Row]], target: Target) -> list[str]:
    """Two lists: the cells that were only lowered, and those that failed, with their errors."""
    lowered: list[str] = []
    failed: dict[str, list[str]] = {}
    for model, rows in results.items():
        names = [name for name, row in rows.items() if "error" not in row and "planned_bytes" not in row]
        lowered += [f"- {model}: {', '.join(names)}"] if names else []
        for name, row in rows.items():
            if "error" in row:
                failed.setdefault(_escaped(row["error"]), []).append(f"{model} {name}")
    lines = ["### Not compiled", ""] if lowered or failed else []
    lines += [_LOWERED.format(missing=target.missing), "", *lowered, ""] if lowered else []
    lines += ["Failed:", "", *(f"- {error}: {', '.join(cells)}" for error, cells in failed.items())] if failed else []
    return lines


def hand_written(name: str) -> str:
    """The cell of the hand-written form in the same dtype and variant.

    Example:
        >>> hand_written("autocast_bfloat16+remat")
        'flax_bfloat16+remat'
    """
    configuration, plus, variant = name.partition("+")
    half = "bfloat16" if "bfloat16" in configuration else "float16" if "float16" in configuration else ""
    return f"flax_{half}{plus}{variant}" if half else ""


def _dry_line(rows: dict[str, Row], name: str, full: str) -> list[str]:
    """A line; `full` is the float32 cell that it is compared with, at JAX's default precision on a TPU."""
    _, plus, variant = name.partition("+")
    row, by_hand = rows[name], rows.get(hand_written(name), {})
    float32 = rows.get(f"{full}{plus}{variant}") or rows.get(full, {})
    least = row.get("least_seconds")
    return [
        name,
        f"{row['planned_bytes'] / 1e9:.2f} GB",
        number(ratio(row, float32, "planned_bytes"), "{:.2f}"),
        number(ratio(row, by_hand, "planned_bytes"), "{:.2f}"),
        f"{row['bytes_moved'] / 1e9:.1f} GB",
        number(ratio(row, float32, "bytes_moved"), "{:.2f}"),
        number(ratio(row, by_hand, "bytes_moved"), "{:.2f}"),
        number(least and 1e3 * least, "{:.1f} ms"),
        *(number(ratio(row, other, "least_seconds"), "{:.2f}") for other in (float32, rows.get("tf32", {}), by_hand)),
        f"{row['kernels']:,}",
        f"{row['half_matmuls']} of {row['compiled_matmuls']}"
        + (f", {row['float8_matmuls']} in float8" if row.get("float8_matmuls") else ""),
        number(row.get("compile_seconds"), "{:.1f} s"),
    ]
