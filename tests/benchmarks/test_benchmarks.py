"""The benchmarks run, interrupted runs continue, and their page names earlier and pending results."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import runpy

import jax
import jax.numpy as jnp
import optax
import pytest

from benchmarks import RESULTS, casting, faults, gpu, headlines, loss_scaling, report, sharded_steps
from benchmarks.loss_scaling_forms import forms
from benchmarks.training.cells import Cell, Results
from benchmarks.training.configurations import CONFIGURATIONS, flops_per_example, loss_function
from benchmarks.training.dry_run import dry_run, is_known
from benchmarks.training.tables import dry_run_table, hand_written, ratio
from benchmarks.training.worker import measure
from mpjax.inspection.devices import DEVICES
from mpjax.inspection.profiling.hlo import HloModule
from mpjax.planning import traffic
from mpjax.planning.target import TARGETS
from perf.environment import versions
from perf.memory import program_bytes
from testing import cheap_keys
from testing.gpu_program import GPU_PROGRAM
from testing.models.published import WORKLOADS
from testing.random_programs.evaluate import arrays_in_numpy


def one_layer(workload):
    fewest = {"layers": 1, "stages": (1,)}
    return dataclasses.replace(workload, **{name: n for name, n in fewest.items() if hasattr(workload, name)})


TOYS = {name: one_layer(workload.toy()) for name, workload in WORKLOADS.items()}
DISTINCT = {workload: name for name, workload in TOYS.items()}


@pytest.mark.parametrize("workload", DISTINCT, ids=DISTINCT.values())
def test_models_have_a_finite_loss_in_half(workload):
    batch = arrays_in_numpy(workload.batch)(cheap_keys.key(1))
    variables = arrays_in_numpy(workload.module().init)(cheap_keys.key(0), *workload.inputs(batch))
    params = variables.pop("params")
    in_half = loss_function(workload, CONFIGURATIONS["flax_bfloat16"])
    loss, _ = arrays_in_numpy(in_half)(params, variables, batch)
    assert loss.dtype == "float32"
    assert 0 < float(loss) < 100


def test_sequence_length_and_size_are_those_of_the_published_models():
    counts = {}
    for name in ("resnet50", "bert_base_128", "bert_large_512", "gpt2_medium"):
        workload = dataclasses.replace(WORKLOADS[name], batch_size=2)
        inputs = workload.inputs(jax.eval_shape(workload.batch, jax.random.key(0)))
        shapes = jax.eval_shape(workload.module().init, jax.random.key(0), *inputs)["params"]
        counts[name] = sum(x.size for x in jax.tree.leaves(shapes)) / 1e6
    # Millions of parameters as published; BERT's here have no more than the positions of their length.
    assert counts["resnet50"] == pytest.approx(25.56, abs=0.01)
    assert counts["bert_base_128"] == pytest.approx(110, abs=1.5)
    assert counts["bert_large_512"] == pytest.approx(336, abs=1.5)
    assert counts["gpt2_medium"] == pytest.approx(355, abs=1.5)


def test_flops_are_those_of_the_matmuls():
    workload = TOYS["ncf"]
    forward = 2 * (16 * 8 + 16)  # a dense layer of 16 to 8, the head of 8 + 8 to 1
    # The gradient of the head's input contracts its one output, which is a multiplication and no matmul.
    assert flops_per_example(workload) == 3 * forward - 2 * 16


def test_dry_run_lowers_the_full_size_for_cuda():
    found = dry_run(Cell.parse("ncf", "autocast_float16"), toy=False, target=TARGETS["h200"], device=None)
    assert found["matmuls"] >= 12
    assert found["arguments_bytes"] > 3 * 4 * 31e6  # parameters and Adam's two moments in float32


@pytest.mark.parametrize(("name", "half"), [("h200", "float16"), ("v5e", "bfloat16")])
def test_a_step_is_compiled_for_an_absent_device(name, half):
    target = TARGETS[name]
    devices = target.devices()
    if devices is None:
        pytest.skip(target.missing)
    found = dry_run(Cell.parse("ncf", f"flax_{half}"), toy=True, target=target, device=devices[0])
    assert found["half_matmuls"] == found["compiled_matmuls"] > 0
    assert found["planned_bytes"] >= found["arguments_bytes"]


def test_rows_of_the_same_program_and_versions_are_kept():
    lowered = {"program": "a", "versions": versions(), "matmuls": 12}
    compiled, device = lowered | {"planned_bytes": 100}, jax.devices()[0]
    assert is_known(lowered, lowered, None)
    assert not is_known(lowered, lowered, device)  # It can be compiled.
    assert is_known(compiled, lowered, device)
    assert not is_known(compiled | {"versions": {**versions(), "jax": "0.4.1"}}, lowered, device)
    assert not is_known(compiled | {"program": "b"}, lowered, device)


def test_a_dry_run_returns_the_known_row_of_its_program():
    cell, target = Cell.parse("ncf", "autocast_float16"), TARGETS["h200"]
    row = dry_run(cell, True, target, None) | {"planned_bytes": 100}
    assert dry_run(cell, True, target, None, row) == row
    assert "planned_bytes" not in dry_run(Cell.parse("ncf", "tf32"), True, target, None, row)


def test_kernels_move_only_the_bytes_they_need():
    program = HloModule(GPU_PROGRAM)
    found = {kernel.name: kernel for kernel in traffic.kernels(program, program.entry)}
    half, full = 2, 4

    def moved(name):
        return found[name].times, found[name].bytes

    assert moved("loop_subtract_fusion") == (1, 3 * full * 1000 * 128)  # in the branch of a finite loss
    assert moved("wrapped_convert") == (1, (full + half) * 256 * 128)
    assert moved("cudnn-conv.1") == (1, half * (2 * 8 * 32 * 32 * 64 + 64 * 3 * 3 * 64))
    # The embedding of 128 tokens reads their rows, not the table; its gradient adds to those rows.
    assert moved("loop_gather_fusion") == (1, (full + half) * 128 * 128 + 4 * 128)
    assert moved("input_scatter_fusion") == (1, 3 * half * 128 * 128 + 4 * 128)
    # In the loop: a Triton matmul; reading a slice; writing a slice in place, in an asynchronous kernel.
    assert moved("gemm_fusion_dot_general.1") == (16, half * (8 * 256 + 256 * 128 + 8 * 128))
    assert moved("input_concatenate_fusion") == (16, half * (8 * 128 + 8 * 128 + 8 * 256) + 4)
    assert moved("fusion-start.1") == (16, half * 2 * 8 * 128 + 4)
    assert found["gemm_fusion_dot_general.1"].flops == 2 * 8 * 256 * 128
    assert found["cudnn-conv.1"].flops == 2 * 8 * 32 * 32 * 64 * 64 * 3 * 3


def test_a_tpus_scatter_adds_in_place_and_its_copies_move_a_slice():
    # XLA for TPUs nests the scatter of an embedding's gradient in two fusions, and starts a copy to vector memory.
    text = """HloModule m
