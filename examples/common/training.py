"""The training state and the training step. The `mpjax.` calls contain everything about precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpjax
from examples.common.cli import UsageError, say
from examples.common.config import RunConfig
from examples.common.optimizers import create_optimizer, learning_rate_schedule, update_ema
from examples.common.processes import several

T = TypeVar("T")
Sums = dict[str, jax.Array]  # each shape=(), dtype=float32; "count" is the divisor of the others


class Variables(NamedTuple):
    """The parameters and statistics of a model."""

    params: Any
    stats: Any  # of normalisation, float32


class TrainState(NamedTuple):
    """Everything that a step changes and a checkpoint stores."""

    step: jax.Array  # shape=(), dtype=int32
    seed: jax.Array  # shape=(), dtype=uint32; in the state so that one program serves all seeds
    params: Any
    stats: Any
    opt_state: Any
    totals: Sums  # of the epoch so far
    ema: Any  # the variables' moving average, float32; empty without --ema


class Model(NamedTuple):
    """A network, its loss and its update as pure functions, in the precision of the policy."""

    init: Callable[[jax.Array], Variables]  # (key) -> Variables; params in float32 or in the dtype of a module's policy
    # (params, stats, batch, key) -> the mean, float32, with sums for metrics and updated statistics
    loss: Callable[..., tuple[jax.Array, tuple[Sums, Any]]]
    # (tx, TrainState, batch, key) -> the state after the step, and its sums
    update: Callable[..., tuple[TrainState, Sums]]
    sums: tuple[str, ...] = ("loss", "count")


class Training(NamedTuple):
    """A training set-up of jitted pure functions."""

    policy: mpjax.Policy
    init: jax.stages.Wrapped  # (seed) -> TrainState
    train_step: jax.stages.Wrapped  # (TrainState, batch) -> (TrainState, outputs); donates the state
    learning_rate: optax.Schedule
    model: Model

    def weights(self, state: TrainState) -> Variables:
        """The variables for testing and inference: the moving average if there is one."""
        if not state.ema:
            return Variables(state.params, state.stats)
        return Variables(self.policy.cast_to_param(state.ema["params"]), state.ema["stats"])


def create_training(model: Model, flags: RunConfig, steps: int, parallel: DataParallel) -> Training:
    """Builds the optimizer and the training step for a model.

    Args:
        model: In the precision of the flags.
        flags: The recipe and the precision.
        steps: Number of steps of an epoch.
        parallel: Placement of the state.
    """
    policy, schedule = mpjax.get_policy(flags.policy), learning_rate_schedule(flags, steps)
    tx = create_optimizer(flags, schedule)

    def init(seed: Any) -> TrainState:
        variables = model.init(jax.random.key(seed))
        # Always float32: its updates are too small for half precision.
        ema = mpjax.get_policy("float32").cast_to_param(variables._asdict()) if flags.ema else {}
        params = policy.cast_to_param(variables.params)
        with warnings.catch_warnings():
            if policy.param_dtype == policy.output_dtype:
                # A policy in half throughout has no masters, so the warning about them does not apply.
                warnings.simplefilter("ignore", mpjax.LossScaleWarning)
            opt_state = tx.init(params)
        step = jnp.zeros((), jnp.int32)
        return TrainState(step, jnp.uint32(seed), params, variables.stats, opt_state, zeros(model.sums), ema)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(jax.random.key(state.seed), state.step)
        state, sums = model.update(tx, state, batch, key)
        if flags.ema:
            weights = {"params": state.params, "stats": state.stats}
            state = state._replace(ema=update_ema(state.ema, weights, state.step, flags, state.opt_state))
        totals = jax.tree.map(jnp.add, state.totals, sums)
        names = ("loss_scale", "skipped_steps", "consecutive_skips")
        outputs = {"totals": totals, **{name: getattr(state.opt_state, name) for name in names}}
        return state._replace(step=state.step + 1, totals=totals), outputs

    places = jax.tree.map(parallel.of_state, jax.eval_shape(init, 0))
    return Training(
        policy,
        # Runs once. Optimizing its random numbers would take longer than the rest of the start.
        jax.jit(init, out_shardings=places, compiler_options={"xla_backend_optimization_level": 0}),
        # A step must return the state with its input shardings, or the next step would not accept it.
        jax.jit(train_step, donate_argnums=0, out_shardings=(places, None) if parallel.fsdp else None),
        schedule,
        model,
    )


def zeros(names: Iterable[str]) -> Sums:
    """Sums of zero: separate arrays, since a shared one would be one buffer, which can't be donated twice."""
    return {name: jnp.zeros(()) for name in names}


