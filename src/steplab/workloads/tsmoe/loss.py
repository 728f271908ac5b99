"""The training loss: Huber per horizon, and how evenly the experts were used."""

# B batch, N tokens, T points, H points of all horizons, L layers, E experts
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HorizonLoss(nn.Module):
    """Mean over the heads of each head's mean Huber loss over the points that are known.

    The head of horizon h at token n predicts the h points that follow the token's last point.
    """

    def __init__(self, horizons: Sequence[int], patch_length: int, delta: float) -> None:
        super().__init__()
        self.horizons = tuple(horizons)
        self.patch_length = patch_length
        self.delta = delta

    def forward(self, outputs_BNH: Tensor, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the scalar loss; `values_BT` has one point more than the tokens cover."""
        longest = max(self.horizons)
        targets_BNh = self._following(values_BT, longest)
        known_BNh = self._following(mask_BT.to(values_BT.dtype), longest)
        losses = []
        for prediction_BNh in outputs_BNH.to(values_BT.dtype).split(self.horizons, dim=-1):
            h = prediction_BNh.shape[-1]
            error = F.huber_loss(
                prediction_BNh, targets_BNh[..., :h], reduction="none", delta=self.delta
            )
            known = known_BNh[..., :h]
            losses.append((error * known).sum() / known.sum().clamp_min(1))
        return torch.stack(losses).mean()

    def _following(self, points_BT: Tensor, length: int) -> Tensor:
        """Return (B, N, length): the points after each token; beyond the window zeros."""
        after = F.pad(points_BT[:, self.patch_length :], (0, length - 1))
        return after.unfold(1, length, self.patch_length)


def balance(load_LE: Tensor, importance_LE: Tensor) -> Tensor:
    """Mean over layers of E * sum(load * importance): 1.0 when every layer is balanced."""
    return (load_LE * importance_LE).sum(-1).mean() * load_LE.shape[-1]


def balance_across_layers(load_LE: Tensor, importance_LE: Tensor, chosen: int) -> Tensor:
    """Time-MoE's definition, over all layers at once: `chosen` when balanced.

    Layers whose imbalances cancel look balanced to it.
    """
    mean_load_E, mean_importance_E = load_LE.mean(0), importance_LE.mean(0)
    return chosen * (mean_load_E * mean_importance_E).sum() * load_LE.shape[-1]
