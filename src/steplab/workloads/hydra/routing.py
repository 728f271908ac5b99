"""MoD: which tokens a feed-forward takes. Routers score in fp32 or better."""

# B batch, S tokens, K tokens taken, D width
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steplab.workloads.hydra.config import HydraConfig
from steplab.workloads.hydra.rows import best, put_back, take
from steplab.workloads.hydra.swiglu import Matrices, SwiGLU

LARGEST_SCORE = 10.0


def share_score(share: float) -> float:
    """Return the score whose sigmoid is `share`, up to the largest score."""
    return math.log(share / (1 - share)) if share < 1 else LARGEST_SCORE


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


class Took(NamedTuple):
    """What a routed feed-forward did in one pass."""

    probability_BS: Tensor
    least_B: Tensor | None = None  # the lowest score that top-k took of each sequence


class RoutedFeedForward(nn.Module):
    """A SwiGLU network for the tokens that its router takes; the others get 0."""

    def __init__(self, config: HydraConfig, routed: bool) -> None:
        super().__init__()
        self.config = config
        self.form = config.mod if routed else "dense"
        self.feed_forward = SwiGLU(config.width, config.ff_width)
        self.router = Router(config.width) if routed else None

    def forward(
        self, x_BSD: Tensor, matrices: Matrices, threshold: Tensor | None = None
    ) -> tuple[Tensor, Took | None]:
        """Return ((B, S, D), what the router did); `threshold` is for the form of that name."""
        if self.form == "dense":  # asked first: with and without a router one graph serves
            return self.feed_forward(x_BSD, matrices), None
        assert self.router is not None
        score_BS = self.router(x_BSD)
        probability_BS = score_BS.clamp(-LARGEST_SCORE, LARGEST_SCORE).sigmoid()
        by_router = self.form == "soft" or self.config.mod_gate == "router"
        weight_BS = probability_BS if by_router else torch.ones_like(probability_BS)
        if self.form == "top-k":
            return self._best(x_BSD, matrices, score_BS.detach(), weight_BS, probability_BS)
        if self.form == "threshold":
            assert threshold is not None
            weight_BS = weight_BS * (score_BS >= threshold)
        return self.feed_forward(x_BSD, matrices, weight_BS), Took(probability_BS)

    def _best(
        self,
        x_BSD: Tensor,
        matrices: Matrices,
        score_BS: Tensor,
        weight_BS: Tensor,
        probability_BS: Tensor,
    ) -> tuple[Tensor, Took]:
        # Their order does not matter to a network that takes each token by itself.
        choice, least_B = best(score_BS, self.config.taken(x_BSD.shape[1]))
        weight_BK = take(weight_BS[..., None], choice)[..., 0]
        out_BKD = self.feed_forward(take(x_BSD, choice), matrices, weight_BK)
        return put_back(out_BKD, choice), Took(probability_BS, least_B)
