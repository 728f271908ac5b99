"""A process group whose collectives return at once and move nothing.

Rank 0 of N with it pays for everything that sharding costs by itself: the host's calls, copies into
and out of buffers, memory. What it computes means nothing: buffers hold whatever was there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

NAME = "silent"


class Done(dist.Work):
    """Work that was never begun."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is there already."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class SilentGroup(dist.ProcessGroup):
    """Answers every collective by `Done`."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.name = ""

    def setGroupName(self, name: str) -> None:
        """Take the name by which torch looks groups up."""
        self.name = name

    def getGroupName(self) -> str:
        """Return it."""
        return self.name

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return NAME

    def _done(self, *_: Any, **__: Any) -> Done:
        return Done()

    allreduce = broadcast = reduce = barrier = allgather = reduce_scatter = _done
    _allgather_base = _reduce_scatter_base = alltoall_base = _done  # up to torch 2.12
    all_gather_single = reduce_scatter_single = all_to_all_single = _done  # since then


def join(size: int) -> None:
    """Make this process rank 0 of `size` ranks, of which the others do not exist."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> SilentGroup:
        return SilentGroup(rank, size)

    dist.Backend.register_backend(NAME, make, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=size)
