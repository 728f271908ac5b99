"""MoR: how many passes each token makes."""

# B batch, S tokens, D width, R passes
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steplab.kernels.stream_norm import Chosen
from steplab.workloads.hydra.config import HydraConfig
from steplab.workloads.hydra.routing import Router
from steplab.workloads.hydra.rows import chosen

# Share of the passes that the routers of the first and the last block are biased to.
FIRST_SHARE, LAST_SHARE = 0.2, 0.5


class Depth(NamedTuple):
    """A depth of n means n + 1 passes."""

    logit_BS: Tensor
    probability_BS: Tensor
    wanted_BS: Tensor  # between the least and the greatest depth, not rounded
    depth_BS: Tensor  # whole numbers, in the dtype of the logits; no gradient
    order: Chosen | None = None  # deepest first, where the form sorts
    least_R: Tensor | None = None  # lowest logit in each pass, where the form sorts by it

    def straight_through(self) -> Tensor:
        """Return ones (B, S) whose gradient pulls what is wanted to the depth that helped."""
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

    def _by_rank(self, logit_BS: Tensor) -> tuple[Tensor, Chosen, Tensor]:
        length = logit_BS.shape[1]
        falling = logit_BS.sort(dim=1, descending=True, stable=True)
        order = chosen(falling.indices, length)
        sizes = self.config.pass_sizes(length)
        depth_BS = torch.zeros_like(logit_BS)
        for size in sizes[1:]:
            depth_BS = depth_BS + (order.places_BS < size)
        least_R = torch.stack([falling.values[:, size - 1].mean() for size in sizes])
        return depth_BS, order, least_R
