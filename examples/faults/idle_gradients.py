"""Gradients of frozen weights: steplab profile examples/faults/idle_gradients.py:faulty

A network and its head are trained together; then the network is frozen, only the head goes on, and
the last gradients of the network stay. The clean twin clears them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "idle_gradients"
where = "cpu"


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def trained_before(width: int) -> tuple[nn.Module, nn.Module]:
    """Eight layers and a head that have had a step of their own."""
    layers = [part for _ in range(8) for part in (nn.Linear(width, width), nn.GELU())]
    network, head = nn.Sequential(*layers), nn.Linear(width, 8)
    head(network(torch.randn(8, width))).square().mean().backward()
    return network, head


def head_only(network: nn.Module, head: nn.Module, width: int) -> steplab.UserModel:
    """Train the head on what the network makes of a batch."""

    def batches(size: int) -> Iterator[Tensor]:
        while True:
            yield torch.randn(size, width)

    def loss(head: nn.Module, x_ND: Tensor) -> Tensor:
        return head(network(x_ND)).square().mean()

    return steplab.UserModel(head, batches, loss, 1, optimizer=adamw)


def faulty(width: int = 512) -> steplab.UserModel:
    """Freezes, and leaves the gradients."""
    network, head = trained_before(width)
    network.requires_grad_(False)
    return head_only(network, head, width)


def clean(width: int = 512) -> steplab.UserModel:
    """Freezes, and clears the gradients."""
    network, head = trained_before(width)
    network.requires_grad_(False).zero_grad(set_to_none=True)
    return head_only(network, head, width)