%inner (table: f32[1000,128], rows: s32[32], added: f32[32,128]) -> f32[1000,128] {
  %table = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %rows = s32[32]{0:T(128)} parameter(1)
  %added = f32[32,128]{1,0:T(8,128)} parameter(2)
  ROOT %scatter-add = f32[1000,128]{1,0:T(8,128)} scatter(%table, %rows, %added), to_apply=%add
}
%outer (table.1: f32[1000,128], rows.1: s32[32], added.1: f32[32,128]) -> f32[1000,128] {
  %table.1 = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %rows.1 = s32[32]{0:T(128)} parameter(1)
  %added.1 = f32[32,128]{1,0:T(8,128)} parameter(2)
  ROOT %fusion.1 = f32[1000,128]{1,0:T(8,128)} fusion(%table.1, %rows.1, %added.1), kind=kCustom, calls=%inner
}
ENTRY %main (table.2: f32[1000,128], rows.2: s32[32], added.2: f32[32,128]) -> f32[1000,128] {
  %table.2 = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %rows.2 = s32[32]{0:T(128)} parameter(1)
  %added.2 = f32[32,128]{1,0:T(8,128)} parameter(2)
  %part = ((f32[1000,128]{1,0:T(8,128)}), f32[32,128]{1,0:T(8,128)S(1)}, s32[]) dynamic-slice-start(%table.2, %rows.2)
  ROOT %fusion.2 = f32[1000,128]{1,0:T(8,128)} fusion(%table.2, %rows.2, %added.2), kind=kCustom, calls=%outer
}
"""
    assert traffic.bytes_moved(text) == 4 * (3 * 32 * 128 + 32) + 4 * 32 * 128


def test_the_batch_of_a_tpus_matmul_is_not_multiplied_with_itself():
    # 8 × 16 attention scores of 1024 × 1024 over 64 features, as XLA for TPUs writes them; a padded convolution.
    text = """HloModule m
