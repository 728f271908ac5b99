"""Subject: an op with its inputs, ready to be called again and again. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steplab.errors import Unsupported

TORCH_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Subject:
    """`forward()` computes the output from `leaves`; `dout` is the gradient that it is given."""

    forward: Callable[[], Tensor]
    leaves: Mapping[str, Tensor]  # by name; their gradients are wanted
    dout: Tensor  # of the shape and dtype of the output

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the leaves; the graph of `out` is used up."""
        return torch.autograd.grad(out, list(self.leaves.values()), self.dout)

    def results(self) -> dict[str, Tensor]:
        """Return the output as `out` and the gradient of each leaf as `d<name>`."""
        out = self.forward()
        names = [f"d{name}" for name in self.leaves]
        return {"out": out.detach(), **dict(zip(names, self.backward(out), strict=True))}


def use_dtype(name: str, device: torch.device) -> torch.dtype:
    """Set the precision of fp32 products as `name` says, and return torch's dtype for it."""
    if name == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability() < (8, 0)):
        raise Unsupported("tf32 needs an NVIDIA GPU of compute capability 8.0 or newer.")
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    return TORCH_DTYPES[name]