def masked_sums(counted: jax.Array, **values: jax.Array) -> Sums:
    """Sums over the counted entries of a batch with a finite `loss`, so that one overflow does not spoil an epoch.

    Args:
        counted: [batch], bool or float, nonzero for the entries that count.
        values: [batch] each. One of them is `loss`.
    """
    counted = jnp.where(jnp.isfinite(values["loss"]), counted, 0).astype(jnp.float32)
    sums = {name: jnp.sum(jnp.where(counted > 0, value, 0)) for name, value in values.items()}
    return {**sums, "count": jnp.sum(counted)}


def checked_sums(mask: jax.Array, finite: jax.Array, **values: jax.Array) -> Sums:
    """Sums over all entries of a test batch. An entry with a non-finite output is wrong: its values are 0.

    Args:
        mask: [batch], nonzero for the entries that count.
        finite: [batch], whether the outputs of an entry are finite.
        values: [batch] each. One of them is `loss`, which only finite entries have.
    """
    counted = jnp.asarray(mask).astype(jnp.float32)
    sums = {name: jnp.sum(jnp.where((counted > 0) & finite, value, 0)) for name, value in values.items()}
    return {**sums, "nonfinite": jnp.sum(jnp.where(finite, 0, counted)), "count": jnp.sum(counted)}


def check_outputs(nonfinite: float, count: int, unit: str, last: bool = True) -> None:
    """Reports test entries with non-finite outputs.

    Raises:
        UsageError: All are non-finite, and training has ended (`last`), so there is nothing to measure.
    """
    if last and nonfinite and nonfinite >= count:
        cause = "the model diverged, or its weights are damaged. --policy float32 shows whether half precision is why."
        raise UsageError(f"all {count} test {unit} gave inf or NaN: {cause}")
    if nonfinite:
        say(f"{nonfinite:.0f} of {count} test {unit} gave inf or NaN; they count as wrong")


def test_metrics(sums: Sums, unit: str, last: bool) -> dict[str, float]:
    """The means of a test, of which entries with non-finite outputs are reported."""
    found = means(sums)
    check_outputs(found["nonfinite"], int(sums["count"]), unit, last)
    return {f"test_{name}": value for name, value in found.items()}


def means(sums: Mapping[str, Any]) -> dict[str, float]:
    """Divides sums by their count on the host, the loss by the finite entries alone; NaN if there are none."""
    found = {name: float(x) for name, x in jax.device_get(dict(sums)).items()}
    count, nonfinite = found.pop("count"), found.pop("nonfinite", None)
    counts = {name: count - (nonfinite or 0) if name == "loss" else count for name in found}
    divided = {name: value / counts[name] if counts[name] else float("nan") for name, value in found.items()}
    return divided if nonfinite is None else {**divided, "nonfinite": nonfinite}


# Converts a training state to another precision, so that a run can continue in it.


def float32_params(state: TrainState) -> Any:
    """The parameters in float32: the master weights where the state has them."""
    inner = state.opt_state.inner_state
    if not isinstance(inner, mpjax.MasterWeightsState):
        return jax.tree.map(lambda p: p.astype(jnp.float32), state.params)
    # A leaf without a master is already float32. Its place holds a node without leaves.
    return jax.tree.map(lambda m, p: p if _is_masked(m) else m, inner.master, state.params, is_leaf=_is_masked)


def inner_state(state: TrainState) -> Any:
    """The optimizer's state inside those of the loss scale and the masters."""
    inner = state.opt_state.inner_state
    return inner.inner_state if isinstance(inner, mpjax.MasterWeightsState) else inner


def change_precision(old: TrainState, new: TrainState, policy: mpjax.Policy) -> TrainState:
    """Converts the state `old` to the precision of `new`.

    Parameters (through their float32 masters), statistics, EMA, the optimizer's momentum and counts, and the count of
    skipped steps carry over. The loss scale and its count of good steps start as in the new precision, since a
    scale found for float16 does not apply to bfloat16.

    Args:
        old: The restored state.
        new: An initial state in the new precision. Of its values, only the loss scale is used.
        policy: The new policy.
    """
    changed = with_params(new, float32_params(old), policy, inner_state(old))
    names = ("inner_state", "loss_scale", "good_steps", "consecutive_skips")
    scaling = old.opt_state._replace(**{name: getattr(changed.opt_state, name) for name in names})
    return old._replace(params=changed.params, opt_state=scaling)


