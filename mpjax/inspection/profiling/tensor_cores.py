"""Detects the GPU kernels that use Tensor Cores by their names.

A trace has no counter for their use, which would need Nsight Compute and its privileges. But libraries include the
instruction in a kernel's name. The names and their sources:

- `884`, `1688`, `16816` and so on are the shapes m·n·k of the `mma` instruction (PTX ISA, "Matrix multiply-accumulate
  operation using mma instruction") behind the accumulator's type: `volta_h884gemm`, `turing_fp16_s1688cudnn_fp16`,
  `ampere_bf16_s16816gemm_bf16_128x64`. XProf matches the same ones (`xprof/utils/kernel_stats_utils.cc`).
- `hmma`, `imma`, `wmma`, `wgmma`, `gmma`: the instructions themselves (SASS and PTX), as in
  `cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16`.
- `cutlass_80_tensorop_*`, `cutlass3x_sm90_tensorop_*`: CUTLASS's operator class for Tensor Cores. `simt` is the
  class for ordinary cores.
- `sm80_xmma_*_tensor16x8x16_*`, `sm90_xmma_*`: the generator of cuBLAS and cuDNN. It also generates float32 kernels for
  ordinary cores, with `ffma` in their names: `sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_*_ffma_*`.
- `nvjet_*`: cuBLAS on Hopper and newer, for Tensor Cores only.
- `flash_fwd_kernel`, `fmha_*`: FlashAttention's; its helpers `flash_bwd_dot_do_o` and `flash_bwd_convert_dq` are
  elementwise.
- `volta_sgemm_*`, `ampere_scudnn_*`, `gemv*`, `winograd`, `implicit_convolve_sgemm` and others are for ordinary cores.
- `first_layer_wgrad_kernel`, `conv2d_c1_k1`: cuDNN's on Volta, from XProf's list.

The names of XLA's Triton matmuls (`gemm_fusion_dot_3`) do not show the instruction. `tl.dot` compiles to an `mma` for
half and 8-bit operands, and for float32 operands if TF32 is allowed, on GPUs whose compute capability supports it
(CUDA C++ programming guide, "Compute capabilities").
"""

from __future__ import annotations

import re

from mpjax.inspection.profiling import hlo

_ORDINARY = re.compile(
    r"simt|ffma|[sdh]gemm|[sh]cudnn|gemv|gemmsn|gemmk1|splitk_?reduce|flash_bwd_(dot_do_o|convert_dq)"
    r"|convolve_common_engine|implicit_convolve|winograd|fft2d|dgrad_engine|dgrad2d_alg|wgrad_alg|grouped_direct"
)
_TENSOR_CORES = re.compile(
    r"(?<![0-9])[a-z]?(884|1688|16816|16832|161616|8816|8832)(?![0-9])"
    r"|[hid]mma|[wg]mma|tensorop|tensor\d+x\d+x\d+|xmma_|nvjet"
    r"|flash_(fwd|bwd|fprop|bprop)|fmha"
    r"|first_layer_wgrad_kernel|conv2d_c1_k1"
)
_TRITON = re.compile(r"(nested_)?gemm_fusion|triton_gemm")
_WORK = (  # Helpers first: a library's matmul may consist of several kernels, only one of which is the matmul.
    (hlo.REDUCTION, re.compile(r"splitk_?reduce")),
    (hlo.COPY, re.compile(r"nchwtonhwc|nhwctonchw|tensortransform|tensor_transform")),
    (hlo.ELEMENTWISE, re.compile(r"flash_bwd_(dot_do_o|convert_dq)")),
    (hlo.ATTENTION, re.compile(r"flash|fmha|sdpa|mha_")),
    (hlo.CONVOLUTION, re.compile(r"conv(?!ert)|fprop|dgrad|wgrad|cudnn")),
    (hlo.MATMUL, re.compile(r"gemm|gemv|nvjet|matmul|_dot")),
)
# The first compute capability whose Tensor Cores support operands of this dtype (CUDA programming guide).
_SINCE = {"f16": 7.0, "s8": 7.2, "u8": 7.2, "bf16": 8.0, "f64": 8.0, "f8e4m3fn": 8.9, "f8e5m2": 8.9}
_TF32_SINCE = 8.0


def work_of(name: str) -> str:
    """The kind of work in a library kernel's name, as `Instruction.kind`; empty if unknown.

    Example:
        >>> work_of("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tensor16x8x16_g1__5x_cudnn")
        'convolution'
    """
    return next((kind for kind, pattern in _WORK if pattern.search(name.lower())), "")


def uses_tensor_cores(
    name: str, instruction: hlo.Instruction | None = None, capability: float | None = None
) -> bool | None:
    """Whether a GPU kernel runs on Tensor Cores.

    Args:
        name: The kernel's name in the trace.
        instruction: The HLO instruction that launched it, if known.
        capability: The GPU's compute capability, as 9.0; None if unknown, which assumes 9.0.

    Returns:
        True or False; None for matmuls, convolutions and attention whose name does not show it.

    Example:
        >>> uses_tensor_cores("ampere_fp16_s16816gemm_fp16_128x64_nn"), uses_tensor_cores("ampere_sgemm_128x64_nn")
        (True, False)
    """
    lower = name.lower()
    if _ORDINARY.search(lower):
        return False
    if _TENSOR_CORES.search(lower):
        return True
    if (work_of(name) or (instruction.kind if instruction else "")) not in hlo.ON_TENSOR_CORES:
        return False
    if instruction is None:
        return None
    if instruction.triton or _TRITON.match(lower):
        return all(takes(dtype, instruction.exact, capability) for dtype in instruction.dtypes or {"f32"})
    # Without Triton, XLA itself generates plain loops.
    return False if lower.startswith(kernel_name(instruction.name).lower()) else None


def kernel_name(instruction: str) -> str:
    """The name of the kernel that XLA generates for an instruction: `gemm_fusion_dot_3` for `gemm_fusion_dot.3`."""
    return re.sub(r"\W", "_", instruction)


def takes(dtype: str, exact: bool = False, capability: float | None = None) -> bool:
    """Whether Tensor Cores support operands of a dtype (in HLO's names). Float32 runs as TF32 unless `exact`."""
    since = _TF32_SINCE if dtype == "f32" and not exact else _SINCE.get(dtype, float("inf"))
    return since <= (9.0 if capability is None else capability)


def why_not(instruction: hlo.Instruction) -> str:
    """Why a matmul or convolution is not on Tensor Cores, as far as its instruction shows."""
    if "f32" in instruction.dtypes:
        return "float32 at precision=highest" if instruction.exact else "float32"
    if "f64" in instruction.dtypes:
        return "float64"
    return "the library chose a kernel without them: a small matmul, or dimensions that are not multiples of 8"
