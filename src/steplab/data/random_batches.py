"""Seeded random batches, for measuring a step that need not learn anything."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def random_tokens(
    batch: int, context: int, vocab_size: int, device: torch.device, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens_BT, next_tokens_BT), made on the host and copied as a loader would.

    Pinned memory lets the copy overlap with the previous step's kernels.
    """
    generator = torch.Generator().manual_seed(seed)
    pin = device.type == "cuda"
    while True:
        tokens = torch.randint(
            vocab_size, (batch, context + 1), generator=generator, pin_memory=pin, device="cpu"
        )
        on_device = tokens.to(device, non_blocking=pin)
        yield on_device[:, :-1], on_device[:, 1:]


def random_walks(
    batch: int, points: int, device: torch.device, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (values_BT, mask_BT): normalized random walks, every point known.

    Made on the host and copied as a loader would.
    """
    generator = torch.Generator().manual_seed(seed)
    pin = device.type == "cuda"
    while True:
        steps = torch.randn(batch, points, generator=generator)
        walks = steps.cumsum(1)
        walks = (walks - walks.mean(1, keepdim=True)) / walks.std(1, keepdim=True)
        values = walks.pin_memory() if pin else walks
        mask = torch.ones(batch, points, dtype=torch.bool, device=device)
        yield values.to(device, non_blocking=pin), mask
