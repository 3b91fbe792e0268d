"""The flags that all training scripts share, and the settings that follow from them."""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import optax

import mpjax
from examples.common import flags
from examples.common.cli import UsageError
from examples.common.flags import Group
from examples.common.run_folder import RunFolder, read_settings

# The actions of a config (`RunConfig.action`). An inspection takes the flags of the training that it inspects.
INSPECT = ("audit", "profile", "numerics")
TRAIN = ("train", *INSPECT)
BENCHMARKS = ("training_benchmark", "inference_benchmark")
USE = ("evaluate", "predict")
STEP = (*TRAIN, "training_benchmark")  # actions that build a training step
BUILD = (*TRAIN, *BENCHMARKS)  # actions that build a model

ACTION = Group("action")
PRECISION = Group("precision", stored="free")
FILES = Group("files")
OUTPUT = Group("files", ("train", *BENCHMARKS, *USE))
WEIGHTS = Group("files", stored="running")
DATA = Group("data", stored="fixed")
MODEL = Group("model", BUILD, stored="fixed")
RECIPE = Group("training", STEP, stored="fixed")
TRAINING = Group("training", TRAIN, stored="fixed")
RUNNING = Group("checkpoints and logs", TRAIN, stored="running")
BENCHMARK = Group("benchmarks", BENCHMARKS)
DEVICES = Group("devices and workers", stored="running")
PROCESSES = Group("several processes")

# The precision may change at any checkpoint.
PRECISION_FLAGS = ("policy", "amp", "loss_scale")

Mode = Literal["train_and_evaluate", "train", "evaluate", "predict", "training_benchmark", "inference_benchmark"]
POLICIES = "float32, mixed_float16, mixed_bfloat16, O0, O1, O2, O3"
DTYPES = '"params=float32,compute=float16,output=float32"'
Export = Literal["float16", "bfloat16", "float32"]


