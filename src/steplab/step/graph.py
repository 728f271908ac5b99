"""CUDA graphs of a whole training step, and `steplab.graph` for inference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from steplab.core.errors import Unsupported, UserError
from steplab.step.graphed_call import CudaGraphs, GraphBackend, GraphedCall
from steplab.step.step import Step
from steplab.workloads.misuse import describe

NOT_OPTIONS = ("params", "param_names")  # keys of a parameter group
WARMUP = 3  # eager calls of a module before it is captured


def graph_step(step: Step, graphs: Callable[[torch.device], GraphBackend] = CudaGraphs) -> None:
    """Let `step` warm up, capture itself and be replayed from then on.

    Learning rates become tensors where the optimizer can be captured with them, so that schedules
    keep working. All micro-batches of a step are captured together.
    """
    if step.mode == "full" and step.parts.scaler.is_enabled():
        raise Unsupported(
            "No CUDA graph: a gradient scaler decides on the host whether a step is skipped.",
            "Use precision=bf16, which needs none, or leave the graph out.",
        )
    if step.optimizer is not None:
        make_capturable(step.optimizer, step.parts.device)

    def frozen_values() -> dict[str, Any]:
        return {"training mode": step.model.training, **_group_values(step.optimizer)}

    backend, warmup = graphs(step.parts.device), step.parts.graph_warmup
    step.graph = GraphedCall(step.run, backend, warmup, frozen_values)


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let the optimizer keep on the device what it would read on the host, before its first step.

    One without a `capturable` option keeps its numbers: the capture freezes them.
    """
    if not all("capturable" in group for group in optimizer.param_groups):
        return
    for group in optimizer.param_groups:
        group["capturable"] = True
    learning_rates_to_device(optimizer, device)


def learning_rates_to_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Turn learning rates into tensors, which captured and compiled updates see change."""
    for group in optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(group["lr"], device=device)


def _group_values(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the options of all parameter groups that are not tensors, by name."""
    groups = optimizer.param_groups if optimizer is not None else []
    return {
        f"{key} of parameter group {index}": value
        for index, group in enumerate(groups)
        for key, value in group.items()
        if key not in NOT_OPTIONS and not _holds_tensor(value)
    }


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


class GraphedModule:
    """Replays a captured forward pass; made by `graph`."""

    def __init__(self, module: Callable[..., Any], graphs: GraphBackend) -> None:
        self.module = module
        self._call = GraphedCall(self._forward, graphs, WARMUP, self._frozen_values)

    @torch.no_grad()
    def __call__(self, *inputs: Any) -> Any:
        """Return the module's outputs for inputs of the example's shapes and dtypes."""
        return self._call(inputs)

    def _forward(self, inputs: Sequence[Any]) -> Any:
        return self.module(*inputs)

    def _frozen_values(self) -> dict[str, Any]:
        return {"training mode": getattr(self.module, "training", False)}


def graph(module: Callable[..., Any], example_inputs: Sequence[Any]) -> GraphedModule:
    """Capture `module(*example_inputs)` without gradients; return what replays it.

    `module` is an nn.Module in eval mode, compiled or not, or any function of tensors on a CUDA
    device. Calls must have the example's shapes and dtypes; each returns new tensors. Weights
    that are changed in place, as by load_state_dict, are seen by later calls. A forward pass in
    which the host waits for the device is refused with its line.
    """
    if not callable(module) or inspect.isclass(module):
        raise UserError(f"The module is {describe(module)}.", "Give a module or a function.")
    if isinstance(example_inputs, Tensor):
        raise UserError("example_inputs is a tensor.", "Give a tuple of all inputs: (x,).")
    if isinstance(module, nn.Module) and module.training:
        raise UserError("The module is in training mode.", "Call module.eval() first.")
    return capture_example(
        GraphedModule(module, CudaGraphs(_device(example_inputs))), example_inputs
    )


def capture_example(graphed: GraphedModule, example_inputs: Sequence[Any]) -> GraphedModule:
    """Warm up and capture with the example."""
    for _ in range(WARMUP + 1):
        graphed(*example_inputs)
    return graphed


def _device(inputs: Sequence[Any]) -> torch.device:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not tensors:
        raise UserError("example_inputs holds no tensor.", "Give the inputs as a tuple: (x,).")
    device = tensors[0].device
    if device.type != "cuda":
        raise Unsupported(
            f"CUDA graphs need a CUDA GPU, but the inputs are on {device}.",
            "Move the module and its inputs to a GPU, or call the module itself.",
        )
    return device
