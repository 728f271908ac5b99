"""The training loss: Huber and pinball per horizon, and the balance of the experts."""

# B batch, N tokens, T points, H points of all horizons, h points of one, Q quantiles, L layers,
# E experts
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steplab.modules.attention import document_starts


class HorizonLoss(nn.Module):
    """Mean over the heads of each head's mean Huber loss over the points that are known.

    The head of horizon h at token n predicts the h points that follow the token's last point.
    """

    def __init__(self, horizons: Sequence[int], patch_length: int, delta: float) -> None:
        super().__init__()
        self.horizons = tuple(horizons)
        self.patch_length = patch_length
        self.delta = delta

    def forward(
        self,
        outputs_BNH: Tensor,
        values_BT: Tensor,
        mask_BT: Tensor,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the scalar loss; `values_BT` has one point more than the tokens cover.

        With `documents_BT`, points of another document than the token's are no targets.
        """
        shape = (max(self.horizons), self.patch_length)
        targets_BNh, known_BNh = targets(values_BT, mask_BT, documents_BT, *shape)
        losses = []
        for prediction_BNh in outputs_BNH.to(values_BT.dtype).split(self.horizons, dim=-1):
            h = prediction_BNh.shape[-1]
            error = F.huber_loss(
                prediction_BNh, targets_BNh[..., :h], reduction="none", delta=self.delta
            )
            known = known_BNh[..., :h]
            losses.append((error * known).sum() / known.sum().clamp_min(1))
        return torch.stack(losses).mean()


class QuantileLoss(nn.Module):
    """Mean over heads and levels of twice the pinball loss: |error| at the level 0.5."""

    levels_Q: Tensor

    def __init__(self, horizons: Sequence[int], patch_length: int, levels: Sequence[float]) -> None:
        super().__init__()
        self.horizons = tuple(horizons)
        self.patch_length = patch_length
        self.register_buffer("levels_Q", torch.tensor(levels), persistent=False)

    def forward(
        self,
        quantiles_BNHQ: Tensor,
        values_BT: Tensor,
        mask_BT: Tensor,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the scalar loss of predicting the points that `HorizonLoss` takes as known."""
        shape = (max(self.horizons), self.patch_length)
        targets_BNh, known_BNh = targets(values_BT, mask_BT, documents_BT, *shape)
        losses = []
        for prediction_BNhQ in quantiles_BNHQ.to(values_BT.dtype).split(self.horizons, dim=-2):
            h = prediction_BNhQ.shape[-2]
            above_BNhQ = targets_BNh[..., :h, None] - prediction_BNhQ
            error_BNhQ = torch.maximum(self.levels_Q * above_BNhQ, (self.levels_Q - 1) * above_BNhQ)
            known = known_BNh[..., :h]
            mean_BNh = 2 * error_BNhQ.mean(-1)
            losses.append((mean_BNh * known).sum() / known.sum().clamp_min(1))
        return torch.stack(losses).mean()


def targets(
    values_BT: Tensor, mask_BT: Tensor, documents_BT: Tensor | None, length: int, patch_length: int
) -> tuple[Tensor, Tensor]:
    """Return (B, N, length) each: the points after each token, and 1 where they are targets.

    Targets are known points of the token's own document.
    """
    points_BNh = following(values_BT, length, patch_length)
    known_BNh = following(mask_BT.to(values_BT.dtype), length, patch_length)
    if documents_BT is not None:
        start_BT = document_starts(documents_BT)
        start_BN = start_BT[:, :-patch_length:patch_length]
        known_BNh = known_BNh * (following(start_BT, length, patch_length) == start_BN[..., None])
    return points_BNh, known_BNh


def following(points_BT: Tensor, length: int, patch_length: int) -> Tensor:
    """Return (B, N, length): the points after each token; beyond the window zeros."""
    after = F.pad(points_BT[:, patch_length:], (0, length - 1))
    return after.unfold(1, length, patch_length)


def balance(load_LE: Tensor, importance_LE: Tensor) -> Tensor:
    """Mean over layers of E * sum(load * importance): 1.0 when every layer is balanced."""
    return (load_LE * importance_LE).sum(-1).mean() * load_LE.shape[-1]


def balance_across_layers(load_LE: Tensor, importance_LE: Tensor, chosen: int) -> Tensor:
    """Time-MoE's definition, over all layers at once: `chosen` when balanced.

    Layers whose imbalances cancel look balanced to it.
    """
    mean_load_E, mean_importance_E = load_LE.mean(0), importance_LE.mean(0)
    return chosen * (mean_load_E * mean_importance_E).sum() * load_LE.shape[-1]
