"""The flags that all training scripts share, and the settings that follow from them."""

from __future__ import annotations

import abc
import dataclasses
import math
import os
from pathlib import Path
from typing import Any, ClassVar, Literal

import optax

import mpjax
from examples.common.cli import UsageError
from examples.common.flags import Foreign, Group, from_json, of_the_run
from examples.common.optimizers import Hyperparameters, Recipe

# The actions of a config (`RunConfig.action`). An inspection takes the flags of the training that it inspects.
INSPECT = ("audit", "profile")
TRAIN_ONLY = ("train", "compare")  # one policy, or several in sequence
TRAIN = (*TRAIN_ONLY, *INSPECT)
BENCHMARKS = ("training_benchmark", "inference_benchmark")
MEASURE = (*BENCHMARKS, "find_batch_size")
USE = ("evaluate", "predict")
BUILD = (*TRAIN, *MEASURE)  # actions that build an optimizer

WHAT = Group("what to do")
PRECISION = Group("precision")
FILES = Group("files")
DATA = Group("data", decides=True)
MODEL = Group("model", BUILD, decides=True)
RECIPE = Group("training", BUILD, decides=True)
TRAINING = Group("training", TRAIN, decides=True)
RUNNING = Group("checkpoints and logs", TRAIN)
BENCHMARK = Group("benchmarks", MEASURE)
DEVICES = Group("devices and workers")

# The precision may change at any checkpoint.
PRECISION_FLAGS = ("policy", "amp", "loss_scale")

