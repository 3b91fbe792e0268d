"""Why a policy is worse, and the remedy tried: a small network whose gradients float16 flushes without a scale."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.inspection.cli import main
from mpjax.inspection.parity.evidence import Evidence, Remedy, given_to
from mpjax.inspection.parity.running import run_training

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
def compiled(policy, loss_scale):
    precision = "mixed_float16" if policy == "static 1" else policy
    tx = optax.adam(0.05, eps=1e-20)
    if loss_scale is not None:
        tx = mpjax.dynamic_loss_scale(tx, init_scale=loss_scale)
    else:
        tx = mpjax.static_loss_scale(tx, 1.0) if policy == "static 1" else mpjax.loss_scale_for(tx, precision)
    loss = mpjax.autocast(loss_fn, precision)

    @jax.jit
    def step(state, batch):
        params, opt_state = state
        value, grads = mpjax.value_and_grad(loss, opt_state)(params, batch)
        return mpjax.apply_gradients(tx, grads, opt_state, params), value

    return jax.jit(tx.init), loss, step


def make(policy, seed, *, loss_scale=None):
    init, loss, step = compiled(policy, loss_scale)
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

    return mpjax.Training((params, init(params)), step, batches, metric, loss)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def report(folder):
    return mpjax.parity(make, ["static 1"], 3, fix=True, output=folder, progress=False)


def test_flushed_gradients_are_found_and_the_scale_that_saves_them(report):
    (found,) = report.evidence
    assert report["static 1"].kind == "worse"
    assert found.parted_at is not None
    assert found.parted_at < STEPS
    assert found.loss_scale == 1
    assert found.flushed > 0.5
    assert found.flushed_after < 0.01
    assert found.remedy.loss_scale == 2.0**24
    assert found.remedy.overrides == ()


def test_modules_and_parameters_come_with_their_share_and_error(report):
    (found,) = report.evidence
    modules = {row.name: row for row in found.modules}
    assert modules["second"].flushed > 0.5
    errors = dict(found.parameters)
    assert [*errors] == sorted(errors, key=errors.get, reverse=True)
    assert min(errors["first"], errors["second"]) > 0.5, "nearly all of their gradients are lost"


def test_the_remedy_is_tried_and_the_result_shown(report):
    (fix,) = report.fixes
    assert fix.comparison.policy == "static 1 + dynamic scale from 2^24"
    assert fix.comparison.kind != "worse"
    assert abs(fix.comparison.interval.mean) < 0.1 * abs(report["static 1"].interval.mean)
    lines = str(report).splitlines()
    assert lines[0].startswith("static 1: worse by")
    assert lines[1].startswith("static 1 + dynamic scale from 2^24: ")
    assert "gradients are flushed to zero at scale 1, 0.0% at 2^24" in " ".join(str(report).split())
    assert report.failure(), "the policy is worse all the same"


def test_evidence_is_kept_with_the_runs(report, folder):
    (path,) = (folder / "runs").glob("*-evidence.json")
    kept = json.loads(path.read_text())
    assert Evidence.from_dict(kept["evidence"]) == report.evidence[0]
    assert json.loads(report.to_json())["evidence"][0]["remedy"]["loss_scale"] == 2.0**24


def test_the_command_exits_with_1_if_a_policy_is_worse(report, folder, capsys):
    command = ["parity", f"{__name__}:make", "--policies", "static 1", "--seeds", "3", "--output", str(folder)]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("static 1: worse by ")
    assert "to try for static 1 (fix=True, --fix): dynamic scale from 2^24" in printed.out
    assert main([*command[:4], "--seeds", "1,2", "--output", str(folder)]) == 0, "two seeds do not tell"


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


def test_overrides_reach_make_as_an_argument_or_in_the_text_of_the_policy():
    remedy = Remedy(overrides=(("*/head", "float32"),))

    def plain(policy, seed):
        """Takes neither."""

    def full(policy, seed, overrides=(), loss_scale=None):
        """Takes both."""

    assert given_to(full, "mine", remedy) == ("mine", {"overrides": remedy.overrides})
    assert given_to(plain, "mixed_bfloat16", remedy) == ("mixed_bfloat16;*/head=>float32", {})
    with pytest.raises(ValueError, match=r"'mine' is not an mpjax policy.*overrides=\(\)"):
        given_to(plain, "mine", remedy)
    with pytest.raises(ValueError, match="loss_scale=None"):
        given_to(plain, "mixed_float16", Remedy(loss_scale=8.0))
    assert mpjax.get_policy("mixed_bfloat16;*/head=>float32").overrides


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
    from mpjax.inspection.parity.running import run_training

    training = mpjax.Training((params, tx.init(params)), step, [params] * 6, lambda state: state[0])
    run = run_training(training, "p", 0)
    # Scaled cotangents pass through float16, which holds up to 65504.
    assert run.scales == ((1, 2.0**16), (2, 2.0**15), (4, 2.0**16), (5, 2.0**15))
    assert run.skipped == (1, 2, 5)


def hot(params, x):
    with jax.named_scope("hot"):
        y = (300 * x) @ params["hot"] / 1e4  # the product leaves float16's range
    with jax.named_scope("mild"):
        return jnp.mean((y @ params["mild"] - 1) ** 2)


def make_hot(policy, seed):
    """Knows no remedies: overrides come in the text of the policy."""
    loss = mpjax.autocast(hot, policy)
    tx = mpjax.loss_scale_for(optax.sgd(1e-3), policy)

    @jax.jit
    def step(state, x):
        params, opt_state = state
        value, grads = mpjax.value_and_grad(loss, opt_state)(params, x)
        return mpjax.apply_gradients(tx, grads, opt_state, params), value

    params = {"hot": np.full((4, 4), 100.0 + seed, np.float32), "mild": np.full((4,), 0.1, np.float32)}
    x, evaluate = np.ones((2, 4), np.float32), jax.jit(loss)
    return mpjax.Training(
        (params, jax.jit(tx.init)(params)),
        step,
        [x] * 3,
        lambda state: evaluate(state[0], x),
        loss,
        larger_is_better=False,
    )


def test_a_module_that_leaves_the_range_diverges_and_is_fixed_by_an_override():
    report = mpjax.parity(make_hot, ["mixed_float16"], 1, fix=True, progress=False)
    assert report.verdict("mixed_float16") == "worse: 1 of 1 runs diverged"
    (found,) = report.evidence
    assert found.remedy.overrides == (("*/hot", "float32"),)
    (fix,) = report.fixes
    assert fix.comparison.policy == "mixed_float16 + */hot in float32"
    assert not fix.comparison.diverged
    assert abs(fix.comparison.differences[0]) < 0.01


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
    training = mpjax.Training((model, optimizer), step, batches, lambda state: float(np.sum(state[0].kernel[...])))
    run = run_training(training, "p", 0)
    assert run.scales == ((1, 8.0),)
    assert run.losses[-1] < run.losses[0]
