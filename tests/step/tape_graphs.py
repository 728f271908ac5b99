"""A stand-in for CUDA graphs that freezes what they freeze: a tape of operators.

A capture records every operator with the very memory and numbers that it was given, undoes its
effects, and runs the tape again on replay. Python does not run then.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class TapeGraphs:
    """Captures on the CPU, and counts what is asked of it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.warmed = self.captures = self.replays = 0

    def warm(self, run: Callable[[], Any], strict: bool) -> Any:
        self.warmed += 1
        return run()

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.captures += 1
        with Tape() as tape:
            outputs = run()
        tape.undo()

        def replay() -> Any:
            self.replays += 1
            with torch.no_grad():
                tape.play()
            return outputs

        return replay


class Tape(TorchDispatchMode):
    """Records operators; what they are given is kept as it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # by storage

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # others keep Dynamo from compiling anything

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Aliases: a parameter whose memory is exchanged later must not change the tape.
        kept = tree_map(alias, (args, kwargs or {}))
        for tensor in tree_leaves(
            kept
        ):  # whatever the schema says: batch norm's hides what it writes
            if isinstance(tensor, Tensor):
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self.before.setdefault(whole.data_ptr(), (whole, whole.clone()))
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, *kept, tree_map(alias, out)))
        return out

    def undo(self) -> None:
        for whole, before in self.before.values():
            whole.copy_(before)

    def play(self) -> None:
        for func, args, kwargs, out in self.calls:
            for kept, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(kept, Tensor) and kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


def alias(leaf: Any) -> Any:
    """The same memory under another name, without autograd."""
    if not isinstance(leaf, Tensor):
        return leaf
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        made = torch.empty(0, dtype=leaf.dtype)
        return made.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())
