"""Causal convolutions over packed query and key channels, as matrix products of shifted rows.

Tensors stay (B, S, C): torch's own convolution wants channels before time, which costs a copy on
each side. A convolution that mixes within heads is done as one dense product with zeros between
the heads: at these widths (240 to 512 channels) the zeros cost less than a product per head.
"""

# B batch, S tokens, C channels, K taps, H heads, E head width
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.workloads.hydra.config import KERNEL, HydraConfig


def shifted(x_BSC: Tensor, by: int) -> list[Tensor]:
    """Return x delayed by `by`, by - 1, ..., 0 tokens; what lies before the start is zero."""
    padded = F.pad(x_BSC, (0, 0, by, 0))
    return [padded[:, i : i + x_BSC.shape[1]] for i in range(by + 1)]


def convolve(x_BSC: Tensor, weight_CKC: Tensor) -> Tensor:
    """Return the causal convolution (B, S, C) by (out, tap, in) weights, the oldest tap first."""
    return F.linear(torch.cat(shifted(x_BSC, weight_CKC.shape[1] - 1), -1), weight_CKC.flatten(1))


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
    """Mixes time, each channel by itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inputs = KERNEL
        self.weight_KC = nn.Parameter(torch.empty(KERNEL, channels))

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map (B, S, C) to (B, S, C)."""
        taps = zip(shifted(x_BSC, KERNEL - 1), self.weight_KC, strict=True)
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


# What a new token's convolved channels depend on: so many tokens before it.
REACH = 2 * (KERNEL - 1)
