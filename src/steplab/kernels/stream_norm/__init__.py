"""Add to some rows of a stream, shift it, norm it, score its rows, and take the chosen ones.

The stream is x plus an update: a tensor of its shape, or rows that are scattered back to where a
selection took them from. The norm is that of stream + offset, times weight; the score is its
product with a vector. Both are computed in fp32 or better, and the norm is rounded once. The stream
is returned without the offset: a caller that continues with the returned one lets one backward
kernel add all of its gradients.

Every implementation offers `norm`, `score` and `take`, as below, and, unless it takes everything,
`refuse(x, update, norm)`.
"""

# B batch, S rows of a sequence, K rows taken, D width
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steplab.kernels.dispatch import load_all, select
from steplab.kernels.stream_norm._rows import RowSelection, gather_rows, scatter_rows

__all__ = ["Norm", "RowSelection", "Scored", "Update", "gather_rows", "scatter_rows"]


class Update(NamedTuple):
    """What is added to a stream (B, S, D): as many rows, or (B, K, D) and where they belong."""

    added: Tensor
    selection: RowSelection | None = None


class Norm(NamedTuple):
    """A norm's parameters; the offset is added to the stream for the norm alone."""

    weight_D: Tensor
    eps: float
    offset_D: Tensor | None = None


class Scored(NamedTuple):
    """A stream and its scores to choose by, (B, S); no gradient passes through these."""

    stream_BSD: Tensor
    score_BS: Tensor
    kept: tuple[Tensor, ...]  # the implementation's own


# After the types above, which the implementations import.
IMPLS = load_all("stream_norm")
PREFERENCE = ("triton_stream", "reference")


def choose(impl: str, x_BSD: Tensor, update: Update | None, norm: Norm) -> str:
    """Return the implementation to run. `auto` takes the first that accepts the inputs."""
    return select("stream_norm", IMPLS, PREFERENCE, impl, x_BSD, update, norm)


def add_and_norm(
    impl: str,
    x_BSD: Tensor,
    update: Update | None,
    norm: Norm,
    dtype: torch.dtype | None = None,
    ends: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (normed, stream), (B, S, D) each; the norm in `dtype`, by default the stream's.

    `ends`: the stream is not used further and gets no gradient. (When compiled, a gradient of
    zeros would be written and read.)
    """
    out: tuple[Tensor, Tensor] = IMPLS[impl].norm(x_BSD, update, norm, dtype, ends)
    return out


def add_and_score(
    impl: str, x_BSD: Tensor, update: Update | None, norm: Norm, router_D: Tensor
) -> Scored:
    """Return the new stream and the scores of its rows, for `take_normed`."""
    out: Scored = IMPLS[impl].score(x_BSD, update, norm, router_D)
    return out


def take_normed(
    impl: str,
    scored: Scored,
    selection: RowSelection,
    norm: Norm,
    router_D: Tensor,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (normed_BKD, stream_BSD, score_BS): the chosen rows, and scores with a gradient."""
    out: tuple[Tensor, Tensor, Tensor] = IMPLS[impl].take(scored, selection, norm, router_D, dtype)
    return out
