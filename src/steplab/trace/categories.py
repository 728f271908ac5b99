"""Categories: what kind of work a kernel, or on a CPU an operator, is. Each has exactly one.

A kernel is judged by its name; where that hides the dtype of a matrix product, by the dtypes of the
operator that launched it; where it says nothing at all, by that operator.
"""

from __future__ import annotations

import functools
import json
import re

from steplab.hardware.kernel_names import attention_backend, matmul_class

CATEGORIES = (
    "matmul fp32 simt",
    "matmul tf32",
    "matmul bf16",
    "matmul fp16",
    "matmul fp8",
    "matmul other",
    "attention flash",
    "attention cudnn",
    "attention efficient",
    "attention triton",
    "attention other",
    "normalization",
    "softmax",
    "elementwise",
    "reduction",
    "copy",
    "memset",
    "optimizer",
    "embedding",
    "sort and index",
    "communication",
    "other",
)
MATMUL = "matmul "  # how the categories of matrix products begin
ATTENTION = "attention "

_COMMUNICATION = (
    r"nccl|rccl|nvshmem|cross_device_reduce|(multimem|one_shot|two_shot)_(all|reduce)"
    r"|trtllm_(allreduce|alltoall)|\b(deep_ep|ep)::(inter|intra)node"
)
_PRODUCT = re.compile(
    r"nvjet|[Gg]emm|[Gg]emv|matmul|splitKreduce|dot_kernel|_xmma_|\bCijk_|implicit_convolve|conv(olve)?_"
    r"|(\d|_|\b)(fprop|dgrad|wgrad)|cudnn::(cnn|winograd)|miopen(Sp3Asm)?Conv|\bbmm_"
    r"|[hs]\d*cudnn_"
)
_FBGEMM = re.compile(r"\bfbgemm(_gpu)?(::|_)?")
# Many small copies at once, as before and after an all-gather of parameters.
_COPIES_TENSORS = re.compile(
    r"multi_tensor_apply.*\b(Copy|CopyFunctor)\b|chunk_cat|split_with_sizes"
)
# The first match decides: the name of a softmax may mention elementwise work too.
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
            "normalization",
        ),
        (r"[Ss]oft_?[Mm]ax|nll_loss|cross_entropy|logsumexp", "softmax"),
        (r"rotary|rope|upsample|_with_index", "elementwise"),
        (r"indexSelect|[Ee]mbedding|compute_grad_weight|sum_and_scatter|krn_partial", "embedding"),
        (r"DeviceReduce|max_pool_|(average|avg)_pool", "reduction"),
        (
            r"cub::|[Ss]ort|[Rr]adix|scatter|gather|ind(ex|ices)|topk|TopK|nonzero|[Uu]nique|[Hh]istogram"
            r"|searchsorted|masked_select|permute_kernel|permute_(\dD|pooled)_|routing",
            "sort and index",
        ),
        (r"FillFunctor|(?<!masked_)fill_kernel", "memset"),
        (
            r"copy_kernel|CatArrayBatchedCopy|[Tt]ranspose|nchwToNhwc|nhwcToNchw|_copy_kernel_cuda"
            r"|reshape_and_cache|store_kvcache|copy_async|tensorTransform",
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
def kernel_category(kernel: str, op: str = "", dtypes: str = "") -> str:
    """Return the category of a kernel; `op` is the innermost operator around its launch.

    `dtypes` is the JSON list of the types of that operator's inputs, as the profiler wrote it.
    """
    if is_communication_kernel(kernel):
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
    if _COPIES_TENSORS.search(kernel) or op.startswith("aten::_foreach_copy"):
        return "copy"
    # The library's name ends like that of a product; its embeddings and casts are none.
    kernel = _FBGEMM.sub("", kernel)
    dtype = matmul_class(kernel)
    if dtype or _PRODUCT.search(kernel):
        return _product_category(dtype or _product_dtype(kernel, op, dtypes))
    triton = _inductor_category(kernel)
    if triton == MATMUL:
        return _product_category(_input_dtype(op, dtypes), plain_units=False)
    if triton:
        return triton
    found = next((category for pattern, category in _KERNELS if pattern.search(kernel)), None)
    return found or op_category(op, dtypes)


def _product_category(dtype: str | None, plain_units: bool = True) -> str:
    """Return the category of a product that multiplies in `dtype`; None: unknown.

    Without `plain_units` it is not known whether fp32 was multiplied as tf32.
    """
    if dtype == "fp32":
        return "matmul fp32 simt" if plain_units else "matmul other"
    return MATMUL + (dtype or "other")


def _other_attention(kernel: str, op: str) -> str:
    """Return the category of attention by an unknown kernel: by its operator, else by its name.

    Triton's names are plain identifiers.
    """
    known = _listed_category(op) or ""
    if known.startswith(ATTENTION):
        return known
    plain = re.fullmatch(r"\w+", kernel) is not None and not re.search(r"fmha|Sm\d+", kernel)
    return "attention triton" if plain else "attention other"


def _product_dtype(kernel: str, op: str, dtypes: str) -> str | None:
    """Return the dtype of a product where matmul_class is not sure; None: unknown.

    Operators of other libraries may convert their inputs before they multiply: nothing is known.
    """
    given = _input_dtype(op, dtypes) if op.startswith(("aten::", "triton_")) else None
    letters = _NVJET.search(kernel)
    if given == "fp32":
        # These kernels use matrix units only, which take fp32 as tf32.
        if letters or "tf32" in kernel:
            return "tf32"
        return "fp32" if re.search(r"gemv|dot_kernel|simt|ffma|sgemm|scudnn", kernel) else None
    if given:
        return given
    if letters:
        return {"t": "bf16", "h": "fp16", "q": "fp8"}.get(letters[1][0])
    return next((dtype for dtype, pattern in _SPELLED if pattern.search(kernel)), None)


def _input_dtype(op: str, dtypes: str) -> str | None:
    """Return the dtype of an operator's first factor; None: not recorded or not a float."""
    if not dtypes:
        return None
    types = [word for word in json.loads(dtypes)[1 if op in ADDING_OPS else 0 :] if word in _DTYPES]
    return _DTYPES[types[0]] if types else None


# Operators by name, for CPUs and for kernels whose own names say nothing. Only operators that do
# the work are listed. Those that call another (linear, clone, to) take next to no time themselves,
# and counting both would count one piece of work twice.

ADDING_OPS = frozenset(f"aten::{name}" for name in "addmm baddbmm addbmm addmv addr".split())
PRODUCT_OPS = ADDING_OPS | frozenset(
    """aten::mm aten::bmm aten::mv aten::dot aten::vdot aten::_grouped_mm aten::_scaled_mm
    aten::_scaled_grouped_mm aten::_int_mm aten::mkldnn_linear aten::mkldnn_linear_backward_input
    aten::mkldnn_linear_backward_weights aten::mkldnn_convolution aten::cudnn_convolution
    aten::cudnn_convolution_backward_input aten::cudnn_convolution_backward_weight
    aten::miopen_convolution aten::convolution_backward aten::_slow_conv2d_forward
    aten::_slow_conv2d_backward aten::slow_conv3d_forward mkldnn::_linear_pointwise
    mkldnn::_convolution_pointwise mkl::_mkl_linear""".split()
)
_OPS_BY_CATEGORY = {
    "normalization": (
        "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward "
        "native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward "
        "_batch_norm_impl_index cudnn_batch_norm cudnn_batch_norm_backward"
    ),
    "softmax": (
        "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data logsumexp "
        "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward"
    ),
    "reduction": (
        "sum mean amax amin max min argmax argmin any all norm linalg_vector_norm var std var_mean "
        "prod cumsum cumprod _foreach_norm aminmax median logcumsumexp"
    ),
    "copy": "copy_ cat _cat constant_pad_nd repeat_interleave roll flip _pin_memory",
    "memset": "fill_ zero_",
    "embedding": "embedding index_select embedding_dense_backward embedding_renorm_ _embedding_bag",
    "sort and index": (
        "sort topk gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ "
        "index index_put_ _index_put_impl_ index_add index_add_ index_copy_ index_fill_ nonzero "
        "masked_select masked_scatter_ bincount histc searchsorted bucketize _unique2 take "
        "kthvalue multinomial"
    ),
    "elementwise": (
        "add sub rsub mul div neg pow sqrt rsqrt exp exp2 expm1 log log2 log1p sigmoid silu "
        "gelu relu tanh sin cos erf abs sign reciprocal square floor ceil round threshold clamp "
        "clamp_min clamp_max where addcmul addcdiv lerp masked_fill eq ne lt le gt ge "
        "logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_xor "
        "bitwise_not maximum minimum normal uniform random bernoulli exponential log_normal "
        "native_dropout softplus elu leaky_relu hardtanh hardswish mish logit glu fmod "
        "remainder isnan isfinite isinf arange tril triu hypot atan2 mse_loss smooth_l1_loss "
        "huber_loss nan_to_num polar angle complex fill_diagonal im2col col2im "
        "upsample_nearest2d"
    ),
}
_CATEGORY_OF_OP = {
    name: category for category, names in _OPS_BY_CATEGORY.items() for name in names.split()
}
_ATTENTIONS = (
    ("attention flash", r"_flash_attention(_forward|_backward|_for_cpu|_for_cpu_backward)$"),
    ("attention cudnn", r"_cudnn_attention(_forward|_backward)?$"),
    ("attention efficient", r"_efficient_attention(_forward|_backward)?$"),
)
_COMMUNICATION_OPS = re.compile(
    r"c10d::|_c10d_functional(_autograd)?::|nccl:|gloo:|record_param_comms"
)


def is_communication_kernel(kernel: str) -> bool:
    """Whether a kernel exchanges data with other devices."""
    return re.search(_COMMUNICATION, kernel) is not None


def is_communication_op(op: str) -> bool:
    """Whether an operator calls a collective, or waits for one."""
    return _COMMUNICATION_OPS.match(op) is not None


def op_category(op: str, dtypes: str = "") -> str:
    """Return the category of an operator, as a CPU runs it."""
    if op in PRODUCT_OPS:
        return _product_category(_input_dtype(op, dtypes))
    return _listed_category(op) or _inductor_category(op) or "other"


def _listed_category(op: str) -> str | None:
    """Return the category of an operator other than a matrix product; None: it is not listed."""
    if is_communication_op(op):
        return "communication"
    for category, pattern in _ATTENTIONS:
        if re.search(pattern, op):
            return category
    name = op.removeprefix("aten::")
    if name == op:
        return None
    if name in _CATEGORY_OF_OP:
        return _CATEGORY_OF_OP[name]
    if name.startswith("_foreach_copy"):
        return "copy"
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")):
        return "optimizer"
    # In place, and the backward of elementwise functions: add_, threshold_backward.
    plain = name.removesuffix("_").removesuffix("_backward")
    return "elementwise" if _CATEGORY_OF_OP.get(plain) == "elementwise" else None


# Inductor's kernels have in their names what was fused: triton_red_fused_add_mean_rsqrt_3. poi is
# pointwise, red and per are reductions, tem is a template (matrix product, attention), for is many
# small tensors at once, as optimizers have them. On a CPU the names are cpp_fused_....

_INDUCTOR_NAME = re.compile(
    r"(?:triton_(?P<kind>poi|red|per|tem|mm|for|spl)|cpp)_fused_(?P<ops>\w*)"
)
_MOVES = frozenset(
    "clone copy to view transpose permute t cat stack expand slice split unsqueeze squeeze select "
    "constant pad nd reshape unsafe as strided contiguous".split()
)
# The first match decides.
_INSIDE = (
    (r"layer_norm|rms_norm|group_norm|batch_norm", "normalization"),
    (r"softmax|logsumexp|nll_loss|cross_entropy", "softmax"),
    (r"embedding", "embedding"),
    (r"sort|topk|scatter|gather|index_put|index_add|nonzero", "sort and index"),
)


def _inductor_category(kernel: str) -> str | None:
    """Return the category of an Inductor kernel; "matmul " for a product; None: not Inductor's."""
    parts = _INDUCTOR_NAME.fullmatch(kernel)
    if parts is None:
        return None
    kind, ops = parts["kind"], parts["ops"].rstrip("0123456789").removesuffix("_")
    if kind in ("tem", "mm"):
        return "attention triton" if re.search("attention", ops) else "matmul "
    if kind == "for":
        return "optimizer"
    for pattern, category in _INSIDE:
        if re.search(pattern, ops):
            return category
    if kind in ("red", "per", "spl"):
        # A mean of squares under a root is a norm that was written out.
        return "normalization" if "rsqrt" in ops else "reduction"
    words = {word for word in ops.split("_") if word}
    return "copy" if words and words <= _MOVES else "elementwise"
