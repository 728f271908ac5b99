"""Which experts each token goes to, from even to hopeless. Imports torch."""

# T tokens, E experts, K chosen
from __future__ import annotations

import torch
from torch import Tensor


def assign(routing: str, tokens: int, experts: int, chosen: int, seed: int) -> Tensor:
    """Return (T, K) int64, K different experts per token, the same on every machine.

    balanced: every expert gets as many rows as any other, give or take one. skewed: expert e is
    asked for with a weight of 1 / (e + 1), as words are in a text. collapsed: all tokens go to the
    first K experts.
    """
    if routing == "collapsed":
        return torch.arange(chosen).expand(tokens, chosen).contiguous()
    generator = torch.Generator().manual_seed(seed)
    if routing == "balanced":
        start_T1 = torch.randperm(tokens, generator=generator)[:, None] * chosen
        return (start_T1 + torch.arange(chosen)) % experts
    uniform_TE = torch.rand(tokens, experts, generator=generator).clamp_min(1e-30)
    # The largest K of log(weight) + Gumbel noise are K draws without putting back.
    gumbel_TE = -(-uniform_TE.log()).log()
    weight_E = 1 / (1 + torch.arange(experts))
    return (weight_E.log() + gumbel_TE).topk(chosen).indices
