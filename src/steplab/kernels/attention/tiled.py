"""FlashAttention-2 in plain torch, tile by tile: to be read and to test against.

Forward: for each tile of queries go over the keys, keep the running maximum and the running sum of
the softmax, and rescale what was added up whenever the maximum grows. Backward: compute the weights
again from the saved log-sum-exp. All sums are in fp32 or better.
"""

# B batch, H query heads, G key heads, N query heads that share a key head, T queries, S keys,
# D head width, Q and K one tile of queries and of keys
from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from steplab.kernels.attention._flash_op import empty_as_BTHD, empty_lse, flash_op
from steplab.kernels.attention._inputs import AttentionInputs, refuse_for_flash

TILE = 64  # queries and keys
NOT_TUNED = "it is here to be read and to test against: its products are in fp32"


def refuse(inputs: AttentionInputs) -> str:
    """Return why it cannot run, or ""."""
    return refuse_for_flash(inputs)


def tiles(length: int) -> Iterator[slice]:
    """Yield the tiles of an axis; the last one may be shorter."""
    return (slice(start, min(start + TILE, length)) for start in range(0, length, TILE))


class Mask:
    """Which keys each query sees: those of its document and, if causal, none after itself."""

    def __init__(
        self, T: int, S: int, causal: bool, first_BS: Tensor | None, past_BS: Tensor | None
    ) -> None:
        self.ahead = S - T  # the last query stands at the last key
        self.causal, self.first_BS, self.past_BS = causal, first_BS, past_BS

    def skips(self, queries: slice, keys: slice) -> bool:
        """Whether no query of one tile sees any key of the other, for a causal reason."""
        return self.causal and keys.start > queries.stop - 1 + self.ahead

    def __call__(self, scores_BGNQK: Tensor, queries: slice, keys: slice) -> Tensor:
        """Return the scores, -inf where a query does not see the key."""
        key_K = torch.arange(keys.start, keys.stop, device=scores_BGNQK.device)
        if self.causal:
            query_Q = torch.arange(queries.start, queries.stop, device=key_K.device)
            hidden_QK = key_K > (query_Q + self.ahead)[:, None]
            scores_BGNQK = scores_BGNQK.masked_fill(hidden_QK, -math.inf)
        if self.first_BS is not None and self.past_BS is not None:
            own = slice(queries.start + self.ahead, queries.stop + self.ahead)
            first_BQ1, past_BQ1 = self.first_BS[:, own, None], self.past_BS[:, own, None]
            hidden_BQK = (key_K < first_BQ1) | (key_K >= past_BQ1)
            scores_BGNQK = scores_BGNQK.masked_fill(hidden_BQK[:, None, None], -math.inf)
        return scores_BGNQK


