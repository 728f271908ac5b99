"""Categories: what kind of work a kernel, or on a CPU an operator, is. Each has exactly one.

A kernel is judged by its name; where that hides the dtype of a matrix product, by the dtypes of
the operator that launched it; where it says nothing at all, as that operator would be.
"""

from __future__ import annotations

import functools
import json
import re

from steplab.hardware.kernel_names import attention_backend, matmul_class
from steplab.trace.op_categories import ADDING, PRODUCTS, category_of_op
from steplab.trace.triton_names import category_of_triton

CATEGORIES = (
    *("matmul fp32 simt", "matmul tf32", "matmul bf16", "matmul fp16", "matmul fp8"),
    "matmul other",
    *("attention flash", "attention cudnn", "attention efficient", "attention triton"),
    "attention other",
    *("normalisation", "softmax", "elementwise", "reduction", "copy", "memset", "optimizer"),
    *("embedding", "sort and index", "communication", "other"),
)
MATMUL = "matmul "  # how the categories of matrix products begin
ATTENTION = "attention "

_COMMUNICATION = (
    r"nccl|rccl|nvshmem|cross_device_reduce|(multimem|one_shot|two_shot)_(all|reduce)"
    r"|trtllm_(allreduce|alltoall)"
)
_PRODUCT = re.compile(
    r"nvjet|[Gg]emm|[Gg]emv|matmul|splitKreduce|dot_kernel|_xmma_|\bCijk_|implicit_convolve|conv(olve)?_"
    r"|(\d|_)(fprop|dgrad|wgrad)|cudnn::(cnn|winograd)|miopen(Sp3Asm)?Conv|\bbmm_"
)
# The first that is found decides: a softmax's name may speak of elementwise work too.
_KERNELS = tuple(
    (re.compile(pattern), category)
    for pattern, category in (
        (r"LpNormFunctor|lpnorm_cleanup|foreach_norm", "reduction"),
        (r"^(add_segments|ema_[a-z]+)_kernel$", "reduction"),
        (r"^(loss_rows|gradient_tiles)_kernel$", "softmax"),
        (r"^find_segments_kernel$", "sort and index"),
        (r"multi_tensor_apply|[Ff]used_?[Aa]dam|FusedSgd|FusedAdagrad|adamw?_kernel", "optimizer"),
        (
            r"([Ll]ayer|[Rr]ms|RMS|[Gg]roup|[Bb]atch|instance)_?[Nn]orm|\bbn_[fb]w_"
            r"|GammaBeta|RowwiseMoments|InternalGradients|Compute(Backward)?FusedParams",
            "normalisation",
        ),
        (r"[Ss]oft_?[Mm]ax|nll_loss|cross_entropy|logsumexp", "softmax"),
        (r"rotary|rope|upsample|_with_index", "elementwise"),
        (r"indexSelect|[Ee]mbedding|compute_grad_weight|sum_and_scatter|krn_partial", "embedding"),
        (r"DeviceReduce", "reduction"),
        (
            r"cub::|[Ss]ort|[Rr]adix|scatter|gather|ind(ex|ices)|topk|TopK|nonzero|[Uu]nique|[Hh]istogram"
            r"|searchsorted|masked_select|permute_kernel|routing",
            "sort and index",
        ),
        (r"FillFunctor|(?<!masked_)fill_kernel", "memset"),
        (
            r"copy_kernel|CatArrayBatchedCopy|[Tt]ranspose|nchwToNhwc|nhwcToNchw|_copy_kernel_cuda"
            r"|reshape_and_cache|tensorTransform",
            "copy",
        ),
        (
            r"reduce_kernel|ReduceOp|_scan_|ScanKernel|cumsum|cumprod|absmax|amax_kernel",
            "reduction",
        ),
        (
            r"elementwise|distribution_|dropout|activation|silu|gelu|swiglu|quant|pointwise"
            r"|SubTensorOp|OpTensor",
            "elementwise",
        ),
    )
)
_DTYPES = {
    "float": "fp32",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
}
# cuBLAS's letters: t is bf16, h fp16, q an 8-bit float; nvjet_tst_..., nvjet_sm100_qqtst_....
_NVJET = re.compile(r"\bnvjet_(?:sm\d+_)?([a-z]+)_")
_SPELLED = (
    ("fp8", re.compile(r"e4m3|e5m2|fp8", re.IGNORECASE)),
    ("bf16", re.compile(r"bf16|bfloat16|_BBS_|_BSS_", re.IGNORECASE)),
    ("fp16", re.compile(r"\bhalf_t|__half|_f16|_fp16|_HHS_|_h\d+gemm")),
    ("tf32", re.compile(r"tf32")),
)


