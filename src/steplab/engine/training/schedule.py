"""Learning rate by step: linear warm-up, then a cosine down to the end of the run."""

from __future__ import annotations

import math

import torch

from steplab.spec.training import TrainSettings

WARMUP_SHARE = 0.05


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Return the rate for optimizer step `step`, counted from 1."""
    total = max(settings.total_steps, 1)
    asked = settings.warmup_steps
    warmup = max(1, round(WARMUP_SHARE * total)) if asked < 0 else asked
    if step <= warmup:
        return settings.lr * step / warmup
    progress = min(1.0, (step - warmup) / max(total - warmup, 1))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * cosine


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all groups the rate; one that is a tensor is filled, so compiled code sees it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
