"""What this rank holds of a tensor that several ranks share (a DTensor)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TOGETHER_BYTES = 32 * 2**20  # below it a collective takes as long as its round trip


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of the tensor only."""
    # Not by its class, whose import takes a second that only ranks need.
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: a view of it."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def stored(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, outside of autograd.

    For those who look at memory: a view of a shard without data (a fake one, of an estimate), as
    autograd takes one, ends the process.
    """
    with torch.no_grad():
        return local(tensor)


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor with all its numbers in memory: of a sparse one, its zeros too."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered from the ranks that share it; all of them must ask for it.

    Not by `full_tensor`, whose collective crashes torch 2.11 where gloo ranks share a GPU.
    """
    return next(wholes([tensor]))


def wholes(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all of each tensor, dense; one collective gathers neighbors that the same ranks share.

    A rank then holds TOGETHER_BYTES more at most, or the largest tensor.
    """
    together: list[Tensor] = []
    for tensor in map(dense, tensors):
        size = sum(each.nbytes for each in [*together, tensor])
        if together and (_sharing(together[0]) != _sharing(tensor) or size > TOGETHER_BYTES):
            yield from _whole_together(together)
            together = []
        together.append(tensor)
    yield from _whole_together(together)


def _sharing(tensor: Tensor) -> Any:
    """Return what tensors must have in common to be gathered by one collective."""
    if not is_sharded(tensor):
        return None
    placements = tensor.placements  # type: ignore[attr-defined]
    cut = tuple(placement.is_shard() for placement in placements)
    return tensor.device_mesh, cut, tensor.dtype, _is_cut_twice(tensor)  # type: ignore[attr-defined]


def _is_cut_twice(tensor: Tensor) -> bool:
    """Whether one axis is cut over two axes of the mesh: its pieces do not lie side by side."""
    placements = tensor.placements  # type: ignore[attr-defined]
    axes = [placement.dim for placement in placements if placement.is_shard()]
    return len(set(axes)) < len(axes)


def _whole_together(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return all of each of some tensors that have `_sharing` in common."""
    if not tensors or not is_sharded(tensors[0]):
        return tensors
    if _is_cut_twice(tensors[0]):
        return [tensor.full_tensor() for tensor in tensors]  # type: ignore[attr-defined]
    mesh = tensors[0].device_mesh  # type: ignore[attr-defined]
    found = [local(tensor) for tensor in tensors]
    for number in range(mesh.ndim):
        cuts = [tensor.placements[number] for tensor in tensors]  # type: ignore[attr-defined]
        if cuts[0].is_shard():
            axes = [cut.dim for cut in cuts]
            sizes = [tensor.shape[axis] for tensor, axis in zip(tensors, axes, strict=True)]
            found = _gathered(found, axes, sizes, mesh.get_group(number))
    return found


def _gathered(
    parts: Sequence[Tensor], axes: Sequence[int], sizes: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """Return all of some tensors, `size` long along an axis; the last part may be shorter."""
    ranks = dist.get_world_size(group)
    padded = []
    for part, axis, size in zip(parts, axes, sizes, strict=True):
        shape = [*part.shape]
        shape[axis] = -(-size // ranks)
        padded.append(part.new_zeros(shape))
        padded[-1].narrow(axis, 0, part.shape[axis]).copy_(part)
    flat = torch.cat([tensor.flatten() for tensor in padded])
    every = [torch.empty_like(flat) for _ in range(ranks)]
    dist.all_gather(every, flat, group=group)
    split = [row.split([tensor.numel() for tensor in padded]) for row in every]
    found = []
    for tensor, axis, size, *pieces in zip(padded, axes, sizes, *split, strict=True):
        joined = torch.cat([piece.view(tensor.shape) for piece in pieces], axis)
        found.append(joined.narrow(axis, 0, size).contiguous())
    return found


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
