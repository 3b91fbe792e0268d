"""Tests a trained model of any script, and exports its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

import mpjax
from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError
from examples.common.config import PRECISION_FLAGS, RunConfig
from examples.common.devices import DataParallel
from examples.common.flags import from_json
from examples.common.hosts import is_main, say, wait_for_all
from examples.common.precision_change import float32_params
from examples.common.run_folder import RunFolder
from examples.common.task import Task
from examples.common.training import Variables
from examples.common.weights import cast_weights, file_variables, read_about, write_weights

# The largest loss of the metric by an export: rounding may flip an entry or two of a small test set.
_TOLERANCE = 0.005
# Flags that may differ between training a model and using it.
_MAY_DIFFER = ("mode", *PRECISION_FLAGS)


def evaluate(config: RunConfig, kind: type[Task]) -> dict[str, Any]:
    """Tests a trained model in the precision of the flags, regardless of the precision in training."""
    task, variables = open_model(config, kind)
    metrics = task.test(cast_to_policy(task, variables), lambda: None)
    task.report(config.output)
    results = {"policy": config.policy, "amp": config.amp, **metrics, **task.facts()}
    if config.export is not None:
        assert config.output is not None
        results |= export(task, variables, config.output, config.export)
    return results


def open_model(config: RunConfig, kind: type[Task]) -> tuple[Task, Variables]:
    """Opens the model of --weights or of the run in --output, with its float32 variables.

    Flags that are not given have their values of the training.

    Args:
        config: The flags.
        kind: The script's task.

    Raises:
        UsageError: There is no model, it belongs to another script, or it is damaged.
    """
    folder = RunFolder(config.output or Path())
    if config.weights is None:
        settings, description = folder.settings(config.script), folder.description()
    else:
        about = read_about(config.weights)
        settings, description = about.get("settings", {}), about.get("data", {})
        if settings.get("script") != config.script:
            raise UsageError(f"--weights {str(config.weights)!r} is a model of examples.{settings.get('script')}.")
    given = {name for name in config.given if getattr(config, name) is not None}
    replaced = {*_MAY_DIFFER, *given, *(kind.alternatives if given.intersection(kind.alternatives) else ())}
    kept = {name: value for name, value in settings.items() if name not in replaced}
    try:
        trained = dataclasses.replace(config, **from_json(type(config), kept))
    except TypeError as error:
        raise UsageError(f"the settings that the model was trained with are damaged: {error}") from error
    task = kind(trained, DataParallel(trained.devices), kind.open(trained, description))
    if config.weights is None:
        return task, run_variables(task, folder)
    like = jax.eval_shape(task.training.init, 0)
    float32 = mpjax.get_policy("float32")
    wanted = jax.eval_shape(float32.cast_to_param, like.params)
    read = file_variables(config.weights, Variables(wanted, like.stats), "--weights")
    return task, task.parallel.replicate(read)


def run_variables(task: Task, folder: RunFolder) -> Variables:
    """The float32 variables of a run's checkpoint: the moving average if there is one."""
    config = task.config
    path = folder.best if config.best else folder.checkpoints
    if not path.is_dir():
        raise UsageError(f"--output {str(folder.path)!r} holds no {path.name}; give the folder of a training.")
    with Checkpoints(path) as checkpoints:
        restored = task.restore_as_saved(checkpoints, config.resume_step)
    if restored is None:
        raise UsageError(f"--output {str(folder.path)!r} holds no checkpoint yet: the run ended before its first.")
    state, _ = restored
    return Variables(**state.ema) if state.ema else Variables(float32_params(state), state.stats)


def cast_to_policy(task: Task, variables: Variables) -> Variables:
    """Casts variables to the dtypes in which the policy of the flags stores them."""
    return Variables(task.training.policy.cast_to_param(variables.params), variables.stats)


def export(task: Task, variables: Variables, folder: Path, dtype: str) -> dict[str, Any]:
    """Writes weights for inference into a run's folder and tests the file against the float32 weights.

    Args:
        task: Task of the run, with its test data.
        variables: float32 variables.
        folder: Folder of the run.
        dtype: Dtype of the parameters in the file.

    Raises:
        UsageError: A parameter is out of range, or the file tests too much worse. No file is then left.
    """
    name, sign = task.metric
    source = _tested(task, "float32", variables)[name]
    path = folder / f"weights_{dtype}.safetensors"
    if is_main():
        about = {"settings": task.config.settings(), "data": task.description(), "dtype": dtype}
        write_weights(path, cast_weights(variables, dtype), about)
    wait_for_all("export")
    written = task.parallel.replicate(file_variables(path, variables, "--export"))
    found = _tested(task, dtype, written)[name]
    if not sign * found >= sign * source - _TOLERANCE - 1 / task.test_count:
        path.unlink(missing_ok=True)
        raise UsageError(
            f"--export {dtype}: {task.metric_name} {found:.2%}, but {source:.2%} for the float32 weights; the file "
            "was removed. Use another dtype."
        )
    size = path.stat().st_size
    say(f"{path}: {size / 2**20:.2f} MiB, {task.metric_name} {found:.2%} (float32 weights: {source:.2%})")
    return {"export": str(path), "export_bytes": size, f"export_{name}": found, f"float32_{name}": source}


def _tested(task: Task, dtype: str, variables: Variables) -> dict[str, Any]:
    policy = f"params={dtype},compute={dtype},output=float32"
    other = task.with_config(task.config.with_precision({"policy": policy, "amp": "module", "loss_scale": None}))
    return other.test(cast_to_policy(other, variables), lambda: None)
