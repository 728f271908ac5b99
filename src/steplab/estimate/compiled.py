"""What a compiler makes of the counted ops: a model of Inductor, not Inductor.

Inductor needs a GPU to compile for. Its two large effects are modelled: neighbors that only move
numbers become one kernel, which takes as long as the longest of them; and what such a kernel can
make again from tensors that are kept anyway is not kept for the backward, unless a product or an
opaque op reads it there (so AOTAutograd's partitioner decides). Those ops stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from steplab.estimate.ledger import Entry, Kernel, Ledger
from steplab.techniques.compile import find_blocks


def compiled_modules(model: nn.Module, scope: str) -> list[nn.Module]:
    """Return what is compiled: the repeated blocks, or the model."""
    return (find_blocks(model) or [model]) if scope == "blocks" else [model]


@contextlib.contextmanager
def marking(ledger: Ledger, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let the ledger know which ops run inside compiled modules, in both directions."""

    def begin() -> None:
        ledger.is_compiled = True
        ledger.entered += 1

    def end() -> None:
        ledger.is_compiled = False

    def enter(module: nn.Module, inputs: Any) -> None:
        begin()
        if module is modules[0]:
            _on_gradient(inputs, end)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        end()
        _on_gradient(output, begin)

    hooks = [module.register_forward_pre_hook(enter) for module in modules]
    hooks += [module.register_forward_hook(leave) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _on_gradient(values: Any, act: Any) -> None:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda grad: act())


def fuse(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Make one kernel of neighbors that can be fused: the one that does most."""
    fused: list[Entry] = []
    for entry in entries:
        last = fused[-1] if fused else None
        if _are_one(last, entry):
            assert isinstance(last, Kernel) and isinstance(entry, Kernel)
            longest = max(last, entry, key=lambda kernel: kernel.call.bytes)
            fused[-1] = replace(longest, graphs=last.graphs + entry.graphs)
        else:
            fused.append(entry)
    return tuple(fused)


def _are_one(last: Entry | None, entry: Entry) -> bool:
    if not (isinstance(last, Kernel) and isinstance(entry, Kernel)):
        return False
    return last.fusible and entry.fusible and last.stream == entry.stream


def recomputed(ledger: Ledger, kinds: dict[int, str]) -> set[int]:
    """Return the storages that the backward makes again instead of finding them kept.

    Those are made by fusible kernels from storages that are kept anyway: weights, what products and
    opaque ops made, and what can be made again itself.
    """
    ended = ledger.alive_after_forward
    gone: set[int] = set()
    for number in sorted(ended):  # in the order in which they were made
        made = ledger.made_of.get(number)
        if made is None or number in ledger.fed:
            continue
        if all(source in kinds or source in ended or source in gone for source in made):
            gone.add(number)
    return gone