def wide(x: Tensor) -> Tensor:
    """Return `x` in the dtype in which sums are kept: fp32, or fp64 for fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def shared(x_BHTD: Tensor, key_heads: int) -> Tensor:
    """Return (B, G, N, T, D), or without D: the query heads of a key head side by side."""
    return x_BHTD.unflatten(1, (key_heads, -1))


def forward(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    causal: bool,
    first_BS: Tensor | None,
    past_BS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, D) and the log-sum-exp of the scores (B, H, T)."""
    T, S, D = q_BHTD.shape[2], k_BGSD.shape[2], q_BHTD.shape[3]
    mask = Mask(T, S, causal, first_BS, past_BS)
    q_BGNTD = shared(q_BHTD, k_BGSD.shape[1])
    out_BHTD, lse_BHT = empty_as_BTHD(q_BHTD), empty_lse(q_BHTD)
    for queries in tiles(T):
        q_BGNQD = wide(q_BGNTD[..., queries, :]) / math.sqrt(D)
        sum_BGNQD = torch.zeros_like(q_BGNQD)
        # A finite start: a row that has seen no key yet must not compute inf - inf.
        top_BGNQ1 = torch.full_like(q_BGNQD[..., :1], -1e30)
        total_BGNQ1 = torch.zeros_like(top_BGNQ1)
        for keys in tiles(S):
            if mask.skips(queries, keys):
                break
            k_BG1KD, v_BG1KD = (wide(x[:, :, None, keys]) for x in (k_BGSD, v_BGSD))
            scores_BGNQK = mask(q_BGNQD @ k_BG1KD.mT, queries, keys)
            higher_BGNQ1 = torch.maximum(top_BGNQ1, scores_BGNQK.amax(-1, keepdim=True))
            weights_BGNQK = (scores_BGNQK - higher_BGNQ1).exp()
            shrink_BGNQ1 = (top_BGNQ1 - higher_BGNQ1).exp()
            sum_BGNQD = sum_BGNQD * shrink_BGNQ1 + weights_BGNQK @ v_BG1KD
            total_BGNQ1 = total_BGNQ1 * shrink_BGNQ1 + weights_BGNQK.sum(-1, keepdim=True)
            top_BGNQ1 = higher_BGNQ1
        out_BHTD[:, :, queries] = (sum_BGNQD / total_BGNQ1).flatten(1, 2).to(q_BHTD.dtype)
        lse_BHT[:, :, queries] = (top_BGNQ1 + total_BGNQ1.log()).flatten(1, 2).squeeze(-1)
    return out_BHTD, lse_BHT


def backward(
    dout_BHTD: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    out_BHTD: Tensor,
    lse_BHT: Tensor,
    causal: bool,
    first_BS: Tensor | None,
    past_BS: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the shapes and dtypes of q, k and v."""
    (G, S, D), T = k_BGSD.shape[1:], q_BHTD.shape[2]
    mask = Mask(T, S, causal, first_BS, past_BS)
    q_BGNTD, dout_BGNTD, lse_BGNT = (shared(x, G) for x in (q_BHTD, dout_BHTD, lse_BHT))
    delta_BGNT = shared((wide(out_BHTD) * wide(dout_BHTD)).sum(-1), G)
    dq_BGNTD = torch.zeros_like(q_BGNTD, dtype=lse_BHT.dtype)
    dk_BGSD, dv_BGSD = empty_as_BTHD(k_BGSD), empty_as_BTHD(v_BGSD)
    for keys in tiles(S):
        k_BG1KD, v_BG1KD = (wide(x[:, :, None, keys]) for x in (k_BGSD, v_BGSD))
        dk_BGKD, dv_BGKD = torch.zeros_like(k_BG1KD[:, :, 0]), torch.zeros_like(v_BG1KD[:, :, 0])
        for queries in tiles(T):
            if mask.skips(queries, keys):
                continue
            q_BGNQD, dout_BGNQD = (wide(x[..., queries, :]) for x in (q_BGNTD, dout_BGNTD))
            scores_BGNQK = mask(q_BGNQD / math.sqrt(D) @ k_BG1KD.mT, queries, keys)
            weights_BGNQK = (scores_BGNQK - lse_BGNT[..., queries, None]).exp()
            dv_BGKD += (weights_BGNQK.mT @ dout_BGNQD).sum(2)
            dweights_BGNQK = dout_BGNQD @ v_BG1KD.mT
            dscores_BGNQK = weights_BGNQK * (dweights_BGNQK - delta_BGNT[..., queries, None])
            dq_BGNTD[..., queries, :] += dscores_BGNQK @ k_BG1KD / math.sqrt(D)
            dk_BGKD += (dscores_BGNQK.mT @ q_BGNQD).sum(2) / math.sqrt(D)
        dk_BGSD[:, :, keys], dv_BGSD[:, :, keys] = (
            dk_BGKD.to(q_BHTD.dtype),
            dv_BGKD.to(q_BHTD.dtype),
        )
    dq_BHTD = empty_as_BTHD(q_BHTD).copy_(dq_BGNTD.flatten(1, 2))
    return dq_BHTD, dk_BGSD, dv_BGSD


attention = flash_op("tiled_attention", forward, backward)
