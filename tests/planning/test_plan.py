"""`plan`: XLA's peak, what it consists of, and changes that do what the plan says when they are made by hand."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from typing import get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.casting.rules import Residuals
from mpjax.inspection.cli import main
from mpjax.planning.liveness import BACKWARD, FORWARD, Buffer
from mpjax.planning.memory import kind_of, memory_of
from mpjax.planning.plan import bytes_of
from mpjax.planning.step import CAST, CHECKPOINT, DONATE, LOW_BIT, MASTER, OFFLOAD, Place, Step
from mpjax.planning.target import TARGETS
from mpjax.planning.traffic import program_bytes
from tests.planning.programs import (
    LAYERS,
    ROWS,
    WIDTH,
    arrays,
    attention_loss,
    attention_shapes,
    checkpointed,
    compiled_bytes,
    half,
    loss_fn,
    offloaded,
    shapes,
    step_of,
)

ADAM = optax.adam(1e-3)
WEIGHTS = 2 * LAYERS * WIDTH * WIDTH * 4


def donating(step):
    return jax.jit(step, donate_argnums=(0, 1))


STEP = donating(step_of(loss_fn))
GRADIENTS = jax.grad, jax.value_and_grad, jax.vjp, jax.linearize


@pytest.fixture(scope="module")
def plain():
    """A step in float32, without mpjax, that does not fit as it is."""
    return mpjax.plan(STEP, *shapes(), memory="3MB")


@pytest.fixture(scope="module")
def of_loss():
    """A loss on arrays, whose gradient does not fit under autocast alone."""
    return mpjax.plan(loss_fn, *arrays(), memory="2MB")


def row(report, name):
    return next(row for row in report.options if row.name == name)


def test_peak_is_xlas_own(plain):
    assert plain.peak == pytest.approx(compiled_bytes(step_of(loss_fn), *shapes()), rel=0.01)


def test_kinds_add_up_to_the_peak(plain):
    assert sum(plain.kinds.values()) == plain.peak
    assert plain.kinds["parameters"] == WEIGHTS
    assert plain.kinds["optimizer state"] == pytest.approx(2 * WEIGHTS, rel=0.01)
    assert plain.kinds["inputs"] == ROWS * WIDTH * 4
    assert plain.kinds["kept activations"] >= 2 * LAYERS * ROWS * WIDTH * 4  # at least x and the tanh of each layer
    kept = [held for held in plain.memory.held if held.kind == "kept activations"]
    assert any(held.source.startswith("programs.py:") for held in kept)


def test_a_program_without_mpjax_is_tried_under_autocast_of_what_it_differentiates(plain):
    by_hand = compiled_bytes(step_of(half(loss_fn)), *shapes())
    assert row(plain, "autocast").peak == pytest.approx(by_hand, rel=0.01)
    assert plain.edits[0].startswith("differentiate mpjax.autocast(loss_fn, 'mixed_bfloat16'")
    assert plain.fits
    assert plain.after.peak <= plain.budget


def test_autocast_is_around_the_step_where_its_gradient_is_out_of_reach():
    gradient = jax.value_and_grad(loss_fn)

    def step(params, x):
        value, grads = gradient(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params, _, x = shapes()
    report = mpjax.plan(jax.jit(step, donate_argnums=0), params, x, memory="3MB")
    if row(report, "autocast").peak < row(report, "as it is").peak:
        assert report.edits[0].startswith("run mpjax.autocast(step, 'mixed_bfloat16'")
    else:  # XLA of JAX 0.10 plans 1 % more for CPUs, which is no advice
        assert jax.__version_info__ < (0, 12)
        assert report.edits == ()


def test_planning_leaves_jax_as_it_was(plain):
    assert (jax.grad, jax.value_and_grad, jax.vjp, jax.linearize) == GRADIENTS
    params, x = arrays()
    args = params, ADAM.init(params), x
    expected = jax.jit(step_of(loss_fn))(*args)
    assert all(map(np.array_equal, jax.tree.leaves(STEP(*args)), jax.tree.leaves(expected)))


LEAN = mpjax.low_bit_state(ADAM)
MASTERS = mpjax.master_weights(ADAM, "p=bfloat16")
LEAN_MASTERS = mpjax.master_weights(LEAN, "p=bfloat16")


def at_float32(loss):
    """The value and the gradient of a loss at a float32 copy of half parameters."""
    return lambda params, x: jax.value_and_grad(loss)(jax.tree.map(lambda p: p.astype(jnp.float32), params), x)


def with_masters(tx):
    with jax.numpy_dtype_promotion("standard"):  # of `optax.apply_updates`
        return compiled_bytes(step_of(half(loss_fn), tx, at_float32), *shapes(tx, dtype=jnp.bfloat16))


BY_HAND = {
    "master_weights": ((MASTER,), lambda: with_masters(MASTERS)),
    "master_weights and low_bit_state": ((MASTER, LOW_BIT), lambda: with_masters(LEAN_MASTERS)),
    "checkpoint": ((CHECKPOINT,), lambda: compiled_bytes(step_of(half(checkpointed)), *shapes())),
    "low_bit_state": ((LOW_BIT,), lambda: compiled_bytes(step_of(half(loss_fn), LEAN), *shapes(LEAN))),
    "donate": ((DONATE,), lambda: compiled_bytes(step_of(half(loss_fn)), *shapes())),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_an_edit_made_by_hand_has_the_planned_peak(name):
    changes, by_hand = BY_HAND[name]
    jitted = jax.jit if name == "donate" else donating
    step = Step(jitted(step_of(half(loss_fn))), shapes(), {}, Place.of(None, None), mpjax.get_policy("mixed_bfloat16"))
    assert step.compile(changes).peak == pytest.approx(by_hand(), rel=0.03)


def test_the_step_with_master_weights_computes_what_is_made_by_hand():
    changed = Step(step_of(loss_fn), shapes(), {}, Place.of(None, None), mpjax.get_policy("mixed_bfloat16"))
    program = changed.traced((MASTER,)).program
    params, x = arrays()
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    state = MASTERS.init(params)
    masters = jax.tree.leaves(state.master)
    leaves = [*jax.tree.leaves((params, ADAM.init(state.master), x)), *masters]
    found = jax.jit(jax.extend.core.jaxpr_as_fun(program.jaxpr))(*leaves)
    with jax.numpy_dtype_promotion("standard"):
        new, new_state, value = jax.jit(step_of(loss_fn, MASTERS, mpjax.value_and_grad))(params, state, x)
    assert [x.dtype for x in found[:2]] == [jnp.bfloat16] * 2
    expected = [*jax.tree.leaves(new), value, *jax.tree.leaves(new_state.master)]
    for a, b in zip([*found[:2], *found[-3:]], expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-2, atol=1e-6)


def test_master_weights_are_tried():
    report = mpjax.plan(donating(step_of(half(loss_fn))), *shapes(), memory="2MB")
    changed = row(report, "master_weights")
    assert not changed.same


def test_a_time_that_is_not_known_is_no_time_of_zero(plain):
    first, *_ = plain.options
    options = tuple(dataclasses.replace(first, name=f"takes {time}", modelled=time) for time in (0.5, None))
    text = str(dataclasses.replace(plain, options=options))
    assert re.findall(r"^takes (\S+) .*×\s+(\S.*)$", text, re.MULTILINE) == [("0.5", "500 ms"), ("None", "-")]


def test_offload_is_not_available_on_a_cpu(plain):
    assert "offload is not available: the memory of a CPU is the host's" in plain.notes
    assert not any("offload" in each.name for each in plain.options)


def test_offload_copies_the_carry_to_the_host():
    devices = TARGETS["h200"].devices()
    if devices is None:
        pytest.skip("JAX's CUDA plugin is not installed")
    params, _, x = shapes(rows=1 << 16)
    place = Place.of("h200", None)
    step = Step(half(loss_fn), (params, x), {}, place, mpjax.get_policy("mixed_bfloat16"))
    found, kept = step.compile((OFFLOAD,)), step.compile((CHECKPOINT,))
    assert "S(5)" in found.text
    assert "S(5)" not in kept.text
    carries = LAYERS * (1 << 16) * WIDTH * 2
    assert found.host == carries
    assert kept.peak - found.peak > 0.5 * carries
    memory = memory_of(found, (), ())
    assert sum(memory.kinds.values()) == memory.peak
    assert all(size >= 0 for size in memory.kinds.values())
    given = jax.tree.map(place.placed, (params, x))
    by_hand = jax.jit(jax.grad(half(offloaded))).trace(*given).lower(lowering_platforms=("cuda",)).compile()
    assert found.peak == pytest.approx(program_bytes(by_hand), rel=0.03)


def test_chosen_rules_have_the_planned_peak():
    args = attention_shapes()
    gradient = jax.grad(mpjax.autocast(attention_loss, "mixed_bfloat16"))
    before = compiled_bytes(gradient, *args, donate=())
    report = mpjax.plan(gradient, *args, memory=int(0.9 * before))
    assert report.peak == pytest.approx(before, rel=0.01)
    if report.rules is not None:
        by_hand = jax.grad(mpjax.autocast(attention_loss, "mixed_bfloat16", rules=report.rules))
        assert report.after.peak == pytest.approx(compiled_bytes(by_hand, *args, donate=()), rel=0.03)
    assert {"scores", "logits"} & {*report.kinds}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((2, 4, 16, 16), "scores"),
        ((6, 2, 4, 16, 16), "scores"),  # of all layers of a scan
        ((2, 16, 100), "logits"),
        ((3, 2, 16, 16, 4), "scores"),
        ((2, 16, 3, 64), "kept activations"),  # a hidden layer of three times as many elements
        ((2, 16, 32), "kept activations"),
    ],
)
def test_scores_and_logits_are_told_by_their_size(shape, kind):
    kept = Buffer(4 * int(np.prod(shape)), "float32", shape, made={FORWARD}, read={BACKWARD})
    memory = kind_of(kept, [], (), scores={2 * 4 * 16 * 16}, logits={2 * 16 * 100})
    assert memory == kind


@pytest.mark.exhaustive
def test_every_value_of_an_option_is_tried():
    report = mpjax.plan(jax.grad(half(attention_loss)), *attention_shapes(), memory="1KB")
    names = {row.name for row in report.options}
    values = {value for value in get_args(Residuals) if value != "auto" and not value.endswith("_stochastic")}
    assert {f'residuals="{value}"' for value in values} <= names  # Stochastic rounding takes the same bytes.
    assert {'attention="fused"', 'cross_entropy="fused"', 'residual_stream="float32"'} <= names
    assert row(report, 'residual_stream="half"').same


def test_a_step_that_fits_needs_nothing():
    report = mpjax.plan(STEP, *shapes(), memory="1GB")
    assert (report.fits, report.chosen, report.rules, report.edits, report.after) == (True, (), None, (), None)
    assert report.headline.startswith("fits: ")
    assert not report.failure()


def test_a_budget_that_cannot_be_met_says_how_far_the_best_is():
    params, _, x = shapes()
    report = mpjax.plan(loss_fn, params, x, memory="500kB")
    assert report.fits is False
    assert report.after.peak == min(row.peak for row in report.options)
    missing = (report.after.peak - 500_000) / 1e6
    assert f"{missing:.3g} MB too much" in report.failure()
    assert "the least found is" in report.failure()


def test_changes_that_raise_the_peak_are_no_advice():
    def keeps_all(w, x):
        layer = jax.checkpoint(
            lambda w, x: jnp.tanh(jnp.sin(x @ w) * x), policy=jax.checkpoint_policies.everything_saveable
        )
        for _ in range(4):
            x = layer(w, x)
        return jnp.mean(x**2)

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (4096, 64)))
    for options in ({"memory": "4MB"}, {}):
        report = mpjax.plan(keeps_all, w, x, **options)
        assert min(row.peak for row in report.options) == report.peak
        assert (report.chosen, report.edits, report.after) == ((), (), None)


def test_without_a_known_memory_the_least_is_shown():
    params, _, x = shapes()
    report = mpjax.plan(loss_fn, params, x)
    assert report.fits is None
    assert report.after.peak < report.peak
    assert not report.failure()
    assert "memory= gives it" in str(report)


def test_the_gradient_of_a_loss_is_planned(of_loss):
    params, _, x = shapes()
    assert of_loss.peak == pytest.approx(compiled_bytes(jax.grad(loss_fn), params, x, donate=()), rel=0.01)
    assert of_loss.kinds["parameters"] == WEIGHTS
    assert any("the gradient of the loss" in note for note in of_loss.notes)


def test_a_gradient_is_no_updated_argument():
    gradient = lambda params, x: jax.grad(half(loss_fn))(params, x)
    report = mpjax.plan(gradient, *arrays(), memory="1GB")
    assert report.kinds["parameters"] == WEIGHTS
    assert report.kinds["inputs"] == ROWS * WIDTH * 4
    assert "donate" not in {row.name for row in report.options}


def test_inference_is_planned_as_it_is():
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.float32)

    def logits(w, x):
        return jnp.tanh(x @ w) @ w

    report = mpjax.plan(logits, matrix, matrix, memory="1GB")
    assert report.peak == pytest.approx(compiled_bytes(logits, matrix, matrix, donate=()), rel=0.01)
    assert not report.notes

    rows = matrix.update(sharding=NamedSharding(MESH, P("data")))
    report = mpjax.plan(logits, matrix, rows, memory="1GB", mesh={"data": 4})
    assert "each of 4 ×" in report.device
    assert report.kinds["inputs"] == 256 * 256 * 4 // 4


def test_a_model_with_a_policy_is_tried_under_other_rules():
    model = mpjax.with_policy(nn.Sequential([nn.Dense(256), nn.gelu, nn.Dense(64)]), "mixed_bfloat16")
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    report = mpjax.plan(lambda params, x: jnp.mean(model.apply(params, x) ** 2), params, x, memory="1GB")
    assert "autocast" not in " ".join(row.name for row in report.options)
    assert row(report, 'residuals="full"').peak != report.peak


def test_errors_are_of_the_gradients_on_given_arrays(of_loss):
    errors = {row.name: row.error for row in of_loss.options if row.error is not None}
    assert 0 < errors["autocast"] < 0.05
    assert errors['autocast + residual_stream="float32"'] <= errors["autocast"]
    assert "error" in str(of_loss)


@pytest.mark.exhaustive
def test_largest_batch():
    step = donating(step_of(half(loss_fn)))
    report = mpjax.plan(step, *shapes(), memory="3MB", batch_axis=0)
    assert report.batch == ROWS
    for name, rows in {"as it is": {}, 'residual_stream="float32"': {"residual_stream": "float32"}}.items():
        found = row(report, name).batch
        by_hand = step_of(half(loss_fn, **rows))
        assert compiled_bytes(by_hand, *shapes(rows=found)) <= 3e6 < compiled_bytes(by_hand, *shapes(rows=found + 8))
    assert row(report, "checkpoint").batch > row(report, "as it is").batch
    assert "largest batch" in str(report)


def masked_loss(params, x, classes):
    """Linear: no rule changes its program, so that the largest batch is sought of few programs."""
    return jnp.mean(x @ params["up"][0]) + jnp.sum(classes)


CLASSES = jax.ShapeDtypeStruct((10,), jnp.float32)


def test_inputs_of_other_sizes_need_the_arguments_that_carry_the_batch():
    params, _, x = shapes()
    with pytest.raises(ValueError, match=r"args\[1\] has 512, args\[2\] has 10.*batch_args="):
        mpjax.plan(half(masked_loss), params, x, CLASSES, memory="3MB", batch_axis=0)
    report = mpjax.plan(half(masked_loss), params, x, CLASSES, memory="3MB", batch_axis=0, batch_args=1)
    assert report.batch == ROWS
    with pytest.raises(ValueError, match=r"no array of batch_args=7 has"):
        mpjax.plan(half(masked_loss), params, x, CLASSES, memory="3MB", batch_axis=0, batch_args=7)


MESH = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("sharded", ["data", "weights"])
def test_a_mesh_divides_what_its_axes_shard(sharded):
    spec = P(None, None, "data")

    def placed(tree, spec):
        return jax.tree.map(lambda x: x.update(sharding=NamedSharding(MESH, spec if x.ndim == 3 else P())), tree)

    params, opt_state, x = shapes()
    x = x.update(sharding=NamedSharding(MESH, P("data")))
    if sharded == "weights":
        params, opt_state = placed(params, spec), placed(opt_state, spec)
    step = Step(STEP, (params, opt_state, x), {}, Place.of(None, {"data": 4}), mpjax.get_policy("mixed_bfloat16"))
    kinds = memory_of(step.compile(), (), ()).kinds
    assert kinds["inputs"] == ROWS * WIDTH * 4 // 4
    assert kinds["parameters"] == WEIGHTS // (4 if sharded == "weights" else 1)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def test_nnx_modules_and_optimizers():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    weights = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))) * 4
    report = mpjax.plan(train_step, model, optimizer, jnp.ones((512, 64)), memory="1GB")
    assert report.kinds["parameters"] == weights
    assert report.kinds["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    assert row(report, "autocast + low_bit_state").peak < row(report, "autocast").peak
    assert row(report, "autocast + donate").peak < row(report, "autocast").peak


def test_a_train_state_that_is_larger_than_any_memory():
    vast = 1 << 28  # 64 GiB in float32 each: nothing is allocated
    model = nn.Sequential([nn.Dense(vast), nn.relu, nn.Dense(64)])
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    make = lambda params: TrainState.create(apply_fn=model.apply, params=params, tx=ADAM)

    def train_step(state, x):
        grads = jax.grad(lambda params: jnp.mean(state.apply_fn(params, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    report = mpjax.plan(jax.jit(train_step, donate_argnums=0), jax.eval_shape(make, params), x, memory="10TB")
    weights = sum(x.size for x in jax.tree.leaves(params)) * 4
    assert report.kinds["parameters"] == weights > 128 * 2**30
    assert report.kinds["optimizer state"] == pytest.approx(2 * weights, rel=0.01)
    assert "donate" not in " ".join(row.name for row in report.options)


def test_report_in_every_form(plain, tmp_path):
    assert plain.headline.startswith("does not fit as it is: ")
    assert repr(plain) == f"<PlanReport: {plain.headline}>"
    content = json.loads(plain.to_json())
    assert content["peak"] == plain.peak
    assert content["rules"] is None or content["rules"]["residuals"]
    assert len(plain.to_csv().splitlines()) == 1 + len(plain.options)
    page = plain.to_html(tmp_path / "plan.html")
    assert page.count("<img") == 1
    plain.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert all(
        set(point) <= {*plain.kinds, *plain.after.kinds} | {"gradients", "results"} for point in plain.memory.timeline
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "h20"}, "plan(target='h20'): there are h200, "),
        ({"memory": "80 gigs"}, "plan(memory='80 gigs'): give bytes"),
        ({"memory": "-1GB"}, "plan(memory='-1GB'): give bytes"),
        ({"mesh": {"data": 0}}, "plan(mesh={'data': 0}): give the size"),
        ({"mesh": {"data": 4096}}, "4096 devices, and here are"),
        ({"memory": "1GB", "batch_axis": 7}, "plan(batch_axis=7): no input"),
        ({"batch_axis": 0}, "give memory="),
        ({"policy": "mixed_float61"}, "mixed_float61"),
    ],
)
def test_bad_arguments_are_quoted(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        mpjax.plan(donating(step_of(loss_fn)), *shapes(), **options)


def test_sizes():
    assert [bytes_of(x) for x in ("1.5kB", "80 GiB", 7)] == [1500, 80 * 2**30, 7]


def test_without_its_compiler_a_target_says_what_to_install():
    if TARGETS["h200"].devices() is not None:
        pytest.skip("JAX's CUDA plugin is installed")
    with pytest.raises(
        RuntimeError, match="plan\\(target='H200'\\): JAX's CUDA plugin is not installed \\(pip install"
    ):
        mpjax.plan(donating(step_of(loss_fn)), *shapes(), target="h200")


@pytest.mark.parametrize("target", ["h200", "a100", "l4"])
def test_a_described_gpu_has_xlas_peak_of_it(target):
    found = TARGETS[target].devices()
    if found is None:
        pytest.skip("JAX's CUDA plugin is not installed")
    report = mpjax.plan(donating(step_of(loss_fn)), *shapes(), target=target)
    assert report.device == TARGETS[target].name
    assert report.options[0].seconds > 0
    assert sum(report.kinds.values()) == report.peak
    assert report.fits


def test_changes_apply_together():
    step = Step(step_of(loss_fn), shapes(), {}, Place.of(None, None), mpjax.get_policy("mixed_bfloat16"))
    together = step.compile((CAST, CHECKPOINT, DONATE, LOW_BIT)).peak
    by_hand = compiled_bytes(step_of(half(checkpointed), LEAN), *shapes(LEAN))
    assert together == pytest.approx(by_hand, rel=0.03)


SCRIPT = """
import jax, jax.numpy as jnp

def train_step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ w))(w)

def shapes():
    return jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
"""


def test_command_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "train_to_plan.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    call = ["plan", "train_to_plan.py:train_step", "--args", "shapes"]
    assert main([*call, "--memory", "1GB", "--json", "plan.json", "--html", "plan.html"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].startswith("fits: ")
    assert "plan: compiling 1: as it is" in err
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is True
    assert main([*call, "--memory", "1kB", "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert "too much" in out
    assert not err
    assert main([*call, "--memory", "much"]) == 2
    assert "plan(memory='much')" in capsys.readouterr().err


def test_planning_is_imported_at_first_use():
    code = "import sys, mpjax, mpjax.inspection; assert not any('planning' in name for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
