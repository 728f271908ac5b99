"""Weights that no optimizer trains: their gradients, and the casts of frozen ones; idle state."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Set

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from steplab.core.dataflow import FrozenCasts, IdleGradients, IdleState
from steplab.modules.shards import stored
from steplab.probes.holders import places_of
from steplab.probes.known_tensors import live_modules, live_optimizers
from steplab.probes.op_tensors import is_plain, storage_number

NARROW = (torch.bfloat16, torch.float16)


def idle_gradients(
    touched: Set[int], written: Set[int], unused: Set[int]
) -> tuple[IdleGradients, ...]:
    """Return the weights whose gradients nobody uses, by name, most bytes first.

    `touched`: the storages that steps have read or made; `written`: those that the last one has
    written, of which the values in `unused` are for nothing. Meant are gradients that steps have
    nothing to do with, and those of weights that require one though nothing updates them.
    """
    optimizers = live_optimizers()
    trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    if not trained:
        return ()
    found: dict[tuple[str, bool], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, weight in named_weights():
        grad = weight.grad
        if grad is not None and grad.layout != torch.strided:
            continue  # a sparse one has no storage, and is as small as the rows that were read
        held = 0 if grad is None else stored(grad).nbytes  # its own: grads may share one buffer
        number = None if grad is None else _number(grad)
        own = _number(weight)
        updated = id(weight) in trained or own in written
        asked = weight.requires_grad and not updated and own in touched
        stale = number is not None and number not in touched and id(weight) not in trained
        if stale or (asked and (number is None or number in unused)):
            count, size = found[name, asked]
            found[name, asked] = count + 1, size + held
    idle = [IdleGradients(name, *sums, asked=asked) for (name, asked), sums in found.items()]
    return tuple(sorted(idle, key=lambda one: -one.bytes))


def idle_state(touched: Set[int]) -> IdleState | None:
    """Return the optimizers whose state steps have not `touched`, while that of another was.

    An optimizer lives as long as a variable holds it, and a scheduler of it is one.
    """
    used, idle = False, []
    for one in live_optimizers():
        leaves = (leaf for leaf in tree_leaves(dict(one.state)) if isinstance(leaf, Tensor))
        # Fake and packed tensors have no storage that could be told apart.
        state = [own for leaf in leaves if is_plain(own := stored(leaf)) and own.dim()]
        if state and touched.isdisjoint(map(storage_number, state)):
            idle.append((one, sum(own.nbytes for own in state)))
        used |= bool(state) and not touched.isdisjoint(map(storage_number, state))
    if not used or not idle:
        return None
    names = tuple(dict.fromkeys(type(one).__name__ for one, _ in idle))
    places = places_of([one for one, _ in idle])
    return IdleState(names, sum(size for _, size in idle), places)


class CastWatch:
    """Notes which frozen fp32 weights a step only casts, and how much of the copies lives at once.

    `frozen`: the storages of weights that take no gradient.
    """

    def __init__(self, frozen: Set[int]) -> None:
        self._frozen = frozen
        self._cast: dict[int, int] = {}  # bytes of each that is cast
        self._read: set[int] = set()  # by something else
        self._copies: list[tuple[StorageWeakRef, int]] = []
        self._kept: int | None = None  # bytes of copies when the backward begins

    def look(self, inputs: Collection[Tensor], cast_to: Tensor | None, compiled: bool) -> None:
        """Look at an operator; `cast_to`: what it makes of its input, if that is all it does."""
        if self._kept is None and torch._C._current_autograd_node() is not None:
            self._kept = sum(size for copy, size in self._copies if not copy.expired())
        for tensor in inputs:
            number = storage_number(tensor)
            if number not in self._frozen:
                continue
            narrow = cast_to is not None and cast_to.dtype in NARROW
            if not narrow or tensor.dtype != torch.float32:
                self._read.add(number)
                continue
            assert cast_to is not None
            self._cast[number] = tensor.untyped_storage().nbytes()
            if not compiled:  # a compiler decides anew what it keeps
                copy = cast_to.untyped_storage()
                self._copies.append((StorageWeakRef(copy), copy.nbytes()))

    def result(self) -> FrozenCasts | None:
        """Return what was seen; None if there was none."""
        only = {number: size for number, size in self._cast.items() if number not in self._read}
        if not only:
            return None
        sizes: dict[str, int] = defaultdict(int)
        for name, weight in named_weights():
            sizes[name] += only.get(_number(weight), 0)
        names = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
        return FrozenCasts(len(only), sum(only.values()), self._kept or 0, tuple(names))


def _number(tensor: Tensor) -> int:
    return stored(tensor).untyped_storage()._cdata


def named_weights() -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of all modules, once each, with "blocks.*.up.weight" for equal layers."""
    modules = live_modules()
    inner = {id(child) for one in modules for child in one._modules.values()}
    seen: set[int] = set()
    for module in (*(one for one in modules if id(one) not in inner), *modules):
        for name, weight in _weights(module):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield re.sub(r"\.\d+(?=\.)|^\d+(?=\.)", _star, name), weight


def _star(number: re.Match[str]) -> str:
    return ".*" if number[0].startswith(".") else "*"


def _weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, weight in module.named_parameters():
        strided = weight.layout == torch.strided and weight.device.type != "meta"
        if strided and not isinstance(stored(weight), FakeTensor):
            yield name, weight