@functools.lru_cache(maxsize=65536)
def category_of(kernel: str, op: str = "", dtypes: str = "") -> str:
    """Return the category of a kernel; `op` is the innermost operator around its launch.

    `dtypes` are the types of that operator's inputs, as the profiler wrote them: JSON.
    """
    if re.search(_COMMUNICATION, kernel):
        return "communication"
    if kernel.startswith("Memcpy"):
        return "copy"
    if kernel.startswith("Memset"):
        return "memset"
    backend = attention_backend(kernel)
    if backend:
        return ATTENTION + backend
    if re.search(r"fmha|FMHA|[Aa]tt(entio)?n|flash_(fwd|bwd)|FlashAttn", kernel):
        return _other_attention(kernel, op)
    dtype = matmul_class(kernel)
    if dtype or _PRODUCT.search(kernel):
        return product_category(dtype or _product_dtype(kernel, op, dtypes))
    triton = category_of_triton(kernel)
    if triton == MATMUL:
        return product_category(_input_dtype(op, dtypes), plain_units=False)
    if triton:
        return triton
    found = next((category for pattern, category in _KERNELS if pattern.search(kernel)), None)
    return found or operator_category(op, dtypes)


def operator_category(op: str, dtypes: str = "") -> str:
    """Return the category of an operator that does its work itself, as all do on a CPU."""
    if op in PRODUCTS:
        return product_category(_input_dtype(op, dtypes))
    return category_of_op(op) or category_of_triton(op) or "other"


def product_category(dtype: str | None, plain_units: bool = True) -> str:
    """Name the category of a product that multiplies in `dtype`; None: unknown.

    Without `plain_units` nobody knows whether fp32 was multiplied as tf32.
    """
    if dtype == "fp32":
        return "matmul fp32 simt" if plain_units else "matmul other"
    return MATMUL + (dtype or "other")


def _other_attention(kernel: str, op: str) -> str:
    """Attention whose name is of no known backend: by its operator; Triton's are plain words."""
    known = category_of_op(op) or ""
    if known.startswith(ATTENTION):
        return known
    plain = re.fullmatch(r"\w+", kernel) is not None and not re.search(r"fmha|Sm\d+", kernel)
    return "attention triton" if plain else "attention other"


def _product_dtype(kernel: str, op: str, dtypes: str) -> str | None:
    """The dtype where matmul_class is not sure; None: unknown.

    What an operator of somebody else's does to its inputs before it multiplies is not known.
    """
    given = _input_dtype(op, dtypes) if op.startswith(("aten::", "triton_")) else None
    letters = _NVJET.search(kernel)
    if given == "fp32":
        # These only use matrix units, which take fp32 as tf32.
        if letters or "tf32" in kernel:
            return "tf32"
        return "fp32" if re.search(r"gemv|dot_kernel|simt|ffma|sgemm", kernel) else None
    if given:
        return given
    if letters:
        return {"t": "bf16", "h": "fp16", "q": "fp8"}.get(letters[1][0])
    return next((dtype for dtype, pattern in _SPELLED if pattern.search(kernel)), None)


def _input_dtype(op: str, dtypes: str) -> str | None:
    """What an operator multiplies, by its first factor; None: not recorded or not a float."""
    if not dtypes:
        return None
    types = [word for word in json.loads(dtypes)[1 if op in ADDING else 0 :] if word in _DTYPES]
    return _DTYPES[types[0]] if types else None
