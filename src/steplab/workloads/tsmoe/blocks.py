"""What the network is made of: gated embedding, attention, and blocks with experts."""

# B batch, N tokens, S tokens with the cached ones, P points per token, D width
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.modules.attention import Attention
from steplab.modules.experts import MixtureOfExperts, Routing
from steplab.modules.kv_cache import LayerCache
from steplab.modules.rms_norm import RMSNorm
from steplab.modules.rotary import Angles, Rotary, RotaryHeads
from steplab.workloads.tsmoe.config import TsmoeConfig

EPS = 1e-6


class Place(NamedTuple):
    """Where tokens stand among others."""

    angles: Angles | None = None  # None: at positions 0 to N - 1
    documents_BS: Tensor | None = None  # of all keys; None: each row is one document
    counted_BN: Tensor | None = None  # tokens that the balancing loss counts; None: all


ALONE = Place()


class PointLinear(nn.Linear):
    """A product in the dtype of its input, not of its weight: so points keep their digits."""

    def forward(self, points: Tensor) -> Tensor:
        """Map (..., P) to (..., D)."""
        return F.linear(points, self.weight.to(points.dtype))


class Embedding(nn.Module):
    """silu(gate(x)) * value(x) of one point or patch."""

    def __init__(self, patch_length: int, width: int) -> None:
        super().__init__()
        self.value = PointLinear(patch_length, width, bias=False)
        self.gate = PointLinear(patch_length, width, bias=False)

    def forward(self, patches_BNP: Tensor) -> Tensor:
        """Map (B, N, P) to (B, N, D), never in autocast's dtype, then rounded to the weights'.

        So the residual stream keeps the dtype of the norms' weights, without which torch has no
        fused RMSNorm; and one point times one weight gains nothing from tensor cores.
        """
        with torch.autocast(patches_BNP.device.type, enabled=False):
            x_BND = F.silu(self.gate(patches_BNP)) * self.value(patches_BNP)
            return x_BND.to(self.value.weight.dtype)


class SelfAttention(nn.Module):
    """Causal attention with rotary positions; biased q, k, v in one product."""

    def __init__(self, config: TsmoeConfig, rotary: Rotary) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.rotary = RotaryHeads(rotary, config.n_head)
        self.attention = Attention(causal=True)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x_BND: Tensor, place: Place = ALONE, cache: LayerCache | None = None
    ) -> Tensor:
        """Map (B, N, D) to (B, N, D); the keys of `cache` are seen too, and the new ones added."""
        q, k, v = self.rotary(self.qkv(x_BND), place.angles)
        if cache is not None:
            k, v = cache.append(k, v)
        mixed = self.attention(q, k, v, place.documents_BS)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then the mixture layers, each behind its norm and beside its residual."""

    def __init__(self, config: TsmoeConfig, rotary: Rotary) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = RMSNorm(width, EPS)
        self.attention = SelfAttention(config, rotary)
        layers = range(config.num_expert_layers)
        self.norms = nn.ModuleList(RMSNorm(width, EPS) for _ in layers)
        shape = (config.d_expert, config.d_ff, config.num_experts, config.k, config.activation)
        self.mixtures = nn.ModuleList(MixtureOfExperts(width, *shape) for _ in layers)

    def forward(
        self, x_BND: Tensor, place: Place = ALONE, cache: LayerCache | None = None
    ) -> tuple[Tensor, list[Routing]]:
        """Return (x_BND, the routing of each mixture layer)."""
        normed_BND, x_BND = self.attention_norm(x_BND)
        out_BND = self.attention(normed_BND, place, cache)
        routings = []
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            normed_BND, x_BND = norm(x_BND, out_BND)
            out_BND, routing = mixture(normed_BND, place.counted_BN)
            routings.append(routing)
        return x_BND + out_BND, routings
