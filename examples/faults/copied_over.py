"""An average by way of a new dict: steplab profile examples/faults/copied_over.py:faulty

After the forward, the moving average of the weights is computed anew and loaded with
load_state_dict. The clean twin moves it in place.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "copied_over"
where = "cpu"
DECAY = 0.999


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


@torch.no_grad()
def load_average(average: nn.Module, model: nn.Module) -> None:
    """Make a third model and copy it over the second."""
    old, new = average.state_dict(), model.state_dict()
    average.load_state_dict({key: DECAY * old[key] + (1 - DECAY) * new[key] for key in old})


@torch.no_grad()
def move_average(average: nn.Module, model: nn.Module) -> None:
    """Move every weight of the average."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - DECAY)


def made(width: int, rows: int, anew: bool) -> steplab.UserModel:
    """A stack of layers and its average."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    average = copy.deepcopy(model).requires_grad_(False)

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        (load_average if anew else move_average)(average, model)
        return model(x_ND).square().mean()

    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def faulty(width: int = 768, rows: int = 8) -> steplab.UserModel:
    """Through state_dict."""
    return made(width, rows, anew=True)


def clean(width: int = 768, rows: int = 8) -> steplab.UserModel:
    """In place."""
    return made(width, rows, anew=False)
