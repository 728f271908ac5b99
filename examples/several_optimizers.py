"""Two awkward steps as a model of your own: several optimizers, and a GAN.

steplab bench step examples/several_optimizers.py:two_optimizers
steplab bench step examples/several_optimizers.py:gan --part discriminator
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import steplab


class Together(torch.optim.Optimizer):
    """Several optimizers that are stepped as one; schedules and clipping see all their groups."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})

    def step(self, closure: None = None) -> None:
        """Step each of them."""
        for one in self.optimizers:
            one.step()


def two_optimizers(width: int = 64, layers: int = 2) -> steplab.UserModel:
    """SGD with momentum for the matrices and AdamW for the rest, as with Muon."""
    blocks = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]

    def batches(size: int) -> Iterator[Tensor]:
        while True:
            yield torch.randn(size, width)

    def optimizer(model: nn.Module, **how: bool) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim != 2]
        return Together(
            torch.optim.SGD(matrices, lr=0.01, momentum=0.9, **how),
            torch.optim.AdamW(vectors, lr=1e-3, **how),
        )

    return steplab.UserModel(
        model=nn.Sequential(*blocks),
        batches=batches,
        loss=lambda model, x_BD: F.mse_loss(model(x_BD), x_BD),
        optimizer=optimizer,
    )


def gan(part: str = "generator", width: int = 32) -> steplab.UserModel:
    """One half of a GAN's iteration: each half has its own loss, backward pass and update."""
    generator = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 16))
    discriminator = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 1))
    own, other = (generator, discriminator) if part == "generator" else (discriminator, generator)
    other.requires_grad_(False)  # the other half is part of the model, and is not trained

    def batches(size: int) -> Iterator[dict[str, Tensor]]:
        while True:
            yield {"noise": torch.randn(size, 8), "real": torch.randn(size, 16)}

    def loss(model: nn.ModuleDict, batch: dict[str, Tensor]) -> Tensor:
        fake_BD = model["generator"](batch["noise"])
        if part == "generator":
            return F.softplus(-model["discriminator"](fake_BD)).mean()
        wrong_B = F.softplus(model["discriminator"](fake_BD.detach()))
        return wrong_B.mean() + F.softplus(-model["discriminator"](batch["real"])).mean()

    return steplab.UserModel(
        model=nn.ModuleDict({"generator": generator, "discriminator": discriminator}),
        batches=batches,
        loss=loss,
        optimizer=lambda model, **how: torch.optim.Adam(own.parameters(), lr=2e-4, **how),
    )
