"""The data that a sharded training step sends between devices: `python -m benchmarks.communication`.

Compiles one step of a residual network for 8 and for 64 simulated CPU devices and lists the
collectives that the partitioner inserted: data parallel, FSDP (parameters and Adam's state sharded), FSDP with tensor
parallelism, and FSDP with the layers in a `scan`; in float32, in half by hand, by `autocast` and by `with_policy`.

`--h200` compiles for eight H200s with JAX's CUDA plugin, which needs no GPU, and omits the gradient error.
`--tpu 16x16` compiles for 256 v5e chips with libtpu, which needs no TPU.

The gradient error compares all gradients with float32 on one device: the norm of the difference over the norm. It is
given for the batch on one device, and for the same batch spread over all devices, which adds the reduction's error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from benchmarks import commands
from mpjax.inspection.auditing.communication import collectives
from mpjax.planning.target import NO_PLUGIN, TARGETS

LAYOUTS = ("data parallel", "FSDP", "FSDP × TP", "FSDP, scan")
FORMS = ("float32", "by hand", "autocast", "with_policy")
DEVICES = (8, 64)
WIDTH, HIDDEN, LAYERS, ROWS_PER_DEVICE = 256, 1024, 3, 64


def measure(
    devices: int, half: str, layouts: tuple[str, ...] = LAYOUTS, forms: tuple[str, ...] = FORMS, targets: Any = None
) -> list[Any]:
    """The rows for `devices` devices: those in `targets`, or those of this process, which must then have that many."""
    if targets is None and len(jax.devices()) != devices:
        raise RuntimeError(f"this process has {len(jax.devices())} devices, not {devices}")
    rows = []
    for layout in layouts:
        for form in forms:
            row = {"layout": layout, "devices": devices, "form": form}
            row |= _communication(layout, form, half, devices, targets)
            if targets is None and layout == LAYOUTS[0] and form != FORMS[0]:
                row["error"] = {str(n): gradient_error(form, half, n, devices) for n in (1, devices)}
            rows.append(row)
    return rows


def _communication(layout: str, form: str, half: str, devices: int, targets: Any = None) -> dict[str, Any]:
    mesh, step, _, shapes = program(layout, form, half, devices, targets=targets)
    platforms = None
    if targets:
        platforms = ("tpu",) if targets[0].platform == "tpu" else ("cuda",)
    carried = jax.tree.map(lambda x: x.sharding, shapes[:2])
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*carried, None))
    with jax.set_mesh(mesh):
        found = collectives(jitted.trace(*shapes).lower(lowering_platforms=platforms).compile().as_text() or "")
    return {"collectives": [dataclasses.asdict(row) | {"sum_in_half": row.is_sum_in_half} for row in found]}


def program(
    layout: str, form: str, half: str, devices: int, batch_devices: int = 0, targets: Any = None
) -> tuple[Any, Any, Any, Any]:
    """The mesh, the training step, its gradients alone, and the shapes of the step's arguments with their shardings."""
    tensor = 2 if "TP" in layout else 1
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    grid = (devices // tensor, tensor)
    mesh = jax.make_mesh(grid, ("data", "model"), axis_types=axis_types, devices=(targets or jax.devices())[:devices])
    dtype = half if form == "by hand" else None

    def rows(x: Any, *axes: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", *axes)))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any = None) -> Any:
            hidden = nn.relu(rows(nn.Dense(HIDDEN, dtype=dtype, name="up")(x), "model"))
            return rows(x + nn.Dense(WIDTH, dtype=dtype, name="down")(hidden)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            if "scan" in layout:
                stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
                return stack(name="blocks")(x, None)[0]
            for i in range(LAYERS):
                x, _ = Block(name=f"block{i}")(x)
            return x

    net, policy = Net(), f"mixed_{half}"
    model = mpjax.with_policy(net, policy) if form == "with_policy" else net

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        out: Any = model.apply(params, x.astype(half) if form == "by hand" else x)
        return jnp.mean((out.astype(jnp.float32) - y) ** 2)

    loss_fn = mpjax.autocast(loss_fn, policy) if form == "autocast" else loss_fn
    adam = optax.adam(1e-3)
    tx = adam if form == "float32" else mpjax.dynamic_loss_scale(adam)

    def gradients(params: Any, state: Any, x: Any, y: Any) -> Any:
        return mpjax.value_and_grad(loss_fn, None if form == "float32" else state)(params, x, y)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = gradients(params, state, x, y)
        params, state = mpjax.apply_gradients(tx, grads, state, params)
        return params, state, loss

    def spec(path: Any, x: Any) -> Any:
        if layout == "data parallel" or not x.ndim:
            return P()
        name = jax.tree_util.keystr(path)
        matrix = ("data", "model") if "up" in name else ("model", "data")
        axes = matrix if "kernel" in name else matrix[1:]
        return P(*(None,) * (x.ndim - len(axes)), *axes)

    def place(tree: Any) -> Any:
        def leaf(path: Any, x: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(path, x)))

        return jax.tree_util.tree_map_with_path(leaf, tree)

    count = ROWS_PER_DEVICE * (batch_devices or devices)
    batch = jax.ShapeDtypeStruct((count, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    params = place(jax.eval_shape(net.init, jax.random.key(0), jax.ShapeDtypeStruct((count, WIDTH), jnp.float32)))
    return mesh, step, gradients, (params, place(jax.eval_shape(tx.init, params)), batch, batch)


def gradient_error(form: str, half: str, devices: int, batch_devices: int) -> float:
    """The gradient error of data parallel training, with the batch of `batch_devices` devices."""

    def gradients(form: str, devices: int) -> list[Any]:
        mesh, _, gradients, shapes = program(LAYOUTS[0], form, half, devices, batch_devices)

        @jax.jit
        def arrays() -> Any:
            keys = iter(jax.random.split(jax.random.key(0), 100))

            def normal(x: Any, scale: float) -> Any:
                return jax.random.normal(next(keys), x.shape) * scale

            params = jax.tree.map(lambda x: normal(x, x.shape[0] ** -0.5 if x.ndim == 2 else 0.0), shapes[0])
            return params, normal(shapes[2], 1.0), normal(shapes[3], 1.0)

        shardings = jax.tree.map(lambda x: x.sharding, (shapes[0], shapes[2], shapes[3]))
        params, x, y = jax.device_put(arrays(), shardings)
        # The scale is so small that nothing overflows, and the error is only rounding.
        tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), init_scale=2.0**8)
        state = jax.device_put(tx.init({}), NamedSharding(mesh, P()))
        with jax.set_mesh(mesh):
            _, grads = jax.jit(gradients)(params, state, x, y)
        return [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]

    found, exact = gradients(form, devices), gradients(FORMS[0], 1)
    difference = sum(np.sum((a - b) ** 2) for a, b in zip(found, exact, strict=True))
    return float(np.sqrt(difference / sum(np.sum(b**2) for b in exact)))


def summary(row: dict[str, Any]) -> dict[str, int]:
    """Bytes of a row by purpose."""
    found: dict[str, int] = dict.fromkeys(("gathered", "summed in half", "summed in float32", "predicates", "other"), 0)
    for collective in row["collectives"]:
        if collective["op"] == "all-gather":
            found["gathered"] += collective["bytes"]
        elif collective["dtype"] in ("bool", "uint32"):  # A TPU reduces booleans as integers.
            found["predicates"] += collective["arrays"]
        elif collective["op"] in ("all-reduce", "reduce-scatter"):
            found["summed in half" if collective["sum_in_half"] else "summed in float32"] += collective["bytes"]
        else:
            found["other"] += collective["bytes"]
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with a row for each layout, number of devices and form."""
    header = ["layout", "devices", "form", "gathered, MB", "of float32's", "summed in float32, MB"]
    header += ["summed in half, MB", "predicates", "other, MB", "gradient error, one device", "all devices"]
    lines = []
    for row in rows:
        found = summary(row)
        key = row["layout"], row["devices"], FORMS[0]
        baselines = [r for r in rows if (r["layout"], r["devices"], r["form"]) == key]
        baseline = summary(baselines[0])["gathered"] if baselines else 0
        share = f"{found['gathered'] / baseline:.2f}" if baseline else ""
        gathered, single, half, other = (
            f"{found[name] / 1e6:.2f}" for name in ("gathered", "summed in float32", "summed in half", "other")
        )
        errors = [f"{error:.1e}" for error in row.get("error", {}).values()] or ["", ""]
        lines.append([*key[:2], row["form"], gathered, share, single, half, found["predicates"], other, *errors])
    return commands.markdown(header, lines)


def _in_subprocess(devices: int, half: str) -> list[Any]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.communication", "--devices", str(devices), "--half", half]
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def _for_pods(topologies: list[str], half: str) -> Iterator[Any]:
    """The rows of v5e pods."""
    target = TARGETS["v5e"]
    jax.config.update("jax_platforms", "cpu")
    for topology in topologies:
        count = math.prod(map(int, topology.split("x")))
        pod = target.devices(count, topology) or sys.exit(f"--tpu: {target.missing}")
        yield from measure(count, half, ("FSDP", "FSDP × TP"), targets=pod)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--half", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--devices", type=int, help="print the rows of this process, which must have this many devices")
    parser.add_argument("--h200", action="store_true", help="compile for eight H200s, without a GPU")
    parser.add_argument("--tpu", nargs="+", metavar="TOPOLOGY", help="compile for v5e pods such as 8x8, without a TPU")
    args = parser.parse_args()
    if args.devices:
        commands.refuse(parser, args, "--h200 --tpu --out", "with --devices, which only prints")
    if args.tpu:
        commands.refuse(parser, args, "--h200", "with --tpu")
    if args.devices:
        print(json.dumps(measure(args.devices, args.half)))
        return
    name, versions = f"communication_{args.half}", {}
    if args.tpu:
        rows = [*_for_pods(args.tpu, args.half)]
        name, versions = f"{name}_v5e", TARGETS["v5e"].versions()
    elif args.h200:
        rows = measure(8, args.half, targets=TARGETS["h200"].devices(8) or parser.error(f"--h200: {NO_PLUGIN}"))
        name = f"{name}_h200"
    else:
        rows = [row for devices in DEVICES for row in _in_subprocess(devices, args.half)]
    print(table(rows))
    commands.publish(name, {"steps": rows, **versions}, table(rows), args.out)


if __name__ == "__main__":
    main()
