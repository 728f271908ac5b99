"""Witness: sees which tensors a step holds, in which phase and module, and keeps none of them."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from time import time_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from steplab.probes.probe import WatchedStep

SAVED = "saved"  # beside the kinds weights, gradients and optimizer state
WHOLE_MODEL = "(model)"
NO_MODULE = "(outside the model)"


@dataclass(frozen=True)
class TensorRecord:
    """A tensor that was alive at a moment, by the address of its storage."""

    time_ns: int
    address: int
    bytes: int  # of the whole storage
    role: str  # a kind, or SAVED
    shape: tuple[int, ...] | None  # None: the tensor is only a part of its storage
    dtype: str
    module: str


@dataclass(frozen=True)
class Phase:
    """One pass through a phase."""

    name: str
    begin_ns: int
    end_ns: int


class TensorTracker:
    """Hooks of one step; `watching` sets them and takes them away again."""

    def __init__(self, step: WatchedStep) -> None:
        self.step = step
        self.records: list[TensorRecord] = []
        self.phases: list[Phase] = []
        self.held: dict[int, int] = {}  # address to bytes of what was there before the step
        self.begin_ns = 0
        self._places: dict[nn.Module, list[str]] = defaultdict(list)
        for path, module in step.model.named_modules(remove_duplicate=False):
            self._places[module].append(path)
        self._outside = WHOLE_MODEL if _is_compiled(step.model) else NO_MODULE
        self._inside: list[str] = []  # paths of the modules whose forward is running
        self._turns: list[tuple[int, str]] = []  # from this moment on, this module ran
        self._owners: dict[Tensor, str] = {
            parameter: path.rpartition(".")[0] or WHOLE_MODEL
            for path, parameter in step.model.named_parameters()
        }

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one step."""
        watch_before, self.step.watch = self.step.watch, self.phase
        hooks = []
        for module in self._uncompiled(self.step.model):
            hooks.append(module.register_forward_pre_hook(self._enter))
            # Always: recomputing a checkpointed module ends in an exception of its own.
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        self._see_model()
        self._see_optimizer()
        self.held = {record.address: record.bytes for record in self.records}
        self.begin_ns = time_ns()
        try:
            yield
        finally:
            self.step.watch = watch_before
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch one phase, and see what it leaves behind."""
        begin_ns = time_ns()
        with contextlib.ExitStack() as hooks:
            if name == "forward":
                hooks.enter_context(saved_tensors_hooks(self._save, _same))
            yield
        self.phases.append(Phase(name, begin_ns, time_ns()))
        if name == "backward":
            self._see_gradients()
        elif name == "optimizer":
            self._see_optimizer()

    @property
    def compiled(self) -> bool:
        """Whether a part of the model is compiled."""
        return any(_is_compiled(module) for module in self.step.model.modules())

    def module_at(self, moment_ns: int) -> str:
        """Return the path of the module whose forward ran; "" for none."""
        turn = bisect_right(self._turns, moment_ns, key=lambda turn: turn[0])
        return self._turns[turn - 1][1] if turn else ""

    def _uncompiled(self, module: nn.Module) -> set[nn.Module]:
        """Return the modules outside compiled ones: a hook inside would break their graphs."""
        if _is_compiled(module):
            return set()
        return {module}.union(*(self._uncompiled(child) for child in module.children()))

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        outer = f"{self._inside[-1]}." if self._inside and self._inside[-1] else ""
        places = self._places[module]
        # A module with several places (a rotary table) is where its caller is.
        path = next((path for path in places if path.startswith(outer)), places[0])
        self._inside.append(path)
        self._turns.append((time_ns(), path or WHOLE_MODEL))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside.pop()
        path = (self._inside[-1] or WHOLE_MODEL) if self._inside else ""
        self._turns.append((time_ns(), path))

    def _save(self, tensor: Tensor) -> Tensor:
        module = (self._inside[-1] or WHOLE_MODEL) if self._inside else self._outside
        self._see(tensor, SAVED, module)
        # The tensor itself would hold its own graph, and be freed only by a backward.
        return tensor.detach()

    def _see_model(self) -> None:
        for parameter, owner in self._owners.items():
            self._see(parameter, "weights", owner)
        for path, buffer in self.step.model.named_buffers():
            self._see(buffer, "weights", path.rpartition(".")[0] or WHOLE_MODEL)
        self._see_gradients()

    def _see_gradients(self) -> None:
        for parameter, owner in self._owners.items():
            if parameter.grad is not None:
                self._see(parameter.grad, "gradients", owner)

    def _see_optimizer(self) -> None:
        if self.step.optimizer is None:
            return
        for parameter, state in self.step.optimizer.state.items():
            for leaf in tree_leaves(state):
                if isinstance(leaf, Tensor):
                    self._see(leaf, "optimizer state", self._owners.get(parameter, ""))

    def _see(self, tensor: Tensor, role: str, module: str) -> None:
        if tensor.layout != torch.strided or tensor.device.type != self.step.parts.device.type:
            return  # the step counter of AdamW stays on the host
        storage = tensor.untyped_storage()
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        shape = tuple(tensor.shape) if whole else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        place = (time_ns(), storage.data_ptr(), storage.nbytes())
        self.records.append(TensorRecord(*place, role, shape, dtype, module))


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _same(tensor: Tensor) -> Tensor:
    return tensor
