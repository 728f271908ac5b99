"""Chunks of tokens with one Triton kernel between the products: logits to losses and gradients."""

# T tokens, D width, V vocabulary
from __future__ import annotations

from typing import Any

from torch import Tensor

from steplab.kernels._triton import DTYPES, refuse_device
from steplab.kernels.cross_entropy._chunked_op import RowMath, chunked_op

NEEDS_GPU = True


def refuse(x_TD: Tensor, weight_VD: Tensor) -> str:
    """Return why it cannot run, or ""."""
    reason = refuse_device(x_TD)
    if reason:
        return reason
    if x_TD.dtype not in DTYPES:
        return f"needs fp16, bf16 or fp32, not {x_TD.dtype}"
    return ""


def _loss(*args: Any) -> None:
    from steplab.kernels.cross_entropy import _triton_rows

    _triton_rows.loss(*args)


def _gradient(*args: Any) -> None:
    from steplab.kernels.cross_entropy import _triton_rows

    _triton_rows.gradient(*args)


mean, per_token = chunked_op("triton_chunked_cross_entropy", RowMath(_loss, _gradient))
