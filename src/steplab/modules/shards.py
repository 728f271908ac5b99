"""What this rank holds of a tensor that several ranks share (a DTensor)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of the tensor only."""
    # Not by its class, whose import takes a second that only ranks need.
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: a view of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered from the ranks that share it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors together, each number of them counted once.

    They may be whole (the same on every rank) and sharded over several meshes. Summed in fp32 or
    better; one collective per group of ranks.
    """
    together: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        together.setdefault(_sharing_groups(tensor), []).append(local(tensor))
    squares = []
    for groups, parts in together.items():
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        squares.append(torch.stack(torch._foreach_norm(parts, 2.0, wide)).square().sum())
        for group in groups:
            dist.all_reduce(squares[-1], group=group)
    return torch.stack(squares).sum().sqrt()


def _sharing_groups(tensor: Tensor) -> tuple[Any, ...]:
    """Return the groups of ranks over which the parts of a tensor add up to the whole."""
    if not is_sharded(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    axes = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    return tuple(mesh.get_group(axis) for axis in axes)
