"""Sums in one order, whatever the number of ranks: a binary tree over global micro-batch numbers.

Micro-batch g of a step belongs to rank g % ranks. So the lowest levels of the tree join ranks (the
functions here, for every micro-batch) and the upper ones what a rank has summed (PairwiseSum).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from steplab.core.run import Collective

# Its name since torch 2.13, and before.
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PairwiseSum:
    """Adds lists of tensors as a binary counter counts: 1 + 1 is carried to the next level.

    Two equal halves are added last, however many lists one rank adds by itself: 2 ranks with 4
    each and one rank with 8 build the same tree. It holds one list per level.
    """

    def __init__(self) -> None:
        self.levels: dict[int, list[Tensor]] = {}  # level n holds the sum of 2 ** n lists

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Add one more list, whose tensors may be overwritten afterward."""
        carried, level = list(tensors), 0
        while level in self.levels:
            earlier = self.levels.pop(level)
            torch._foreach_add_(earlier, carried)
            carried, level = earlier, level + 1
        self.levels[level] = carried if level else [tensor.clone() for tensor in carried]

    def total(self) -> list[Tensor]:
        """Return the sum, and begin anew."""
        latest, *earlier = [self.levels[level] for level in sorted(self.levels)]
        for tensors in earlier:
            torch._foreach_add_(latest, tensors)
        self.levels.clear()
        return latest


def tree_all_reduce(flat: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum a flat tensor over ranks in place, rank 0 + rank 1 first, then pairs of pairs."""
    size = dist.get_world_size(group)
    whole = flat.new_zeros(padded(flat.numel(), size))
    whole[: flat.numel()] = flat
    own = whole.new_empty(whole.numel() // size)
    tree_reduce_scatter(own, whole, group)
    gather_single(whole, own, group=group)
    flat.copy_(whole[: flat.numel()])


def planned_tree(ranks: int, calls: int, sent: int) -> tuple[Collective, ...]:
    """Return what so many `tree_all_reduce` of `sent` bytes call; `calls` 0: any number.

    The slices are exchanged and the sums gathered; so are, once a step, the metrics of all ranks.
    """
    return (
        Collective("all-to-all", ranks, calls, sent),
        Collective("all-gather", ranks, calls + 1 if calls else 0, sent),
    )


def padded(numel: int, ranks: int) -> int:
    """Return how many numbers are sent where each rank gets a slice of the same size."""
    return -(-numel // ranks) * ranks


def tree_reduce_scatter(
    output: Tensor, flat: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Write this rank's slice of the sum over ranks: the slices are exchanged, then added."""
    parts = torch.empty_like(flat)
    dist.all_to_all_single(parts, flat, group=group)
    rows = list(parts.view(dist.get_world_size(group), -1))
    while len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
    output.copy_(rows[0].view_as(output))
