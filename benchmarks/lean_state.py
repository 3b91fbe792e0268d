"""Costs and savings of lean optimizer state: `python -m benchmarks.lean_state`.

Each form is AdamW on float32 gradients: float32 throughout, or with bfloat16 parameters and one of mpjax's
transformations. The columns:

- bytes per parameter that persist between steps: parameters, moments, compensation, scales, keys;
- CPU time of the update alone and of whole training steps, over that of float32, interleaved in one process. It is the
  process's CPU time, which other processes disturb less than the wall time;
- the update's memory traffic and its temporary bytes, in the program that XLA compiles for an H200
  (`--planned`, which needs JAX's CUDA plugin and no GPU);
- `--parity`: the final loss of small real tasks against float32, over seeds.

A run adds its part to the results of the others.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from benchmarks import commands
from benchmarks.parity.families import get
from benchmarks.parity.family import Family
from benchmarks.parity.results import last_loss
from benchmarks.parity.training import FLOAT32, Batches, Training
from perf.results import previous
from perf.timing import interleaved, ratios

Row = dict[str, Any]
Wrap = Callable[[optax.GradientTransformation], optax.GradientTransformation]

FILE = "lean_state"
HALF = "bfloat16"
TASKS = ("rossmann", "sentiment", "graph")
# Rows of a batch; 0 is the update alone. A row is a token: each costs 6 operations per parameter.
BATCHES = (0, 256, 4096)
WIDTH, LAYERS = 512, 4


def _rounded(dtype: str) -> Wrap:
    # Some tasks have fewer parameters than the default minimum for low-bit storage.
    return lambda tx: mpjax.stochastic_rounding(mpjax.low_bit_state(tx, dtype, min_size=256))


# The dtype of the parameters, and the wrapper of the optimizer.
FORMS: dict[str, tuple[str, Wrap]] = {
    "float32": ("float32", lambda tx: tx),
    "float32, again": ("float32", lambda tx: tx),
    "master_weights": (HALF, lambda tx: mpjax.master_weights(tx, "p=bf16")),
    "kahan": (HALF, mpjax.kahan),
    "stochastic_rounding": (HALF, mpjax.stochastic_rounding),
    "stochastic_rounding, low_bit_state bfloat16": (HALF, _rounded("bfloat16")),
    "stochastic_rounding, low_bit_state float8": (HALF, _rounded("float8")),
    "stochastic_rounding, low_bit_state int8": (HALF, _rounded("int8")),
}
BASE = "float32"


def optimizer(form: str) -> tuple[Any, optax.GradientTransformation]:
    """A form's parameter dtype and its AdamW."""
    dtype, wrap = FORMS[form]
    return jnp.dtype(dtype), wrap(optax.adamw(1e-3))


def shapes(form: str, width: int = WIDTH) -> tuple[Any, Any, Any]:
    """Parameters, state and gradients of some layers, as `ShapeDtypeStruct`s."""
    dtype, tx = optimizer(form)
    params = [jax.ShapeDtypeStruct((width, width), dtype)] * LAYERS
    grads = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * LAYERS
    return params, jax.eval_shape(tx.init, params), grads


def bytes_kept(form: str) -> float:
    """Bytes of parameters and state per parameter."""
    params, state, _ = shapes(form)
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    return total / (LAYERS * WIDTH**2)


