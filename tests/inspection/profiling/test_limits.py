"""What limits a step: real small steps that are compiled again, call Python, or do little but update parameters."""

import itertools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.inspection.profiling import hlo
from mpjax.inspection.profiling.kernels import Kernel, Split
from mpjax.inspection.profiling.stepping import Stepper
from tests.inspection.profiling.gpu_traces import advised

pytestmark = pytest.mark.usefixtures("always_compiled")

W = jax.device_put(np.eye(16, dtype=np.float32))


def train_step(w, x):
    return w - 0.1 * x.T @ jnp.tanh(x @ w), x.sum()


def test_a_new_shape_at_each_step_is_recompilation_with_the_shapes():
    batches = (np.ones((n, 16), np.float32) for n in itertools.count(8))
    report = mpjax.profile(jax.jit(train_step), W, batches=batches, steps=10)
    assert report.limit == "recompilation"
    assert report.compilation_share > 0.8 > report.dispatch_share
    assert report.recompilation.steps == report.recompilation.measured == report.steps == 3
    assert set(report.recompilation.changed) == {"args[1]"}
    assert "args[1]: float32[8,16], float32[9,16]" in " ".join(str(report).split())


def test_four_shapes_in_turn_are_compiled_once_each_and_timed_together():
    batches = [np.ones((8 * n, 16), np.float32) for n in (1, 2, 3, 4)]
    report = mpjax.profile(jax.jit(train_step), W, batches=batches, steps=8)
    assert report.recompilation is None
    assert report.compilation_share == 0
    assert any("several shapes" in note and "float32[32,16]" in note for note in report.notes)
    # A step takes far less than a millisecond, unless compilations are taken for steps.
    assert max(report.step_seconds, report.traced_seconds) < 0.04


def test_a_new_function_at_each_step_is_recompilation_without_a_shape():
    def step(w, x):
        return jax.jit(lambda w, x: train_step(w, x))(w, x)

    report = mpjax.profile(step, W, np.ones((8, 16), np.float32), steps=2)
    assert [advice.limit for advice in report.advice] == ["recompilation"]
    assert report.recompilation.changed == {}
    assert "a function created at each call" in str(report)


def test_a_type_that_changed_before_is_not_the_cause_of_a_recompilation():
    """A counter of Python that the first step makes an array; batches of two shapes; a new static argument."""
    inner, count = jax.jit(lambda state, x, n: ((state[0] - n * x.sum(), state[1] + 1), n), static_argnums=2), [0]

    def step(state, x):
        count[0] += 1
        return inner(state, x, count[0])

    batches = [np.ones((n, 16), np.float32) for n in (8, 4)]
    report = mpjax.profile(step, (W, 0), batches=batches, steps=2, carry=1)
    assert report.recompilation.changed == {}
    assert "a static argument" in str(report)


def test_a_number_of_python_has_the_type_of_the_array_that_replaces_it():
    step = jax.jit(lambda state, x: ((state[0] - 0.1 * x.sum(), state[1] + 1), x.sum()))
    batches = [np.ones((n, 16), np.float32) for n in (8, 4)]
    report = mpjax.profile(step, (W, 0), batches=batches, steps=2, carry=1)
    (note,) = [note for note in report.notes if "shapes" in note]
    assert "args[0]" not in note


def test_a_step_that_reads_a_counter_of_python_is_not_advised_to_be_jitted():
    """One program of it all would keep the counter's first value."""
    inner, count = jax.jit(lambda w, n: w - 0.1 * n * w, static_argnums=1), [0]

    def step(w):
        count[0] += 1
        return inner(w, count[0])

    report = mpjax.profile(step, W, steps=2, carry=1)
    assert report.limit == "recompilation"
    assert report.compiled_seconds is None
    assert not re.search(r"\bjit (the|what)", str(report))


def test_work_of_the_host_in_a_step_is_not_called_dispatch(tmp_path):
    inner = jax.jit(lambda w: w * 2)

    def step(w):
        np.savez(tmp_path / "w.npz", w=np.asarray(w))
        return inner(w)

    report = mpjax.profile(step, W, steps=2)
    assert report.limit == "host work in the step"
    assert "scan" not in str(report)


@pytest.mark.parametrize("read", [float, lambda x: x.item(), np.asarray, lambda x: "" if x > 0 else "-"])
def test_the_line_that_waits_for_a_value_is_named(read):
    inner = jax.jit(lambda w: (w * 2, w.sum()))

    def step(w):
        w, loss = inner(w)
        read(loss)
        return w, loss

    report = mpjax.profile(step, W, steps=2)
    assert report.limit == "host work in the step"
    assert re.search(r"test_limits\.py:\d+ waits for the value of an array", str(report.advice[0]))
    assert not re.search("autocast|lax.cond", str(report))


WAITS = (jax.device_get, jax.block_until_ready, lambda x: x.block_until_ready(), repr, float, np.asarray)


