"""Many graph sizes: steplab profile examples/faults/many_graph_sizes.py:faulty

Batches keep changing length, and CUDA graphs are captured again for each length: Inductor runs a
length without a graph the first time, captures it the second time, and replays it from the third.
The clean twin pads to one length.
"""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "many_graph_sizes"
where = "cuda"

SHORTEST, LONGEST = 128, 512


class Stack(nn.Module):
    """Modules in a row. torch.compile looks into user code, but not into nn.Sequential's own."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        for part in self.parts:
            x_BTD = part(x_BTD)
        return x_BTD


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, layers: int, padded: bool) -> steplab.UserModel:
    """A compiled stack, replayed by CUDA graphs; batches lie on the device."""
    if not torch.cuda.is_available():
        raise Unsupported("This exhibit needs a GPU.", "Others show their fault on a CPU.")

    def batches(size: int) -> Iterator[Tensor]:
        device = "cuda"
        batch = torch.randn(size, LONGEST, width, device=device, dtype=torch.bfloat16)
        for number in count():
            yield batch if padded else batch[:, : SHORTEST + number // 2 % (LONGEST - SHORTEST)]

    def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
        return model(x_BTD).abs().mean()

    layered = (nn.Linear(width, width) for _ in range(layers))
    model = Stack(*(part for layer in layered for part in (layer, nn.GELU()))).to(torch.bfloat16)
    model.compile(mode="reduce-overhead", dynamic=not padded)
    return steplab.UserModel(model, batches, loss, LONGEST, optimizer=adamw)


def faulty(width: int = 4096, layers: int = 16) -> steplab.UserModel:
    """One capture per length, at every second step."""
    return made(width, layers, padded=False)


def clean(width: int = 4096, layers: int = 16) -> steplab.UserModel:
    """One capture."""
    return made(width, layers, padded=True)