Export = Literal["float16", "bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class RunConfig(abc.ABC):
    """The flags of a training script."""

    script: ClassVar[str]  # the name of its package
    unit: ClassVar[str]  # what an item of a batch is, in the plural
    foreign: ClassVar[dict[str, Foreign]] = {}  # flags of other scripts
    # Flags that a resumed run may change, since they do not affect earlier steps.
    may_change: ClassVar[tuple[str, ...]] = (*PRECISION_FLAGS, "epochs")

    # The names of the flags in a command line.
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    audit: bool = WHAT(False, "print the precision of each part of a step (mpjax.audit); in --output, audit.html")
    profile: bool = WHAT(False, "print where the time of some steps goes (mpjax.profile); in --output, profile.html")

    policy: str = PRECISION(
        "mixed_float16",
        "float32, mixed_float16, mixed_bfloat16, O0, O1, O2, O3, or dtypes such as "
        '"params=float32,compute=float16,output=float32"',
        decides=True,
    )
    amp: Literal["module", "autocast"] = PRECISION(
        "module",
        "how the policy is applied: on the modules (mpjax.with_policy), or on the traced operations "
        "(mpjax.autocast, for policies with float32 parameters)",
        decides=True,
    )
    loss_scale: str | None = PRECISION(
        None, "dynamic, or a fixed number; by default dynamic in float16, else 1", uses=BUILD, decides=True
    )

    output: Path | None = FILES(
        None,
        "folder of the run: new or empty for a training (by default the next number in runs/SCRIPT), else the run "
        "that the model is from",
        "--results-dir",
    )
    resume: bool = FILES(
        False, "continue the run in --output from its newest checkpoint, in any precision, to any --epochs", uses=TRAIN
    )
    resume_step: int | None = FILES(None, "take the checkpoint of this step, not the newest", uses=(*TRAIN_ONLY, *USE))
    init_from: Path | None = FILES(
        None,
        "start from the weights of a run, an export, or a .safetensors or .npz file, in whatever precision they are",
        uses=TRAIN_ONLY,
    )
    keep_optimizer: bool = FILES(
        False, "with --init-from RUN: go on with its optimizer state too (momentum, moments, counts)", uses=TRAIN_ONLY
    )
    weights: Path | None = FILES(None, "a file that --export wrote, instead of a checkpoint in --output", uses=USE)
    export: Export | None = FILES(
        None,
        "write the trained weights in this dtype, and test them against the float32 ones",
        uses=(*TRAIN_ONLY, "evaluate"),
    )
    best: bool = FILES(False, "take the best checkpoint of the run, not the newest (--keep-best)", uses=USE)

    epochs: int | None = TRAINING(None, "passes over the training data")
    batch_size: int | None = RECIPE(None, "entries of a step, on all devices together", uses=(*BUILD, *USE))
    learning_rate: float | None = RECIPE(None, "peak of the schedule")
    schedule: Literal["cosine", "constant"] | None = RECIPE(None, "what follows the warm-up; by default cosine")
    warmup_epochs: float | None = RECIPE(None, "epochs over which the learning rate rises from zero to its peak")
    optimizer: Literal["sgd", "adam", "adamw", "lars", "lamb"] | None = RECIPE(None, "lars and lamb: large batches")
    momentum: float | None = RECIPE(None, "of sgd and lars")
    nesterov: bool | None = RECIPE(None, "Nesterov's momentum, of sgd and lars")
    weight_decay: float | None = RECIPE(None, "on kernels (not on biases and normalisation)")
    clip_norm: float | None = RECIPE(None, "largest norm of all gradients together", "--max-gradient-norm")
    ema: float = RECIPE(0.0, "decay of a moving average of the weights, which is then tested; such as 0.9999")
    accumulate: int = RECIPE(1, "steps whose gradients are averaged to one update")
    seed: int = RECIPE(0, "of the initial weights, the order of the data and its augmentation")
    patience: int | None = RUNNING(None, "stop after so many epochs without a better test")

    save_every: float = RUNNING(60.0, "seconds between two checkpoints (one at the end and on interruption anyway)")
    keep: int = RUNNING(2, "newest checkpoints that are kept")
    keep_best: bool = RUNNING(True, "keep the checkpoint of the best epoch too, in OUTPUT/best")
    log_every: int = RUNNING(50, "steps between two lines of steps.jsonl (and of a log file)")
    log_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = RUNNING(
        ("tensorboard",), "where the metrics go beside metrics.jsonl and steps.jsonl"
    )

    warmup_steps: int = BENCHMARK(200, "steps before those that are measured", uses=BENCHMARKS)
    num_iter: int = BENCHMARK(500, "how much is measured", uses=(*BENCHMARKS, "compare"))
    compare: str | None = BENCHMARK(
        None,
        "policies, with commas between: measure them in turns in one process, as a table and a plot; a training trains "
        "each of them first",
        uses=(*MEASURE, "compare"),
    )
    batch_sizes: str | None = BENCHMARK(
        None, "batch sizes of --compare, with commas between", uses=(*MEASURE, "compare")
    )
    find_batch_size: bool = BENCHMARK(False, "print the largest batch that a training step has memory for", uses=None)
    memory_limit: float | None = BENCHMARK(
        None, "GiB that --find-batch-size and --compare may take; by default the device's, on a CPU the machine's",
        uses=(*MEASURE, "compare"),
    )  # fmt: skip

    devices: int | None = DEVICES(None, "devices of each process that share a batch; all by default")
    fsdp: bool = DEVICES(
        False, "split parameters and optimizer state over all devices, not a copy on each", uses=(*BUILD, "compare")
    )  # fmt: skip
    coordinator: str | None = DEVICES(
        None, "several processes: HOST:PORT of process 0, or auto on a cluster that JAX knows", uses=BUILD
    )  # fmt: skip
    processes: int | None = DEVICES(None, "how many processes there are in all", uses=BUILD)
    process_id: int | None = DEVICES(None, "which of them this is, from 0", uses=BUILD)
    workers: int = DEVICES(os.cpu_count() or 1, "threads or processes that load data")

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_precision()
        self._check_together()

    # Defined by each script.

    mode: ClassVar[str]

    @property
    @abc.abstractmethod
    def recipe_defaults(self) -> Recipe:
        """Defaults of the flags that have the names of `Recipe`'s fields."""

    # Derived from the flags.

    @property
    def action(self) -> str:
        """The requested action. It decides which flags have an effect."""
        for name in (*INSPECT, "find_batch_size"):
            if getattr(self, name):
                return name
        if self.mode not in ("train", "train_and_evaluate"):
            return self.mode
        return "train" if self.compare is None else "compare"

    @property
    def action_flag(self) -> str:
        """The flag that requests `action`."""
        return (
            f"--mode {self.mode}" if self.action in ("train", *BENCHMARKS, *USE) else f"--{self._dashed(self.action)}"
        )

    @property
    def policies(self) -> tuple[str, ...]:
        """The requested policies: those of --compare, else --policy."""
        return (self.policy,) if self.compare is None else tuple(self.compare.split(","))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes of a comparison."""
        return tuple(int(size) for size in (self.batch_sizes or str(self.preset.batch_size)).split(","))

    @property
    def is_benchmark(self) -> bool:
        """Whether the mode measures speed rather than trains."""
        return self.mode in BENCHMARKS

    @property
    def preset(self) -> Recipe:
        """The default recipe with the given flags applied."""
        recipe = self.recipe_defaults
        given = {name: getattr(self, name) for name in recipe._fields if getattr(self, name, None) is not None}
        if "learning_rate" in given:
            given["per_256"] = False
        return recipe._replace(**given)

    def hyperparameters(self, steps_per_epoch: int) -> Hyperparameters:
        """The optimizer's hyperparameters for epochs of `steps_per_epoch` steps."""
        preset = self.preset
        entries = preset.batch_size * self.accumulate
        return Hyperparameters(
            optimizer=preset.optimizer,
            learning_rate=preset.learning_rate * (entries / 256 if preset.per_256 else 1),
            warmup_updates=round(preset.warmup_epochs * steps_per_epoch / self.accumulate),
            updates=max(1, preset.epochs * steps_per_epoch // self.accumulate),
            momentum=preset.momentum,
            nesterov=preset.nesterov,
            weight_decay=preset.weight_decay,
            clip_norm=preset.clip_norm,
            ema=self.ema,
            accumulate=self.accumulate,
            schedule=preset.schedule,
        )

    def settings(self) -> dict[str, Any]:
        """The flags that decide the result, as JSON. A resumed run must have the same."""
        preset = {name: value for name, value in self.preset._asdict().items() if hasattr(self, name)}
        return {"script": self.script, **of_the_run(self), **preset}

    def trained(self, settings: dict[str, Any]) -> Any:
        """Returns a copy with the settings that a run was trained with."""
        return dataclasses.replace(self, compare=None, batch_sizes=None, **from_json(type(self), settings))

    def with_precision(self, precision: dict[str, Any]) -> Any:
        """Returns a copy with another precision."""
        return dataclasses.replace(self, compare=None, batch_sizes=None, **precision)

    @property
    def precision(self) -> dict[str, Any]:
        """The flags of the precision."""
        return {name: getattr(self, name) for name in PRECISION_FLAGS}

    def _check_numbers(self) -> None:
        for name in ("epochs", "batch_size", "workers", "accumulate", "keep", "log_every", "patience"):
            self._require(name, lambda x: x >= 1, "must be 1 or more")
        self._require("num_iter", lambda x: x >= 2, "must be 2 or more")
        self._require("seed", lambda x: 0 <= x < 2**31, "must be between 0 and 2147483647")
        for name in ("learning_rate", "clip_norm", "memory_limit"):
            self._require(name, lambda x: 0 < x < math.inf, "must be a positive number")
        for name in ("warmup_epochs", "weight_decay", "save_every", "warmup_steps"):
            self._require(name, lambda x: 0 <= x < math.inf, "must be 0 or more")
        for name in ("momentum", "ema"):
            self._require(name, lambda x: 0 <= x < 1, "must be at least 0 and below 1")
        if self.batch_sizes is not None and not all(x.isdecimal() and int(x) for x in self.batch_sizes.split(",")):
            raise UsageError(
                f"--batch-sizes {self.batch_sizes!r}: give numbers with commas between, such as 32,64,128."
            )

    def _check_precision(self) -> None:
        flag = "--policy" if self.compare is None else "--compare"
        for name in self.policies:
            try:
                policy = mpjax.get_policy(name)
            except ValueError as error:
                raise UsageError(f"{flag} {name!r}: {error}") from error
            if self.amp == "autocast" and policy.param_dtype != "float32":
                raise UsageError(
                    f"--amp autocast keeps the parameters in float32, and {flag} {name!r} asks for "
                    f"{policy.param_dtype} ones; take --amp module, or a policy such as mixed_float16."
                )
        if self.loss_scale not in (None, "dynamic"):
            try:
                mpjax.static_loss_scale(optax.identity(), float(self.loss_scale or ""))
            except ValueError as error:
                raise UsageError(
                    f"--loss-scale {self.loss_scale!r}: give dynamic, or a number from 2**-126 to 2**126."
                ) from error

    def _check_together(self) -> None:
        if self.output is None and self.resume:
            raise UsageError("--resume needs the folder of the run to continue: add --output DIR.")
        if self.resume_step is not None and self.action in TRAIN_ONLY and not self.resume:
            raise UsageError(f"--resume-step {self.resume_step} says where --resume goes on: add --resume.")
        if self.output is None and self.weights is None and self.action in USE:
            raise UsageError(f"{self.action_flag} needs a trained model: add --output DIR or --weights FILE.")
        if self.weights is not None and (self.export or self.best):
            raise UsageError(f"--weights {str(self.weights)!r}: --export and --best are for the checkpoints of a run.")
        if self.keep_optimizer and self.init_from is None:
            raise UsageError("--keep-optimizer takes the optimizer state of a run: add --init-from RUN.")
        if self.batch_sizes is not None and self.compare is None:
            raise UsageError(f"--batch-sizes {self.batch_sizes} are those of --compare: add it, or give --batch-size.")

    def _require(self, name: str, holds: Any, what: str) -> None:
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise UsageError(f"--{self._dashed(name)} {value}: {what}.")

    @staticmethod
    def _dashed(name: str) -> str:
        return name.replace("_", "-")
