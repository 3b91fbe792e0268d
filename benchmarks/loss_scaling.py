"""What loss scaling adds to a step: `python -m benchmarks.loss_scaling`.

Adam on an MLP with float32 parameters, donated buffers, all forms interleaved in one process. The compute-bound
step has a large batch; the parameter-bound one a batch of 4, so that it is little more than its optimizer.

A step that can skip has all gradients in memory before its first update, so it needs more temporary memory. On a
CPU XLA takes that from malloc at each step, and glibc gives blocks of this size back to the system at once: then
fetching fresh pages costs more than all that loss scaling does. Accelerators have a pool, so by default this
benchmark runs with a malloc that keeps its memory; `--system-malloc` shows what a CPU user sees without.

With half matmuls, for which loss scaling is made, unscaling is part of the cast of the gradients to float32; with
float32 ones it is a pass of its own.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks.measure import interleaved, ratios, save

SIZES = ((512, 2048), (2048, 2048), (2048, 1024), (1024, 1024))  # 8.4 million parameters
# Batch size, and dtype of the matmuls.
KINDS = {
    "compute-bound, float32": (512, "float32"),
    "parameter-bound, float32": (4, "float32"),
    "parameter-bound, bfloat16": (4, "bfloat16"),
    "parameter-bound, float16": (4, "float16"),
}

# For glibc, read when a process starts.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "400000000",
    "MALLOC_ARENA_MAX": "1",
}

Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]

Step = Callable[[Any, Any, jax.Array, jax.Array], tuple[Any, Any, jax.Array]]


def init_params() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    return [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, SIZES, strict=True)]


def loss_in(dtype: str) -> Loss:
    """The loss function of the MLP, with matmuls in `dtype`."""

    def loss_fn(params: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        for w in params[:-1]:
            x = jax.nn.relu(x @ w.astype(dtype))
        return jnp.mean(((x @ params[-1].astype(dtype)).astype(jnp.float32) - y) ** 2)

    return loss_fn


def plain(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def materialised(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    """No loss scaling, but all gradients exist before the first update, as they must in any step that can skip."""

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.lax.optimization_barrier(jax.value_and_grad(loss_fn)(params, x, y))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def with_update(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = mpjax.value_and_grad(loss_fn, state)(params, x, y)
        updates, state = optax.with_extra_args_support(tx).update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    return step


def with_apply(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = mpjax.value_and_grad(loss_fn, state)(params, x, y)
        params, state = mpjax.apply_gradients(tx, grads, state, params, value=loss)
        return params, state, loss

    return step


def scaled_by_hand(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    """`grads_are_scaled=True`: unscaling happens inside the update, not as the gradients are made."""

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, x, y) * state.loss_scale)(params)
        params, state = mpjax.apply_gradients(tx, grads, state, params, value=loss)
        return params, state, loss

    return step


def forms(loss_fn: Loss) -> dict[str, tuple[optax.GradientTransformation, Step]]:
    adam = optax.adam(1e-3)
    dynamic = mpjax.dynamic_loss_scale(adam)
    by_hand = mpjax.dynamic_loss_scale(adam, grads_are_scaled=True)
    return {
        "plain Adam": (adam, plain(adam, loss_fn)),
        "plain Adam again": (adam, plain(adam, loss_fn)),
        "gradients materialised, no scaling": (adam, materialised(adam, loss_fn)),
        "apply_gradients": (dynamic, with_apply(dynamic, loss_fn)),
        "apply_gradients, grads_are_scaled": (by_hand, scaled_by_hand(by_hand, loss_fn)),
        "tx.update + apply_updates": (dynamic, with_update(dynamic, loss_fn)),
    }


def advance(compiled: Any, carried: dict[str, Any], name: str, batch: tuple[jax.Array, jax.Array]) -> Any:
    """One step of the form `name`, from where its last one ended (donated buffers are gone)."""
    params, state, loss = compiled(*carried[name], *batch)
    carried[name] = (params, state)
    return params, state, loss


def measure(batch: int, dtype: str, rounds: int, donate: bool) -> dict[str, dict[str, Any]]:
    """Step times of all forms at one batch size, and XLA's count of temporary bytes."""
    x = jax.random.normal(jax.random.key(1), (batch, SIZES[0][0]))
    y = jax.random.normal(jax.random.key(2), (batch, SIZES[-1][1]))
    carried: dict[str, Any] = {}
    runs: dict[str, Callable[[], Any]] = {}
    temporaries = {}
    for name, (tx, step) in forms(loss_in(dtype)).items():
        params = init_params()
        carried[name] = (params, tx.init(params))
        jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
        compiled = jitted.lower(*carried[name], x, y).compile()
        analysis = compiled.memory_analysis()
        temporaries[name] = analysis.temp_size_in_bytes if analysis else None
        runs[name] = functools.partial(advance, compiled, carried, name, (x, y))
    table = ratios(interleaved(runs, rounds), "plain Adam")
    return {name: {**row, "temporary_bytes": temporaries[name]} for name, row in table.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds for each step")
    parser.add_argument("--no-donate", action="store_true", help="keep the old params and state alive")
    parser.add_argument("--system-malloc", action="store_true", help="leave glibc's malloc as it is")
    args = parser.parse_args()
    if not args.system_malloc and not KEEP_MEMORY.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.loss_scaling", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **KEEP_MEMORY})
    results = {kind: measure(*how, args.rounds, not args.no_donate) for kind, how in KINDS.items()}
    for kind, rows in results.items():
        print(f"\n{kind} (batch {KINDS[kind][0]}, {'not ' if args.no_donate else ''}donated)")
        for name, row in rows.items():
            low, high = row["ratio_quartiles"]
            print(f"  {name:36s} {row['milliseconds']:9.2f} ms  {row['ratio']:5.2f}  [{low:.2f}, {high:.2f}]")
    name = "loss_scaling" + "_not_donated" * args.no_donate + "_system_malloc" * args.system_malloc
    print("\nwritten:", save(name, results))


if __name__ == "__main__":
    main()
