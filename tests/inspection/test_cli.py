"""`python -m mpjax`: on a script that knows nothing of it, and with every mistake one can make."""

from __future__ import annotations

import csv
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import mpjax
from examples.imagenet.__main__ import main as train_images
from mpjax.inspection.cli import main
from mpjax.inspection.tools import TOOLS
from testing import cheap_keys
from tests.examples.imagenet.runs import make_quick

SCRIPT = """
import jax
import jax.numpy as jnp
import numpy as np


def loss_fn(params, batch):
    return jnp.mean(jnp.exp(batch @ params["w"] * params["scale"]))


def example_args():
    return example(1.0)


def overflowing():
    return example(1e3)


def example(scale):
    return {"w": jnp.ones((64, 64)), "scale": jnp.float32(scale)}, jnp.ones((32, 64))


def keywords():
    params, batch = example_args()
    return {"params": params, "batch": batch}


def scaled_loss(params, *, batch):
    return jnp.mean((batch @ params["w"] * params["scale"]) ** 2)


def batches():
    params, batch = example_args()
    for i in range(3):
        yield params, batch * i


@jax.jit
def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), loss


def one_array():
    return jnp.ones(3)


def takes_one(x):
    return (x,)


def nothing():
    yield from ()


def shapes():
    return jax.eval_shape(example_args)


def raising():
    raise RuntimeError("no data here\\nsecond line")


def numpy_loss(params, batch):
    return np.mean(np.asarray(batch))


def printing_loss(params, batch):
    print(float(batch.sum()))
    return loss_fn(params, batch)


def loss_and_aux(params, batch):
    return loss_fn(params, batch), {"batch": batch}


def batch_first(batch, params):
    return loss_fn(params, batch)


def batch_and_params():
    params, batch = example_args()
    return batch, params


config = {}
"""


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    (tmp_path / "my_train.py").write_text(SCRIPT)
    (tmp_path / "broken_train.py").write_text("1 / 0\n")
    (tmp_path / "lacking_train.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("my_train", "broken_train", "lacking_train"):
        sys.modules.pop(name, None)


def run(capsys, *arguments):
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_without_a_command_it_lists_the_commands(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert all(re.search(rf"^    {name}\b", out, re.MULTILINE) for name in ("run", *(tool.name for tool in TOOLS)))


def test_runs_as_a_program_on_a_script_in_the_working_directory(script):
    command = [sys.executable, "-m", "mpjax", "audit", "my_train:loss_fn", "--args", "my_train:example_args"]
    home = str(pathlib.Path(mpjax.__file__).parent.parent)
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=script, check=True, env={**os.environ, "PYTHONPATH": home}
    )
    assert "0.0% in half" in done.stdout
    assert "my_train.py:8" in done.stdout


def test_policy_puts_the_function_under_autocast(capsys):
    code, out, _ = run(capsys, "audit", "my_train.py:loss_fn", "--args", "example_args", "--policy", "mixed_bfloat16")
    assert code == 0
    assert "bfloat16" in out
    assert "100.0% in half" in out


def test_writes_the_files_that_are_asked_for(capsys, script):
    for command in ("audit", "explain"):
        code, _, _ = run(
            capsys, command, "my_train:loss_fn", "--args", "my_train:keywords", "--html", "r.html", "--json", "r.json"
        )
        assert code == 0
        assert json.loads((script / "r.json").read_text())["flops"]
        page = (script / "r.html").read_text()
        assert "my_train.py:8" in page
        assert "http" not in page


def test_audit_fails_where_too_little_is_half(capsys):
    call = ("audit", "my_train:loss_fn", "--args", "example_args", "--min-half", "0.99")
    code, _, err = run(capsys, *call)
    assert code == 1
    assert "my_train.py:8" in err
    assert run(capsys, *call, "--policy", "mixed_float16")[0] == 0


def test_nonfinite_exits_with_one_if_there_is_something(capsys):
    code, out, _ = run(capsys, "find_nonfinite", "my_train:loss_fn", "--args", "example_args")
    assert code == 0
    assert "finite" in out
    code, out, _ = run(capsys, "find_nonfinite", "my_train:loss_fn", "--args", "overflowing")
    assert code == 1
    assert "my_train.py:8" in out
    assert "exp" in out


def test_numerics_goes_over_the_batches_that_are_yielded(capsys, script):
    code, _, _ = run(capsys, "numerics", "my_train:loss_fn", "--args", "batches", "--json", "r.json")
    assert code == 0
    assert json.loads((script / "r.json").read_text())["batches"] == 3


def test_profile_measures_the_steps_that_are_asked_for(capsys, script):
    code, _, _ = run(capsys, "profile", "my_train:train_step", "--args", "batches", "--steps", "2", "--json", "r.json")
    assert code == 0
    assert json.loads((script / "r.json").read_text())["steps"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("my_train", ["'my_train'", "expected module:name"]),
        ("my_trian:loss_fn", ["no module 'my_trian'", "did you mean 'my_train'"]),
        ("no_such/train.py:loss_fn", ["no file 'no_such/train.py'"]),
        ("broken_train:loss_fn", ["importing broken_train fails", "ZeroDivisionError"]),
        ("lacking_train:loss_fn", ["'no_such_library', which is not installed"]),
        ("my_train:los_fn", ["no 'los_fn'", "did you mean 'loss_fn'"]),
        ("my_train:zzz", ["no 'zzz'", "its functions are loss_fn, example_args"]),
        ("my_train:config", ["is a dict", "should be a function"]),
        ("my_train:loss_fn", ["takes (params, batch)", "given ()", "--args module:make_args"]),
        ("my_train:takes_one --args example_args", ["takes (x)", "given (dict, ArrayImpl)"]),
        ("my_train:loss_fn --args one_array", ["returned an ArrayImpl", "a tuple", "yield batches"]),
        ("my_train:loss_fn --args takes_one", ["called without arguments", "'x'"]),
        ("my_train:loss_fn --args config", ["is a dict", "makes the arguments"]),
        ("my_train:loss_fn --args nothing", ["yielded nothing"]),
        ("my_train:loss_fn --args example_args --policy mixed_float61", ["--policy 'mixed_float61'", "mixed_float16"]),
    ],
)
def test_mistakes_exit_with_two_and_say_what_was_found_and_what_is_expected(capsys, arguments, words):
    code, out, err = run(capsys, "audit", *arguments.split())
    assert (code, out) == (2, "")
    assert [word for word in words if word not in err] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("numerics my_train:loss_fn --args shapes", ["ShapeDtypeStruct", "give arrays"]),
        ("find_nonfinite my_train:loss_fn --args shapes", ["ShapeDtypeStruct", "give arrays"]),
        ("profile my_train:train_step --args shapes", ["ShapeDtypeStruct", "needs arrays"]),
        ("audit my_train:loss_fn --args raising", ["RuntimeError: no data here"]),
        ("audit my_train:numpy_loss --args example_args", ["jax.numpy", "TracerArrayConversionError"]),
        ("audit my_train:printing_loss --args example_args", ["needs the value of an array"]),
        ("profile my_train:train_step --args example_args --steps 0", ["steps=0", "1 or more"]),
        ("numerics my_train:loss_and_aux --args example_args", ["--has-aux"]),
        ("audit my_train:loss_fn --args example_args --device B100", ["'B100'", "did you mean"]),
        ("audit my_train:loss_fn --args example_args --json no/such/r.json", ["--json 'no/such/r.json'", "directory"]),
        ("audit my_train:loss_fn --args example_args --csv .", ["--csv '.'", "it is a directory"]),
    ],
)
def test_bad_calls_of_every_command_exit_with_two_and_one_line(capsys, arguments, words):
    code, out, err = run(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert [word for word in words if word not in err] == []


def test_options_reach_the_functions(capsys, script):
    first = ("numerics", "my_train:batch_first", "--args", "batch_and_params", "--argnums", "1", "--csv", "r.csv")
    assert run(capsys, *first)[0] == 0
    rows = list(csv.DictReader((script / "r.csv").read_text().splitlines()))
    assert {row["op"] for row in rows} >= {"dot_general", "exp"}
    for command in ("audit", "explain", "find_nonfinite"):
        made = "overflowing" if command == "find_nonfinite" else "example_args"
        assert run(capsys, command, "my_train:loss_fn", "--args", made, "--csv", "r.csv")[0] == int(
            made != "example_args"
        )
        assert list(csv.DictReader((script / "r.csv").read_text().splitlines()))
    assert run(capsys, "profile", "my_train:train_step", "--args", "batches", "--steps", "1", "--carry", "9")[0] == 2
    assert run(capsys, "profile", "my_train:train_step", "--args", "batches", "--steps", "1", "--carry", "1")[0] == 0


COMMANDS = ["audit", "explain", "numerics", "layerwise_error", "search", "find_nonfinite", "profile"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_keyword_arguments(capsys, command):
    policy = ("--policy", "mixed_float16") if command == "layerwise_error" else ()
    fun = "train_step" if command == "profile" else "scaled_loss"
    code, out, err = run(capsys, command, f"my_train:{fun}", "--args", "keywords", *policy)
    assert (code, err) == (0, ""), out


@pytest.mark.standard_promotion  # as the scripts are
def test_the_image_training_script_audits_and_profiles_its_step_instead_of_training(capsys, script, monkeypatch):
    def profile(step, state, batches, steps):
        first, second = itertools.islice(batches, 2)
        assert (first.images != second.images).any()
        return f"{steps} steps, loss scale {jax.eval_shape(step, state, first)[1]['loss_scale']}"

    monkeypatch.setattr(mpjax, "profile", profile)
    make_quick(monkeypatch)
    cheap_keys.make_default(monkeypatch)
    for inspection in ("--audit", "--profile"):
        flags = [inspection, "--batch-size", "32", "--amp", "autocast", "--policy", "mixed_bfloat16"]
        assert train_images(flags) == 0
    out = capsys.readouterr().out
    assert "train_step: " in out
    assert re.search(r"ResNet/BasicBlock_\S+/Conv_", out)
    assert "100.0% in half" in out
    assert "10 steps, loss scale ShapeDtypeStruct(shape=()" in out
    assert not (script / "runs").exists()
