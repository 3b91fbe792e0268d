"""The training that a comparison runs: a state, a step, batches and a metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol


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
        >>> training = mpjax.Training(0.0, lambda state, x: (state + x, state), [1.0, 2.0], float, metric_name="sum")
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
        >>> def make(policy: str, seed: int) -> mpjax.Training:
        ...     loss = mpjax.autocast(lambda w, x: jnp.mean((x @ w - 1) ** 2), policy)
        ...     tx = mpjax.loss_scale_for(optax.sgd(0.1), policy)
        ...     @jax.jit
        ...     def step(state, x):
        ...         value, grads = mpjax.value_and_grad(loss, state[1])(state[0], x)
        ...         return mpjax.apply_gradients(tx, grads, state[1], state[0]), value
        ...     xs = jax.random.normal(jax.random.key(seed), (4, 8, 3))
        ...     w = jnp.zeros(3)
        ...     return mpjax.Training((w, tx.init(w)), step, list(xs), lambda state: state[0].sum(), loss)
        >>> checked: mpjax.MakeTraining = make
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
            "seed that returns an mpjax.Training (see mpjax.MakeTraining), not a loss function"
        )
        raise
    if isinstance(found, Training):
        training = found
    elif isinstance(found, tuple) and len(found) == 4:
        training = Training(*found)
    else:
        of = f" of {len(found)}" if isinstance(found, Sequence) else ""
        raise TypeError(
            f"parity: make({policy!r}, {seed}) returned a {type(found).__name__}{of}; return an mpjax.Training, or a "
            "tuple (state, step, batches, metric)."
        )
    for name in ("step", "metric"):
        if not callable(getattr(training, name)):
            raise TypeError(f"parity: make({policy!r}, {seed}) returned a {name} that is not a function.")
    return training
