"""Why a policy is worse: a small network whose gradients float16 flushes without a scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.inspection.cli import main
from mpjax.inspection.comparison.training import run_training

STEPS, SMALL = 30, 3e-8
TRUE = np.random.default_rng(9).normal(size=(4, 2)).astype(np.float32)


def loss_fn(params, batch):
    """As of a mean over many million pixels; Adam makes up for the size of the gradients, not for zeros."""
    x, y = batch
    with jax.named_scope("first"):
        h = x @ params["first"]
    with jax.named_scope("second"):
        return SMALL * jnp.mean((h @ params["second"] - y) ** 2)


@functools.cache
def compiled(policy):
    precision = "mixed_float16" if policy == "static 1" else policy
    tx = optax.adam(0.05, eps=1e-20)
    tx = mpjax.static_loss_scale(tx, 1.0) if policy == "static 1" else mpjax.loss_scale_for(tx, precision)
    loss = mpjax.autocast(loss_fn, precision)

    @jax.jit
    def step(state, batch):
        params, opt_state = state
        value, grads = mpjax.value_and_grad(loss, opt_state)(params, batch)
        return mpjax.apply_gradients(tx, grads, opt_state, params), value

    return jax.jit(tx.init), loss, step


def make(policy, seed):
    init, loss, step = compiled(policy)
    rng = np.random.default_rng(seed)
    params = {
        name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in (("first", (4, 8)), ("second", (8, 2)))
    }
    xs = rng.normal(size=(STEPS, 16, 4)).astype(np.float32)
    batches = [(x, x @ TRUE) for x in xs]
    x = np.random.default_rng(99).normal(size=(64, 4)).astype(np.float32)

    def metric(state):
        found = x @ np.asarray(state[0]["first"]) @ np.asarray(state[0]["second"])
        return 1 - np.mean((found - x @ TRUE) ** 2) / np.var(x @ TRUE)

    return mpjax.inspection.Training((params, init(params)), step, batches, metric, loss)


@pytest.fixture(scope="module")
def report():
    return mpjax.parity(make, ["static 1"], 3)


def test_flushed_gradients_are_found(report):
    (found,) = report.evidence
    assert report["static 1"].kind == "worse"
    assert found.parted_at is not None
    assert found.parted_at < STEPS
    assert found.loss_scale == 1
    assert found.ranges.flushed_at(1) > 0.5


def test_modules_and_parameters_come_with_their_share_and_error(report):
    (found,) = report.evidence
    modules = {row.name: row for row in found.ranges.gradients}
    assert modules["second"].flushed > 0.5
    errors = {row.name: row.error for row in found.errors.parameters}
    assert min(errors["first"], errors["second"]) > 0.5, "nearly all of their gradients are lost"


def test_the_command_exits_with_1_if_a_policy_is_worse(capsys):
    command = ["parity", f"{__name__}:make", "--policies", "static 1", "--seeds", "3"]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("static 1: worse by ")
    assert main([*command[:4], "--seeds", "1,2"]) == 0, "two seeds do not tell"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parity", f"{__name__}:STEPS"], "should be a function"),
        (["parity", f"{__name__}:make", "--seeds", "0"], "seeds=0"),
        (["parity", f"{__name__}:loss_fn", "--seeds", "1"], "give a function of a policy and a seed"),
    ],
)
def test_mistakes_in_the_call_exit_with_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_skips_and_the_history_of_the_scale_are_recorded():
    @jax.jit
    def step(state, x):
        params, opt_state = state
        value, grads = mpjax.value_and_grad(lambda w: (w * x).astype(jnp.float16).astype(jnp.float32).sum(), opt_state)(
            params
        )
        return mpjax.apply_gradients(tx, grads, opt_state, params), value

    tx = mpjax.dynamic_loss_scale(optax.sgd(0.0), init_scale=2.0**17, growth_interval=2)
    params = np.ones((), np.float32)
    from mpjax.inspection.comparison.training import run_training

    training = mpjax.inspection.Training((params, tx.init(params)), step, [params] * 6, lambda state: state[0])
    run = run_training(training, "p", 0)
    # Scaled cotangents pass through float16, which holds up to 65504.
    assert run.scales == ((1, 2.0**16), (2, 2.0**15), (4, 2.0**16), (5, 2.0**15))
    assert run.skipped == (1, 2, 5)


def test_nnx_objects_are_a_state():
    from flax import nnx

    model = nnx.jit(lambda: nnx.Linear(2, 1, rngs=nnx.Rngs(0)))()
    optimizer = nnx.Optimizer(model, mpjax.static_loss_scale(optax.sgd(0.1), 8.0), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def step(state, x):
        return state, update(*state, x)

    batches = [np.ones((4, 2), np.float32)] * 3
    training = mpjax.inspection.Training(
        (model, optimizer), step, batches, lambda state: float(np.sum(state[0].kernel[...]))
    )
    run = run_training(training, "p", 0)
    assert run.scales == ((1, 8.0),)
    assert run.losses[-1] < run.losses[0]
