"""CCGQA: attention in a compressed space, its queries and keys convolved and coupled.

The rotation pairs channel j with j + E/2, not with its neighbor: another order of the channels
within each head, which every learned weight around it follows.

Convolutions are matrix products of shifted rows, so that tensors stay (B, S, C): torch's own
convolution wants channels before time, which costs a copy on each side. One that mixes within heads
is one dense product with zeros between the heads: at these widths (240 to 512 channels) the zeros
cost less than a product per head.
"""

# B batch, S tokens, D width, H query heads, G key heads, E head width, C channels of q and k,
# K taps, R tokens that are kept, Z channels of q, k and v
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.modules.attention import Attention
from steplab.modules.kv_cache import LayerCache
from steplab.modules.precision import matmul_dtype
from steplab.modules.rotary import Angles, Rotary
from steplab.workloads.hydra.config import KERNEL, HydraConfig

# Tokens before a new one that its convolved channels depend on: two convolutions in a row.
REACH = 2 * (KERNEL - 1)
TINY = 1e-12  # keeps the norm of a zero vector from dividing by zero


def shift_tokens(x_BSC: Tensor, by: int) -> list[Tensor]:
    """Return x delayed by `by`, by - 1, ..., 0 tokens; what lies before the start is zero."""
    padded = F.pad(x_BSC, (0, 0, by, 0))
    return [padded[:, i : i + x_BSC.shape[1]] for i in range(by + 1)]


def convolve(x_BSC: Tensor, weight_CKC: Tensor) -> Tensor:
    """Return the causal convolution (B, S, C) by (out, tap, in) weights, the oldest tap first."""
    return F.linear(
        torch.cat(shift_tokens(x_BSC, weight_CKC.shape[1] - 1), -1), weight_CKC.flatten(1)
    )


class HeadConvolution(nn.Module):
    """Mixes time and the channels within each head."""

    def __init__(self, heads: int, head_width: int) -> None:
        super().__init__()
        self.inputs = KERNEL * head_width  # that one output sums up
        self.weight_HEKE = nn.Parameter(torch.empty(heads, head_width, KERNEL, head_width))

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S, C), C being all heads side by side."""
        heads = len(self.weight_HEKE)
        between_HH = torch.eye(heads, dtype=self.weight_HEKE.dtype, device=x_BSC.device)
        dense = self.weight_HEKE[:, :, :, None] * between_HH[:, None, None, :, None]
        return convolve(x_BSC, dense.flatten(3).flatten(0, 1))


class DenseConvolution(nn.Module):
    """Mixes time and all query channels, and apart from them time and all key channels."""

    def __init__(self, query_width: int, key_width: int) -> None:
        super().__init__()
        self.inputs = KERNEL * query_width
        self.query_QKQ = nn.Parameter(torch.empty(query_width, KERNEL, query_width))
        self.key_CKC = nn.Parameter(torch.empty(key_width, KERNEL, key_width))

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S, C), C being queries, then keys."""
        query = F.pad(self.query_QKQ, (0, self.key_CKC.shape[0]))
        key = F.pad(self.key_CKC, (self.query_QKQ.shape[0], 0))
        return convolve(x_BSC, torch.cat([query, key]))


class DepthwiseConvolution(nn.Module):
    """Mixes time, separately for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inputs = KERNEL
        self.weight_KC = nn.Parameter(torch.empty(KERNEL, channels))

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S, C)."""
        taps = zip(shift_tokens(x_BSC, KERNEL - 1), self.weight_KC, strict=True)
        return torch.stack([x * weight_C for x, weight_C in taps]).sum(0)


def convolutions(config: HydraConfig) -> nn.Sequential:
    """Return the two convolutions, without a bias and with nothing between them.

    HYDRA: within heads, then dense. The paper: over time alone, then within heads.
    """
    heads = config.heads + config.kv_heads
    within = HeadConvolution(heads, config.head_width)
    if config.attention == "hydra":
        return nn.Sequential(within, DenseConvolution(config.latent, config.kv_width))
    return nn.Sequential(DepthwiseConvolution(config.latent + config.kv_width), within)


class AttentionState(NamedTuple):
    """What attention keeps of the tokens it has seen."""

    keys_values: LayerCache
    latent_BRZ: Tensor  # projections of the last REACH tokens, oldest first, updated in place
    angles: Angles


