"""A block's feed-forward repeated, each token for its own number of passes."""

# B batch, S tokens, T tokens of all sequences, D width, R passes
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steplab.kernels.stream_norm import RowSelection, Update, gather_rows, scatter_rows
from steplab.modules.norms import NormInput, StreamNorm
from steplab.workloads.hydra.config import HydraConfig
from steplab.workloads.hydra.routing import (
    Depth,
    DepthRouter,
    RoutedFeedForward,
    Thresholds,
    Took,
    choose_rows,
)

EPS = 1e-6
OnePass = Callable[[int, Tensor], Tensor]  # (pass, h_BSD) -> what the pass adds, (B, S, D)


class Routed(NamedTuple):
    """What a block's routers did; None where there was nothing to decide."""

    took: list[Took] | None  # MoD, one per pass
    depth: Depth | None  # MoR


class Recursion(nn.Module):
    """R passes through one feed-forward, each with an offset of its own."""

    def __init__(self, config: HydraConfig, block: int) -> None:
        super().__init__()
        self.passes = config.recursions
        self.config = config
        self.offset_RD = nn.Parameter(torch.empty(config.recursions, config.width))
        self.embedding_RD = nn.Parameter(torch.empty(config.recursions, config.width))
        self.norm = StreamNorm(config.width, EPS)
        self.feed_forward = RoutedFeedForward(config, routed=0 < block < config.blocks - 1)
        self.router = DepthRouter(config, block)

    def forward(
        self, h_BSD: Tensor, first: Update, thresholds: Thresholds | None = None
    ) -> tuple[Tensor, Update | None, Routed]:
        """Return (h_BSD after its passes, what is yet to be added to it, what was decided).

        `first` is to be added to `h_BSD` before the first pass.
        """
        mod_R, mor_R = thresholds or (None, None)
        matrices = self.feed_forward.feed_forward.matrices(h_BSD)
        offsets_RD = self.offset_RD + self.embedding_RD
        took: list[Took] = []

        def enter(index: int, h_BSD: Tensor, update: Update | None) -> tuple[Update, Tensor]:
            least = None if mod_R is None else mod_R[index]
            entry = NormInput(self.norm, h_BSD, update, offsets_RD[index])
            found, h_BSD, own = self.feed_forward(entry, matrices, least)
            if own is not None:
                took.append(own)
            return found, h_BSD

        def one_pass(index: int, h_BSD: Tensor) -> Tensor:
            (added, choice), _ = enter(index, h_BSD, None)
            return added if choice is None else scatter_rows(added, choice)

        if self.router.form == "fixed":
            update = first
            for index in range(self.passes):
                update, h_BSD = enter(index, h_BSD, update)
            return h_BSD, update, Routed(took or None, None)
        h_BSD = h_BSD + first.added
        depth = self.router(h_BSD, mor_R)
        return self._adaptive(h_BSD, depth, one_pass), None, Routed(took or None, depth)

    def _adaptive(self, h_BSD: Tensor, depth: Depth, one_pass: OnePass) -> Tensor:
        if self.router.form == "soft":
            out_BSD = torch.zeros_like(h_BSD)
            for index, weight_BS in enumerate(depth.pass_weights(self.passes)):
                h_BSD = h_BSD + one_pass(index, h_BSD)
                out_BSD = out_BSD + scale_tokens(h_BSD, weight_BS)
            return out_BSD
        if self.router.form == "capacity":
            assert depth.order is not None
            sizes = self.config.pass_sizes(h_BSD.shape[1])
            h_BSD = shrinking_passes(h_BSD, depth.order, sizes, one_pass)
        elif self.router.form == "packed":
            h_BSD = self._packed(h_BSD, depth.depth_BS, one_pass)
        else:
            for index in range(self.passes):
                goes_on_BS1 = (depth.depth_BS >= index)[..., None]
                h_BSD = h_BSD + one_pass(index, h_BSD) * goes_on_BS1
        return scale_tokens(h_BSD, depth.straight_through())

    def _packed(self, h_BSD: Tensor, depth_BS: Tensor, one_pass: OnePass) -> Tensor:
        """Run each pass on the tokens that make it; their number is read on the host."""
        depth_1T = depth_BS.reshape(1, -1)
        order = choose_rows(
            depth_1T.argsort(dim=1, descending=True, stable=True), depth_1T.shape[1]
        )
        index_R1 = torch.arange(self.passes, device=depth_BS.device)[:, None]
        sizes = (depth_1T >= index_R1).sum(1).tolist()
        return shrinking_passes(h_BSD.flatten(0, 1)[None], order, sizes, one_pass).view_as(h_BSD)


def shrinking_passes(
    h_BSD: Tensor, order: RowSelection, sizes: Sequence[int], one_pass: OnePass
) -> Tensor:
    """Run pass i on the first `sizes[i]` tokens in `order`; sizes fall from all tokens on."""
    active, done = gather_rows(h_BSD, order), []
    for index, size in enumerate(sizes):
        done.append(active[:, size:])
        active = active[:, :size]
        if size:
            active = active + one_pass(index, active)
    return scatter_rows(torch.cat([active, *reversed(done)], 1), order)


def scale_tokens(x_BSD: Tensor, weight_BS: Tensor) -> Tensor:
    """Weigh tokens without widening them: a wide weight would widen the residual stream."""
    return x_BSD * weight_BS[..., None].to(x_BSD.dtype)
