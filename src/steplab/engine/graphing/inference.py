"""`steplab.graph(module, example_inputs)`: inference with a single launch per call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from steplab.engine.graphing.call import GraphedCall, Graphs
from steplab.engine.graphing.cuda import CudaGraphs
from steplab.errors import Unsupported, UserError

WARMUP = 3


class GraphedModule:
    """Replays a captured forward pass; made by `graph`."""

    def __init__(self, module: Callable[..., Any], graphs: Graphs) -> None:
        self.module = module
        self._call = GraphedCall(self._forward, graphs, WARMUP, self._baked)

    @torch.no_grad()
    def __call__(self, *inputs: Any) -> Any:
        """Return the module's outputs for inputs of the example's shapes and dtypes."""
        return self._call(inputs)

    def _forward(self, inputs: Sequence[Any]) -> Any:
        return self.module(*inputs)

    def _baked(self) -> dict[str, Any]:
        return {"training mode": getattr(self.module, "training", False)}


def graph(module: Callable[..., Any], example_inputs: Sequence[Any]) -> GraphedModule:
    """Capture `module(*example_inputs)` without gradients; return what replays it.

    `module` is an nn.Module in eval mode, compiled or not, or any function of tensors on a CUDA
    device. Calls must have the example's shapes and dtypes; each returns new tensors. Weights
    that are changed in place, as by load_state_dict, are seen by later calls. A forward pass in
    which the host waits for the device is refused with its line.
    """
    if isinstance(example_inputs, Tensor):
        raise UserError("example_inputs is a tensor.", "Give a tuple of all inputs: (x,).")
    if isinstance(module, nn.Module) and module.training:
        raise UserError("The module is in training mode.", "Call module.eval() first.")
    return prepared(GraphedModule(module, CudaGraphs(_device(example_inputs))), example_inputs)


def prepared(graphed: GraphedModule, example_inputs: Sequence[Any]) -> GraphedModule:
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
