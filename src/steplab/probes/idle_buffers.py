"""Buffers and copies of weights that a step could do without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Set

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from steplab.core.dataflow import IdleBuffers, IdleCopies
from steplab.modules.shards import stored
from steplab.probes.holders import holding_places, python_tensors
from steplab.probes.known_tensors import held_by_objects, live_modules

Kind = tuple[tuple[int, ...], torch.dtype]
LEAST_BYTES = 2**16  # of a buffer; running means and tables of angles are smaller


def idle_buffers(read: Set[int]) -> tuple[IdleBuffers, ...]:
    """Return them by name, most bytes first. `read`: the storages that the step has read."""
    unread: dict[str, int] = defaultdict(int)
    copies: dict[str, int] = defaultdict(int)
    seen: dict[int, str] = {}
    first: dict[object, list[Tensor]] = defaultdict(list)
    for name, buffer in _buffers():
        storage = buffer.untyped_storage()
        if storage._cdata in seen:
            continue  # one that several modules share
        seen[storage._cdata] = name
        others = first[(tuple(buffer.shape), buffer.dtype, buffer.device)]
        if storage._cdata not in read:
            unread[name] += storage.nbytes()
        elif any(torch.equal(buffer, other) for other in others):
            copies[name] += storage.nbytes()
        else:
            others.append(buffer)
    found = (IdleBuffers(name, unread[name], copies[name]) for name in {**unread, **copies})
    return tuple(sorted(found, key=lambda one: -one.unread - one.copies))


def idle_copies(touched: Set[int], older: Mapping[int, Kind]) -> IdleCopies | None:
    """Return tensors like weights that neither a step nor a module or optimizer has.

    `touched`: the storages that steps have read or made. `older`: what they have read that they did
    not make. Some of it is data: other batches look like this one, and may look like a weight.
    """
    known = _owned()
    owned = {tensor.untyped_storage()._cdata for tensor in known}
    large = [t for t in known if t.numel() * t.element_size() >= LEAST_BYTES]
    like_weights = {kind_of(tensor) for tensor in large} - data_kinds(older)
    idle: dict[int, Tensor] = {}
    for tensor in python_tensors():
        if kind_of(tensor) in like_weights and not tensor.requires_grad:
            number = stored(tensor).untyped_storage()._cdata
            if number not in owned and number not in touched:
                idle[number] = tensor
    if not idle:
        return None
    size = sum(tensor.untyped_storage().nbytes() for tensor in idle.values())
    addresses = {tensor.untyped_storage().data_ptr() for tensor in idle.values()}
    return IdleCopies(size, holding_places(addresses))


def data_kinds(older: Mapping[int, Kind]) -> set[Kind]:
    """Return the kinds of what a step reads that is older and that no module or optimizer has."""
    owned = {tensor.untyped_storage()._cdata for tensor in _owned()}
    return {kind for number, kind in older.items() if number not in owned}


def _owned() -> list[Tensor]:
    return [stored(tensor) for tensor in held_by_objects() if tensor.layout == torch.strided]


def kind_of(tensor: Tensor) -> Kind:
    """Return what tensors that look alike share."""
    return tuple(tensor.shape), tensor.dtype


def _buffers() -> Iterator[tuple[str, Tensor]]:
    """Yield the large buffers of all modules, named by the class of their module."""
    for module in live_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.layout != torch.strided or buffer.device.type == "meta":
                continue
            own = stored(buffer)
            if not isinstance(own, FakeTensor) and own.untyped_storage().nbytes() >= LEAST_BYTES:
                yield f"{type(module).__name__}.{name}", own
