"""A Linear with a choice of implementation."""

from __future__ import annotations

from torch import Tensor, nn

from steplab.kernels import projection as projection_op
from steplab.kernels.dispatch import AUTO
from steplab.modules.precision import matmul_dtype, without_autocast


class Projection(nn.Linear):
    """An nn.Linear, with the same parameters, by the implementation that was asked for."""

    op = "projection"

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.impl = AUTO
        self.ran = ""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        dtype = matmul_dtype(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        inputs = (x.to(dtype), self.weight.to(dtype))
        self.ran = projection_op.choose(self.impl, *inputs)
        # Not every implementation is known to autocast, so the casts are ours.
        with without_autocast(x):
            return projection_op.projection(self.ran, *inputs, bias)
