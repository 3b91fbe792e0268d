"""mpjax.profile: where the time of a step goes, on the CPU for real and on a GPU from traces made by hand."""

import dataclasses
import itertools
import json
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.inspection.profiling import hlo
from mpjax.inspection.profiling.hlo import HloModule
from mpjax.inspection.profiling.kernels import Kernel, Recording, Split, read, uses_tensor_cores
from mpjax.inspection.profiling.profile import Timing, report_of
from mpjax.inspection.profiling.stepping import Stepper, seconds_per_step
from testing.gpu_program import GPU_PROGRAM
from tests.inspection.profiling.gpu_traces import Span, advised, kernel, profile_data, transfer

pytestmark = pytest.mark.usefixtures("always_compiled")

ON = """volta_h884gemm_128x128_ldg8_nn volta_fp16_s884cudnn_fp16_128x128_ldg8_relu_exp_small_nhwc_tn_v1
turing_fp16_s1688cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1 turing_h1688gemm_128x128_nn
ampere_bf16_s16816gemm_bf16_128x64_sliced1x2_ldg8_f2f_tn ampere_s16816gemm_fp16_128x128_ldg8_stages_64x3_nn
void_cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4>(Params)
cutlass_75_wmma_tensorop_s161616gemm_f16_32x32_64x1_nn_align8
cutlass3x_sm100_tensorop_s256x256x16implicit_gemm_fprop_bf16
sm80_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16_execute_kernel__5x_cublas
sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_g1_tensor16x8x8_alignc4
sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel
sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1
nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT nvjet_hsh_32x64_64x16_4x1_v_bz_splitK_TNN nvjet_sss_tf32_128x256_TNT
cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_6_128x64x64_4x1x1_cga1x1x1_kernel0_0
cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16 fmha_cutlassF_bf16_aligned_64x128_rf_sm80
flash_fwd_splitkv_kernel flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel""".split()
OFF = """volta_sgemm_128x64_nn ampere_sgemm_32x32_sliced1x4_nn maxwell_hgemm_128x64_nn implicit_convolve_sgemm
sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel__5x
void_cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(T1::Params) ampere_scudnn_128x64_relu_small_nn_v1
cublasLt::splitKreduce_kernel gemv2T_kernel_val nchwToNhwcKernel flash_bwd_dot_do_o_kernel flash_bwd_convert_dq_kernel
gemmSN_NN_kernel
cudnn::winograd_nonfused::winogradForwardData4x4 loop_add_fusion_3 input_reduce_fusion_110""".split()

# What XLA's GPU backend writes, shortened to what is read from it.
HLO = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/train.py"
2 "/site-packages/flax/linen/linear.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=19}
2 {file_name_id=2 function_name_id=1 line=700 end_line=700 column=4 end_column=19}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused_dot (a: f16[64,256], b: f16[256,256]) -> f16[64,256] {
  %a = f16[64,256]{1,0} parameter(0)
  %b = f16[256,256]{1,0} parameter(1)
  %dot.1 = f16[64,256]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata=@dot
  ROOT %tanh.1 = f16[64,256]{1,0} tanh(%dot.1), metadata=@tanh
}

%fused_cast (c: f32[256,256]) -> f16[256,256] {
  %c = f32[256,256]{1,0} parameter(0)
  ROOT %convert.1 = f16[256,256]{1,0} convert(%c), metadata=@convert
}