@dataclasses.dataclass(frozen=True)
class RunConfig(abc.ABC):
    """The flags of a training script."""

    script: ClassVar[str]  # the name of its package
    unit: ClassVar[str]  # what an item of a batch is, in the plural
    alternatives: ClassVar[tuple[str, ...]] = ()  # flags of which one, if given, drops the others of a run
    foreign: ClassVar[dict[str, tuple[str, str]]] = {}  # switches of other scripts: a note, and a policy to turn on
    without: ClassVar[tuple[str, ...]] = ()  # flags of this class that the script does not have
    of_tests: ClassVar[tuple[str, ...]] = ("patience", "keep_best")  # without effect if no epoch is tested

    # The names of the flags in a command line.
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    mode: Mode = ACTION("train_and_evaluate", "train, test, use or measure (see the README)", stored="fixed")
    audit: bool = ACTION(False, "print the precision of each part of a training step")
    profile: bool = ACTION(False, "print where the time of a training step goes")
    numerics: bool = ACTION(False, "print the values of a training step that half precision would lose")

    policy: str = PRECISION("mixed_float16", f"{POLICIES}, or {DTYPES}")
    amp: Literal["module", "autocast"] = PRECISION("module", "how: mpjax.with_policy or mpjax.autocast")
    loss_scale: str | None = PRECISION(None, "dynamic (default in float16) or a number", uses=STEP)

    output: Path | None = OUTPUT(None, "folder of the run (default: the next number in runs/SCRIPT)", "--results-dir")
    resume: bool = FILES(False, "continue the run in --output, with its flags where none are given", uses=("train",))
    config: Path | None = FILES(None, "take the flags that are not given from a run's config.json", uses=BUILD)
    init_from: Path | None = WEIGHTS(None, "start from weights: a run, an export or a file", uses=("train", "numerics"))
    weights: Path | None = FILES(None, "use a file written by --export instead of a checkpoint in --output", uses=USE)
    export: Export | None = WEIGHTS(None, "write tested weights in this dtype", uses=("train", "evaluate"))
    best: bool = FILES(False, "use the best checkpoint of the run instead of the newest (see --keep-best)", uses=USE)

    epochs: flags.Count = TRAINING(None, "passes over the training data", stored="free")
    batch_size: flags.Count = RECIPE(None, "examples per step, over all devices together", uses=(*BUILD, *USE))
    learning_rate: flags.Positive = RECIPE(None, "peak learning rate of the schedule")
    schedule: Literal["cosine", "constant"] = RECIPE(None, "schedule after the warm-up (default: cosine)")
    warmup_epochs: flags.NotNegative = RECIPE(None, "epochs over which the learning rate rises from zero to its peak")
    optimizer: Literal["sgd", "adam", "adamw"] = RECIPE(None, "the update rule")
    momentum: flags.Share = RECIPE(None, "momentum of sgd")
    nesterov: bool = RECIPE(None, "Nesterov momentum for sgd")
    weight_decay: flags.NotNegative = RECIPE(None, "weight decay of kernels (not of biases and normalisation)")
    clip_norm: flags.Positive | None = RECIPE(None, "clip the global norm of the gradients to this value")
    ema: flags.Share = RECIPE(0.0, "decay of a moving average of the weights to test and export, such as 0.9999")
    freeze: str | None = RECIPE(None, "regular expression of parameters that stay as they are, such as stem")
    accumulate: flags.Count = RECIPE(1, "number of steps whose gradients are averaged into one update")
    seed: flags.Seed = RECIPE(0, "seed of the initial weights, the data order and the augmentation", uses=BUILD)
    patience: flags.Count | None = RUNNING(None, "stop after this many epochs without a better test result")

    save_every: flags.NotNegative = RUNNING(60.0, "seconds between checkpoints")
    keep: flags.Count = RUNNING(2, "number of newest checkpoints to keep")
    keep_best: bool = RUNNING(True, "also keep the checkpoint of the best epoch, in OUTPUT/best")
    log_every: flags.Count = RUNNING(50, "steps between metrics of a step in TensorBoard")

    warmup_steps: flags.Natural = BENCHMARK(200, "steps to run before measuring")
    num_iter: flags.TwoOrMore = BENCHMARK(500, "number of steps to measure")

    devices: int | None = DEVICES(None, "number of devices that share a batch (default: all)")
    fsdp: bool = DEVICES(False, "shard the state over all devices instead of copying it", uses=BUILD)
    workers: flags.Count | None = DEVICES(None, "threads that load data (default: one per core)", uses=(*TRAIN, *USE))

    coordinator: str | None = PROCESSES(None, "HOST:PORT of process 0; Slurm and others are detected")
    num_processes: flags.Count | None = PROCESSES(None, "number of processes; 1 if each is meant to train alone")
    process_id: flags.Natural | None = PROCESSES(None, "number of this process, from 0")

    def __post_init__(self) -> None:
        flags.check_ranges(self)
        for name, value in {"momentum": 0.9, "nesterov": False, "schedule": "cosine", **self.recipe_defaults}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        try:
            re.compile(self.freeze or "")
        except re.error as error:
            raise UsageError(f"--freeze {self.freeze!r} is not a regular expression: {error}.") from error
        self._check_precision()
        self._check_together()

    # Defined by each script.

    @property
    @abc.abstractmethod
    def recipe_defaults(self) -> dict[str, Any]:
        """The values of the flags of the training that are not given, by name."""

    # Derived from the flags.

    @property
    def action(self) -> str:
        """The requested action. It decides which flags have an effect."""
        mode = "train" if self.mode == "train_and_evaluate" else self.mode
        return next((name for name in INSPECT if getattr(self, name)), mode)

    @property
    def action_flag(self) -> str:
        """The flag that requests `action`."""
        return f"--mode {self.mode}" if self.action in ("train", *BENCHMARKS, *USE) else f"--{self.action}"

    @property
    def is_benchmark(self) -> bool:
        """Whether the mode measures speed rather than trains."""
        return self.mode in BENCHMARKS

    def settings(self) -> dict[str, Any]:
        """The flags that are stored with a run, as JSON."""
        return {"script": self.script, **flags.stored_flags(self)}

    @classmethod
    def of_run(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The flags of the run that --resume continues or --config names, which are not on the command line."""
        if given.get("config"):
            source, settings = given["config"], read_settings(given["config"], cls.script, "--config")
        elif given.get("resume") and given.get("output") and not RunFolder(given["output"]).blank:
            source, settings = given["output"], RunFolder(given["output"]).settings(cls.script, "--resume")
        else:
            return {}
        names = {name for name, value in given.items() if value is not None}
        return cls.like(settings, source, names)

    @classmethod
    def like(cls, settings: Any, source: Path, given: Collection[str], without: Collection[str] = ()) -> dict[str, Any]:
        """The flags in the settings of a run, but those that are given on the command line or not wanted.

        Raises:
            UsageError: They are damaged, or name code to import that the command line does not name.
        """
        model = settings.get("model")
        if isinstance(model, str) and ":" in model and "model" not in given:
            trust = f"if you trust it, give --model {model}."
            raise UsageError(f"{str(source)!r} names the model {model!r}, which is code: {trust}")
        replaced = {*given, *without, *(cls.alternatives if {*given}.intersection(cls.alternatives) else ())}
        try:
            own = flags.from_json(cls, settings)
            values = {name: x for name, x in own.items() if name not in replaced}
            # The default rate follows the batch size, so it is no flag of the new command.
            plain = {name: x for name, x in own.items() if name not in ("mode", "model", "learning_rate")}
            if "learning_rate" in values and values["learning_rate"] == cls(**plain).learning_rate:
                del values["learning_rate"]
        except (TypeError, AttributeError) as error:
            raise UsageError(f"{str(source)!r}: the flags of the run are damaged: {error}") from error
        return values

    @property
    def precision(self) -> dict[str, Any]:
        """The flags of the precision."""
        return {name: getattr(self, name) for name in PRECISION_FLAGS}

    def _check_precision(self) -> None:
        try:
            policy = mpjax.get_policy(self.policy)
        except ValueError as error:
            raise UsageError(f"--policy {self.policy!r}: {error}") from error
        if self.amp == "module" and policy.matmul_dtype is not None:
            raise UsageError(f"--policy {self.policy!r}: layers have no float8 matmuls; add --amp autocast.")
        if self.amp == "autocast" and policy.param_dtype != "float32":
            need = f"--policy {self.policy!r} requires {policy.param_dtype} ones; use --amp module, or mixed_float16"
            raise UsageError(f"--amp autocast keeps the parameters in float32, but {need}.")
        if self.loss_scale not in (None, "dynamic"):
            try:
                mpjax.static_loss_scale(optax.identity(), float(self.loss_scale or ""))
            except ValueError as error:
                raise UsageError(f"--loss-scale {self.loss_scale!r}: give dynamic, or 2**-126 to 2**126.") from error

    def _check_together(self) -> None:
        several = sum(getattr(self, name) for name in INSPECT) > 1
        if self.action in INSPECT and (several or self.mode in (*USE, "inference_benchmark")):
            raise UsageError("--audit, --profile and --numerics inspect a training: give one of them, without --mode.")
        if "warmup_epochs" in self.given and self.warmup_epochs > self.epochs / 2:
            raise UsageError(f"--warmup-epochs {self.warmup_epochs}: above half of --epochs {self.epochs}.")
        if self.output is None and self.resume and self.action == "train":
            raise UsageError("--resume needs the folder of the run to continue: add --output DIR.")
        if self.resume and self.config is not None:
            raise UsageError(f"--config {self.config}: --resume takes the flags of the run in --output; leave it out.")
        if self.output is None and self.weights is None and self.action in USE:
            raise UsageError(f"{self.action_flag} needs a trained model: add --output DIR or --weights FILE.")
        if self.weights is not None and (self.export or self.best):
            raise UsageError(f"--weights {str(self.weights)!r}: --export and --best need the checkpoint of a run.")
        for name in self.of_tests if self.mode == "train" else ():
            if name in self.given:
                flag = flags.as_text(name, getattr(self, name))
                raise UsageError(f"{flag} needs tests after each epoch: leave out --mode train.")
        for name in ("momentum", "nesterov"):
            if name in self.given and self.optimizer != "sgd":
                raise UsageError(f"--{name} is for sgd; --optimizer {self.optimizer} has none.")
