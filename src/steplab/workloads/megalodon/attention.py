"""Gated attention within chunks; what is older comes through the moving averages."""

# B batch, L tokens, D width, H heads, K width of a head's keys, V of its values, C tokens of a
# chunk
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.core.errors import Unsupported
from steplab.kernels import attention as attention_op
from steplab.kernels.attention import AttentionInputs
from steplab.kernels.dispatch import AUTO, select
from steplab.kernels.timestep_norm import Statistics
from steplab.modules.attention import Attention
from steplab.modules.precision import Fp32Module
from steplab.modules.rotary import Angles, Rotary
from steplab.workloads.megalodon.config import MegalodonConfig
from steplab.workloads.megalodon.layers import MovingAverages, TimestepNorm, ZeroCenteredRMSNorm
from steplab.workloads.megalodon.streaming import BlockCache

WIDE_VALUE_IMPLS = ("blocks", "reference")  # implementations for values wider than keys


class BlockState(NamedTuple):
    """What a block carries from token to token, besides the keys and values of its chunk."""

    statistics: Statistics
    averages_B2ND: Tensor

    def detached(self) -> BlockState:
        """Return the same, detached from the graph."""
        statistics = Statistics(*(x.detach() for x in self.statistics))
        return BlockState(statistics, self.averages_B2ND.detach())


class WideAttention(Attention):
    """Attention whose values may be wider than its keys, which few implementations take."""

    def forward(
        self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, documents_BS: Tensor | None = None
    ) -> Tensor:
        """Return (B, H, T, V)."""
        if v_BHSV.shape[-1] == q_BHTK.shape[-1]:
            return super().forward(q_BHTK, k_BHSK, v_BHSV, documents_BS)
        if self.impl not in (AUTO, *WIDE_VALUE_IMPLS):
            raise Unsupported(
                f"attention {self.impl!r} needs values as wide as keys, but a head's values have "
                f"{v_BHSV.shape[-1]} and its keys {q_BHTK.shape[-1]}.",
                f"Use impl.attention={WIDE_VALUE_IMPLS[0]}, or leave it out.",
            )
        inputs = AttentionInputs(q_BHTK, k_BHSK, v_BHSV, self.causal, documents_BS)
        self.ran = select("attention", attention_op.IMPLS, WIDE_VALUE_IMPLS, self.impl, inputs)
        return attention_op.attention(self.ran, *inputs)


