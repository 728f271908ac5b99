"""Norms of a residual stream, each by the implementation that was asked for."""

# B batch, S rows of a sequence, K rows taken, D width
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from steplab.kernels import rms_norm as rms_norm_op
from steplab.kernels import stream_norm as stream_norm_op
from steplab.kernels.dispatch import AUTO
from steplab.kernels.stream_norm import Norm, RowSelection, Scored, Update
from steplab.modules.precision import matmul_dtype


class _Norm(nn.Module):
    """A root-mean-square norm, whose only parameter is called `weight`, as in nn.RMSNorm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.impl = AUTO
        self.ran = ""


class RMSNorm(_Norm):
    """Root-mean-square norm of x, or of x + added."""

    op = "rms_norm"

    def forward(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (normed, stream), both (..., D): the stream is x, or x + added.

        The norm has the dtype of the matrix product that takes it: autocast's where it is on.
        Continue with the returned stream: then one kernel adds its gradients in the backward.
        """
        self.ran = rms_norm_op.choose(self.impl, x, self.weight, added)
        return rms_norm_op.rms_norm(
            self.ran, x, self.weight, self.eps, added, dtype=matmul_dtype(x)
        )


class StreamNorm(_Norm):
    """Root-mean-square norm of a stream that is added to, shifted and scored."""

    op = "stream_norm"

    def forward(self, x_BSD: Tensor, update: Update | None = None) -> Tensor:
        """Return the norm of x, with the update added, in the stream's dtype."""
        return NormInput(self, x_BSD, update).normed(narrow=False, ends=True)[0]


class NormInput(NamedTuple):
    """What a layer after the norm is given: the norm, and what it is to be applied to.

    Continue with the returned stream: then one kernel adds its gradients in the backward.
    """

    norm: StreamNorm
    x_BSD: Tensor
    update: Update | None = None
    offset_D: Tensor | None = None

    def normed(self, narrow: bool, ends: bool = False) -> tuple[Tensor, Tensor]:
        """Return (normed, stream).

        `narrow`: the norm has the dtype of the matrix product that takes it. `ends`: the stream is
        not used further and gets no gradient.
        """
        dtype = matmul_dtype(self.x_BSD) if narrow else None
        inputs = (self.x_BSD, self.update, self._parameters())
        return stream_norm_op.add_and_norm(self._choose(), *inputs, dtype, ends)

    def scored(self, router_D: Tensor) -> Scored:
        """Return the stream and its scores, by which rows are selected for `taken`."""
        inputs = (self.x_BSD, self.update, self._parameters())
        return stream_norm_op.add_and_score(self._choose(), *inputs, router_D)

    def taken(
        self, scored: Scored, selection: RowSelection, router_D: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (normed rows (B, K, D) in the products' dtype, stream_BSD, score_BS)."""
        dtype = matmul_dtype(self.x_BSD)
        inputs = (scored, selection, self._parameters(), router_D, dtype)
        return stream_norm_op.take_normed(self.norm.ran, *inputs)

    def _parameters(self) -> Norm:
        return Norm(self.norm.weight, self.norm.eps, self.offset_D)

    def _choose(self) -> str:
        inputs = (self.x_BSD, self.update, self._parameters())
        self.norm.ran = stream_norm_op.choose(self.norm.impl, *inputs)
        return self.norm.ran