@pytest.mark.parametrize("wait", WAITS)
def test_a_line_that_waits_is_named_whether_or_not_the_step_can_be_compiled_as_a_whole(wait):
    inner = jax.jit(lambda w: (w * 2, w.sum()))

    def step(w):
        w, loss = inner(w)
        wait(loss)
        return w, loss

    stepper = Stepper(step, (W,), None, 1)
    stepper.warm_up()
    lines = {fun.__code__.co_firstlineno + below for fun, below in ((step, 2), (WAITS[2], 0))}
    assert len(stepper.reads_at) == 1
    assert set(stepper.reads_at) <= {f"test_limits.py:{line}" for line in lines}


def test_a_library_that_reads_an_array_is_not_the_line_that_waits():
    def step(w):
        return w * 2, np.linalg.svd(w)[1]

    stepper = Stepper(step, (W,), None, 1)
    stepper.warm_up()
    assert stepper.reads_at == [f"test_limits.py:{step.__code__.co_firstlineno + 1}"]


@pytest.mark.parametrize("compiled", [None, 0.5])
def test_the_lines_that_wait_are_part_of_the_advice(compiled):
    split = Split(device=1, input=0, dispatch=3)
    (advice,) = advised(split, compiled=compiled, jitted=False, reads_at=("a.py:1", "a.py:2"))
    assert "and a.py:1, a.py:2 wait for the value of an array" in str(advice)


def test_arrays_that_each_call_copies_are_named():
    split = Split(device=1, input=0, dispatch=3)
    (advice,) = advised(split, copied=16 << 20)
    assert "16.8 MB of NumPy arrays" in str(advice)
    assert "jax.device_put" in str(advice)


def slow(x):
    time.sleep(0.02)
    return x


@pytest.mark.parametrize("kind", ["pure_callback", "io_callback", "debug_print"])
def test_host_callbacks_are_named_with_their_line(kind, capfd):
    @jax.jit
    def step(x):
        if kind == "debug_print":
            jax.debug.print("{}", x[0, 0])
            return x @ x
        call = jax.pure_callback if kind == "pure_callback" else jax.experimental.io_callback
        return call(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x) @ x

    report = mpjax.profile(step, W, steps=2)
    (callback,) = (kernel for kernel in report.kernels if kernel.kind == hlo.CALLBACK)
    assert callback.source.startswith("test_limits.py:")
    if kind != "debug_print":  # Printing is quick.
        assert report.limit == "host callbacks"
        assert f"{kind} at {callback.source}" in report.advice[0].text
        assert callback.seconds > 0.019


def test_on_a_gpu_waiting_for_a_callback_is_said_where_the_device_waits():
    callback = hlo.Instruction("pure_callback.1", hlo.CALLBACK, "", "a.py:3", "/a.py", False)
    (advice,) = advised(Split(device=1, input=0, dispatch=3), callbacks=[callback])
    assert advice.limit == "host callbacks"
    assert "pure_callback at a.py:3" in advice.text


def test_a_step_that_mostly_updates_parameters_is_limited_by_the_optimizer():
    update = Kernel("k", "op", "elementwise", "", "", "/x/optax/transform.py", False, "", 0.9, 8.0, False, "")
    (advice,) = advised(Split(device=1, input=0, dispatch=0), [update])
    assert advice.limit == "optimizer"
    assert "optax.flatten" in advice.text
    assert advice.share == 1


compiled_step = jax.jit(train_step)
counted = jax.jit(lambda w, x, i: train_step(w, x * i), static_argnums=2)


def jits_in_each_call(w, x):
    return jax.jit(lambda w, x: train_step(w, x))(w, x)


def counts(w, x, counter=itertools.count(1)):  # noqa: B008
    return counted(w, x, next(counter))


def saves_each_fifth_step(w, x, counter=itertools.count(1)):  # noqa: B008
    if next(counter) % 5 == 0:
        time.sleep(0.1)  # as a checkpoint does
    return compiled_step(w, x)


def runs_eagerly(w, x):
    for _ in range(1000):  # So many that the compiled part is lost in them on the busiest machine.
        x = jnp.add(x, 1)
    return compiled_step(w, x)


@pytest.mark.parametrize("step", [jits_in_each_call, counts])
def test_a_step_that_compiles_again_is_limited_by_that_alone(step):
    report = mpjax.profile(step, W, np.ones((8, 16), np.float32), steps=10)
    assert (report.limit, report.outside_share) == ("recompilation", None)


@pytest.mark.parametrize("step", [saves_each_fifth_step, runs_eagerly])
def test_what_a_step_does_outside_of_jit_is_its_limit(step):
    report = mpjax.profile(step, W, np.ones((8, 16), np.float32), steps=10)
    assert report.limit == "code outside of jit"
    assert report.outside_share == pytest.approx(1 - report.compiled_seconds / report.step_seconds)
    assert "as given, without jit" in str(report).splitlines()[1]


def test_jax_operations_of_the_input_pipeline_are_input():
    def batches():
        x = np.ones((1024, 1024), np.float32)
        while True:
            jax.block_until_ready(x := jnp.tanh(jnp.asarray(x) @ x))
            yield x[:8, :16]

    report = mpjax.profile(jax.jit(train_step), W, batches=batches(), steps=4)
    assert report.input_share > 0.7
    assert report.limit == "input pipeline"


def test_a_batch_of_several_arguments_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"step\(state, \*batch\)"):
        mpjax.profile(lambda state, images, labels: state, jnp.ones(2), batches=[(jnp.ones(2), jnp.ones(2))])
