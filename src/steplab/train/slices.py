"""Slices of tensors that several ranks hold: which one is this rank's, and who writes which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from steplab.modules.shards import is_sharded, local


@dataclass(frozen=True)
class Slice:
    """A part of a tensor: where it begins along each axis, and how long it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """What cuts it out of the whole tensor."""
        pairs = zip(self.offset, self.shape, strict=True)
        return tuple(slice(first, first + length) for first, length in pairs)

    def overlap(self, other: Slice) -> Slice | None:
        """Return what two slices of a tensor have in common; None: nothing."""
        begins = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = [min(a.stop, b.stop) for a, b in zip(self.index, other.index, strict=True)]
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return Slice(tuple(begins), tuple(lengths)) if all(n > 0 for n in lengths) else None

    def within(self, outer: Slice) -> Slice:
        """Return this slice in the coordinates of another one that contains it."""
        pairs = zip(self.offset, outer.offset, strict=True)
        return Slice(tuple(a - b for a, b in pairs), self.shape)


def own_slice(tensor: Tensor) -> tuple[Slice, Tensor]:
    """Return what this rank holds of a tensor; of one that is not sharded, all of it."""
    if not is_sharded(tensor):
        return Slice((0,) * tensor.ndim, tuple(tensor.shape)), tensor
    # torch's own protocol for checkpoints
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return Slice(tuple(chunk.offsets), tuple(chunk.sizes)), local(tensor)


def placed_like(part: Tensor, target: Tensor) -> Tensor:
    """Return a slice in the form of the tensor whose slice it is, on its device."""
    part = part.to(target.device)
    if not is_sharded(target):
        return part
    from torch.distributed.tensor import DTensor

    assert isinstance(target, DTensor)
    return DTensor.from_local(
        part, target.device_mesh, target.placements, shape=target.shape, stride=target.stride()
    )


@dataclass(frozen=True)
class Held:
    """A slice that a rank could write."""

    name: str
    offset: tuple[int, ...]
    size: int  # bytes


def held_slices(tensors: Mapping[str, Tensor]) -> list[Held]:
    """Return what this rank holds of some tensors; an empty share of it is left out."""
    found = []
    for name, tensor in tensors.items():
        part, own = own_slice(tensor)
        if math.prod(part.shape) or not tensor.numel():
            found.append(Held(name, part.offset, own.numel() * own.element_size()))
    return found


def choose_writers(held: Sequence[Sequence[Held]]) -> list[set[tuple[str, tuple[int, ...]]]]:
    """Return what each rank writes, given what each holds: every slice once, bytes spread evenly.

    All ranks compute the same from the same lists, which need no further word between them.
    """
    # 16-bit weights may be kept in fp32 by the rank that updates them: the longest is the whole.
    longest: dict[tuple[str, tuple[int, ...]], Held] = {}
    for each in (each for slices in held for each in slices):
        known = longest.setdefault((each.name, each.offset), each)
        longest[each.name, each.offset] = max(known, each, key=lambda h: h.size)
    holders: dict[Held, list[int]] = {}
    for rank, slices in enumerate(held):
        for each in slices:
            if each == longest[each.name, each.offset]:
                holders.setdefault(each, []).append(rank)
    chosen: list[set[tuple[str, tuple[int, ...]]]] = [set() for _ in held]
    load = [0] * len(held)
    # Slices with one holder first, then the large ones: what is left evens the loads out.
    for each in sorted(holders, key=lambda h: (len(holders[h]), -h.size, h.name, h.offset)):
        writer = min(holders[each], key=lambda rank: (load[rank], rank))
        chosen[writer].add((each.name, each.offset))
        load[writer] += each.size
    return chosen
