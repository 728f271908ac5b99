"""Like `fused`, with gelu and its derivative in the kernels of the matrix products."""

from __future__ import annotations

from torch import Tensor

from steplab.kernels.experts import ExpertWeights, GroupedMatmul, RoutedTokens, fused
from steplab.kernels.grouped_mm._epilogue import IN_PRODUCT, refuse_shape

NOT_TUNED = "no GPU has measured it yet"


def refuse(x_TD: Tensor, experts: ExpertWeights) -> str:
    """Return why it cannot run, or ""."""
    if experts.activation != "gelu":
        return f"needs gelu, not {experts.activation}"
    return fused.refuse(x_TD, experts) or refuse_shape(x_TD, *experts.w_out_EDF.shape[1:])


def experts(
    tokens: RoutedTokens, experts: ExpertWeights, matmul: GroupedMatmul
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, 0)."""
    in_product = experts._replace(activation=IN_PRODUCT)
    return fused.experts(tokens, in_product, matmul)
