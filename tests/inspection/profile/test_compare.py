"""What a profile says besides time: FLOP/s, memory and its holders, the trace, and what changed since another one."""

import json
import types

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax.inspection.cli import main
from mpjax.inspection.profile.hlo import instructions
from mpjax.inspection.profile.hlo_text import HloModule
from mpjax.inspection.profile.memory import memory_of

SIDE = 128


def small(w, x):
    with jax.named_scope("first"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        return jnp.sum(h @ w)


def large(w, x):
    with jax.named_scope("first"):
        h = jax.lax.fori_loop(0, 40, lambda i, h: jnp.tanh(h @ w), x)
    with jax.named_scope("second"):
        return jnp.sum(h @ w)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    args = jnp.eye(SIDE), jnp.ones((SIDE, SIDE))
    slow = mpjax.profile(jax.jit(large), *args, steps=3)
    slow.to_json(folder / "slow.json")
    fast = mpjax.profile(
        jax.jit(small), *args, steps=3, trace=folder / "trace", against=folder / "slow.json", device="50,2,1"
    )
    return slow, fast, folder


def test_flops_are_those_of_the_matmuls_over_the_time_of_a_step(profiles):
    slow, fast, _ = profiles
    assert fast.flops == 2 * 2 * SIDE**3
    assert fast.flops_per_second == pytest.approx(fast.flops / fast.step_seconds)
    assert slow.peak_flops is None is slow.mfu  # of a CPU, which has no published peak
    assert fast.peak_flops == 1e12
    assert fast.mfu == pytest.approx(fast.flops_per_second / 1e12)
    assert "8.39 MFLOP a step" in str(fast)


def test_memory_has_the_parts_and_what_holds_them(profiles):
    _, fast, _ = profiles
    size = 4 * SIDE * SIDE
    assert fast.memory.arguments == 2 * size
    assert fast.memory.peak >= fast.memory.arguments + fast.memory.temporaries


def test_what_is_alive_at_the_peak_holds_the_memory():
    text = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[256]) -> f32[256] {
  %x = f32[256]{0} parameter(0)
  %kept = f32[256]{0} negate(%x), metadata={op_name="jit(step)/kept/neg"}
  %wide = (f32[256]{0}, f32[1024]{0}) custom-call(%kept), metadata={op_name="jit(step)/wide/call"}
  %part = f32[1024]{0} get-tuple-element(%wide), index=1
  %sum = f32[] reduce(%part), metadata={op_name="jit(step)/sum/reduce_sum"}
  %late = f32[512]{0} broadcast(%sum), metadata={op_name="jit(step)/late/broadcast"}
  ROOT %out = f32[256]{0} custom-call(%late, %kept), metadata={op_name="jit(step)/out/call"}
}
"""

    class Executable:
        def memory_analysis(self):
            stats = {"argument": 1024, "output": 1024, "alias": 1000, "temp": 5120}
            return types.SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in stats.items()})

    memory = memory_of(Executable(), text, instructions(HloModule(text)))
    assert (memory.peak, memory.results) == (1024 + 24 + 5120, 24)
    # `late` and `out` are made when `wide` is gone.
    assert [(h.module, h.bytes) for h in memory.holders] == [("wide", 5120), ("kept", 1024), ("sum", 4)]


def test_the_trace_is_kept_for_xprof_and_perfetto(profiles):
    files = {path.name for path in (profiles[2] / "trace").glob("plugins/profile/*/*")}
    assert "perfetto_trace.json.gz" in files
    assert any(name.endswith(".xplane.pb") for name in files)


def test_a_comparison_says_by_module_what_got_faster(profiles):
    slow, fast, _ = profiles
    on_gpus = [
        {"step_seconds": seconds, "device": "gpu", "modules": {"first": first, "second": (0.1, 0.1)}}
        for seconds, first in ((2.0, (0.8, 1.0)), (1.0, (0.4, 0.4)))
    ]
    compared = mpjax.profile.compare(*on_gpus)
    assert compared.speedup == 2
    assert [change.module for change in compared.faster] == ["first"]
    assert [change.module for change in compared.unchanged] == ["second"]
    assert [change.module for change in mpjax.profile.compare(*on_gpus[::-1]).slower] == ["first"]
    assert "faster: first" in str(compared)
    on_cpus = mpjax.profile.compare(slow, fast)
    assert on_cpus.speedup == pytest.approx(slow.step_seconds / fast.step_seconds)
    assert "faster: " not in str(on_cpus)


def test_a_report_against_an_earlier_one_begins_with_what_changed(profiles):
    slow, fast, _ = profiles
    assert fast.comparison.before == slow.step_seconds
    assert str(fast).index("Comparison of profiles") < str(fast).index("Time of a step")
    assert json.loads(fast.to_json())["comparison"]["before"] == slow.step_seconds


def test_what_is_no_profile_is_refused_before_the_step_runs(tmp_path):
    for text, words in (("{}", "is not a profile"), ("nothing", "is not JSON")):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            mpjax.profile(lambda x: 1 / 0, 1.0, against=tmp_path / "r.json")


def test_the_command_line_compares_and_keeps_the_trace(profiles, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_step.py").write_text(
        "import jax.numpy as jnp\n\ndef step(x):\n    return x @ x\n\ndef args():\n    return (jnp.eye(8),)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    call = ["profile", "my_step:step", "--args", "args", "--steps", "1"]
    assert main([*call, "--trace", "kept", "--against", str(profiles[2] / "slow.json")]) == 0
    assert "Comparison of profiles" in capsys.readouterr().out
    assert list((tmp_path / "kept").glob("plugins/profile/*/*.xplane.pb"))
    assert main([*call, "--against", "missing.json"]) == 2
    assert "missing.json" in capsys.readouterr().err