class QueriesKeys(Fp32Module):
    """Queries and keys from one shared projection: normed per head, each with its own affine."""

    def __init__(self, config: MegalodonConfig) -> None:
        super().__init__()
        self.heads, self.eps = config.heads, config.eps
        self.scale_2Z = nn.Parameter(torch.zeros(2, config.shared_width))  # minus one
        self.shift_2Z = nn.Parameter(torch.zeros(2, config.shared_width))

    def forward(self, z_BLZ: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return q and k, (B, H, L, K), rotated.

        Attention divides scores by sqrt(K) once, which is in the keys already; so the queries get
        it back.
        """
        dtype = z_BLZ.dtype
        wide = torch.promote_types(dtype, torch.float32)
        with torch.autocast(z_BLZ.device.type, enabled=False):
            z_BLHK = z_BLZ.to(wide).unflatten(-1, (self.heads, -1))
            K = z_BLHK.shape[-1]
            normed_BLHK = F.rms_norm(z_BLHK, (K,), eps=self.eps)
            scale_2HK = (1 + self.scale_2Z).unflatten(-1, (self.heads, -1))
            shift_2HK = self.shift_2Z.unflatten(-1, (self.heads, -1))
            q_BLHK = normed_BLHK * scale_2HK[0] + shift_2HK[0] * K**0.5
            k_BLHK = normed_BLHK * (scale_2HK[1] / K**0.5) + shift_2HK[1]
            q, k = (rotate_pairs(x.transpose(1, 2), *angles) for x in (q_BLHK, k_BLHK))
        return q.to(dtype), k.to(dtype)


def rotate_pairs(x_BHLK: Tensor, cos_LK: Tensor, sin_LK: Tensor) -> Tensor:
    """Rotate neighbors, features 2 j and 2 j + 1, by the j-th angle of the position."""
    even, odd = x_BHLK.unflatten(-1, (-1, 2)).unbind(-1)
    turned = (even * cos_LK - odd * sin_LK, even * sin_LK + odd * cos_LK)
    return torch.stack(turned, -1).flatten(-2)


class GatedAttention(nn.Module):
    """The first half of a block: norm, moving averages, chunked attention, gate."""

    def __init__(self, config: MegalodonConfig, rotary: Rotary) -> None:
        super().__init__()
        width, value_width = config.width, config.value_width
        self.chunk, self.rotary, self.heads = config.chunk, rotary, config.heads
        self.norm = TimestepNorm(width, config.norm_groups, config.eps)
        self.averages = MovingAverages(width, config.modes)
        self.average_norm = ZeroCenteredRMSNorm(width, config.eps)
        # The projection for queries and keys, the gate, and what bypasses attention.
        self.parts = (config.shared_width, value_width, width)
        self.from_averages = nn.Linear(width, sum(self.parts))
        self.values = nn.Linear(width, value_width)
        self.queries_keys = QueriesKeys(config)
        self.attention = WideAttention(causal=True)
        self.out = nn.Linear(value_width, width, bias=False)

    def forward(
        self,
        x_BLD: Tensor,
        valid_BL: Tensor | None = None,
        cache: BlockCache | None = None,
        keeps: bool = False,
    ) -> tuple[Tensor, BlockState | None]:
        """Return what is added to the stream, and if `keeps` what the next tokens need.

        With a `cache` the tokens continue where it ended, and it is updated.
        """
        before = cache.statistics if cache else None
        state = cache.averages_B2ND if cache else None
        keeps = keeps or cache is not None
        normed_BLD, statistics = self.norm(x_BLD, before, valid_BL, keeps)
        averages_BLD, last = self.averages(normed_BLD, state, keeps)
        parts = self.from_averages(self.average_norm(averages_BLD)).split(self.parts, -1)
        z_BLZ, gate_BLE, past_BLD = parts
        v_BLE = F.silu(self.values(normed_BLD))
        v_BHLV = v_BLE.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if cache is None:
            mixed_BHLV = self._in_chunks(z_BLZ, v_BHLV)
        else:
            q, k = self.queries_keys(z_BLZ, cache.angles(self.rotary, x_BLD.shape[1]))
            mixed_BHLV = cache.attend(self.attention, q, k, v_BHLV)
        mixed_BLE = mixed_BHLV.transpose(1, 2).flatten(-2) * F.silu(gate_BLE)
        out_BLD = past_BLD + self.out(mixed_BLE)
        if not keeps:
            return out_BLD, None
        assert statistics is not None and last is not None
        return out_BLD, BlockState(statistics, last)

    def _in_chunks(self, z_BLZ: Tensor, v_BHLV: Tensor) -> Tensor:
        """Attend within chunks that begin at token 0: whole ones as a batch, then the rest."""
        B, L, _ = z_BLZ.shape
        whole = L // self.chunk * self.chunk
        out = []
        if whole:
            shape = (whole // self.chunk, self.chunk)
            z_BcCZ = z_BLZ[:, :whole].unflatten(1, shape).flatten(0, 1)
            v_BcHCV = v_BHLV[:, :, :whole].unflatten(2, shape).transpose(1, 2).flatten(0, 1)
            q, k = self.queries_keys(z_BcCZ, self.rotary.first(self.chunk))
            mixed_BcHCV = self.attention(q, k, v_BcHCV)
            out.append(mixed_BcHCV.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3))
        if whole < L:
            q, k = self.queries_keys(z_BLZ[:, whole:], self.rotary.first(L - whole))
            out.append(self.attention(q, k, v_BHLV[:, :, whole:]))
        return out[0] if len(out) == 1 else torch.cat(out, 2)
