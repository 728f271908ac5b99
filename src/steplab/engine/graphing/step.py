"""The whole training step, or the forward pass of inference, as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from steplab.engine.graphing.call import GraphedCall, Graphs
from steplab.engine.graphing.cuda import CudaGraphs
from steplab.engine.step import Step
from steplab.errors import Unsupported

NOT_VALUES = ("params", "param_names")


def graph_step(step: Step, graphs: Callable[[torch.device], Graphs] = CudaGraphs) -> None:
    """Let `step` warm up, capture itself and be replayed from then on.

    Learning rates become tensors where the optimizer can be captured with them, so that schedules
    work on. All micro-batches of a step are captured together.
    """
    if step.mode == "full" and step.parts.scaler.is_enabled():
        raise Unsupported(
            "No CUDA graph: a gradient scaler decides on the host whether a step is skipped.",
            "Use precision=bf16, which needs none, or leave the graph out.",
        )
    if step.optimizer is not None:
        make_capturable(step.optimizer, step.parts.device)

    def baked() -> dict[str, Any]:
        return {"training mode": step.model.training, **_group_values(step.optimizer)}

    step.graph = GraphedCall(step.run, graphs(step.parts.device), step.parts.graph_warmup, baked)


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let the optimizer keep on the device what it would read on the host, before its first step.

    One that knows no `capturable` keeps its numbers as they are: they are frozen by the capture.
    """
    if not all("capturable" in group for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
    rates_on_device(optimizer, device)


def rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Turn learning rates into tensors, which captured and compiled updates see change."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], device=device)


def _group_values(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the numbers of all parameter groups that are no tensors, by name."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {
        f"{key} of parameter group {index}": value
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key not in NOT_VALUES and not _holds_tensor(value)
    }


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
