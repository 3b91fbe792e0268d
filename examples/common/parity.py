"""Adapts a training script to `python -m mpjax parity`, which tests whether half precision changes its result.

    python -m mpjax parity examples.speech.parity:make --policies mixed_float16 "mixed_float16 --loss-scale 1"

A policy is the value of the script's `--policy`, which may be followed by further precision flags. The environment
variable FLAGS holds flags for all runs: `FLAGS="--epochs 14" python -m mpjax parity ...`
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import mpjax
from examples.common.flags import parse
from examples.common.modes import task_maker
from examples.common.task import Task
from examples.common.training import TrainState, Variables


class Maker:
    """A `mpjax.inspection.MakeTraining` of a script. A policy's step and test are compiled once for all seeds.

    Args:
        kind: The script's task.
        flags: Flags for all runs; by default those of the environment variable FLAGS.
    """

    def __init__(self, kind: type[Task], flags: Sequence[str] | None = None) -> None:
        self._kind = kind
        self._flags = shlex.split(os.environ.get("FLAGS", "")) if flags is None else [*flags]
        self._make_task: Callable[[Any], Task] | None = None
        self._tasks: dict[str, Task] = {}
        self.__qualname__ = kind.config_type.script

    def __call__(self, policy: str, seed: int) -> mpjax.inspection.Training:
        """Makes the training for a policy and a seed.

        Args:
            policy: The value of `--policy` with further flags, as `"mixed_float16 --amp autocast --loss-scale 1"`.
            seed: The value of `--seed`.
        """
        words = ["--policy", *shlex.split(policy)]
        key = shlex.join(words)
        task = self._tasks[key] = self._tasks.get(key) or self._task(words, 0)
        seeded = self._task(words, seed)
        state = task.training.init(seed)
        name, sign = task.metric

        def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
            # Reset the sums, so that they are those of this step alone.
            state, outputs = task.training.train_step(task.next_epoch(state), batch)
            return state, outputs["totals"]["loss"] / outputs["totals"]["count"]

        def batches() -> Iterator[Any]:
            with contextlib.closing(seeded):
                for epoch in range(task.epochs):
                    yield from seeded.batches(epoch, 0)

        def metric(state: TrainState) -> float:
            return task.test(task.training.weights(state), lambda: None)[name]

        def loss(weights: Variables, batch: Any) -> jax.Array:
            return task.training.model.loss(*weights, batch, jax.random.key(0))[0]

        def weights(state: TrainState) -> Variables:
            return Variables(state.params, state.stats)

        return mpjax.inspection.Training(state, step, batches, metric, loss, weights, sign > 0, True, task.metric_name)

    def _task(self, words: Sequence[str], seed: int) -> Task:
        flags = self._kind.config_type
        config = parse(flags, f"python -m examples.{flags.script}", [*self._flags, *words, "--seed", str(seed)])
        self._make_task = self._make_task or task_maker(config, self._kind)  # opens the data once
        return self._make_task(config)