ENTRY %main (q: bf16[8,1024,16,64], k: bf16[8,1024,16,64], x: bf16[2,4,4,8], w: bf16[3,3,8,16]) -> bf16[2,4,4,16] {
  %q = bf16[8,1024,16,64]{3,1,2,0} parameter(0)
  %k = bf16[8,1024,16,64]{3,1,2,0} parameter(1)
  %x = bf16[2,4,4,8]{3,2,1,0} parameter(2)
  %w = bf16[3,3,8,16]{3,2,1,0} parameter(3)
  %qk = bf16[8,16,1024,1024]{2,3,1,0} convolution(%q, %k), window={size=8x16 stride=7x15 lhs_dilate=8x16}, dim_labels=0b1f_0o1i->01bf
  ROOT %conv = bf16[2,4,4,16]{3,2,1,0} convolution(%x, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
}
"""  # noqa: E501
    program = HloModule(text)
    found = {kernel.name: kernel.flops for kernel in traffic.kernels(program, program.entry)}
    assert found == {"qk": 2 * 8 * 16 * 1024 * 1024 * 64, "conv": 2 * 2 * 10 * 10 * 8 * 16}


@pytest.mark.parametrize(("bandwidth", "microseconds"), [(1e12, 4.0), (1e8, 3 + 6.4)])
def test_a_kernel_takes_at_least_its_launch_and_the_longer_of_bytes_and_flops(bandwidth, microseconds):
    text = """HloModule m
ENTRY %main (a: f16[8,8], b: f16[8,16]) -> f16[8,16] {
  %a = f16[8,8]{1,0} parameter(0)
  %b = f16[8,16]{1,0} parameter(1)
  ROOT %dot.1 = f16[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    device = dataclasses.replace(DEVICES["H200"], bandwidth=bandwidth, float16=2 * 8 * 16 * 8 / 1e-6)
    assert traffic.summary(text, device)["least_seconds"] == pytest.approx(1e-6 * microseconds)


def test_a_compiled_program_is_summarised():
    found = traffic.summary(GPU_PROGRAM, DEVICES["H200"])
    assert found["kernels"] == 27 + 16 * 13 + 12
    assert (found["compiled_matmuls"], found["half_matmuls"], found["float32_matmuls"]) == (5, 5, 0)
    in_full = traffic.summary(GPU_PROGRAM.replace("f16[", "f32["), DEVICES["H200"])
    assert (in_full["half_matmuls"], in_full["float32_matmuls"]) == (0, 5)
    assert found["bytes_moved"] < in_full["bytes_moved"] < 2 * found["bytes_moved"]


def test_dry_run_table_states_that_nothing_ran():
    row = {"planned_bytes": 2e9, "bytes_moved": 4e9, "kernels": 10, "half_matmuls": 0, "compiled_matmuls": 3}
    row |= {"compile_seconds": 1.0, "batch_size": 8, "least_seconds": 0.5}
    half = row | {"planned_bytes": 1e9, "bytes_moved": 2e9, "least_seconds": 0.25, "half_matmuls": 3}
    rows = {
        "float32": row,
        "flax_float16+remat": half,
        "autocast_float16+remat": half | {"bytes_moved": 3e9},
        "tf32": {"matmuls": 3, "operations": 50},
        "flax_float16": {"error": "ValueError: no"},
    }
    text = dry_run_table({"results": {"ncf": rows}}, TARGETS["h200"])
    assert "for an H200 without a device: the programs were not autotuned and\nnever ran" in text
    assert "full float32). Source: NVIDIA H200 datasheet (SXM)." in text
    rest = "10 | 0 of 3 | 1.0 s |"
    assert f"| float32 | 2.00 GB | 1.00 | - | 4.0 GB | 1.00 | - | 500.0 ms | 1.00 | - | - | {rest}" in text
    bytes_and_time = "3.0 GB | 0.75 | 1.50 | 250.0 ms | 0.50 | - | 1.00"
    assert f"| autocast_float16+remat | 1.00 GB | 0.50 | 1.00 | {bytes_and_time} | 10 | 3 of 3 | 1.0 s |" in text
    assert "JAX's CUDA plugin is not installed" in text
    assert "\n\n- ncf: tf32\n" in text
    assert "- ValueError: no: ncf flax_float16\n" in text
    assert hand_written("tf32") == ""


def test_a_cell_is_measured():
    row = measure(Cell.parse("ncf", "flax_bfloat16"), toy=True, seconds=0.01, profile=True)
    assert row["finite_loss"]
    assert "profile_error" not in row


@pytest.mark.parametrize("name", ["float64", "float32+remat+remat"])
def test_unknown_cells_are_refused(name):
    with pytest.raises(ValueError, match=r"variant|configuration"):
        Cell.parse("ncf", name)


# A command with a flag that has no effect beside the others, which comes last.
IGNORED = """
casting --no-compile --compilations 3
casting --residuals half --regions
compiled --compilations 5
compiled --passes --out folder
communication --devices 2 --h200
communication --devices 2 --tpu 8x8
communication --tpu 8x8 --h200
launcher --foreign folder --rounds 3
launcher --foreign folder --parts step
launcher --scripts name
launcher --parts startup --rounds 3
loss_scaling --sharded --bound compute-bound
inspection --parts watch --models ResNet-18
inspection --parts times --rounds 3
lean_state --planned --parity
lean_state --planned --rounds 3
lean_state --parity --rounds 3
lean_state --planned --seeds 3
lean_state --tasks gpt
training.__main__ --dry-run --seconds 3
training.__main__ --dry-run --cell-limit 3
training.__main__ --dry-run --target v5e --variants
training.__main__ --dry-run --target v5e --quick
training.__main__ --toy --target v5e
training.__main__ --cells float32 --full
training.__main__ --only ncf --cells float32 --quick
training.__main__ --quick --full
"""


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("line", IGNORED.split("\n")[1:-1])
def test_a_flag_without_effect_is_refused(line, monkeypatch, capsys):
    module, *flags = line.split()
    environment = dict(os.environ)  # The processes that later tests start would print what one of them turns on.
    monkeypatch.setattr("sys.argv", line.split())
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module(f"benchmarks.{module}", run_name="imported")["main"]()
    quoted = next(flag for flag in reversed(flags) if flag.startswith("--"))
    error = capsys.readouterr().err.splitlines()[-1]
    assert quoted in error
    assert "no effect" in error or "not allowed with" in error
    assert os.environ == environment | {"PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"]}


def test_results_of_a_cell_are_merged_and_an_error_is_replaced(tmp_path):
    cell, path = Cell.parse("ncf", "float32"), tmp_path / "results.json"
    Results(path).add(cell, {"error": "out of memory"})
    Results(path).add(cell, {"milliseconds": 2.0, "compile_seconds": 5.0})
    Results(path).add(cell, {"milliseconds": 1.0})
    assert Results(path).row(cell) == {"milliseconds": 1.0, "compile_seconds": 5.0}


def test_gpu_run_continues_with_unfinished_steps(tmp_path, monkeypatch):
    (tmp_path / "ends_with.py").write_text("import sys; sys.exit(int(sys.argv[1]))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def steps(status):
        short = gpu.Step("short", ("ends_with", "0"), 0, 60, writes=False)
        return short, dataclasses.replace(short, name="long", arguments=("ends_with", str(status)))

    assert gpu.run_steps(steps(gpu.INCOMPLETE), tmp_path, budget=60) == {"short": "done", "long": "incomplete"}
    assert gpu.run_steps(steps(2), tmp_path, budget=60) == {"short": "done", "long": "failed with exit status 2"}
    assert gpu.run_steps(steps(0), tmp_path, budget=60) == {"short": "done", "long": "done"}
    last = dataclasses.replace(steps(0)[0], name="last", min_seconds=100)
    assert gpu.run_steps((last,), tmp_path, budget=60) == {"last": "not started"}


@pytest.fixture
def folder(tmp_path):
    """Results like those of a GPU, of the current and of an old version."""
    now = versions()
    fast = {"examples_per_second": 400.0, "milliseconds": 2.5, "peak_bytes": 50, "batch_size": 1, "versions": now}
    slow = {**fast, "examples_per_second": 100.0, "peak_bytes": 100, "versions": {**now, "mpjax": "0.0.1"}}
    training = {
        "environment": {"platform": "gpu", "device": "a GPU", **now},
        "matmul_peak": {"float16": 1e6},
        "flops_per_example": {"gpt2_medium": 1e3},
        "results": {"gpt2_medium": {"float32": slow, "autocast_float16": fast}},
    }
    old = {"environment": {"device": "CPU", "jax": "0.4.1", "mpjax": now["mpjax"]}, "results": {}}
    for name, content in {"training_gpu": training, "faults_cpu": old}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        (tmp_path / f"{name}.md").write_text(f"the table of {name}\n")
    return tmp_path


def test_the_readme_leads_with_the_headlines_of_the_results():
    rows = headlines.headlines(RESULTS)
    assert len(rows) == 6
    readme = (RESULTS.parents[1] / "README.md").read_text()
    page = (RESULTS / "README.md").read_text()
    for row in rows:
        assert row.row("benchmarks/results/README.md") in readme, "run: python -m benchmarks.headlines"
        assert row.row() in page, "run: python -m benchmarks.report"
        assert f"\n## {row.title}\n" in page


FORMS = {"written out": "", "in a `scan`": "+scan", "in a `scan`, with a checkpoint each": "+scan_remat"}
DEEP = {
    "ViT-B/16, six layers": "vit_b16",
    "GPT-2 medium, two layers": "gpt2_medium",
    "BERT base, six layers": "bert_base_128",
}
TPU_ROWS = {
    "LSTM, one layer in a `scan`": ("lstm_lm", ""),
    "Deep Speech 2, one recurrent layer": ("deep_speech_2", ""),
    "ResNet-50, first stage with one block": ("resnet50", ""),
} | {f"{model} {form}": (DEEP[model], FORMS[form]) for model in DEEP for form in FORMS}


def test_the_page_of_dtypes_quotes_the_results_for_tpus():
    page = (RESULTS.parents[1] / "docs/guides/dtypes.md").read_text()
    of_float32 = {"planned_bytes": [], "bytes_moved": []}
    shown = {label: f"| {label} |" for label in TPU_ROWS}
    for target in ("v5e", "v6e"):
        results = json.loads((RESULTS / f"training_dry_run_{target}.json").read_text())["results"]
        for label, (model, form) in TPU_ROWS.items():
            float32, by_hand, autocast = (
                results.get(model, {}).get(name + form, {}) for name in ("tf32", "flax_bfloat16", "autocast_bfloat16")
            )
            for key, found in of_float32.items():
                of_by_hand = ratio(autocast, by_hand, key)
                shown[label] += f" {of_by_hand:.2f} |" if of_by_hand else " |"
                found += [x for x in [ratio(autocast, float32, key)] if x]
    assert not [row for row in shown.values() if row not in page]
    memory, moved = (f"{min(found):.2f} to {max(found):.2f}" for found in of_float32.values())
    assert f"{memory} of float32's memory and {moved} of its bytes" in page.replace("\n", " ")


def test_every_file_of_results_has_its_command_and_its_place_on_the_page():
    page = (RESULTS / "README.md").read_text()
    for path in RESULTS.iterdir():
        if path.suffix == ".json":
            environment = json.loads(path.read_text())["environment"]
            assert importlib.util.find_spec(environment["command"].split()[2]), path
            assert f"## {report.TITLES[path.stem]}\n\n{report.origin(environment)}\n" in page, path
        elif path.name != "README.md":
            assert f"({path.name})" in page or path.with_suffix(".json").exists(), path


def test_report_shows_all_results_and_says_of_which_versions_they_are(folder):
    text = report.write(folder).read_text()
    assert "the table of training_gpu" in text
    assert text.index("| Speed of a float16 training step over float32 | gpt2_medium 4.00× |") < text.index("## ")
    assert re.search(r"Made with jax 0\.4\.1[^\n;]* \(all\)", text)
    assert re.search(r"Made with [^\n]* \(gpt2_medium float32\)", text)
    assert "Stale" not in text
    assert (folder / "speedup.png").stat().st_size > 1000


def test_a_plan_is_not_a_measurement(folder):
    rows = {"float32": {"planned_bytes": 100}, "autocast_bfloat16": {"planned_bytes": 58}}
    content = {"environment": {"device": "a GPU"}, "results": {"gpt2_medium": rows, "resnet50": rows}}
    (folder / "training_dry_run.json").write_text(json.dumps(content))
    assert "planned_memory.png" not in report.plot_all(folder)
    (folder / "training_gpu.json").unlink()
    assert report.plot_all(folder) == ["planned_memory.png"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # some probes do on purpose what mpjax warns about
def test_mpjax_has_none_of_the_faults():
    found = faults.run(libraries=("mpjax",))
    has = {fault for fault, cells in found.items() if cells["mpjax"] not in (faults.NOT, faults.NOT_APPLICABLE)}
    assert not has
    assert sum(cells["mpjax"] == faults.NOT for cells in found.values()) == len(found) == 22


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the oldest XLA gathers weights as well")
def test_a_sharded_step_adds_one_reduction_of_predicates_and_gathers_nothing():
    found, x = forms(optax.adam(1e-3), loss_scaling.loss_in("float16")), jnp.ones((8, 16))
    params = loss_scaling.init_params((16, 16, 16))
    steps = {name: sharded_steps.compiled(found[name], params, x, x)[0] for name in sharded_steps.FORMS}
    plain = sharded_steps.counted(steps["no loss scaling"])
    assert {"all-gather float16", "all-reduce float32"} <= set(plain)
    for name in ("mpjax: apply_gradients", "mpjax: tx.update, apply_updates"):
        assert set(sharded_steps.counted(steps[name]) - plain) == {"all-reduce bool"}


@functools.cache
def total_units(form, donate, layers=16, width=256):
    """Memory of a step of Adam, in units of its float32 parameters: arguments, results and temporary bytes."""
    found = forms(optax.adam(1e-3), loss_scaling.loss_in("float16"))[form]
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    batch = jax.ShapeDtypeStruct((2, width), jnp.float32)
    args = (params, jax.eval_shape(found.init, params), batch, batch)
    step = jax.jit(found.step, donate_argnums=(0, 1) if donate else ()).lower(*args).compile()
    return program_bytes(step) / (4 * layers * width**2)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="with several devices, XLA would gather what this saves")
@pytest.mark.parametrize(("donate", "most"), [(False, 7.25), (True, 5.1)])
def test_memory_of_a_step_in_addition_to_adams(donate, most):
    adam = total_units("no loss scaling", donate=donate)
    assert adam < most - 0.9
    for form in ("mpjax: apply_gradients", "mpjax: tx.update, apply_updates"):
        assert total_units(form, donate=donate) < most


def test_the_casting_table_has_the_error_over_casts_by_hand():
    row = {"half_share": 1.0, "risky": 0, "casts": 1, "residuals": 0.5, "trace": 1.0, "forward_trace": 1.0}
    accurate, overflowing = row | {"error_of_by_hand": 0.8}, row | {"error_of_by_hand": float("nan")}
    programs = {"a": {"ours": accurate, "theirs": overflowing}, "callback": {"ours": row, "theirs": {"error": "fails"}}}
    ours, theirs = casting.summary(programs).splitlines()[2:]
    assert "| 0.80 (0.80, 1) |" in ours
    assert "(not finite, 1) |" in theirs
    assert "| - (-, 0) |" in casting.summary({"callback": {"ours": row}})


def test_outcomes_of_a_fault_by_library():
    poisoned = next(fault for fault in faults.FAULTS if "accumulated" in fault.name)
    cells = faults.run([poisoned], libraries=("mpjax", "optax alone", "jaxamp"))[poisoned.name]
    assert cells == {"mpjax": faults.NOT, "optax alone": faults.HAS_IT, "jaxamp": faults.NOT_APPLICABLE}
    assert faults.outcome(lambda: 1 / 0) == "fails: ZeroDivisionError: division by zero"
