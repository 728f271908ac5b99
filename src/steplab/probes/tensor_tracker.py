"""TensorTracker: notes which tensors a step holds, in which phase and module, and keeps none."""

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

from steplab.modules.optimizer import unpacked_state
from steplab.modules.shards import stored
from steplab.probes.probe import WatchedStep

SAVED = "saved"  # beside the kinds weights, gradients and optimizer state
WHOLE_MODEL = "(model)"
NO_MODULE = "(outside the model)"


@dataclass(frozen=True)
class TensorRecord:
    """A tensor that was alive at a moment, identified by the address of its storage."""

    time_ns: int
    address: int
    bytes: int  # of the whole storage
    role: str  # a kind, or SAVED
    shape: tuple[int, ...] | None  # None: the tensor is a part of its storage
    dtype: str
    module: str


@dataclass(frozen=True)
class Phase:
    """One pass through a phase."""

    name: str
    begin_ns: int
    end_ns: int


class TensorTracker:
    """Follows one step by hooks, which `tracking` sets and removes again."""

    def __init__(self, step: WatchedStep) -> None:
        self.step = step
        self.records: list[TensorRecord] = []
        self.phases: list[Phase] = []
        self.held: dict[int, int] = {}  # address -> bytes of what was there before the step
        self.begin_ns = 0
        self._paths: dict[nn.Module, list[str]] = defaultdict(list)
        for path, module in step.model.named_modules(remove_duplicate=False):
            self._paths[module].append(path)
        self._outside = WHOLE_MODEL if _is_compiled(step.model) else NO_MODULE
        self._inside: list[str] = []  # paths of the modules whose forward is running
        self._module_starts: list[tuple[int, str]] = []  # (ns, path): from then on that module ran
        self._owners: dict[Tensor, str] = {
            parameter: path.rpartition(".")[0] or WHOLE_MODEL
            for path, parameter in step.model.named_parameters()
        }

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Track the step that runs inside."""
        watch_before, self.step.watch = self.step.watch, self.phase
        hooks = []
        for module in self._uncompiled(self.step.model):
            hooks.append(module.register_forward_pre_hook(self._enter))
            # always_call: recomputing a checkpointed module ends in an exception.
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        self._note_model()
        self._note_optimizer()
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
        """Track one phase, and note what it leaves behind."""
        begin_ns = time_ns()
        with contextlib.ExitStack() as hooks:
            if name == "forward":
                hooks.enter_context(saved_tensors_hooks(self._save, _unchanged))
            yield
        self.phases.append(Phase(name, begin_ns, time_ns()))
        if name == "backward":
            self._note_gradients()
        elif name == "optimizer":
            self._note_optimizer()

    @property
    def compiled(self) -> bool:
        """Whether a part of the model is compiled."""
        return any(_is_compiled(module) for module in self.step.model.modules())

    def module_at(self, moment_ns: int) -> str:
        """Return the path of the module whose forward ran; "" for none."""
        count = bisect_right(self._module_starts, moment_ns, key=lambda start: start[0])
        return self._module_starts[count - 1][1] if count else ""

    def _uncompiled(self, module: nn.Module) -> set[nn.Module]:
        """Return the modules outside compiled ones: a hook inside one would break its graph."""
        if _is_compiled(module):
            return set()
        return {module}.union(*(self._uncompiled(child) for child in module.children()))

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        outer = f"{self._inside[-1]}." if self._inside and self._inside[-1] else ""
        paths = self._paths[module]
        # A module with several paths (a rotary table) is named by the path inside its caller.
        path = next((path for path in paths if path.startswith(outer)), paths[0])
        self._inside.append(path)
        self._module_starts.append((time_ns(), path or WHOLE_MODEL))

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside.pop()
        path = (self._inside[-1] or WHOLE_MODEL) if self._inside else ""
        self._module_starts.append((time_ns(), path))

    def _save(self, tensor: Tensor) -> Tensor:
        module = (self._inside[-1] or WHOLE_MODEL) if self._inside else self._outside
        self._note(tensor, SAVED, module)
        # The tensor itself would keep its own graph alive until a backward frees it.
        return tensor.detach()

    def _note_model(self) -> None:
        for parameter, owner in self._owners.items():
            self._note(parameter, "weights", owner)
        for path, buffer in self.step.model.named_buffers():
            self._note(buffer, "weights", path.rpartition(".")[0] or WHOLE_MODEL)
        self._note_gradients()

    def _note_gradients(self) -> None:
        for parameter, owner in self._owners.items():
            if parameter.grad is not None:
                self._note(parameter.grad, "gradients", owner)

    def _note_optimizer(self) -> None:
        if self.step.optimizer is None:
            return
        for parameter, state in unpacked_state(self.step.optimizer):
            for leaf in tree_leaves(state):
                if isinstance(leaf, Tensor):
                    self._note(leaf, "optimizer state", self._owners.get(parameter, ""))

    def _note(self, tensor: Tensor, role: str, module: str) -> None:
        if tensor.layout != torch.strided or tensor.device.type != self.step.parts.device.type:
            return  # the step counter of AdamW stays on the host
        tensor = stored(tensor)  # of one that ranks share, this rank's part
        storage = tensor.untyped_storage()
        whole = tensor.numel() * tensor.element_size() == storage.nbytes()
        shape = tuple(tensor.shape) if whole else None
        dtype = str(tensor.dtype).removeprefix("torch.")
        address, size = storage.data_ptr(), storage.nbytes()
        self.records.append(TensorRecord(time_ns(), address, size, role, shape, dtype, module))


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
