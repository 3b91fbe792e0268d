"""The cost of the inspections: `python -m benchmarks.inspection`.

`times`: CPU seconds of each inspection of a loss function with nothing compiled before, as a ratio to compiling its
gradient and running it once (`find_nonfinite` of the loss: to compiling and running the loss; of a program in half: to
its gradient). "With a fault" means
parameters of which one kernel in the middle of the model overflows float32. `profile` runs the step several times,
which dominates its cost on a CPU, so its row is also given without these runs.

`watch`: the time of a training step with `mpjax.watch`, over that of the same step without it, interleaved in one
process: steps between two records, steps that make a record, and the mean if every 100th step makes one.

Times are CPU seconds, because other processes disturb them less than the wall time.
A run merges its parts into the file.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks import commands
from examples.imagenet.networks import BasicBlock, ResNet
from perf.results import previous
from perf.timing import interleaved, ratios
from testing.models.published import Workload
from testing.models.published.gpt import Gpt
from testing.models.published.resnet import ResNet50, TrainedResNet


class ResNet18(ResNet50):
    """ResNet-18 (He et al., 2015)."""

    def module(self, dtype: Any = None) -> ResNet:
        return TrainedResNet(self.stages, BasicBlock, self.classes, self.width, dtype)


PARTS = ("times", "watch")
MODELS: dict[str, Workload] = {
    "ResNet-18": ResNet18(batch_size=8, side=64, classes=100, stages=(2, 2, 2, 2)),
    "GPT, 12 layers": Gpt(batch_size=2, length=64, features=128, layers=12, heads=4, vocabulary=512),
}
WATCHED = Gpt(batch_size=8, length=128, features=256, layers=2, heads=4, vocabulary=1024)
PROFILED_STEPS = 2
SEARCHED = 0.0005  # a budget that half misses, so that modules are searched
EVERY = 100
Row = dict[str, Any]


def loss_of(workload: Workload) -> tuple[Callable[..., Any], Any, Any]:
    """The loss function of a model, its parameters and a batch."""
    module = workload.module()
    batch = jax.jit(workload.batch)(jax.random.key(0))
    variables = jax.jit(module.init)(jax.random.key(1), *workload.inputs(batch))
    state = {name: tree for name, tree in variables.items() if name != "params"}

    def loss_fn(params: Any, batch: Any) -> Any:
        outputs, _ = module.apply({**state, "params": params}, *workload.inputs(batch), mutable=["batch_stats"])
        return workload.loss(outputs, batch)

    return loss_fn, variables["params"], batch


def cpu_seconds(call: Callable[[], Any]) -> float:
    """The CPU seconds of a call with empty compilation caches."""
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    out = call()
    if isinstance(out, (tuple, jax.Array)):  # not a report
        jax.block_until_ready(out)
    return time.process_time() - start


def with_a_fault(params: Any) -> Any:
    """The parameters with one kernel, in the middle of the model, so large that its layer overflows."""
    leaves, tree = jax.tree.flatten(params)
    kernels = [i for i, leaf in enumerate(leaves) if leaf.ndim > 1]
    middle = kernels[len(kernels) // 2]
    leaves[middle] = jnp.where(leaves[middle] < 0, -3e38, 3e38)
    return jax.tree.unflatten(tree, leaves)


class CountedStep:
    """A jitted step that counts its calls."""

    def __init__(self, step: Any):
        self.step, self.lower, self.runs = step, step.lower, 0

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        return self.step(*args)


def measure_times(workload: Workload) -> Row:
    """CPU seconds of the inspections of one model, and their ratios."""
    loss_fn, *args = loss_of(workload)
    step = CountedStep(jax.jit(jax.value_and_grad(loss_fn)))
    half_loss, faulty = mpjax.autocast(loss_fn, "mixed_bfloat16"), with_a_fault(args[0])

    calls: dict[str, Callable[[], Any]] = {
        "loss": lambda: jax.jit(loss_fn)(*args),
        "gradient": lambda: jax.jit(jax.value_and_grad(loss_fn))(*args),
        "gradient in half": lambda: jax.jit(jax.value_and_grad(half_loss))(*args),
        "find_nonfinite of the loss": lambda: mpjax.find_nonfinite(loss_fn, *args),
        "find_nonfinite of the gradient": lambda: mpjax.find_nonfinite(jax.grad(loss_fn), *args),
        "find_nonfinite with a fault": lambda: mpjax.find_nonfinite(jax.grad(loss_fn), faulty, args[1]),
        "find_nonfinite with a fault, in half": lambda: mpjax.find_nonfinite(jax.grad(half_loss), faulty, args[1]),
        "audit": lambda: mpjax.audit(jax.grad(half_loss), *args),
        "explain": lambda: mpjax.explain(half_loss, *args),
        "layerwise_error": lambda: mpjax.layerwise_error(half_loss, *args),
        "search": lambda: mpjax.search(loss_fn, *args, budget=SEARCHED),
        "numerics": lambda: mpjax.numerics(loss_fn, *args),
        "numerics, verify=False": lambda: mpjax.numerics(loss_fn, *args, verify=False),
        "profile": lambda: mpjax.profile(step, *args, steps=PROFILED_STEPS),
    }
    seconds = {name: cpu_seconds(call) for name, call in calls.items()}
    runs = step.runs
    one_run = min(interleaved({"step": lambda: step(*args)}, 3, clock=time.process_time)["step"])
    seconds[f"profile without {runs} runs of the step"] = seconds["profile"] - runs * one_run
    bases = {
        name: "loss" if name.endswith("the loss") else "gradient in half" if name.endswith("in half") else "gradient"
        for name in seconds
    }
    return {
        name: {"seconds": round(found, 2), "ratio": round(found / seconds[bases[name]], 2), "to": bases[name]}
        for name, found in seconds.items()
    }


def step_runner(loss_fn: Callable[..., Any], params: Any, batch: Any, every: int | None, argument: str = "") -> Any:
    """A training step that carries its state, with `watch` unless `every` is None."""
    tx = mpjax.dynamic_loss_scale(optax.adam(1e-3))
    watched = None if every is None else mpjax.watch(loss_fn, every=every)
    carry = jax.tree.map(jnp.copy, [params, tx.init(params)])
    carry += [None if watched is None else watched.init(params, batch)]

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, opt_state: Any, watch_state: Any, batch: Any) -> Any:
        loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch)
        new_params, new_state = mpjax.apply_gradients(tx, grads, opt_state, params)
        if watched is not None:
            options = {"finite": new_state} if argument == "finite" else {"grads": grads} if argument == "grads" else {}
            watch_state = watched.update(watch_state, params, batch, opt_state=opt_state, **options)
        return new_params, new_state, watch_state, loss

    def call() -> Any:
        carry[:], loss = (out := step(*carry, batch))[:3], out[3]
        return carry[:2], loss

    return call


def measure_watch(rounds: int) -> Row:
    """Ratios of the CPU time of steps with and without `watch`."""
    loss_fn, params, batch = loss_of(WATCHED)
    never = 2**30
    make = functools.partial(step_runner, loss_fn, params, batch)
    runs = {
        "no watch": make(None),
        "between records": make(never),
        "between records, finite=": make(never, "finite"),
        "between records, grads=": make(never, "grads"),
        "a record": make(1),
    }
    found = ratios(interleaved(runs, rounds, clock=time.process_time), "no watch")
    between, record = found["between records"]["ratio"], found["a record"]["ratio"]
    cost = ((EVERY - 1) * between + record) / EVERY - 1
    return {"steps": found, f"cost at every={EVERY}": round(cost, 4)}


def table(results: Row) -> str:
    """Markdown tables of the times by model, then of the steps of `watch`."""
    tables = []
    if times := results.get("times"):
        rows = [
            (model, name, f"{row['seconds']:.1f}", f"{row['ratio']:.2f}", f"the {row['to']}")
            for model, of_model in times.items()
            for name, row in of_model.items()
        ]
        header = ("model", "what runs", "CPU seconds", "ratio", "to compiling and running once")
        tables.append(commands.markdown(header, rows))
    if found := results.get("watch"):
        steps = []
        for name, row in found["steps"].items():
            low, high = row["ratio_quartiles"]
            steps.append((name, f"{row['milliseconds']:.0f}", f"{row['ratio']:.3f}", f"{low:.3f} to {high:.3f}"))
        tables.append(
            commands.markdown(("steps with `mpjax.watch`", "CPU ms", "ratio to no watch", "quartiles"), steps)
        )
        tables.append(f"Cost of `watch` with every={EVERY}: {found[f'cost at every={EVERY}']:.1%} of a step.\n")
    return "\n".join(tables)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=60, help="timed rounds of the watched steps")
    args = parser.parse_args()
    for part, flag in (("times", "--models"), ("watch", "--rounds")):
        if part not in args.parts:
            commands.refuse(parser, args, flag, f"without the part {part}")
    results: Row = previous("inspection", args.out) or {}

    def write() -> None:
        commands.publish("inspection", results, table(results), args.out)

    for name in args.models if "times" in args.parts else ():
        results.setdefault("times", {})[name] = measure_times(MODELS[name])
        write()
    if "watch" in args.parts:
        results["watch"] = measure_watch(args.rounds)
        write()
    print(table(results))


if __name__ == "__main__":
    main()
