"""Sparse peak: steplab profile examples/faults/sparse_peak.py:faulty --mfu-peak-tflops 1979

MFU against the peak that the datasheet gives for sparse matrices. The clean twin uses the dense
one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import steplab

rule = "sparse_peak"
where = "cpu"
flags = {"faulty": ("--mfu-peak-tflops", "1979"), "clean": ("--mfu-peak-tflops", "989.4")}


def adamw(model: nn.Module, **implementation: bool) -> torch.optim.Optimizer:
    """A fused update unless another is asked for: it is no part of this fault."""
    return torch.optim.AdamW(model.parameters(), **(implementation or {"fused": True}))


def faulty(width: int = 512, rows: int = 256) -> steplab.UserModel:
    """Two products in bf16."""

    def batches(size: int) -> Iterator[Tensor]:
        batch = torch.randn(size * rows, width)
        while True:
            yield batch

    def loss(model: nn.Module, x_ND: Tensor) -> Tensor:
        with torch.autocast(x_ND.device.type, torch.bfloat16):
            return model(x_ND).float().abs().mean()

    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    return steplab.UserModel(model, batches, loss, rows, optimizer=adamw)


def clean(width: int = 512, rows: int = 256) -> steplab.UserModel:
    """The same step."""
    return faulty(width, rows)
