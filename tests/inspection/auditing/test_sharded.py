"""FLOPs of a program on several devices: in total and per device, inside and outside of shard_map."""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.inspection.cli import main

DEVICES, ROWS, SIDE = 4, 64, 32

SCRIPT = f"""
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh(({DEVICES},), ("data",), axis_types=(AxisType.Auto,))


def loss(w, x):
    local = lambda w, x: jax.lax.psum(jnp.sum((x @ w) ** 2), "data")
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)


gradient = jax.grad(loss)


def arguments():
    return jnp.ones(({SIDE}, {SIDE})), jnp.ones(({ROWS}, {SIDE}))
"""


@pytest.fixture(scope="module")
def report():
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    inside = jax.shard_map(lambda w, x: x @ w, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    return mpjax.audit(lambda w, x: inside(w, x) @ w, jnp.ones((SIDE, SIDE)), jnp.ones((ROWS, SIDE)))


def test_flops_count_on_all_devices_and_on_each(report):
    of_each_matmul = 2 * ROWS * SIDE * SIDE  # One is inside of shard_map, one outside.
    assert report.flops == {"float32": 2 * of_each_matmul}
    assert [(row.devices, row.flops) for row in report.matmuls] == [(DEVICES, of_each_matmul), (1, of_each_matmul)]


def test_the_report_labels_both(report):
    assert "262 kFLOP in total on 4 devices (65.5 kFLOP per device)" in str(report)


def test_the_bound_is_that_of_one_device(report):
    whole = mpjax.audit(lambda w, x: (x @ w) @ w, jnp.ones((SIDE, SIDE)), jnp.ones((ROWS, SIDE)))
    slow = "T4"
    assert report.speedup_bound(slow).least == pytest.approx(whole.speedup_bound(slow).least / DEVICES)


def test_the_gradient_of_a_sharded_reduction_is_audited_under_a_policy(tmp_path, monkeypatch, capsys):
    (tmp_path / "sharded_step.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    call = ["audit", "sharded_step.py:gradient", "--args", "arguments", "--min-half", "1"]
    assert main([*call, "--policy", "mixed_bfloat16"]) == 0
    assert f"in total on {DEVICES} devices" in capsys.readouterr().out
    assert main(call) == 1
