"""Seeded random walks: work for a time-series model when nothing is to be learned."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def random_walks(
    batch: int, points: int, device: torch.device, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (values_BT, mask_BT): normalised walks, every point known, copied as a loader would."""
    generator = torch.Generator().manual_seed(seed)
    pin = device.type == "cuda"
    while True:
        steps = torch.randn(batch, points, generator=generator)
        walks = steps.cumsum(1)
        walks = (walks - walks.mean(1, keepdim=True)) / walks.std(1, keepdim=True)
        values = walks.pin_memory() if pin else walks
        mask = torch.ones(batch, points, dtype=torch.bool, device=device)
        yield values.to(device, non_blocking=pin), mask
