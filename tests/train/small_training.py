"""A training so small that twenty steps take milliseconds, and which draws random numbers."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

IMPLEMENTATIONS = {
    "forloop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Net(nn.Module):
    """Embedding tied to the head, dropout, a buffer, and a parameter that gets no gradient."""

    def __init__(self, width: int = 8, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.head = nn.Linear(width, 16, bias=False)
        self.embedding = nn.Embedding(16, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.BatchNorm1d(width))
        self.unused = nn.Parameter(torch.ones(3))
        if not head_first:
            self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_B: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens_B)))


class Training:
    """What a checkpoint holds. Fresh ones differ: each is built from another seed."""

    built = 0

    def __init__(self, impl: str = "foreach", scaled: bool = False, device: str = "cpu") -> None:
        Training.built += 1
        torch.manual_seed(Training.built)
        self.device = device
        self.model = Net().to(device)
        self.optimizer = adamw(self.model, **IMPLEMENTATIONS[impl])
        self.scaler = torch.amp.GradScaler(device, init_scale=2.0**18, enabled=scaled)
        self.scaler._growth_interval = 3

    @property
    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
        return self.model, self.optimizer, self.scaler

    def run(self, first: int, last: int) -> list[Tensor]:
        """Take the steps first..last-1 on random tokens; return the losses."""
        losses = []
        for step in range(first, last):
            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            tokens_B = torch.randint(16, (32,), device=self.device)
            shift = random.randrange(3) + int(np.random.randint(3))
            targets_B = (tokens_B + shift) % 16
            loss = nn.functional.cross_entropy(self.model(tokens_B), targets_B)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def content(self) -> dict[str, Tensor]:
        """Return a copy of every tensor that training changes, by name."""
        names = {p: name for name, p in self.model.named_parameters()}
        found = {f"model/{k}": v.clone() for k, v in self.model.state_dict().items()}
        for parameter, state in self.optimizer.state.items():
            found |= {f"{key}/{names[parameter]}": v.clone() for key, v in state.items()}
        return found


def adamw(model: Net, **options: bool) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "betas": (0.8, 0.95)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether both hold the same bits, dtypes and devices under the same names."""
    return one.keys() == other.keys() and all(
        torch.equal(one[k], other[k])
        and one[k].dtype == other[k].dtype
        and one[k].device == other[k].device
        for k in one
    )
