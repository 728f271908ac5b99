"""Host stall: steplab profile examples/faults/host_stall.py:faulty

Every loss is written to a log on a slow disk before the step goes on. The clean twin hands it to a
thread that writes.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "host_stall"
where = "cpu"

WRITE_SECONDS = 0.02


def write(line: str) -> None:
    """Take as long as a slow disk takes to flush."""
    time.sleep(WRITE_SECONDS)


def in_background() -> Callable[[str], None]:
    """Return a writer that only queues its lines."""
    lines: queue.Queue[str] = queue.Queue()

    def work() -> None:
        while True:
            write(lines.get())

    threading.Thread(target=work, daemon=True).start()
    return lines.put


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def made(width: int, log: Callable[[str], None]) -> steplab.UserModel:
    """A step of some 30 ms on two cores."""
    layers = [nn.Linear(width, width) for _ in range(6)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * 128, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        found = model(x_ND).abs().mean()
        log("one more loss")
        return found

    return steplab.UserModel(model, batches, loss, 128, optimizer=adamw)


def faulty(width: int = 512) -> steplab.UserModel:
    """Writes in the step."""
    return made(width, write)


def clean(width: int = 512) -> steplab.UserModel:
    """Writes beside it."""
    return made(width, in_background())
