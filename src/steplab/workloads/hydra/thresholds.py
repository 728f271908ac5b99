"""Scores to pass in place of a place among others, so that a token does not see later ones.

Top-k and `capacity` compare a token with the whole sequence. What their last taken tokens scored,
averaged over the training, decides the same by the token alone.
"""

# N blocks, R passes
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from steplab.workloads.hydra.config import HydraConfig
from steplab.workloads.hydra.routing import share_score

if TYPE_CHECKING:
    from steplab.workloads.hydra.recursion import Routed

PACE = 0.05  # of the running mean: about the last 20 updates


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
            inner_NR.lerp_(torch.stack(taken).mean(1).view_as(inner_NR).to(inner_NR), PACE)
        depths = [each.depth.least_R for each in routed if each.depth is not None]
        ranked = [least_R for least_R in depths if least_R is not None]
        if ranked:
            self.mor_NR.lerp_(torch.stack(ranked).to(self.mor_NR), PACE)
