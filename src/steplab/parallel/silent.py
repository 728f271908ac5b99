"""A process group whose collectives return at once and move nothing.

Rank 0 of N with it pays for everything that sharding costs by itself: the host's calls, copies into
and out of buffers, memory. What it computes means nothing: buffers hold whatever was there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

NAME = "silent"


class Done(dist.Work):
    """Work that was never begun."""

    def __init__(self, result: Any, waited: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.outcome = result
        self.waited = waited

    def wait(self, timeout: Any = None) -> bool:
        """Return at once; who watches is told."""
        if self.waited is not None:
            self.waited()
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is there already."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.outcome)
        return future


class SilentGroup(dist.ProcessGroup):
    """Answers every collective by `Done`.

    `watch`, where it is set, is told of every collective (its name, the group, the arguments) and
    returns what to call when somebody waits for it.
    """

    watch: Callable[[str, SilentGroup, list[Any]], Callable[[], None]] | None = None

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.group_label = ""

    @functools.cached_property
    def stride(self) -> int:
        """How far apart the numbers of neighbors are; in a mesh they are equally far."""
        first, second = [*dist.get_process_group_ranks(self), 1][:2]
        return abs(second - first)

    def setGroupName(self, name: str) -> None:
        """Take the name by which torch looks groups up."""
        self.group_label = name

    def getGroupName(self) -> str:
        """Return it."""
        return self.group_label

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return NAME


def _answer(name: str) -> Callable[..., Done]:
    def done(group: SilentGroup, *args: Any, **options: Any) -> Done:
        arguments = [*args, *options.values()]
        waited = group.watch(name, group, arguments) if group.watch else None
        return Done(arguments[0] if arguments else None, waited)

    return done


COLLECTIVES = ("allreduce", "broadcast", "reduce", "barrier", "allgather", "reduce_scatter")
UP_TO_2_12 = ("_allgather_base", "_reduce_scatter_base", "alltoall_base")
SINCE_2_13 = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
for _name in (*COLLECTIVES, *UP_TO_2_12, *SINCE_2_13):
    setattr(SilentGroup, _name, _answer(_name))


def join_silent(size: int) -> None:
    """Make this process rank 0 of `size` ranks, of which the others do not exist."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> SilentGroup:
        return SilentGroup(rank, size)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=size)