ENTRY %main (p: f32[256,256], x: f16[64,256]) -> f32[3,256] {
  %p = f32[256,256]{1,0} parameter(0)
  %x = f16[64,256]{1,0} parameter(1)
  %loop_convert_fusion = f16[256,256]{1,0} fusion(%p), kind=kLoop, calls=%fused_cast, metadata=@convert
  %gemm_fusion_dot.1 = f16[64,256]{1,0} fusion(%x, %loop_convert_fusion), kind=kCustom, calls=%fused_dot, @triton
  %custom-call.2 = (f32[3,256]{1,0}, s8[4096]{0}) custom-call(%x, %gemm_fusion_dot.1), @cublas
  ROOT %get-tuple-element.1 = f32[3,256]{1,0} get-tuple-element(%custom-call.2), index=0
}
"""
for mark, metadata in {
    "@dot": '{op_name="jit(step)/jvp(Net)/Dense_0/dot_general" stack_frame_id=2}',
    "@triton": 'metadata=@tanh, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}',
    "@cublas": 'custom_call_target="__cublas$gemm", metadata=@backward',
    "@tanh": '{op_name="jit(step)/jvp(Net)/tanh" stack_frame_id=1}',
    "@convert": '{op_name="jit(step)/jvp(Net)/Dense_0/convert_element_type" stack_frame_id=2}',
    "@backward": '{op_name="jit(step)/transpose(jvp(Net))/Dense_0/dot_general" stack_frame_id=2}',
}.items():
    HLO = HLO.replace(mark, metadata)
TIMING = Timing(step=100e-6, compile=1.0)


def instructions(text):
    return hlo.instructions(HloModule(text))


def gpu_recording(kernels, marks=(), transfers=(), steps=1, text=HLO):
    planes = {
        "/host:CPU": {"python": marks},
        "/device:GPU:0": {"Stream #13(Compute)": kernels, "Stream #14(MemcpyH2D)": transfers, "XLA Ops": kernels},
    }
    return Recording(read(profile_data(planes)), text, steps)


def gpu_report(*args, capability=8.0, **kwargs):
    recording = gpu_recording(*args, **kwargs)
    return report_of(recording, recording, TIMING, device="NVIDIA X", capability=capability)


def test_kernels_are_told_apart_by_their_names():
    assert {name: uses_tensor_cores(name) for name in ON} == dict.fromkeys(ON, True)
    assert {name: uses_tensor_cores(name) for name in OFF} == dict.fromkeys(OFF, False)


def test_a_triton_matmul_is_told_by_its_operands_and_the_gpu():
    dot = instructions(HLO)["gemm_fusion_dot.1"]
    f32 = instructions(HLO.replace("f16[", "f32["))["gemm_fusion_dot.1"]
    exact = instructions(
        HLO.replace("f16[", "f32[").replace("s={0}, meta", "s={0}, operand_precision={highest,highest}, meta")
    )
    runs = uses_tensor_cores
    assert (runs("gemm_fusion_dot_1"), runs("a_new_kernel", dot)) == (None, True)
    assert runs("a_new_kernel", instructions(HLO)["custom-call.2"]) is None
    assert runs("gemm_fusion_dot_1", dot, 7.0) is True
    assert (runs("gemm_fusion_dot_1", f32, 7.5), runs("gemm_fusion_dot_1", f32, 8.0)) == (False, True)
    assert runs("gemm_fusion_dot_1", exact["gemm_fusion_dot.1"], 9.0) is False


def test_a_collective_is_a_kind_of_work():
    line = "%sum = f32[8] all-reduce-start(%p), replica_groups=[2,4]<=[8], to_apply=%add"
    text = f"HloModule jit_step\nENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n  ROOT {line}\n}}"
    assert instructions(text)["sum"].kind == hlo.COLLECTIVE


def test_what_xla_starts_beside_other_kernels_is_told_by_what_is_inside():
    started = instructions(GPU_PROGRAM)["fusion-start"]
    assert started.kind == "copy"


def test_both_branches_of_a_conditional_are_called():
    lines = [line for lines in HloModule(GPU_PROGRAM).computations.values() for line in lines.values()]
    (branch,) = (line for line in lines if line.opcode == "conditional")
    assert len(branch.called) == 2


def test_real_matmuls_and_convolutions_are_found_with_their_dtypes():
    found = [i for name, i in instructions(GPU_PROGRAM).items() if name.startswith(("gemm_fusion", "cudnn-conv"))]
    assert sorted(i.kind for i in found) == ["convolution"] * 2 + ["matmul"] * 3
    assert {i.dtypes for i in found} == {frozenset({"f16"})}
    assert [i.triton for i in found] == [i.kind == "matmul" for i in found]


@pytest.mark.parametrize(
    ("op_name", "module"),
    [
        (
            "jit(step)/transpose(jvp(ResNet))/Block_0/while/body/closed_call/Conv_0/conv_general_dilated",
            "ResNet/Block_0/Conv_0",
        ),
        ("jit(step)/jvp(Net/Dense_0)/jit(relu)/max", "Net/Dense_0"),
        ("jit(step)/transpose(jvp(Net))/Block_0/jvp(Net)/Block_0/rematted_computation/tanh", "Net/Block_0"),
        ("jit(step)/mul", ""),
    ],
)
def test_module_paths_have_only_the_scopes_of_the_user(op_name, module):
    assert hlo.module_path(op_name) == module


def test_where_no_scope_names_a_module_the_line_that_calls_the_layer_does():
    scoped, plain = (instructions(text)["custom-call.2"] for text in (HLO, HLO.replace("jvp(Net))/Dense_0", "jvp())")))
    assert (scoped.module, scoped.source) == ("Net/Dense_0", "train.py:12")
    assert (plain.module, plain.source) == ("", "train.py:12")


@pytest.fixture(scope="module")
def gpu():
    """Two steps; of the second, which counts, 90 of 100 µs on the device, 6 µs of input and 4 µs of launches."""
    marks = [Span("mpjax.input", 0, 5), Span("mpjax.dispatch", 5, 9), Span("mpjax.input", 100, 110)]
    marks += [Span("mpjax.dispatch", 110, 113), Span("mpjax.wait", 113, 220)]

    def step(t):
        return [
            kernel("loop_convert_fusion", t, t + 10, "loop_convert_fusion"),
            kernel("gemm_fusion_dot_1", t + 10, t + 40, "command_buffer"),  # Found by its name.
            kernel("ampere_sgemm_32x32_sliced1x4_nn", t + 44, t + 84, "custom-call.2"),
            kernel("cublasLt::splitKreduce_kernel", t + 84, t + 94, "custom-call.2"),
        ]

    return gpu_report([*step(10), *step(110)], marks, [transfer(104, 106)])


def test_a_gpu_trace_gives_tensor_core_share_modules_and_split(gpu):
    assert [k.tensor_cores for k in gpu.kernels] == [False, True, False, False]
    assert gpu.tensor_core_share == pytest.approx(30 / 90)
    assert gpu.kernel_seconds == pytest.approx(90e-6)
    assert gpu.modules == {"Net/Dense_0": (pytest.approx(40e-6), pytest.approx(50e-6))}
    assert {k.name: (k.kind, k.dtype, k.op, k.source) for k in gpu.kernels} == {
        "ampere_sgemm_32x32_sliced1x4_nn": ("matmul", "f16", "custom-call.2", "train.py:12"),
        "gemm_fusion_dot_1": ("matmul", "f16", "gemm_fusion_dot.1", "train.py:12"),
        "cublasLt::splitKreduce_kernel": ("reduction", "f16", "custom-call.2", "train.py:12"),
        "loop_convert_fusion": ("cast", "", "loop_convert_fusion", "train.py:12"),
    }
    # The kernels of step 1 ended at 104 µs, those of step 2 at 204 µs.
    assert (gpu.device_share, gpu.input_share, gpu.dispatch_share) == pytest.approx((0.90, 0.06, 0.04))
    assert gpu.traced_seconds == pytest.approx(100e-6)


def test_what_could_use_tensor_cores_is_listed_with_the_reason(gpu):
    (only,) = (kernel for kernel in gpu.kernels if kernel.why_not)
    assert (only.name, only.backward) == ("ampere_sgemm_32x32_sliced1x4_nn", True)
    text = str(gpu)
    assert "Tensor Cores: 33.3% of the kernels' time" in text
    assert "dimensions that are not multiples of 8" in " ".join(text.split("Device time by kernel")[1].split())


def test_advice_is_ranked_by_the_share_behind_it(gpu):
    shares = [advice.share for advice in gpu.advice]
    assert shares == sorted(shares, reverse=True)
    texts = [advice.text for advice in gpu.advice]
    # The matmul of the forward pass is on them.
    assert texts[0].startswith("half matmuls that are not on Tensor Cores are 40% of the step, the most in Net/Dense_0")
    assert any(text.startswith("casts are 10% of the step") for text in texts)
    assert any(text.startswith("input pipeline is 6% of the step") for text in texts)
    assert gpu.advice[0].bound == pytest.approx(1 / (1 - 0.4))


def test_a_report_is_json_and_one_page(gpu, tmp_path):
    read_back = json.loads(gpu.to_json(tmp_path / "profile.json"))
    assert read_back["tensor_core_share"] == pytest.approx(1 / 3)
    assert len(read_back["kernels"]) == len(gpu.kernels)
    assert "ampere_sgemm_32x32_sliced1x4_nn" in gpu.to_html()


def test_float32_matmuls_on_a_gpu_are_the_first_advice():
    kernels = [kernel("ampere_sgemm_32x32_sliced1x4_nn", t, t + 90, "custom-call.2") for t in (0, 90)]
    report = gpu_report(kernels, [Span("mpjax.wait", 0, 200)], text=HLO.replace("f16[", "f32["))
    assert report.tensor_core_share == 0
    assert report.kernels[0].why_not == "float32"
    assert report.advice[0].text.startswith("float32 matmuls and convolutions are 100% of the step")


@pytest.mark.parametrize(
    ("split", "given", "advice"),
    [
        (Split(device=6, input=0, dispatch=4), {}, "dispatch is 40% of the step"),
        (Split(1, 0, 0), {"kind": "elementwise"}, "elementwise operations, reductions and copies are 100% of the step"),
        (Split(1, 1, 0), {"path": "/x/mpjax/loss_scale/boundary.py"}, "loss scaling is 50% of the step"),
        (Split(3, 1, 0), {"kind": "collective"}, "collectives are 75% of the step"),
        (Split(1, 0, 0), {"kind": "cast"}, "casts are 100% of the step, the most in Net"),
    ],
)
def test_each_fault_has_its_advice(split, given, advice):
    kernel = Kernel("k", "op", "other", "Net", "a.py:1", "/x/a.py", False, "", 1.0, 1.0, None, "")
    texts = [found.text for found in advised(split, [dataclasses.replace(kernel, **given)], gpu=False)]
    assert any(text.startswith(advice) for text in texts)


def test_a_step_of_matmuls_is_limited_by_these(gpu):
    assert gpu.limit == "matmuls"  # They could be on Tensor Cores.
    for advice in (gpu.advice[-1:], ()):
        on_them = dataclasses.replace(gpu, kernels=gpu.kernels[1:2], advice=advice)
        assert on_them.limit == "matmuls and convolutions"
        assert "limited by matmuls and convolutions: 90% of the step" in str(on_them)


def test_nothing_is_advised_where_nothing_stands_out():
    kernel = Kernel("k", "op", "matmul", "Net", "a.py:1", "/x/a.py", False, "f16", 1.0, 1.0, True, "")
    assert advised(Split(device=0.97, input=0.01, dispatch=0.02), [kernel]) == ()


def test_input_that_is_hidden_behind_the_device_costs_nothing():
    # The host fetches for 80 µs of each step, always while the device is at work.
    kernels = [kernel("loop_add_fusion", t, t + 100, "loop_convert_fusion") for t in range(10, 410, 100)]
    marks = [Span("mpjax.input", t + 15, t + 95) for t in range(10, 410, 100)] + [Span("mpjax.wait", 405, 411)]
    report = gpu_report(kernels, marks, steps=3)
    assert (report.device_share, report.input_share) == (1, 0)


def test_kernels_hidden_in_cuda_graphs_are_taken_from_a_trace_without_them():
    marks = [Span("mpjax.wait", 0, 200)]
    whole = gpu_recording([kernel("ampere_h16816gemm_nn", t, t + 50, "command_buffer_1") for t in (0, 50)], marks)
    detailed = gpu_recording([kernel("ampere_h16816gemm_nn", t, t + 45, "custom-call.2") for t in (0, 60)], marks)
    assert (whole.hidden, detailed.hidden) == (1, 0)
    alone, both = (report_of(whole, x, TIMING, device="NVIDIA X", capability=8.0) for x in (whole, detailed))
    assert [(k.kind, k.module, k.tensor_cores) for k in alone.kernels] == [("matmul", "", True)]
    assert [(k.kind, k.module, k.tensor_cores) for k in both.kernels] == [("matmul", "Net/Dense_0", True)]
    assert (alone.split, both.device_share) == (both.split, 1)


def test_a_step_runs_the_same_when_compiled_without_cuda_graphs():
    stepper = Stepper(jax.jit(lambda x: x + 1, donate_argnums=0), (jnp.zeros(3),), None, None)
    stepper.leave_cuda_graphs()
    stepper.run(2)
    assert stepper.out.tolist() == [4, 4, 4]  # One alone, one after recompiling, and these two.


def test_a_gpu_of_another_maker_has_no_tensor_core_column():
    kernels = [kernel("Cijk_Ailk_Bljk", t, t + 50, "custom-call.2") for t in (0, 50)]
    report = gpu_report(kernels, [Span("mpjax.wait", 0, 200)], capability=None)
    assert report.tensor_core_share is None
    assert any("not an NVIDIA GPU" in note for note in report.notes)


def test_without_kernels_the_split_is_the_hosts():
    marks = [Span("mpjax.input", 0, 30), Span("mpjax.dispatch", 30, 40), Span("mpjax.wait", 40, 100)]
    report = gpu_report([], marks)
    assert (report.input_share, report.dispatch_share, report.device_share) == pytest.approx((0.3, 0.1, 0.6))
    assert report.tensor_core_share is None
    assert any("no kernels" in note for note in report.notes)
    late = gpu_report([kernel("loop_add_fusion", t, t + 50, "loop_convert_fusion") for t in (900, 950)], marks)
    assert late.split == report.split
    assert any("no common clock" in note for note in late.notes)


def test_filling_the_pipeline_is_not_a_part_of_the_step():
    now = [0.0]

    def run(steps):  # 5 s for the first batch, which nothing hides, then 2 s a step
        now[0] += 5 + 2 * steps

    assert seconds_per_step(run, 10, lambda: now[0]) == 2.0


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(64)(x))
        x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ jnp.full((64, 64), 0.01)), None), x, None, length=5)
        return nn.Dense(8)(x)


@pytest.fixture(scope="module")
def trained():
    """A donated train step with a slow input pipeline: 25 ms a batch, against much less for the step."""
    net, tx = Net(), mpjax.dynamic_loss_scale(optax.sgd(0.1))
    batch = np.ones((16, 32), np.float32)
    params = net.init(jax.random.key(0), batch)
    opt_state = tx.init(params)

    def train_step(params, opt_state, batch):
        loss, grads = mpjax.value_and_grad(lambda p: jnp.mean(net.apply(p, batch) ** 2), opt_state)(params)
        return *mpjax.apply_gradients(tx, grads, opt_state, params), loss

    def batches():
        while True:
            time.sleep(0.025)
            yield batch

    step = jax.jit(train_step, donate_argnums=(0, 1))
    return mpjax.profile(step, params, opt_state, batches=batches(), steps=3), (params, opt_state)


def test_a_slow_input_pipeline_is_most_of_the_step_and_the_first_advice(trained):
    report, _ = trained
    assert report.input_share > 0.5
    assert report.input_share + report.dispatch_share + report.device_share == pytest.approx(1)
    assert report.advice[0].text.startswith(f"input pipeline is {report.input_share:.0%} of the step")


def test_donated_state_is_carried_on_and_the_callers_arrays_stay(trained):
    report, args = trained
    assert not any(x.is_deleted() for x in jax.tree.leaves(args))
    assert any(note.startswith("carry=2") for note in report.notes)


def test_modules_are_named_as_flax_names_them_and_loops_are_counted(trained):
    named = {(kernel.module, kernel.backward) for kernel in trained[0].kernels}
    assert {("Net/Dense_0", False), ("Net/Dense_1", False), ("Net/Dense_1", True)} <= named
    turns = [k.calls for k in trained[0].kernels if k.kind == "matmul" and k.module == "Net" and not k.backward]
    assert 5 in turns


def test_on_a_cpu_there_is_no_tensor_core_column(trained):
    report, _ = trained
    assert report.tensor_core_share is None
    assert not any(kernel.why_not for kernel in report.kernels)
    text = " ".join(str(report).split())
    assert "whose kernel times are not reliable" in text
    assert "Device time by" not in text
    assert report.modules == {}
    assert "Tensor Cores  " not in text


def test_a_plain_function_is_also_compiled_as_a_whole():
    batches = [jnp.ones((4, 8)), jnp.ones((4, 8))]  # Read again and again.
    report = mpjax.profile(lambda w, x: (x @ w).sum(), jnp.ones((8, 8)), batches=batches, steps=1)
    assert "as given, without jit" in str(report).splitlines()[1]
    assert sum(k.calls for k in report.kernels if k.kind == "matmul") == 1


def donating(w, x):
    return (x @ w).sum()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(
    ("step", "args", "kwargs", "error", "message"),
    [
        (donating, (jnp.ones((2, 2)), jnp.ones((2, 2))), {"steps": 0}, ValueError, "steps=0"),
        (donating, (jnp.ones((2, 2)), jnp.ones((2, 2))), {"carry": 3}, ValueError, "carry=3"),
        (donating, (jnp.ones((2, 2)), jnp.ones((2, 2))), {"carry": 2}, ValueError, "outputs, 1"),
        (donating, (jnp.ones((2, 2)), jax.ShapeDtypeStruct((2, 2), jnp.float32)), {}, TypeError, "argument 1"),
        (donating, (jnp.ones((2, 2)),), {"batches": itertools.repeat(np.ones((2, 2)), 2)}, ValueError, "ended after 2"),
        (donating, (jnp.ones((2, 2)),), {"batches": []}, ValueError, "ended after 0"),
    ],
)  # fmt: skip
def test_a_bad_call_is_refused_with_the_value(step, args, kwargs, error, message):
    with pytest.raises(error, match=message):
        mpjax.profile(step, *args, **kwargs)


def test_a_donated_argument_that_nothing_replaces_is_named():
    step = jax.jit(lambda w, x: (x + 1, w.sum()), donate_argnums=1)
    with pytest.raises(ValueError, match="argument 1 of the step is donated"):
        mpjax.profile(step, jnp.ones((2, 2)), jnp.ones((3,)))


def test_a_step_that_needs_values_runs_as_it_is_given():
    report = mpjax.profile(lambda x: float(x.sum()), jnp.ones(3), steps=2)
    assert any("can't be compiled as a whole (test_profile.py:" in note for note in report.notes)
    assert report.compiled_seconds is report.flops is None


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "precision"), [(jnp.float16, None), (jnp.bfloat16, None), (jnp.float32, "highest")])
def test_half_matmuls_run_on_tensor_cores_and_full_float32_ones_do_not(dtype, precision):
    w = jnp.full((2048, 2048), 1e-3, dtype)
    report = mpjax.profile(jax.jit(lambda x, w: jnp.matmul(x, w, precision=precision)), w, w, steps=5)
    if precision:
        assert report.tensor_core_share == 0
        assert next(kernel.why_not for kernel in report.kernels if kernel.why_not) == "float32 at precision=highest"
    else:
        assert report.tensor_core_share > 0.5
