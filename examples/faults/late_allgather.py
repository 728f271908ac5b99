"""Late all-gather: steplab profile examples/faults/late_allgather.py:faulty --ranks 2

Each rank keeps a part of the frozen tables that the layers add, and every layer gathers its own
when it needs it, over a link of 1 Gbit/s. The clean twin gathers it while the layer before
computes; the first layer adds none.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from hardware.card import Layer
from hardware.link import slow_down
from torch import Tensor, nn

import steplab

rule = "late_allgather"
where = "cpu"
ranks = 2

ROWS = 16
LAYERS = 11
LAYER_MS = 14.0
PART = 192 << 10  # elements of a table on each rank


class Sharded(nn.Module):
    """Layers, each but the first with a table that is spread over the ranks."""

    def __init__(self, width: int, ahead: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, LAYER_MS) for _ in range(LAYERS))
        self.register_buffer("parts", torch.zeros(LAYERS, PART))
        self.ahead = ahead

    def gather(self, layer: int) -> tuple[list[Tensor], dist.Work | None]:
        """Begin to gather the table of a layer."""
        if not dist.is_initialized():
            return [self.parts[layer]], None
        whole = [torch.empty(PART) for _ in range(dist.get_world_size())]
        return whole, dist.all_gather(whole, self.parts[layer], async_op=True)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        first, *others = self.layers
        coming = self.gather(1) if self.ahead else None
        x_ND = first(x_ND)
        for number, layer in enumerate(others, 1):
            whole, work = coming or self.gather(number)
            if work is not None:
                work.wait()
            if self.ahead and number + 1 < LAYERS:
                coming = self.gather(number + 1)
            x_ND = layer(x_ND) + whole[0][: x_ND.shape[1]]
        return x_ND


def made(width: int, ahead: bool) -> steplab.UserModel:
    """Few weights, so that their gradients are sent quickly."""
    slow_down()

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * ROWS, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        return model(x_ND).abs().mean()

    def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))

    return steplab.UserModel(Sharded(width, ahead), batches, loss, ROWS, optimizer=adamw)


def faulty(width: int = 32) -> steplab.UserModel:
    """When it is needed."""
    return made(width, ahead=False)


def clean(width: int = 32) -> steplab.UserModel:
    """One layer ahead."""
    return made(width, ahead=True)
