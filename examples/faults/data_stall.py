"""Data stall: steplab profile examples/faults/data_stall.py:faulty

The loader reads each batch only when the step asks for it. The clean twin prefetches in a thread.
"""

import queue
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "data_stall"
where = "cpu"

READ_SECONDS = 0.03  # what a batch takes to come from a disk
AHEAD = 4


def read(size: int, width: int) -> Iterator[Tensor]:
    """Yield batches, each after the time of a read."""
    while True:
        time.sleep(READ_SECONDS)
        yield torch.randn(size * 128, width)


def read_ahead(size: int, width: int) -> Iterator[Tensor]:
    """Yield the same batches, read by a thread while the step computes."""
    ready: queue.Queue[Tensor] = queue.Queue(AHEAD)

    def fill() -> None:
        for batch in read(size, width):
            ready.put(batch)

    threading.Thread(target=fill, daemon=True).start()
    while True:
        yield ready.get()


def network(width: int) -> nn.Module:
    """A step of some 50 ms on two cores, more than a read takes."""
    layers = [nn.Linear(width, width) for _ in range(8)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))


def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
    """Any scalar."""
    return model(x_ND).abs().mean()


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def faulty(width: int = 768) -> steplab.UserModel:
    """Reads in the step."""
    return steplab.UserModel(
        network(width), lambda size: read(size, width), loss, 128, optimizer=adamw
    )


def clean(width: int = 768) -> steplab.UserModel:
    """Reads ahead."""
    return steplab.UserModel(
        network(width), lambda size: read_ahead(size, width), loss, 128, optimizer=adamw
    )
