"""Losses that train the routers besides the task: share, spread, and more depth for hard tokens."""

# N blocks, P passes of routed blocks, B batch, S tokens
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steplab.workloads.hydra.config import HydraConfig
from steplab.workloads.hydra.routing import BlockRouting

LOSS_EMA_RATE = 0.01  # of the running mean and variance of the tokens' losses
MAX_PONDER = 5.0


def share_loss(probability_PBS: Tensor, capacity: float) -> Tensor:
    """Return (P,): small when the mean is near the capacity and the values are spread out."""
    variance_P = probability_PBS.var((1, 2), correction=0)
    even = max(capacity * (1 - capacity) / 2, 0.01)
    off_P = probability_PBS.mean((1, 2)) - capacity
    return off_P.square() + 0.5 * torch.exp(-5 * variance_P / even)


def ponder_loss(logit_NBS: Tensor, probability_NBS: Tensor) -> Tensor:
    """Return (N,): grows with the depth, and when a router treats all tokens alike."""
    alike_N = 0.01 * torch.exp(-10 * probability_NBS.var((1, 2), correction=0))
    flat_N = 0.1 * (0.5 - logit_NBS.var((1, 2), correction=0)).relu()
    depth_N = 0.0005 * probability_NBS.mean((1, 2))
    return (depth_N + alike_N + flat_N).clamp(max=MAX_PONDER)


class Advantage(nn.Module):
    """Which tokens are harder than usual, by a running mean of the tokens' losses.

    Updates are counted on the device: a number on the host would be frozen in a CUDA graph.
    """

    mean: Tensor
    variance: Tensor
    updates: Tensor

    def __init__(self, warmup: int) -> None:
        super().__init__()
        self.warmup = warmup
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("variance", torch.ones(()))
        self.register_buffer("updates", torch.zeros(()))

    @torch.no_grad()
    def forward(self, losses_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return (advantage_BS in -1 to 1, 0 during warm-up; how far warm-up is, 0 to 1)."""
        losses_BS = losses_BS.detach().to(self.mean.dtype)
        if self.training:
            self.mean.lerp_(losses_BS.mean(), LOSS_EMA_RATE)
            self.variance.lerp_(losses_BS.var(correction=0), LOSS_EMA_RATE)
            self.updates.add_(1)
        warm = (self.updates / self.warmup).clamp(max=1)
        advantage_BS = torch.tanh((losses_BS - self.mean) * self.variance.rsqrt())
        return torch.where(warm == 1, advantage_BS, 0), warm


class RouterLosses(nn.Module):
    """The routers' losses of all blocks."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.config = config
        self.advantage = Advantage(config.router_warmup)

    def forward(self, routings: Sequence[BlockRouting], losses_BS: Tensor) -> dict[str, Tensor]:
        """Return the weighted losses by name, and the mean number of `passes`, which is no loss.

        Routed tokens (MoD) have `share`; adaptive depth (MoR) has `ponder` and `advantage`.
        """
        found: dict[str, Tensor] = {}
        taken = [one.probability_BS for each in routings for one in each.tokens or ()]
        if taken:
            losses = self._share_losses(taken).sum() / self.config.recursions
            found["share"] = self.config.aux_factor * losses
        depths = [each.depth for each in routings if each.depth is not None]
        if depths:
            advantage_BS, warm = self.advantage(losses_BS)
            logit_NBS = torch.stack([depth.logit_BS for depth in depths])
            probability_NBS = torch.stack([depth.probability_BS for depth in depths])
            ponder = ponder_loss(logit_NBS, probability_NBS).sum()
            found["ponder"] = self.config.ponder_factor * warm * ponder
            deeper_N = (advantage_BS * probability_NBS).mean((1, 2)) * (self.config.recursions - 1)
            found["advantage"] = -self.config.advantage_factor * deeper_N.sum()
            found["passes"] = 1 + torch.stack([depth.depth_BS for depth in depths]).mean()
        return found

    def _share_losses(self, probabilities: Sequence[Tensor]) -> Tensor:
        """Return one loss per pass; passes over equally many tokens are computed together."""
        alike: dict[torch.Size, list[Tensor]] = {}
        for probability_BS in probabilities:
            alike.setdefault(probability_BS.shape, []).append(probability_BS)
        losses = [share_loss(torch.stack(some), self.config.capacity) for some in alike.values()]
        return torch.cat(losses)
