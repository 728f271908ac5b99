"""Routing: which tokens a feed-forward takes (MoD), and how many passes each token makes (MoR).

Routers score in fp32 or better. Top-k and `capacity` compare a token with the whole sequence, which
generation cannot. The lowest scores that they accepted, averaged over the training, are thresholds
that decide the same by the token alone.
"""

# B batch, S tokens, K tokens taken, D width, N blocks, R passes
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steplab.kernels.stream_norm import RowSelection
from steplab.workloads.hydra.config import HydraConfig

MAX_SCORE = 10.0  # of a token, either way, before the sigmoid
# Share of the passes that the routers of the first and of the last block are biased to.
FIRST_SHARE, LAST_SHARE = 0.2, 0.5
THRESHOLD_EMA_RATE = 0.05  # of the running thresholds: about the last 20 updates


def choose_rows(rows_BK: Tensor, length: int) -> RowSelection:
    """Return the selection of `rows_BK`, all different, out of `length` rows."""
    taken = rows_BK.shape[1]
    slots_K = torch.arange(taken, device=rows_BK.device)
    slots_BS = rows_BK.new_full((len(rows_BK), length), taken)
    return RowSelection(rows_BK, slots_BS.scatter(1, rows_BK, slots_K.expand_as(rows_BK)))


def share_score(share: float) -> float:
    """Return the score whose sigmoid is `share`, up to the largest score."""
    return math.log(share / (1 - share)) if share < 1 else MAX_SCORE


class Router(nn.Module):
    """One score per token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight_D = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(()))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the scores (B, S)."""
        wide = torch.promote_types(x_BSD.dtype, torch.float32)
        return (x_BSD.to(wide) * self.weight_D).sum(-1) + self.bias


class TokenRouting(NamedTuple):
    """Which tokens a routed feed-forward took in one pass (MoD)."""

    probability_BS: Tensor
    least_B: Tensor | None = None  # the lowest score that top-k took of each sequence


class Depth(NamedTuple):
    """A depth of n means n + 1 passes."""

    logit_BS: Tensor
    probability_BS: Tensor
    wanted_BS: Tensor  # between the least and the greatest depth, not rounded
    depth_BS: Tensor  # whole numbers, in the dtype of the logits; no gradient
    order: RowSelection | None = None  # deepest first, where the form sorts
    least_R: Tensor | None = None  # lowest logit in each pass, where the form sorts by it

    def straight_through(self) -> Tensor:
        """Return ones (B, S) whose gradient pulls the wanted depth to the depth that helped."""
        weight_BS = torch.exp(-((self.wanted_BS - self.depth_BS) ** 2))
        return 1 + weight_BS - weight_BS.detach()

    def pass_weights(self, passes: int) -> Tensor:
        """Return (R, B, S), positive with sum 1: how near each pass is to the wanted depth."""
        index_R = torch.arange(passes, device=self.wanted_BS.device)
        weight_RBS = torch.exp(-((self.wanted_BS - index_R[:, None, None]) ** 2))
        return weight_RBS / weight_RBS.sum(0)


class DepthRouter(nn.Module):
    """Scores tokens and turns scores into depths by the config's form."""

    def __init__(self, config: HydraConfig, block: int) -> None:
        super().__init__()
        self.config = config
        self.form = config.mor
        self.score = Router(config.width)
        share = FIRST_SHARE + (LAST_SHARE - FIRST_SHARE) * block / max(1, config.blocks - 1)
        self.first_bias = math.log(share / (1 - share))

    def forward(self, h_BSD: Tensor, least_R: Tensor | None = None) -> Depth:
        """Return the depths; the form `threshold` compares with `least_R`."""
        logit_BS = 3 * torch.tanh(self.score(h_BSD) / 2)
        probability_BS = logit_BS.sigmoid()
        least, most = self.config.min_depth, self.config.recursions - 1
        wanted_BS = least + probability_BS * (most - least)
        found = (logit_BS, probability_BS, wanted_BS)
        if self.form == "capacity":
            return Depth(*found, *self._by_rank(logit_BS.detach()))
        if self.form == "threshold":
            assert least_R is not None
            reached_RBS = logit_BS >= least_R[1:, None, None]
            return Depth(*found, reached_RBS.sum(0).clamp_min(least).to(logit_BS.dtype))
        return Depth(*found, wanted_BS.detach().round())

    def _by_rank(self, logit_BS: Tensor) -> tuple[Tensor, RowSelection, Tensor]:
        length = logit_BS.shape[1]
        falling = logit_BS.sort(dim=1, descending=True, stable=True)
        order = choose_rows(falling.indices, length)
        sizes = self.config.pass_sizes(length)
        depth_BS = torch.zeros_like(logit_BS)
        for size in sizes[1:]:
            depth_BS = depth_BS + (order.slots_BS < size)
        least_R = torch.stack([falling.values[:, size - 1].mean() for size in sizes])
        return depth_BS, order, least_R


class BlockRouting(NamedTuple):
    """What a block's routers did; None where there was nothing to decide."""

    tokens: list[TokenRouting] | None  # one per pass
    depth: Depth | None


class Thresholds(NamedTuple):
    """Lowest scores in each pass of a block: to be taken (MoD), and to make the pass (MoR)."""

    mod_R: Tensor
    mor_R: Tensor


class RunningThresholds(nn.Module):
    """The thresholds of all blocks, running means over the training.

    The model updates them, not the blocks: a block that is recomputed in the backward pass would
    count twice.
    """

    mod_NR: Tensor
    mor_NR: Tensor

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        shape = (config.blocks, config.recursions)
        self.register_buffer("mod_NR", torch.full(shape, share_score(config.capacity)))
        self.register_buffer("mor_NR", torch.zeros(shape))

    def of_block(self, block: int) -> Thresholds:
        """Return those of one block."""
        return Thresholds(self.mod_NR[block], self.mor_NR[block])

    @torch.no_grad()
    def follow(self, routings: Sequence[BlockRouting]) -> None:
        """Move toward the least scores that these blocks took."""
        passes = [one for each in routings for one in each.tokens or ()]
        taken = [one.least_B for one in passes if one.least_B is not None]
        if taken:
            inner_NR = self.mod_NR[1:-1]
            least_NR = torch.stack(taken).mean(1).view_as(inner_NR)
            inner_NR.lerp_(least_NR.to(inner_NR), THRESHOLD_EMA_RATE)
        depths = [each.depth for each in routings if each.depth is not None]
        ranked = [depth.least_R for depth in depths if depth.least_R is not None]
        if ranked:
            self.mor_NR.lerp_(torch.stack(ranked).to(self.mor_NR), THRESHOLD_EMA_RATE)
