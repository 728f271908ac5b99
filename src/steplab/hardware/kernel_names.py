"""What the names of CUDA kernels tell: dtypes of matrix products, backends of attention.

Only spellings that leave no doubt are listed; any other name gives None. Names that hide the
dtype: triton_tem_fused_mm_* (Inductor), gemv kernels.
"""

from __future__ import annotations

import re
from collections import Counter

from steplab.core import Ran

# cuBLAS, XMMA: gemm_<A><B>_<multiplied as><accumulated in>_..., so that tf32 and the SIMT units
# (ffma) differ: sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x64x16_..._cublas.
_XMMA = r"\bsm\d+_xmma_gemm_"
# cuBLAS, hand-written: [output]_s<MMA shape>gemm_<input>, "s" and "h" for fp32 and fp16 sums:
# ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn, volta_h884gemm_64x64_nt. A shape
# without digits is the SIMT product: ampere_sgemm_128x64_nn; cuDNN calls its convolutions scudnn,
# after a prefix: cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1.
_CUBLAS = r"(?:\b|cudnn_|infer_|train_)(?:maxwell|volta|turing|ampere)_"
# cuBLAS, built with CUTLASS: the same order of parts (gemm_operation.py there):
# cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8. No input type behind
# s1688gemm means fp32 input, which these units can only multiply as tf32. Parts such as
# s1688bf16gemm (fp32 multiplied as bf16) are not listed.
_CUTLASS = r"\bcutlass_\d+_(?:wmma_)?tensorop_"

# cuBLAS on Hopper and newer: a letter each for input, sums and output, t for bf16 and h for fp16:
# nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN. Profiles of bf16 models show no other letter.
_NVJET = r"\bnvjet_(?:sm\d+_)?"

_MATMULS = tuple(
    (dtype, re.compile("|".join(patterns)))
    for dtype, patterns in {
        "bf16": (
            _XMMA + r"bf16bf16_bf16f32_",
            _CUBLAS + r"(?:bf16_)?s\d+gemm_bf16_",
            _CUTLASS + r"(?:bf16_)?s\d+gemm_(?:relu_)?bf16_",
            _NVJET + r"ts[a-z]_",
        ),
        "fp16": (
            _XMMA + r"f16f16_f16f(?:16|32)_",
            _CUBLAS + r"(?:(?:fp16_)?s\d+gemm_fp16_|h\d+(?:gemm|cudnn)_)",
            _CUTLASS + r"(?:(?:f16_)?s\d+gemm_(?:relu_)?f16_|h\d+gemm_)",
            _NVJET + r"hs[a-z]_",
        ),
        "tf32": (_XMMA + r"f32f32_tf32f32_", _CUTLASS + r"s1688gemm_\d"),
        "fp32": (
            _XMMA + r"f32f32_f32f32_",
            _CUBLAS + r"s(?:gemm|cudnn)_\d",
            r"\bcutlass_\d+_simt_sgemm_\d",
        ),
    }.items()
)

FUSED_ATTENTION = ("flash", "efficient", "cudnn")
# cuDNN comes first: its names say "flash" too.
_ATTENTIONS = (
    # cuDNN's generated kernels, and those around its backward: row sums, dq, grouped heads.
    (
        "cudnn",
        r"cudnn_generated_\w{0,100}_sdpa_"
        r"|cudnn::fusion::(?:compute_dot_do_o|convert_dq_to_16bits|fmha_reduce_head)",
    ),
    # PyTorchMemEffAttention: fmha_cutlassF_* forward, fmha_cutlassB_* backward.
    ("efficient", r"\bfmha_cutlass[FB]_"),
    # FlashAttention 2 (pytorch_flash:: in PyTorch, flash:: in its own package) and 3.
    ("flash", r"\bpytorch_flash::|\bflash_(?:fwd|bwd)_|\bflash::FlashAttn(?:Fwd|Bwd)"),
)


def matmul_class(name: str) -> str | None:
    """Return "bf16", "fp16", "tf32" or "fp32": how a GEMM kernel multiplies. None: not sure."""
    return next((dtype for dtype, pattern in _MATMULS if pattern.search(name)), None)


def attention_backend(name: str) -> str | None:
    """Return "flash", "efficient" or "cudnn" for a fused attention kernel. None: not sure."""
    return next((backend for backend, pattern in _ATTENTIONS if re.search(pattern, name)), None)


# Names of C++ types in the profiler.
_TRACED = {"c10::BFloat16": "bf16", "c10::Half": "fp16", "c10::Float8_e4m3fn": "fp8"}


def matmul_dtypes(ran: Ran | None) -> dict[str, int]:
    """Return the calls of matrix products by dtype: fp32, tf32, bf16, fp16, fp8.

    Counted by op where ops were traced, else by kernel name. A replayed graph dispatches no op:
    where its kernels name more products than there were ops, the kernels are counted. Whether an
    fp32 op used TF32 units is known only from the kernel's name or the precision setting.
    """
    if ran is None:
        return {}
    by_op: Counter[str] = Counter()
    ours = {**_TRACED, "float": "tf32" if ran.matmul_precision != "highest" else "fp32"}
    for traced, calls in ran.matmul_dtypes.items():
        by_op[ours.get(traced, traced)] += calls
    by_kernel: Counter[str] = Counter()
    for kernel, launches in ran.kernels.items():
        dtype = matmul_class(kernel)
        if dtype:
            by_kernel[dtype] += launches
    hidden = bool(ran.graph_launches) and by_kernel.total() > by_op.total()
    return dict(by_kernel if hidden else by_op or by_kernel)


def main_matmul_dtype(ran: Ran | None, declared: str) -> str:
    """Return the dtype of most matrix products; `declared` where the trace does not tell."""
    seen = matmul_dtypes(ran)
    return max(seen, key=lambda name: seen[name], default=declared)


def traced_attention(ran: Ran | None) -> set[str]:
    """Return the fused attention backends that a profiled step shows, by op or by kernel name."""
    if ran is None:
        return set()
    backends = FUSED_ATTENTION
    by_op = {name for name in backends for op in ran.attention_ops if f"_{name}_attention" in op}
    return by_op or {name for kernel in ran.kernels if (name := attention_backend(kernel))}
