"""Like `fused`, with the activation and its derivative in the kernels of the products before."""

from __future__ import annotations

from torch import Tensor

from steplab.kernels.activation._in_product import IN_PRODUCT, refuse_layer
from steplab.kernels.experts import ExpertWeights, GroupedMatmul, RoutedTokens, fused
from steplab.kernels.triton_runtime import refuse_gluon

NEEDS_GPU = True


def refuse(x_TD: Tensor, experts: ExpertWeights) -> str:
    """Return why it cannot run, or ""."""
    reason = fused.refuse(x_TD, experts) or refuse_layer(*experts.w_out_EDF.shape[1:])
    return reason or refuse_gluon(x_TD)


def experts(
    tokens: RoutedTokens, experts: ExpertWeights, matmul: GroupedMatmul
) -> tuple[Tensor, Tensor]:
    """Return (output_TD, 0)."""
    inside = experts._replace(activation=IN_PRODUCT[experts.activation])
    return fused.experts(tokens, inside, matmul)
