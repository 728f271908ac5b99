"""What several ranks must have in common: the data of one process, and the bits of what they share.

A step of one process is a step of one rank here; nothing is sent then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from steplab.core.ladder import Check
from steplab.step.step import Step

# By the size of one number: how its bits are read.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SCRAMBLE = 0x1E37_79B9_7F4A_7C15  # any large odd number; this one has no pattern in its bits
PIECE = 1 << 24  # numbers that are added up at once: their 64-bit copies take 400 MiB

T = TypeVar("T")


def rank_count(step: Step) -> int:
    """Return how many ranks share a step; 0 for a step without a scheme."""
    return step.parts.scheme.ranks if step.parts.scheme is not None else 0


def gather(value: T, ranks: int) -> list[T]:
    """Return what every rank has given, by rank."""
    if ranks < 2:
        return [value]
    values: list[T] = [value] * ranks
    dist.all_gather_object(values, value)
    return values


def checksum(tensor: Tensor) -> int:
    """Return a number that changes with any bit of a tensor, and with the order of its values.

    Each value is multiplied by an odd number that its position is scrambled to, and all are added
    modulo 2^64, where the order of adding does not matter: so it is computed where the tensor is.
    """
    flat = tensor.detach().contiguous().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    bits = flat.view(INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE].long()
        factor = torch.arange(start, start + len(piece), device=flat.device) * SCRAMBLE
        factor = (factor ^ (factor >> 29)) * SCRAMBLE | 1
        total += (piece * factor).sum()
    return int(total)


def held_bits(named: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the checksum of every tensor, or of the part of it that this rank holds.

    Ranks that hold the same part name it alike.
    """
    from steplab.modules.shards import dense, local

    return {f"{name}{_part(tensor)}": checksum(dense(local(tensor))) for name, tensor in named}


def _part(tensor: Any) -> str:
    """Name the part of a tensor that this rank holds by its coordinates in the mesh; "": all."""
    if not hasattr(tensor, "placements"):
        return ""
    place = zip(tensor.placements, tensor.device_mesh.get_coordinate(), strict=True)
    return f", part {'.'.join(str(n) for placement, n in place if not placement.is_replicate())}"


def state_of(step: Step) -> Iterable[tuple[str, Tensor]]:
    """Yield what a step carries on: parameters, buffers, the optimizer's state."""
    yield from step.model.named_parameters()
    yield from step.model.named_buffers()
    names: dict[Tensor, str] = {p: name for name, p in step.model.named_parameters()}
    for p, state in step.optimizer.state.items() if step.optimizer is not None else ():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield f"{key} of {names[p]}", value


def check_agreement(held: Sequence[Mapping[str, int]]) -> Check:
    """Compare the checksums of all ranks: what two of them hold must have the same bits."""
    first: dict[str, tuple[int, int]] = {}  # name -> (rank that holds it, its checksum)
    shared: set[str] = set()
    differing: list[str] = []
    for rank, found in enumerate(held):
        for name, bits in found.items():
            holder, expected = first.setdefault(name, (rank, bits))
            if holder != rank:
                shared.add(name)
            if bits != expected:
                differing.append(f"{name} differs between ranks {holder} and {rank}")
    name = "ranks agree"
    if differing:
        more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
        return Check(name, False, differing[0] + more)
    return Check(name, True, f"{len(shared)} tensors that several ranks hold have the same bits")
