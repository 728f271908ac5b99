"""A model whose weights are kept in 16 bits, called outside its step: takes and gives fp32.

The recipe's autocast is open inside the step alone. Evaluation in a loop of one's own, or in a
library's, calls the model without it: a product of fp32 inputs and 16-bit weights would fail, and
what comes out would be in 16 bits.
"""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

HALF = torch.bfloat16


def widen_outside_calls(model: nn.Module, device: torch.device) -> None:
    """Let the model compute as in the step wherever it is called, and return fp32 outside.

    Under an autocast, the step's or the caller's own, and inside `full_weights` it is as written.
    """
    if "forward" in vars(model):  # somebody's own, which need not be a method
        return
    forward = type(model).forward

    @wraps(forward)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        around = step_dtypes(self, device)
        if around is None:
            return forward(self, *args, **kwargs)
        with around:
            output = forward(self, *args, **kwargs)
        return tree_map(_widened, output)

    # A method of the instance: a copy of the model has one of its own.
    model.forward = MethodType(called, model)


def step_dtypes(model: nn.Module, device: torch.device) -> torch.autocast | None:
    """Return the autocast that 16-bit weights need; None where one is on, or none is needed."""
    if torch.is_autocast_enabled(device.type) or all(p.dtype != HALF for p in model.parameters()):
        return None
    return torch.autocast(device.type, dtype=HALF)


def _widened(output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) and output.dtype == HALF else output
