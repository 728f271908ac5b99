"""Exposed communication: steplab profile examples/faults/exposed_communication.py:faulty

Two GPUs of one process all-reduce their gradients on the compute stream, so backward stalls
meanwhile. The clean twin does it on a separate stream while backward continues.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab
from steplab.core.errors import Unsupported

rule = "exposed_communication"
where = "cuda"
gpus = 2


class Replicated(nn.Module):
    """Layers on the first GPU; their gradients are summed with a stand-in's on the second."""

    def __init__(self, width: int, layers: int, overlapped: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.others = [torch.zeros(width, width, device="cuda:1") for _ in range(layers)]
        self.stream = torch.cuda.Stream(0)
        for layer, other in zip(self.layers, self.others, strict=True):
            hook = self.beside if overlapped else self.at_once
            layer.weight.register_post_accumulate_grad_hook(hook(other))

    def at_once(self, other: Tensor) -> object:
        """Sum where backward stands."""
        return lambda weight: torch.cuda.nccl.all_reduce([weight.grad, other])

    def beside(self, other: Tensor) -> object:
        """Sum on a stream of its own, which the end of backward waits for."""

        def reduce(weight: Tensor) -> None:
            self.stream.wait_stream(torch.cuda.current_stream())
            torch.cuda.nccl.all_reduce([weight.grad, other], streams=[self.stream, None])
            weight.grad.record_stream(self.stream)
            torch.autograd.Variable._execution_engine.queue_callback(self.join)

        return reduce

    def join(self) -> None:
        """Let what follows wait for the sums."""
        torch.cuda.current_stream().wait_stream(self.stream)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return (N, D)."""
        return self.layers(x_ND)


def made(width: int, rows: int, layers: int, overlapped: bool) -> steplab.UserModel:
    """Batches lie on the first GPU."""
    if torch.cuda.device_count() < gpus:
        raise Unsupported("This exhibit needs two GPUs.")

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width, device="cuda:0")
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x_ND).float().abs().mean()

    def optimizer(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)

    model = Replicated(width, layers, overlapped)
    return steplab.UserModel(model, batches, loss, rows, optimizer=optimizer)


def faulty(width: int = 4096, rows: int = 4096, layers: int = 8) -> steplab.UserModel:
    """One after the other."""
    return made(width, rows, layers, overlapped=False)


def clean(width: int = 4096, rows: int = 4096, layers: int = 8) -> steplab.UserModel:
    """Side by side."""
    return made(width, rows, layers, overlapped=True)