def with_params(new: TrainState, params: Any, policy: mpjax.Policy, inner: Any) -> TrainState:
    """Replaces the parameters of a state and keeps its precision. Masters, if any, are bitwise equal to `params`.

    Args:
        new: The state.
        params: float32 parameters.
        policy: Policy of the state.
        inner: The optimizer's state inside those of the loss scale and the masters; float32 in every precision.
    """
    target = new.opt_state.inner_state
    if isinstance(target, mpjax.MasterWeightsState):
        # A copy, because the step donates its state and a buffer can't be donated twice.
        copy = lambda m, p: m if _is_masked(m) else jnp.array(p)  # noqa: E731
        masters = jax.tree.map(copy, target.master, params, is_leaf=_is_masked)
        inner = target._replace(master=masters, inner_state=inner)
    return new._replace(params=policy.cast_to_param(params), opt_state=new.opt_state._replace(inner_state=inner))


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


# Data parallelism over the devices of all processes: batches are split, the state is copied or split.


class DataParallel:
    """Placement of arrays. The program is written for one device. XLA splits it, sums gradients and shares statistics.

    Args:
        devices: Number of devices; None for all.
        fsdp: Whether to split the state too, each floating array along its longest evenly divisible dimension. XLA then
            gathers the parameters in half where a layer needs them, and each device keeps its part of the gradients.

    Attributes:
        count: Number of devices.
        replicated, sharded: The shardings of a state and of a batch.
    """

    def __init__(self, devices: int | None = None, fsdp: bool = False) -> None:
        there, processes = jax.device_count(), jax.process_count()
        if processes > 1 and not several():
            raise UsageError(f"JAX has found {processes} processes: join them with --coordinator HOST:PORT and so on.")
        if devices is not None and (not 1 <= devices <= there or devices % processes):
            each = f", each of {processes} processes the same number" if processes > 1 else ""
            raise UsageError(f"--devices {devices}: there are {there}; give 1 to {there}{each}, or leave it out.")
        of_each = [jax.local_devices(i)[: devices and devices // processes] for i in range(processes)]
        mesh = Mesh(np.array([device for part in of_each for device in part]), ("data",))
        self.count, self.fsdp = mesh.size, fsdp
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.sharded = NamedSharding(mesh, PartitionSpec("data"))

    def check(self, batch_size: int) -> None:
        """Raises a `UsageError` if a batch cannot be split evenly."""
        if batch_size % self.count:
            remedy = f"use a multiple of {self.count}, or fewer --devices"
            raise UsageError(f"--batch-size {batch_size} cannot be divided among {self.count} devices; {remedy}.")

    def filled(self, size: int) -> int:
        """The smallest batch of at least `size` that can be split evenly."""
        return -(-size // self.count) * self.count

    def put(self, batch: T) -> T:
        """Puts a batch on its devices. Each process has all of it, and puts its rows."""
        return jax.tree.map(lambda x: _place(x, self.sharded), batch)

    def own(self, size: int) -> slice:
        """The rows of a batch of `size` that lie on the devices of this process."""
        each = size // jax.process_count()  # of the devices, too
        return slice(jax.process_index() * each, (jax.process_index() + 1) * each)

    def put_own(self, batch: T) -> T:
        """Puts a batch on its devices, of which each process has its `own` rows."""
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self.sharded, x), batch)

    def get(self, tree: Any) -> Any:
        """The whole arrays on the host, on every process."""
        return multihost_utils.process_allgather(tree, tiled=True)

    def of_state(self, x: Any) -> NamedSharding:
        """The sharding of an array of the state."""
        splits = self.fsdp and jnp.issubdtype(x.dtype, jnp.floating)
        even = [d for d, size in enumerate(x.shape) if size and size % self.count == 0] if splits else []
        if not even:
            return self.replicated
        longest = max(even, key=lambda d: x.shape[d])
        spec = ("data" if d == longest else None for d in range(x.ndim))
        return NamedSharding(self.replicated.mesh, PartitionSpec(*spec))

    def replicate(self, tree: T) -> T:
        """Places a part of the state from host arrays."""
        return jax.tree.map(lambda x: _place(np.asarray(x), self.of_state(np.asarray(x))), tree)

    def place(self, state: T) -> T:
        """Moves a computed state to the shardings of `like_state`."""
        return jax.jit(lambda x: x, out_shardings=jax.tree.map(self.of_state, state))(state) if self.fsdp else state

    def like_batch(self, batch: Any) -> Any:
        """The abstract form of a batch."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharded), batch)

    def like_state(self, tree: Any) -> Any:
        """The abstract form of a state, or a part of it."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.of_state(x)), tree)


def _place(x: Any, sharding: NamedSharding) -> jax.Array:
    """Puts an array that every process has on the devices of all."""
    return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])
