"""Learning rates on the device, for updates that are captured or compiled.

A number that such an update was made with stays in it: a graph goes on with the old rate, and
compiled code is compiled again for every new one. A tensor is read anew by every update.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from steplab.modules.optimizer import ExtendedOptimizer


class DeviceRates:
    """The learning rates of all groups as tensors, which the optimizer's step reads.

    The groups keep what loops and schedulers assign, floats or tensors of their own: schedules are
    computed on the host, in Python's precision, and no scheduler waits for the device. Only while
    `optimizer.step` runs do the groups hold the tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.device = device
        self._rates: list[Tensor] = []
        self._copied: list[Any] = []  # the number that each tensor has now
        if isinstance(optimizer, ExtendedOptimizer):
            for group in optimizer.param_groups:  # of whose numbers it has made tensors
                self._rates.append(group["lr"])
                group["lr"] = float(group["lr"])
                self._copied.append(group["lr"])
        step = optimizer.step

        def step_on_device(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self.copy_in()
            assigned = [group["lr"] for group in this.param_groups]
            for group, rate in zip(this.param_groups, self._rates, strict=True):
                group["lr"] = rate
            try:
                return step(*args, **kwargs)
            finally:
                for group, value in zip(this.param_groups, assigned, strict=True):
                    group["lr"] = value

        # A method, not a function: torch's schedulers look for its __func__.
        optimizer.step = MethodType(step_on_device, optimizer)  # type: ignore[method-assign]

    def copy_in(self) -> None:
        """Copy what was assigned since the last time to the device, without waiting for it.

        Call it before a capture and before every replay: inside a capture the copy of a number
        would be captured with that number.
        """
        for index, group in enumerate(self.optimizer.param_groups):
            value = group["lr"]
            if index == len(self._rates):
                self._rates.append(torch.zeros((), device=self.device))
                self._copied.append(None)
            if isinstance(value, Tensor) and value.device == self.device:
                self._rates[index].copy_(value)
                self._copied[index] = None
            elif self._copied[index] != (number := float(value)):
                self._rates[index].fill_(number)
                self._copied[index] = number
