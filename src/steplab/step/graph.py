"""CUDA graphs of a whole training step, and `steplab.graph` for inference."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from steplab.core.errors import Unsupported, UserError
from steplab.modules.optimizer import changed_number, update_numbers
from steplab.modules.shards import local
from steplab.probes.disturbances import note_event
from steplab.step.graphed_call import CudaGraphs, GraphBackend, GraphedCall
from steplab.step.step import Step
from steplab.step.usual_shapes import UNUSUAL, UsualShapes, shape_of
from steplab.workloads.misuse import describe
from steplab.workloads.workload import StepOutput

WARMUP = 3  # eager calls of a module before it is captured


def graph_step(step: Step, graphs: Callable[[torch.device], GraphBackend] = CudaGraphs) -> None:
    """Let `step` warm up, capture itself and be replayed from then on.

    All micro-batches of a step are captured together.
    """
    if step.mode == "full" and step.parts.scaler.is_enabled():
        raise Unsupported(
            "No CUDA graph: a gradient scaler decides on the host whether a step is skipped.",
            "Use precision=bf16, which needs none, or leave the graph out.",
        )
    step.graph = StepGraph(step, graphs(step.parts.device))


def make_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Let the optimizer keep on the device what it would read on the host, before its first step.

    Returns whether it can: one without the option `capturable` may count its steps on the host.
    """
    if not all("capturable" in group for group in optimizer.param_groups):
        return False
    for options in (optimizer.defaults, *optimizer.param_groups):  # those of later groups too
        options["capturable"] = True
    return True


class StepGraph:
    """Replays a step. What a capture would freeze is copied in, captured again or left outside.

    Learning rates are copied in before every replay. An update that cannot be captured, or one of
    whose other numbers (weight decay, betas, ...) changes, runs op by op after the replay from then
    on. Weights, buffers or layers that were replaced, layers that were frozen or put into another
    mode, and groups of parameters that were added are captured again.
    """

    usual: UsualShapes | None = None  # others run without the graph; None: they are refused

    def __init__(self, step: Step, graphs: GraphBackend) -> None:
        self.step = step
        self.graphs = graphs
        self.has_update = step.optimizer is None or make_capturable(step.optimizer)
        self.call = GraphedCall(self._run, graphs, step.parts.graph_warmup)
        self._captures = 0  # those that the following describe
        self._shape: Any = None  # of the usual micro-batches
        self._state: Any = None  # of the model
        self._numbers: dict[str, Any] = {}  # of the optimizer
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        if step.optimizer is not None:
            # Its state consists of new tensors then.
            step.optimizer.register_load_state_dict_post_hook(lambda optimizer: self.forget())

    def __call__(self, micro_batches: Sequence[Any]) -> StepOutput:
        """Do one step: by replay, or op by op before the capture and for unusual shapes."""
        if self.step.rates is not None:
            self.step.rates.copy_in()
        state, numbers = self._model_state(), self._update_numbers()
        if self.call.is_captured:
            self._leave_update_out(numbers)
            if state != self._state:
                self.forget()
        if self.usual is not None:
            shape = shape_of(micro_batches)
            if not self.usual.include(shape):
                note_event(UNUSUAL)
                return self.step.run(micro_batches)
            if shape != self._shape:
                self._shape = shape
                self.forget()
        output: StepOutput = self.call(micro_batches)
        if self.call.captures > self._captures:
            self._captures, self._state, self._numbers = self.call.captures, state, numbers
            self._gradients = [(p, p.grad) for p in self.step.model.parameters()]
        if self.call.is_captured:
            for p, gradient in self._gradients:
                p.grad = gradient  # a step in between, or the loop, may have taken them away
        if not self.has_update:
            self.step.update()
        return output

    def forget(self) -> None:
        """Drop the graph: the next calls warm up and capture again."""
        self.call.forget()
        self._gradients = []
        for name in ("_modules", "_members"):  # the model may have others by now
            self.__dict__.pop(name, None)

    def _run(self, micro_batches: Sequence[Any]) -> StepOutput:
        """Run what is captured."""
        run = self.step.run if self.has_update else self.step.accumulate
        return run(micro_batches)

    def _leave_update_out(self, numbers: dict[str, Any]) -> None:
        """Capture again without the update where one of its numbers is not what it was."""
        changed = changed_number(self._numbers, numbers)
        if self.has_update and changed:
            self.has_update = False
            self.forget()
            warnings.warn(
                f"{changed} has changed, which the CUDA graph cannot see: from now on the "
                "optimizer's update runs after the replay and not in it.",
                stacklevel=4,
            )

    def _model_state(self) -> Any:
        """Return all that must be as it was when the graph was captured."""
        found = [kept.get(name) for kept, name in self._members]
        tensors = [None if t is None else (local(t).data_ptr(), t.requires_grad) for t in found]
        layers = [(m.training, *m._modules.values()) for m in self._modules]
        return tensors, layers, [len(group["params"]) for group in self._captured_groups()]

    # Lists: to walk through a model takes longer than to look at its members. Of each member where
    # the model keeps it, because a loop may put another one there.

    @cached_property
    def _modules(self) -> list[nn.Module]:
        return list(self.step.model.modules())

    @cached_property
    def _members(self) -> list[tuple[dict[str, Any], str]]:
        kept = [members for m in self._modules for members in (m._parameters, m._buffers)]
        return [(members, name) for members in kept for name in members]

    def _captured_groups(self) -> list[dict[str, Any]]:
        """Return the groups of parameters whose update is in the graph."""
        optimizer = self.step.optimizer
        return optimizer.param_groups if optimizer is not None and self.has_update else []

    def _update_numbers(self) -> dict[str, Any]:
        """Return the numbers of an update that is captured."""
        optimizer = self.step.optimizer
        return update_numbers(optimizer) if optimizer is not None and self.has_update else {}


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
