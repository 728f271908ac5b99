"""Autocast on tensors without data: the casts that torch makes on a GPU, made in Python.

torch decides in C++ whether a tensor is on a GPU, and there it is not (see fake_card.py). The lists
are those of aten/src/ATen/autocast_mode.h: what is computed in 16 bits, and what in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

NARROW = frozenset(
    """matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm linear conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention attend addmv mv
    einsum prelu chain_matmul multi_dot rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell
    _convolution grouped_mm _grouped_mm""".split()
)
WIDE = frozenset(
    """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__
    __rpow__ softplus layer_norm native_layer_norm group_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
    mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    binary_cross_entropy_with_logits cross_entropy dist pdist cdist renorm logsumexp norm
    softmax log_softmax cumprod cumsum prod sum softmin""".split()
)


class Casting(TorchFunctionMode):
    """Casts the arguments of what autocast lists; weights are cast once while it is on."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.cast: dict[Tensor, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Cast, then call."""
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if not torch.is_autocast_enabled("cuda"):  # turned off further inside
            return func(*args, **options)
        if name in NARROW:
            args, options = tree_map(self._narrow, (args, options))
        elif name in WIDE and options.get("dtype") is None:
            args, options = tree_map(self._widen, (args, options))
        return func(*args, **options)

    def _narrow(self, value: Any) -> Any:
        if not _is_ours(value) or value.dtype in (self.dtype, torch.float64):
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self.dtype)
        if value not in self.cast:
            self.cast[value] = value.to(self.dtype)
        return self.cast[value]

    def _widen(self, value: Any) -> Any:
        half = (torch.bfloat16, torch.float16)
        return value.float() if _is_ours(value) and value.dtype in half else value


def _is_ours(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda" and value.is_floating_point()


class FakeAutocast(torch.autocast):
    """torch.autocast whose casts on the GPU are made in Python."""

    def __enter__(self) -> Any:
        """Begin."""
        entered = super().__enter__()
        self.casting = Casting(self.fast_dtype) if self.device == "cuda" else None
        if self.casting is not None:
            self.casting.__enter__()
        return entered

    def __exit__(self, *raised: Any) -> Any:
        """End, and forget the weights' copies."""
        if self.casting is not None:
            self.casting.__exit__(*raised)
            self.casting.cast.clear()
        return super().__exit__(*raised)
