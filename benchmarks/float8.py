"""Float8 steps compiled for a GPU that is not present: `python -m benchmarks.float8`.

    python -m benchmarks.float8                 float8 on an H200
    python -m benchmarks.float8 --target b200   MXFP8 on a B200

Each model is compiled with two layers, in bfloat16 and in float8: unrolled, in a `scan`, with each layer recomputed,
and with parameters and batch sharded over eight devices (FSDP). All sizes of matmuls are taken. The table counts the
eligible matmuls and the calls of float8 kernels (cuBLASLt's, or cuDNN's of blocks), and gives the bytes that kernels
read and write, the kernels and the collectives. XLA merges matmuls that share an operand, so one call may be several
of them. Nothing runs, so nothing here says how fast a step is. Needs JAX's CUDA plugin.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mpjax
from benchmarks import commands
from benchmarks.sharded_steps import counted
from mpjax.inspection import devices
from mpjax.inspection.auditing.communication import collectives
from mpjax.inspection.auditing.matmuls import matmuls_of
from mpjax.planning.target import NO_PLUGIN, TARGETS
from mpjax.planning.traffic import summary
from mpjax.program.graph import walk
from perf.memory import program_bytes
from perf.results import previous
from testing.models.published import WORKLOADS, Workload

GPT = WORKLOADS["gpt2_medium"]
MODELS = {
    "GPT-2 medium": GPT,
    "BERT-large": WORKLOADS["bert_large_128"],
    "GPT 2048": dataclasses.replace(GPT, features=2048),  # type: ignore[call-arg]
}
FORMS = ("plain", "scan", "remat", "FSDP")
BASE = "mixed_bfloat16"
FLOAT8 = {"h200": "mixed_float8", "b200": "mixed_mxfp8"}  # by target
LAYERS, DEVICES = 2, 8
RULES = mpjax.Rules(float8=mpjax.Float8(min_size=(0, 0)))
Row = dict[str, Any]


def step_of(workload: Workload, policy: str) -> Any:
    """A step of gradient descent: `step(params, batch) -> (params, loss)`."""
    module = workload.module()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return workload.loss(module.apply({"params": params}, *workload.inputs(batch)), batch)

    cast = mpjax.autocast(loss_fn, policy, rules=None if policy == BASE else RULES)

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        loss, grads = jax.value_and_grad(cast)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    return step


def compiled(name: str, form: str, policy: str, target: str) -> tuple[int, Any]:
    """The number of eligible matmuls and the compiled step of a model in a form."""
    change = {"layers": LAYERS, "loop": form == "scan", "remat": form == "remat"}
    workload = dataclasses.replace(MODELS[name], **change)
    devices = TARGETS[target].devices(DEVICES if form == "FSDP" else 1)
    if devices is None:
        raise SystemExit(NO_PLUGIN)
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))

    def placed(x: Any) -> Any:
        split = next((i for i, n in enumerate(x.shape) if n % len(devices) == 0), None)
        spec = PartitionSpec(*[None] * (split or 0), "data") if split is not None else PartitionSpec()
        return x.update(sharding=NamedSharding(mesh, spec))

    def initial(key: jax.Array) -> Any:
        return workload.module().init(key, *workload.inputs(workload.batch(key)))["params"]

    key = jax.random.key(0)
    params, batch = (jax.tree.map(placed, jax.eval_shape(make, key)) for make in (initial, workload.batch))
    out = jax.tree.map(lambda x: x.sharding, params), None
    step: Any = jax.jit(step_of(workload, policy), donate_argnums=0, out_shardings=out)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = step.trace(params, batch)
        lowered = traced.lower(lowering_platforms=("cuda",))
    eligible = sum(row.eight_bits == "float8" for site in walk(traced.jaxpr) for row in matmuls_of([site]))
    # Without autotuning, XLA would widen float8 operands in a Triton kernel.
    return eligible, lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def measured(name: str, form: str, policy: str, target: str) -> Row:
    """What the compiled step of a model does."""
    eligible, program = compiled(name, form, policy, target)
    text = program.as_text()
    found = summary(text, devices.DEVICES[TARGETS[target].key])
    return {
        "eligible": eligible,
        "calls": found["float8_matmuls"],
        "half": found["half_matmuls"],
        "matmuls": found["compiled_matmuls"],
        "bytes": found["bytes_moved"],
        "kernels": found["kernels"],
        "planned_bytes": program_bytes(program),
        "collectives": dict(counted(program)),
        "sent_bytes": sum(row.bytes for row in collectives(text)),
    }


def table(rows: dict[str, Row]) -> str:
    """Markdown: float8 of either kind against bfloat16."""
    header = ("model", "form", "float8 calls of eligible", "bytes moved", "kernels", "planned memory")
    lines = []
    for key, row in rows.items():
        base, found = row[BASE], next(of for policy, of in row.items() if policy != BASE)
        ratio = {name: found[name] / base[name] for name in ("bytes", "kernels", "planned_bytes")}
        counts = " → ".join(", ".join(f"{n} {kind}" for kind, n in r["collectives"].items()) for r in (base, found))
        sent = " → ".join(f"{r['sent_bytes'] / 1e6:.0f}" for r in (base, found)) + " MB"
        cells = (
            f"{found['calls']} of {found['eligible']}",
            f"{ratio['bytes']:.2f}",
            f"{base['kernels']} → {found['kernels']} ({ratio['kernels']:.2f})",
            f"{ratio['planned_bytes']:.2f}",
            *((counts, sent) if base["collectives"] else "--"),
        )
        lines.append((*key.split(" / "), *cells))
    return commands.markdown((*header, "collectives", "bytes sent"), lines)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--target", choices=FLOAT8, default="h200", help="the GPU (default: h200)")
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas (default: all)")
    parser.add_argument("--forms", default=",".join(FORMS), help="names, separated by commas (default: all)")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    name_of = f"{'float8' if args.target == 'h200' else 'mxfp8'}_{args.target}"
    rows: dict[str, Row] = previous(name_of, args.out)
    for name in args.models.split(","):
        for form in args.forms.split(","):
            rows[f"{name} / {form}"] = {p: measured(name, form, p, args.target) for p in (BASE, FLOAT8[args.target])}
            commands.publish(name_of, rows, table(rows), args.out)
            print(f"{name} / {form}: {rows[f'{name} / {form}']}", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
