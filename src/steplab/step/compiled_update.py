"""A compiled update in whose loop betas, weight decay or another of its numbers changes.

Compiled code holds such numbers: it would be compiled anew for each, for seconds, and after eight
of them Dynamo gives up. A default OneCycleLR changes betas at every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from steplab.modules.optimizer import changed_number, update_numbers


def uncompile_at_changes(optimizer: torch.optim.Optimizer, plain: Callable[..., Any]) -> None:
    """Let the compiled `optimizer.step` give way to the plain one for good once a number changes.

    The plain one reads the groups' own rates: from a tensor on the device torch's would wait.
    """
    compiled, numbers, is_left = optimizer.step, dict[str, Any](), False

    def step(this: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        nonlocal numbers, is_left
        if not is_left:
            before, numbers = numbers, update_numbers(this)
            changed = changed_number(before, numbers)
            if not changed:
                return compiled(*args, **kwargs)
            is_left = True
            warnings.warn(
                f"{changed} has changed, for which the update would be compiled anew: from now on "
                "it runs as it is written.",
                stacklevel=2,
            )
        return plain(*args, **kwargs)

    # A method, not a function: torch's schedulers look for its __func__.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
