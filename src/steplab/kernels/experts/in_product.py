"""Like `fused`, with gelu and its derivative in the kernels of the products before them."""

from __future__ import annotations

from torch import Tensor

from steplab.kernels.activation._in_product import IN_PRODUCT, refuse_layer
from steplab.kernels.experts import ExpertWeights, GroupedMatmul, RoutedTokens, fused
from steplab.kernels.triton_runtime import refuse_gluon

NEEDS_GPU = True


def refuse(x_TD: Tensor, experts: ExpertWeights) -> str:
    """Return why it cannot run, or ""."""
    D, F = experts.w_out_EDF.shape[1:]
    reason = fused.refuse(x_TD, experts) or refuse_layer(D, F, experts.activation)
    return reason or refuse_gluon(x_TD)


def experts(
    tokens: RoutedTokens, experts: ExpertWeights, matmul: GroupedMatmul
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, 0)."""
    return fused.experts(tokens, experts._replace(activation=IN_PRODUCT), matmul)
