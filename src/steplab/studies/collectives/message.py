"""The buffers of one collective on one rank, filled with values whose result is known.

Every (sender, place) has a tile of pseudo-random integers, repeated over the part of the message
that goes there; a part that is lost, doubled, swapped or shifted then shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from steplab.studies.collectives.job import LARGEST_VALUE, MAX_WORLD, Op

# A prime, so that no split of a message into blocks falls on the tile's period.
PERIOD = 1021

# torch 2.13 renamed both and warns about the old names at every call.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def tile(sender: int, place: int) -> Tensor:
    """Return the values [PERIOD] that rank `sender` puts into part `place` of its message."""
    generator = torch.Generator().manual_seed(sender * MAX_WORLD + place)
    return torch.randint(0, LARGEST_VALUE + 1, (PERIOD,), generator=generator)


def sent_tiles(op: Op, rank: int, world: int) -> list[Tensor]:
    """Return one tile per part of what `rank` sends: a part for each rank, or one for all."""
    parts = world if op in ("reduce-scatter", "all-to-all") else 1
    return [tile(rank, place) for place in range(parts)]


def due_tiles(op: Op, rank: int, world: int) -> list[Tensor]:
    """Return one tile per part of what `rank` must hold afterwards: the collective's definition."""
    place = rank if op in ("reduce-scatter", "all-to-all") else 0
    arrived = [tile(sender, place) for sender in range(world)]
    if op in ("all-reduce", "reduce-scatter"):
        return [torch.stack(arrived).sum(0)]
    return arrived


def write_tiles(x: Tensor, tiles: Sequence[Tensor]) -> None:
    """Fill each of `len(tiles)` equal parts of the flat `x` with its tile, over and over."""
    for part, values in zip(x.view(len(tiles), -1), tiles, strict=True):
        whole = part.numel() // PERIOD * PERIOD
        part[:whole].view(-1, PERIOD).copy_(values)
        part[whole:].copy_(values[: part.numel() - whole])


def count_wrong(x: Tensor, tiles: Sequence[Tensor]) -> int:
    """Count the elements of the flat `x` that differ from what `write_tiles` would write."""
    wrong = 0
    for part, values in zip(x.view(len(tiles), -1), tiles, strict=True):
        due = values.to(x.device, x.dtype)
        whole = part.numel() // PERIOD * PERIOD
        wrong += int((part[:whole].view(-1, PERIOD) != due).sum())
        wrong += int((part[whole:] != due[: part.numel() - whole]).sum())
    return wrong


class Message:
    """Send and receive buffers of `op` for a full message of `elements` elements."""

    def __init__(
        self, op: Op, elements: int, dtype: torch.dtype, device: torch.device, rank: int, world: int
    ) -> None:
        part = elements // world
        self.sent = [t.to(device, dtype) for t in sent_tiles(op, rank, world)]
        self.due = due_tiles(op, rank, world)
        self.token = torch.zeros(1, device=device)  # of a collective that only lines the ranks up
        source_size = part if op == "all-gather" else elements
        self.source = self.result = torch.empty(source_size, dtype=dtype, device=device)
        if op != "all-reduce":
            result_size = part if op == "reduce-scatter" else elements
            self.result = torch.empty(result_size, dtype=dtype, device=device)
        calls: dict[Op, Callable[[], object]] = {
            "all-reduce": lambda: dist.all_reduce(self.source),
            "all-gather": lambda: _gather(self.result, self.source),
            "reduce-scatter": lambda: _scatter(self.result, self.source),
            "all-to-all": lambda: dist.all_to_all_single(self.result, self.source),
        }
        self.communicate = calls[op]

    def refill(self) -> None:
        """Restore the values to send: an in-place sum grows as world**runs and overflows fp32."""
        if self.result is not self.source:
            self.result.fill_(-1)
        write_tiles(self.source, self.sent)

    def wrong(self) -> int:
        """Count the received elements that are not what the collective must deliver."""
        return count_wrong(self.result, self.due)