class CCGQA(nn.Module):
    """Causal attention over a quarter of the width, by HYDRA's code or by the paper."""

    def __init__(self, config: HydraConfig, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
        self.as_paper = config.attention == "paper"
        latent, kv = config.latent, config.kv_width
        # The part of v that comes from the token before: half of the channels, or of the heads.
        late = config.kv_heads // 2 * config.head_width if self.as_paper else kv // 2
        self.parts = (latent + kv, kv - late, late)
        self.qkv = nn.Linear(config.width, latent + 2 * kv, bias=False)
        self.convolutions = convolutions(config)
        self.temperature = nn.Parameter(torch.empty(config.kv_heads if self.as_paper else 1))
        self.rotary = rotary
        self.attention = Attention(causal=True)
        self.out = nn.Linear(latent, config.width, bias=False)

    def forward(
        self, x_BSD: Tensor, state: AttentionState | None = None, scale: float = 1.0
    ) -> Tensor:
        """Map (B, S, D) to (B, S, D), times `scale`; the tokens follow those seen by `state`."""
        z_BSZ = self.qkv(x_BSD)
        if state is not None:
            z_BSZ = torch.cat([state.latent_BRZ, z_BSZ], 1)
            state.latent_BRZ.copy_(z_BSZ[:, -REACH:])
        qk_BSC, now, late = z_BSZ.split(self.parts, -1)
        v_BSF = torch.cat([now, shift_tokens(late, 1)[0]], -1)
        q_BSHE, k_BSGE = self._couple(qk_BSC, self.convolutions(qk_BSC))
        q, k, v = (
            t.transpose(1, 2)
            for t in (q_BSHE, k_BSGE, v_BSF.unflatten(-1, (-1, self.config.head_width)))
        )
        dtype = matmul_dtype(x_BSD)
        if state is not None:
            q, k, v = (t[:, :, REACH:] for t in (q, k, v))
        angles = None if state is None else state.angles
        q, k, v = (t.to(dtype) for t in (self.rotary(q, angles), self.rotary(k, angles), v))
        attend: Callable[..., Tensor] = self.attention
        if state is not None:
            attend = partial(state.keys_values.attend, self.attention)
        # The weight is scaled, not the product: 300 KB in place of 25 MB (100m, 16,384 tokens).
        heads_BSL = attend(q, k, v).transpose(1, 2).flatten(-2)
        return F.linear(heads_BSL, scale * self.out.weight)

    def _couple(self, before_BSC: Tensor, after_BSC: Tensor) -> tuple[Tensor, Tensor]:
        """Add means of the queries and keys before the convolutions to each other; fix lengths.

        In fp32 or better. Scores end between -1 and 1 in HYDRA and between -sqrt(E) and sqrt(E)
        in the paper, times the learned temperature.
        """
        heads, groups = self.config.heads, self.config.kv_heads
        wide = torch.promote_types(before_BSC.dtype, torch.float32)
        both = (
            t.to(wide).unflatten(-1, (heads + groups, -1)).split([heads, groups], 2)
            for t in (before_BSC, after_BSC)
        )
        (q0_BSHE, k0_BSGE), (q_BSHE, k_BSGE) = both
        root = self.config.head_width**0.5
        if self.as_paper:
            grouped = q0_BSHE.unflatten(2, (groups, -1))
            mean_BSGME = 0.5 * (grouped + k0_BSGE[:, :, :, None])
            q_BSHE = q_BSHE + mean_BSGME.flatten(2, 3)
            k_BSGE = k_BSGE + mean_BSGME.mean(3)
            scale = self.temperature.exp()[:, None] * root
            return normalize(q_BSHE) * root, normalize(k_BSGE) * scale
        q_BSHE = q_BSHE + 0.5 * k0_BSGE.mean(2, keepdim=True)
        k_BSGE = k_BSGE + 0.5 * q0_BSHE.mean(2, keepdim=True)
        return normalize(q_BSHE), normalize(k_BSGE) * self.temperature


def normalize(x: Tensor) -> Tensor:
    """Return the vectors of the last dimension with length 1."""
    return x * (x.square().sum(-1, keepdim=True) + TINY).rsqrt()
