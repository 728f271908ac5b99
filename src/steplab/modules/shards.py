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
    """Return all of a tensor, gathered from the ranks that share it; all of them must ask for it.

    Not by `full_tensor`, whose collective crashes torch 2.11 where gloo ranks share a GPU.
    """
    if not is_sharded(tensor):
        return tensor
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    axes = [placement.dim for placement in placements if placement.is_shard()]
    if len(set(axes)) < len(axes):  # one axis cut twice: its pieces do not lie side by side
        full: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        return full
    found = local(tensor)
    for number, placement in enumerate(placements):
        if placement.is_shard():
            size = tensor.shape[placement.dim]
            found = _gathered(found, placement.dim, size, mesh.get_group(number))
    return found


def _gathered(part: Tensor, axis: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """Return all parts along `axis`, `size` numbers in all, of which the last may hold fewer."""
    ranks = dist.get_world_size(group)
    longest = -(-size // ranks)
    shape = [*part.shape]
    shape[axis] = longest
    padded = part.new_zeros(shape)
    padded.narrow(axis, 0, part.shape[axis]).copy_(part)
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts, axis).narrow(axis, 0, size).contiguous()


def replace_data(parameter: Tensor, data: Tensor, part: Tensor) -> None:
    """Let a parameter be `data`, of another dtype perhaps, of which this rank holds `part`."""
    parameter.data = data
    if is_sharded(parameter):  # torch changes the outside of a DTensor only
        parameter._local_tensor = part  # type: ignore[attr-defined]


def shared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of all tensors together, each number of them counted once.

    They may be whole (the same on every rank) and sharded over several meshes. Summed in fp32 or
    better; one collective per group of ranks.
    """
    together: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        layout = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None  # type: ignore[attr-defined]
        together.setdefault(layout, []).append(tensor)
    squares = []
    for alike in together.values():
        wide = torch.promote_types(alike[0].dtype, torch.float32)
        norms = torch._foreach_norm([local(tensor) for tensor in alike], 2.0, wide)
        squares.append(torch.stack(norms).square().sum())
        for group in _sharing_groups(alike[0]):
            dist.all_reduce(squares[-1], group=group)
    return torch.stack(squares).sum().sqrt()


def _sharing_groups(tensor: Tensor) -> tuple[Any, ...]:
    """Return the groups of ranks over which the parts of a tensor add up to the whole."""
    if not is_sharded(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    axes = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    return tuple(mesh.get_group(axis) for axis in axes)
