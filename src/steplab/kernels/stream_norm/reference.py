"""The definition, in fp32 or better."""

# B batch, S rows of a sequence, K rows taken, D width
from __future__ import annotations

import torch
from torch import Tensor

from steplab.kernels.stream_norm import Norm, RowSelection, Scored, Update, scatter_rows
from steplab.kernels.stream_norm import gather_rows as take_rows


def norm(
    x_BSD: Tensor, update: Update | None, norm: Norm, dtype: torch.dtype | None, ends: bool
) -> tuple[Tensor, Tensor]:
    """Return (normed, stream)."""
    stream_BSD = _added(x_BSD, update)
    normed_BSD = _normed(stream_BSD, norm).to(dtype or stream_BSD.dtype)
    return normed_BSD, stream_BSD.detach() if ends else stream_BSD


def score(x_BSD: Tensor, update: Update | None, norm: Norm, router_D: Tensor) -> Scored:
    """Return the stream, its scores, and what `take` continues with."""
    stream_BSD = _added(x_BSD, update)
    normed_BSD = _normed(stream_BSD, norm)
    score_BS = (normed_BSD * router_D).sum(-1)
    return Scored(stream_BSD, score_BS.detach(), (normed_BSD, score_BS))


def take(
    scored: Scored, selection: RowSelection, norm: Norm, router_D: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed_BKD, stream_BSD, score_BS)."""
    normed_BSD, score_BS = scored.kept
    normed_BSD = normed_BSD.to(dtype or scored.stream_BSD.dtype)
    return take_rows(normed_BSD, selection), scored.stream_BSD, score_BS


def _added(x_BSD: Tensor, update: Update | None) -> Tensor:
    if update is None:
        return x_BSD
    added, selection = update
    return x_BSD + (added if selection is None else scatter_rows(added, selection))


def _normed(stream_BSD: Tensor, norm: Norm) -> Tensor:
    wide = torch.promote_types(stream_BSD.dtype, torch.float32)
    shifted_BSD = stream_BSD.to(wide)
    if norm.offset_D is not None:
        shifted_BSD = shifted_BSD + norm.offset_D
    scale = (shifted_BSD.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return shifted_BSD * scale * norm.weight_D.to(wide)