def _loss(params: Iterable[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def _step(form: str, rows: int) -> tuple[Any, list[Any], Any]:
    """The compiled step of a form with donated parameters and state, its carried state, and its other argument."""
    dtype, tx = optimizer(form)
    rng = np.random.default_rng(0)
    draws = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(LAYERS)]
    params = [jnp.asarray(w / WIDTH**0.5, dtype) for w in draws]
    argument: Any = [jnp.asarray(1e-3 * w) for w in draws]
    if rows:
        argument = jnp.asarray(rng.normal(size=(rows, WIDTH)), jnp.float32)

    def step(params: Any, state: Any, argument: Any) -> tuple[Any, Any]:
        grads = mpjax.grad(_loss)(params, argument) if rows else argument
        return mpjax.apply_gradients(tx, grads, state, params)

    carried = [params, jax.jit(tx.init)(params)]
    return jax.jit(step, donate_argnums=(0, 1)).lower(*carried, argument).compile(), carried, argument


def times(rows: int, rounds: int) -> dict[str, Row]:
    """CPU time of a step for each form, and its ratio to float32 within a round."""

    def run(compiled: Any, carried: list[Any], argument: Any) -> Any:
        carried[:] = compiled(*carried, argument)
        return carried

    runs = {form: functools.partial(run, *_step(form, rows)) for form in FORMS}
    return ratios(interleaved(runs, rounds, clock=time.process_time), BASE)


def planned(form: str, target: jax.sharding.Sharding, width: int = 2048) -> Row:
    """Bytes per parameter that the update moves, and its temporary bytes, when compiled for a device."""
    from mpjax.planning.target import placed
    from mpjax.planning.traffic import bytes_moved

    tx = optimizer(form)[1]
    params, state, grads = placed(shapes(form, width), target)

    def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        return mpjax.apply_gradients(tx, grads, state, params)

    traced = jax.jit(update, donate_argnums=(0, 1)).trace(params, state, grads)
    compiled: Any = traced.lower(lowering_platforms=("cuda",)).compile()
    count = LAYERS * width**2
    moved, temporary = bytes_moved(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes
    return {"moved": round(moved / count, 2), "temporary": round(temporary / count, 2)}


class LeanTraining(Training):
    """A family of the parity suite in float32, except for its parameters' dtype and its optimizer's state."""

    def __init__(self, family: Family, form: str) -> None:
        super().__init__(family, FLOAT32)
        self._dtype, wrap = FORMS[form]
        self.tx = mpjax.loss_scale_for(wrap(family.optimizer(family.steps * family.passes)), self.policy)

    def init(self, seed: int, *args: Any) -> dict[str, Any]:
        """The same parameters for every form, up to rounding."""
        variables = super().init(seed, *args)["variables"]
        cast = functools.partial(jnp.asarray, dtype=self._dtype)
        variables = {name: {**tree, "params": jax.tree.map(cast, tree["params"])} for name, tree in variables.items()}
        return {"variables": variables, "optimizers": self._init_optimizers(variables)}


def final_losses(name: str, form: str, seeds: int) -> list[float]:
    """The mean loss of the last twentieth of the steps, for each seed."""
    training, found = LeanTraining(get(name), form), []
    for seed in range(seeds):
        state, losses = training.init(seed), []
        for batch in Batches(training.family, seed):
            state, loss = training.step(state, batch)
            losses.append(loss)
        found.append(last_loss([*map(float, losses)]))
    return found


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each form, and one for each task."""
    kept, timed, plans = (results.get(name, {}) for name in ("bytes", "times", "planned"))
    columns = ["update alone" if rows == "0" else f"step, {rows} rows" for rows in timed]
    header = ["parameters and state", "bytes a parameter", *(f"CPU time, {column}" for column in columns)]
    lines = []
    for form, (dtype, _) in FORMS.items():
        name, plan = form if dtype == BASE else f"{dtype}, {form}", plans.get(form, {})
        cells = [commands.with_quartiles(rows[form]) if form in rows else "-" for rows in timed.values()]
        lines.append([name, f"{kept[form]:.2f}", *cells, plan.get("moved", "-"), plan.get("temporary", "-")])
    text = commands.markdown([*header, "moved by the update, bytes a parameter", "temporary"], lines)
    if tasks := results.get("parity", {}):
        text += (
            "\nFinal training loss, mean over seeds, and its difference from float32 in standard deviations of float32 "
            "over seeds:\n\n"
        )
        known = next(iter(tasks.values()))
        rows = ([form, *(_loss_cell(found[form], found[BASE]) for found in tasks.values())] for form in known)
        text += commands.markdown(["form", *tasks], rows)
    return text


def deviations(found: list[float], base: list[float]) -> float:
    """The difference of two means, in standard deviations of the second over seeds."""
    return (statistics.fmean(found) - statistics.fmean(base)) / statistics.stdev(base)


def _loss_cell(found: list[float], base: list[float]) -> str:
    mean = f"{statistics.fmean(found):.4g}"
    return f"{mean} ± {statistics.stdev(base):.2g}" if found is base else f"{mean} ({deviations(found, base):+.2f})"


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--planned", action="store_true", help="only compile the updates for an H200, without a GPU")
    parser.add_argument("--parity", action="store_true", help="only train the tasks")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="families of the parity suite")
    parser.add_argument("--seeds", type=int, default=5, help="number of trainings of each task and form")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each step")
    args = parser.parse_args()
    if args.planned:
        commands.refuse(parser, args, "--parity", "with --planned")
    if args.planned or args.parity:
        commands.refuse(parser, args, "--rounds", "without the times")
    if not args.parity:
        commands.refuse(parser, args, "--tasks --seeds", "without --parity")
    results = previous(FILE, args.out) | {"bytes": {form: bytes_kept(form) for form in FORMS}}

    def write(name: str, found: Any) -> None:
        results[name] = found
        commands.publish(FILE, results, table(results), args.out)

    if args.planned:
        from mpjax.planning.target import NO_PLUGIN, TARGETS

        devices = TARGETS["h200"].devices() or parser.error(f"--planned: {NO_PLUGIN}")
        target = jax.sharding.SingleDeviceSharding(devices[0])
        write("planned", {form: planned(form, target) for form in FORMS})
    elif args.parity:
        for task in args.tasks:
            found = {form: final_losses(task, form, args.seeds) for form in FORMS if "again" not in form}
            write("parity", results.get("parity", {}) | {task: found})
            print(task, {form: round(deviations(x, found[BASE]), 2) for form, x in found.items()}, file=sys.stderr)
    else:
        write("times", {str(rows): times(rows, args.rounds) for rows in BATCHES})
    print(table(results))


if __name__ == "__main__":
    main()
