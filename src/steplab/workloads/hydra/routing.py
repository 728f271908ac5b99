"""Routing: which tokens a feed-forward takes (MoD) and how many passes each token makes (MoR)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels.dispatch import AUTO
from steplab.kernels.stream_norm import RowSelection, Update, gather_rows
from steplab.modules.norms import NormInput
from steplab.modules.precision import matmul_dtype
from steplab.workloads.hydra.config import HydraConfig

# B batch, S rows, K rows taken


def choose_rows(rows_BK: Tensor, length: int) -> RowSelection:
    """Return the choice of `rows_BK`, all different, out of `length` rows."""
    taken = rows_BK.shape[1]
    places_K = torch.arange(taken, device=rows_BK.device)
    places_BS = rows_BK.new_full((len(rows_BK), length), taken)
    return RowSelection(rows_BK, places_BS.scatter(1, rows_BK, places_K.expand_as(rows_BK)))


def top_rows(score_BS: Tensor, taken: int) -> tuple[RowSelection, Tensor]:
    """Return the choice of the `taken` highest scores of each sequence, and the lowest of them (B).

    Compiled, a row's place is the number of rows before it in the order: comparisons that become
    one kernel, where a radix selection keeps one processor per sequence busy for 16 turns.
    """
    length = score_BS.shape[1]
    if not torch.compiler.is_compiling():
        found = score_BS.topk(taken, sorted=False)
        return choose_rows(found.indices, length), found.values.amin(1)
    rows_S = torch.arange(length, device=score_BS.device)
    own, other = score_BS[:, :, None], score_BS[:, None]
    earlier = (other == own) & (rows_S < rows_S[:, None])
    rank_BS = ((other > own) | earlier).sum(-1)
    here_BKS = rank_BS[:, None] == rows_S[:taken, None]
    rows_BK = torch.where(here_BKS, rows_S, 0).sum(-1)
    return RowSelection(rows_BK, rank_BS.clamp(max=taken)), score_BS.gather(1, rows_BK[:, -1:])[
        :, 0
    ]


# B batch, S tokens, D width, F inner width


Matrices = tuple[Tensor, Tensor]  # (2F, D) with the gate's rows first, and (D, F)


class SwiGLU(nn.Module):
    """(silu(gate) * up) projected down, for every token by itself."""

    op = "feed_forward"

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_in = nn.Linear(width, 2 * inner, bias=False)
        self.w_out = nn.Linear(inner, width, bias=False)
        self.impl = AUTO
        self.ran = ""

    def matrices(self, x_BSD: Tensor) -> Matrices:
        """Return the weights in the dtype of the products, for all passes of a block.

        Cast in each pass they took 12 % of a step of 64 tokens (tiny, autocast, CPU), so 1.6 %.
        """
        dtype = matmul_dtype(x_BSD)
        return self.w_in.weight.to(dtype), self.w_out.weight.to(dtype)

    def forward(self, x_BSD: Tensor, matrices: Matrices, weight_BS: Tensor | None = None) -> Tensor:
        """Map (B, S, D) to (B, S, D), times a weight per token if given."""
        inputs = (x_BSD.flatten(0, 1).to(matrices[0].dtype), *matrices)
        self.ran = feed_forward_op.choose(self.impl, *inputs)
        weights_T1 = None if weight_BS is None else weight_BS.reshape(-1, 1)
        # Not every implementation is known to autocast, so the casts are ours.
        with torch.autocast(x_BSD.device.type, enabled=False):
            out_TD = feed_forward_op.feed_forward(self.ran, *inputs, "swiglu", weights_T1)
        return out_TD.view_as(x_BSD)


# B batch, S tokens, K tokens taken, D width


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
        self, entry: NormInput, matrices: Matrices, threshold: Tensor | None = None
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
        self, entry: NormInput, router: Router, matrices: Matrices
    ) -> tuple[Update, Tensor, Took]:
        # Their order does not matter to a network that takes each token by itself.
        scored = entry.scored(router.weight_D)
        score_BS = scored.score_BS + router.bias.detach()
        choice, least_B = top_rows(score_BS, self.config.taken(score_BS.shape[1]))
        rows_BKD, stream_BSD, score_BS = entry.taken(scored, choice, router.weight_D)
        probability_BS, weight_BS = self._weights(score_BS + router.bias)
        weight_BK = gather_rows(weight_BS[..., None], choice)[..., 0]
        out_BKD = self.feed_forward(rows_BKD, matrices, weight_BK)
        return Update(out_BKD, choice), stream_BSD, Took(probability_BS, least_B)


# B batch, S tokens, D width, R passes


# Share of the passes that the routers of the first and the last block are biased to.
FIRST_SHARE, LAST_SHARE = 0.2, 0.5


class Depth(NamedTuple):
    """A depth of n means n + 1 passes."""

    logit_BS: Tensor
    probability_BS: Tensor
    wanted_BS: Tensor  # between the least and the greatest depth, not rounded
    depth_BS: Tensor  # whole numbers, in the dtype of the logits; no gradient
    order: RowSelection | None = None  # deepest first, where the form sorts
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

    def _by_rank(self, logit_BS: Tensor) -> tuple[Tensor, RowSelection, Tensor]:
        length = logit_BS.shape[1]
        falling = logit_BS.sort(dim=1, descending=True, stable=True)
        order = choose_rows(falling.indices, length)
        sizes = self.config.pass_sizes(length)
        depth_BS = torch.zeros_like(logit_BS)
        for size in sizes[1:]:
            depth_BS = depth_BS + (order.places_BS < size)
        least_R = torch.stack([falling.values[:, size - 1].mean() for size in sizes])
        return depth_BS, order, least_R


# N blocks, R passes


if TYPE_CHECKING:
    from steplab.workloads.hydra.recursion import Routed

THRESHOLD_EMA_RATE = 0.05  # of the running mean: about the last 20 updates


class Thresholds(NamedTuple):
    """The least scores of one block, by pass: of a token that is taken, and that goes on."""

    mod_R: Tensor
    mor_R: Tensor


class RunningThresholds(nn.Module):
    """The thresholds of all blocks. The model updates them, not the blocks: a block that is
    computed twice, for its activations were not kept, would count twice."""

    mod_NR: Tensor
    mor_NR: Tensor

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        shape = (config.blocks, config.recursions)
        self.register_buffer("mod_NR", torch.full(shape, share_score(config.capacity)))
        self.register_buffer("mor_NR", torch.zeros(shape))

    def of(self, block: int) -> Thresholds:
        """Return those of one block."""
        return Thresholds(self.mod_NR[block], self.mor_NR[block])

    @torch.no_grad()
    def follow(self, routed: Sequence[Routed]) -> None:
        """Move towards the least scores that these blocks took."""
        took = [one.least_B for each in routed for one in each.took or ()]
        taken = [least_B for least_B in took if least_B is not None]
        if taken:
            inner_NR = self.mod_NR[1:-1]
            inner_NR.lerp_(
                torch.stack(taken).mean(1).view_as(inner_NR).to(inner_NR), THRESHOLD_EMA_RATE
            )
        depths = [each.depth.least_R for each in routed if each.depth is not None]
        ranked = [least_R for least_R in depths if least_R is not None]
        if ranked:
            self.mor_NR.lerp_(torch.stack(ranked).to(self.mor_NR), THRESHOLD_EMA_RATE)
