"""Categories of operators by name, for CPUs and for kernels whose own names tell nothing.

Only operators that do the work are listed. Those that hand on to another (linear, clone, to)
spend next to nothing themselves, and counting both would count one piece of work twice.
"""

from __future__ import annotations

import re

ADDING = frozenset(("aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::addmv", "aten::addr"))
PRODUCTS = ADDING | frozenset(
    (
        *("aten::mm", "aten::bmm", "aten::mv", "aten::dot", "aten::vdot", "aten::_grouped_mm"),
        *("aten::_scaled_mm", "aten::_scaled_grouped_mm", "aten::_int_mm"),
        *("aten::mkldnn_linear", "aten::mkldnn_linear_backward_input"),
        *("aten::mkldnn_linear_backward_weights", "aten::mkldnn_convolution"),
        *("aten::cudnn_convolution", "aten::miopen_convolution", "aten::convolution_backward"),
        *("aten::_slow_conv2d_forward", "aten::_slow_conv2d_backward", "aten::slow_conv3d_forward"),
        *("mkldnn::_linear_pointwise", "mkldnn::_convolution_pointwise", "mkl::_mkl_linear"),
    )
)

_NAMES = {
    "normalisation": (
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
_CATEGORY = {name: category for category, names in _NAMES.items() for name in names.split()}
_ATTENTIONS = (
    ("attention flash", r"_flash_attention(_forward|_backward|_for_cpu|_for_cpu_backward)$"),
    ("attention cudnn", r"_cudnn_attention(_forward|_backward)?$"),
    ("attention efficient", r"_efficient_attention(_forward|_backward)?$"),
)
_FRAMES = re.compile(r"c10d::|nccl:|gloo:|record_param_comms")


def category_of_op(op: str) -> str | None:
    """Return the category of an operator other than a matrix product; None: it has none."""
    if _FRAMES.match(op):
        return "communication"
    for category, pattern in _ATTENTIONS:
        if re.search(pattern, op):
            return category
    name = op.removeprefix("aten::")
    if name == op:
        return None
    if name in _CATEGORY:
        return _CATEGORY[name]
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")):
        return "optimizer"
    # In place, and the backward of elementwise functions: add_, threshold_backward.
    plain = name.removesuffix("_").removesuffix("_backward")
    return "elementwise" if _CATEGORY.get(plain) == "elementwise" else None
