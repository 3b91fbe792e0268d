"""The training that a comparison runs, and the record of one run."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.loss_scale.state import LossScaleState


class Training(NamedTuple):
    """The training of one policy with one seed, ready to run; the result of a `MakeTraining`.

    Only the first four fields are required. A plain tuple of these is accepted, too. `loss` is for evidence: with it, a
    report that finds a policy worse lists the modules that lose gradients.

    Args:
        state: Everything that a step changes: parameters, optimizer state, statistics.
        step: `(state, batch) -> (state, loss)`, compiled; it may donate the state. The loss is a scalar, or an array
            with the losses of several steps (a `scan`).
        batches: The batches of the whole run, the same for all policies of a seed: an iterable, or a function without
            arguments that returns one.
        metric: `state -> float`, the quality of the result: accuracy, word error rate, reward.
        loss: `(params, batch) -> scalar`, in the precision of the policy: the function that the step differentiates.
        params: `state -> params`, for `loss`; by default `state.params`, `state["params"]` or a tuple's first entry.
        larger_is_better: Whether larger values of the metric are better; False for an error rate or a loss.
        percent: Whether the metric is a share, shown in percent, with its differences in points.
        metric_name: The name of the metric in reports.

    Example:
        >>> import mpjax
        >>> step = lambda state, x: (state + x, state)
        >>> training = mpjax.inspection.Training(0.0, step, [1.0, 2.0], float, metric_name="sum")
        >>> training.step(training.state, 1.0)
        (1.0, 0.0)
    """

    state: Any
    step: Callable[[Any, Any], tuple[Any, Any]]
    batches: Iterable[Any] | Callable[[], Iterable[Any]]
    metric: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any] | None = None
    params: Callable[[Any], Any] | None = None
    larger_is_better: bool = True
    percent: bool = False
    metric_name: str = "metric"

    def params_of(self, state: Any) -> Any:
        """Returns the parameters in a state, in the form that `loss` takes.

        Raises:
            TypeError: The state has no recognizable parameters.
        """
        if self.params is not None:
            return self.params(state)
        if hasattr(state, "params"):
            return state.params
        if isinstance(state, dict) and "params" in state:
            return state["params"]
        if isinstance(state, tuple) and state:
            return state[0]
        raise TypeError(
            f"parity: a state of type {type(state).__name__} has no params: give Training(params=...), a function of "
            "the state that returns the parameters which loss takes."
        )

    def each_batch(self) -> Iterable[Any]:
        """Returns all batches, starting from the first."""
        return self.batches() if callable(self.batches) else self.batches


class MakeTraining(Protocol):
    """A function that creates the training of a policy and a seed; the argument `make` of `parity`.

    The function interprets the policy, a string. `"float32"` is the baseline. Any other may be an mpjax policy or a
    name of your own ("static scale 1"). The seed determines initialization, data order and dropout. Hyperparameters are
    the same for every policy. The seeds of a policy may share compiled functions (`functools.cache`).

    Example:
        >>> import jax, jax.numpy as jnp, mpjax, optax
        >>> def make(policy: str, seed: int) -> mpjax.inspection.Training:
        ...     loss = mpjax.autocast(lambda w, x: jnp.mean((x @ w - 1) ** 2), policy)
        ...     tx = mpjax.loss_scale_for(optax.sgd(0.1), policy)
        ...     @jax.jit
        ...     def step(state, x):
        ...         value, grads = mpjax.value_and_grad(loss, state[1])(state[0], x)
        ...         return mpjax.apply_gradients(tx, grads, state[1], state[0]), value
        ...     xs = jax.random.normal(jax.random.key(seed), (4, 8, 3))
        ...     w = jnp.zeros(3)
        ...     return mpjax.inspection.Training((w, tx.init(w)), step, list(xs), lambda state: state[0].sum(), loss)
        >>> checked: mpjax.inspection.MakeTraining = make
        >>> state, step, batches, metric, *_ = make("mixed_float16", 0)
        >>> state, value = step(state, batches[0])
    """

    def __call__(self, policy: str, seed: int, /) -> Training | tuple[Any, Any, Any, Any]:
        """Returns the training in its initial state."""
        ...


def make_training(make: Callable[..., Any], policy: str, seed: int) -> Training:
    """The training that a `MakeTraining` returns.

    Raises:
        TypeError: It returned anything else.
    """
    try:
        found = make(policy, seed)
    except Exception as error:
        error.add_note(
            f"parity called {getattr(make, '__name__', 'make')}({policy!r}, {seed}): give a function of a policy and a "
            "seed that returns an mpjax.inspection.Training (see mpjax.inspection.MakeTraining), not a loss function"
        )
        raise
    is_plain = isinstance(found, tuple) and len(found) == 4  # a `Training` has more fields
    training = Training(*found) if is_plain else found
    if not isinstance(training, Training):
        of = f" of {len(found)}" if isinstance(found, Sequence) else ""
        raise TypeError(
            f"parity: make({policy!r}, {seed}) returned a {type(found).__name__}{of}; return an "
            "mpjax.inspection.Training, or a tuple (state, step, batches, metric)."
        )
    for name in ("step", "metric"):
        if not callable(getattr(training, name)):
            raise TypeError(f"parity: make({policy!r}, {seed}) returned a {name} that is not a function.")
    return training


_HASHED_BATCHES = 2  # enough to detect another seed, order or augmentation
_PENDING = 64  # calls whose losses may stay on the device, so that it never waits for the host


@dataclasses.dataclass(frozen=True)
class Run:
    """The record of one run.

    Args:
        policy: The policy passed to `make`.
        seed: The seed of the run.
        metric: The final metric.
        losses: The loss of each step.
        scales: `(step, loss scale)` at the start and after each change; empty without loss scaling. The smallest if
            there are several loss scales.
        skipped: The numbers of the skipped steps, counted from 1.
        seconds: The duration of the run, compilation included.
        data: A checksum of the first batches.
        metric_name, larger_is_better, percent: The properties of the metric, from `Training`.
    """

    policy: str
    seed: int
    metric: float
    losses: tuple[float, ...]
    scales: tuple[tuple[int, float], ...]
    skipped: tuple[int, ...]
    seconds: float
    data: int
    metric_name: str = "metric"
    larger_is_better: bool = True
    percent: bool = False


def run_training(training: Training, policy: str, seed: int) -> Run:
    """Runs a training, in its initial state, through all its batches."""
    started = time.perf_counter()
    record = _Record()
    state, checksum = training.state, 0
    # Drop the initial state, so that the run keeps only one state alive.
    training = training._replace(state=None)
    for number, batch in enumerate(training.each_batch()):
        if number < _HASHED_BATCHES:
            checksum = _checksum(batch, checksum)
        state, loss = _stepped(training, state, batch)
        record.add(state, loss)
    record.fetch()
    if not record.steps:
        raise ValueError(f"parity: the batches of policy {policy!r}, seed {seed} are empty; give at least one.")
    return Run(
        policy=policy,
        seed=seed,
        metric=float(training.metric(state)),
        losses=tuple(record.losses),
        scales=tuple(record.scales),
        skipped=tuple(record.skipped),
        seconds=time.perf_counter() - started,
        data=checksum,
        metric_name=training.metric_name,
        larger_is_better=training.larger_is_better,
        percent=training.percent,
    )


def _stepped(training: Training, state: Any, batch: Any) -> tuple[Any, Any]:
    found = training.step(state, batch)
    if isinstance(found, (tuple, list)) and len(found) == 2:
        return found[0], found[1]
    what = f"{len(found)} values" if isinstance(found, (tuple, list)) else f"a {type(found).__name__}"
    raise TypeError(f"parity: step returned {what}; return (state, loss).")


class _Record:
    """Losses and loss scales of a run, fetched from the device in batches of steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.losses: list[float] = []
        self.scales: list[tuple[int, float]] = []
        self.skipped: list[int] = []
        self._pending, self._skips = list[tuple[int, Any, Any]](), 0

    def add(self, state: Any, loss: Any) -> None:
        """Records one step, or several steps with an array of losses."""
        if np.ndim(loss) > 1:
            raise TypeError(
                f"parity: step returned a loss of shape {np.shape(loss)}; return a scalar, or the losses of several "
                "steps as an array of one dimension."
            )
        self.steps += int(np.size(loss))
        found = [x for x in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(x)]
        # A copy, because the next step may donate the state.
        scaling = [(_copied(x.loss_scale), _copied(x.skipped_steps)) for x in found]
        self._pending.append((self.steps, loss, scaling))
        if len(self._pending) >= _PENDING:
            self.fetch()

    def fetch(self) -> None:
        """Fetches the pending losses and loss scales from the device."""
        for step, loss, scaling in jax.device_get(self._pending):
            first = len(self.losses)
            self.losses += [float(x) for x in np.ravel(np.asarray(loss, np.float64))]
            if not scaling:
                continue
            scale = float(min(np.min(s) for s, _ in scaling))
            skips = sum(int(np.max(n)) for _, n in scaling)
            if not self.scales or self.scales[-1][1] != scale:
                self.scales.append((step, scale))
            # For several steps in one call only the number of skipped steps is known; record the last ones.
            self.skipped += range(step - min(skips - self._skips, step - first) + 1, step + 1)
            self._skips = skips
        self._pending.clear()


def _is_state(x: Any) -> bool:
    return isinstance(x, LossScaleState)


def _copied(x: Any) -> Any:
    (array,) = jax.tree.leaves(x)  # an NNX Variable holds one
    return jnp.copy(array)


def _checksum(batch: Any, start: int) -> int:
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        start = zlib.crc32(f"{array.dtype} {array.shape}".encode(), start)
        if array.dtype != object:
            start = zlib.crc32(np.ascontiguousarray(array).tobytes(), start)
    return start
