"""The feed-forward of a block: for the tokens its router takes, in as many passes as each needs."""

# B batch, S tokens, K tokens taken, T tokens of all sequences, D width, F inner width, R passes
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels.dispatch import AUTO
from steplab.kernels.stream_norm import RowSelection, Update, gather_rows, scatter_rows
from steplab.kernels.top_rows import top_rows
from steplab.modules.norms import NormInput, StreamNorm
from steplab.modules.precision import matmul_dtype
from steplab.workloads.hydra.config import HydraConfig
from steplab.workloads.hydra.routing import (
    MAX_SCORE,
    BlockRouting,
    Depth,
    DepthRouter,
    Router,
    Thresholds,
    TokenRouting,
    choose_rows,
)

EPS = 1e-6
Matrices = tuple[Tensor, Tensor]  # (2F, D) with the gate's rows first, and (D, F)
OnePass = Callable[[int, Tensor], Tensor]  # (pass, h_BSD) -> what the pass adds, (B, S, D)


class SwiGLU(nn.Module):
    """(silu(gate) * up) projected down, for each token independently."""

    op = "feed_forward"

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_in = nn.Linear(width, 2 * inner, bias=False)
        self.w_out = nn.Linear(inner, width, bias=False)
        self.impl = AUTO
        self.ran = ""

    def matrices(self, x_BSD: Tensor) -> Matrices:
        """Return the weights in the dtype of the products, for all passes of a block.

        Casting them in every pass took 12 % of a step of 64 tokens (tiny, autocast, CPU); casting
        them once takes 1.6 %.
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


class RoutedFeedForward(nn.Module):
    """A SwiGLU network for the tokens that its router takes; to the others it adds nothing."""

    def __init__(self, config: HydraConfig, routed: bool) -> None:
        super().__init__()
        self.config = config
        self.form = config.mod if routed else "dense"
        self.feed_forward = SwiGLU(config.width, config.ff_width)
        self.router = Router(config.width) if routed else None

    def forward(
        self, stream: NormInput, matrices: Matrices, threshold: Tensor | None = None
    ) -> tuple[Update, Tensor, TokenRouting | None]:
        """Return (what to add, the stream to add it to, what the router did).

        `threshold` is for the form of that name.
        """
        if self.form == "dense":  # first, so that blocks with and without a router share a graph
            normed_BSD, stream_BSD = stream.normed(narrow=True)
            return Update(self.feed_forward(normed_BSD, matrices)), stream_BSD, None
        assert self.router is not None
        if self.form == "top-k":
            return self._top_k(stream, self.router, matrices)
        normed_BSD, stream_BSD = stream.normed(narrow=False)
        score_BS = self.router(normed_BSD)
        probability_BS, weight_BS = self._weights(score_BS)
        if self.form == "threshold" and self.config.capacity < 1:  # else all are taken
            assert threshold is not None
            weight_BS = weight_BS * (score_BS >= threshold)
        out_BSD = self.feed_forward(normed_BSD, matrices, weight_BS)
        return Update(out_BSD), stream_BSD, TokenRouting(probability_BS)

    def _weights(self, score_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities and weights (B, S)."""
        probability_BS = score_BS.clamp(-MAX_SCORE, MAX_SCORE).sigmoid()
        by_router = self.form == "soft" or self.config.mod_gate == "router"
        return probability_BS, probability_BS if by_router else torch.ones_like(probability_BS)

    def _top_k(
        self, stream: NormInput, router: Router, matrices: Matrices
    ) -> tuple[Update, Tensor, TokenRouting]:
        # The rows may come in any order: the network treats each token independently.
        scored = stream.scored(router.weight_D)
        score_BS = scored.score_BS + router.bias.detach()
        choice, least_B = top_rows(score_BS, self.config.taken(score_BS.shape[1]))
        rows_BKD, stream_BSD, score_BS = stream.taken(scored, choice, router.weight_D)
        probability_BS, weight_BS = self._weights(score_BS + router.bias)
        weight_BK = gather_rows(weight_BS[..., None], choice)[..., 0]
        out_BKD = self.feed_forward(rows_BKD, matrices, weight_BK)
        return Update(out_BKD, choice), stream_BSD, TokenRouting(probability_BS, least_B)


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
    ) -> tuple[Tensor, Update | None, BlockRouting]:
        """Return (h_BSD after its passes, what is still to be added, what the routers decided).

        `first` is to be added to `h_BSD` before the first pass.
        """
        mod_R, mor_R = thresholds or (None, None)
        matrices = self.feed_forward.feed_forward.matrices(h_BSD)
        offsets_RD = self.offset_RD + self.embedding_RD
        routings: list[TokenRouting] = []

        def enter(index: int, h_BSD: Tensor, update: Update | None) -> tuple[Update, Tensor]:
            least = None if mod_R is None else mod_R[index]
            stream = NormInput(self.norm, h_BSD, update, offsets_RD[index])
            added, h_BSD, routing = self.feed_forward(stream, matrices, least)
            if routing is not None:
                routings.append(routing)
            return added, h_BSD

        def one_pass(index: int, h_BSD: Tensor) -> Tensor:
            (added, choice), _ = enter(index, h_BSD, None)
            return added if choice is None else scatter_rows(added, choice)

        if self.router.form == "fixed":
            update = first
            for index in range(self.passes):
                update, h_BSD = enter(index, h_BSD, update)
            return h_BSD, update, BlockRouting(routings or None, None)
        h_BSD = h_BSD + first.added
        depth = self.router(h_BSD, mor_R)
        return self._adaptive(h_BSD, depth, one_pass), None, BlockRouting(routings or None, depth)

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
