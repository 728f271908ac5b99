"""MoD: which tokens a feed-forward takes. Routers score in fp32 or better."""

# B batch, S tokens, K tokens taken, D width
from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steplab.kernels.stream_norm import Update, take
from steplab.modules.stream_norm import Entry
from steplab.workloads.hydra.config import HydraConfig
from steplab.workloads.hydra.rows import best
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
    """A SwiGLU network for the tokens that its router takes; to the others it adds nothing."""

    def __init__(self, config: HydraConfig, routed: bool) -> None:
        super().__init__()
        self.config = config
        self.form = config.mod if routed else "dense"
        self.feed_forward = SwiGLU(config.width, config.ff_width)
        self.router = Router(config.width) if routed else None

    def forward(
        self, entry: Entry, matrices: Matrices, threshold: Tensor | None = None
    ) -> tuple[Update, Tensor, Took | None]:
        """Return (what to add, the stream to add it to, what the router did).

        `threshold` is for the form of that name.
        """
        if self.form == "dense":  # asked first: with and without a router one graph serves
            normed_BSD, stream_BSD = entry.normed(narrow=True)
            return Update(self.feed_forward(normed_BSD, matrices)), stream_BSD, None
        assert self.router is not None
        if self.form == "top-k":
            return self._best(entry, self.router, matrices)
        normed_BSD, stream_BSD = entry.normed(narrow=False)
        score_BS = self.router(normed_BSD)
        probability_BS, weight_BS = self._weights(score_BS)
        if self.form == "threshold" and self.config.capacity < 1:  # else all are taken
            assert threshold is not None
            weight_BS = weight_BS * (score_BS >= threshold)
        out_BSD = self.feed_forward(normed_BSD, matrices, weight_BS)
        return Update(out_BSD), stream_BSD, Took(probability_BS)

    def _weights(self, score_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities and weights (B, S)."""
        probability_BS = score_BS.clamp(-LARGEST_SCORE, LARGEST_SCORE).sigmoid()
        by_router = self.form == "soft" or self.config.mod_gate == "router"
        return probability_BS, probability_BS if by_router else torch.ones_like(probability_BS)

    def _best(
        self, entry: Entry, router: Router, matrices: Matrices
    ) -> tuple[Update, Tensor, Took]:
        # Their order does not matter to a network that takes each token by itself.
        scored = entry.scored(router.weight_D)
        score_BS = scored.score_BS + router.bias.detach()
        choice, least_B = best(score_BS, self.config.taken(score_BS.shape[1]))
        rows_BKD, stream_BSD, score_BS = entry.taken(scored, choice, router.weight_D)
        probability_BS, weight_BS = self._weights(score_BS + router.bias)
        weight_BK = take(weight_BS[..., None], choice)[..., 0]
        out_BKD = self.feed_forward(rows_BKD, matrices, weight_BK)
        return Update(out_BKD, choice), stream_BSD, Took(probability_BS, least_B)
