"""The group of ranks that this process belongs to; a process alone is a group of one."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from steplab.core.errors import UserError

Backend = Literal["nccl", "gloo"]
T = TypeVar("T")
# What torchrun, SLURM scripts and other launchers set for every process.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE")
# A peer that is gone is noticed at once; this bounds the wait for one that is stuck.
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class World:
    """Which rank this process is, out of how many."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes for all."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {socket.gethostname()}"


def current_world() -> World:
    """Return this process's place in the group that it has joined, or a world of one."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World()


def is_launched() -> bool:
    """Whether torchrun, or anybody who sets RANK and WORLD_SIZE, has started this process."""
    return all(name in os.environ for name in LAUNCHER_VARIABLES)


def join_launched(device: str, backend: Backend | None = None) -> World:
    """Join the group that the launcher describes in the environment; take this rank's GPU."""
    local = _whole("LOCAL_RANK") if "LOCAL_RANK" in os.environ else _whole("RANK")
    return join(_whole("RANK"), _whole("WORLD_SIZE"), "env://", device, backend, local)


def join(
    rank: int,
    size: int,
    rendezvous: str,
    device: str,
    backend: Backend | None = None,
    local_rank: int | None = None,
    timeout: float = TIMEOUT_S,
) -> World:
    """Join a group of `size` ranks that meet at `rendezvous` (`env://`, `file:///path`).

    `device` is "cpu" or "cuda"; without `backend` it is nccl on GPUs and gloo on CPUs. Several
    gloo ranks may share a GPU, NCCL ranks may not. `timeout` in seconds.
    """
    local_rank = rank if local_rank is None else local_rank
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(_gpu_of(local_rank, backend))
    elif backend == "nccl":
        raise UserError("nccl moves data between GPUs only.", "Use --backend gloo on a CPU.")
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    return World(rank, size)


def join_local(
    rank: int, size: int, rendezvous: str, device: str, backend: str = "", threads: int = 1
) -> None:
    """Join a group of workers on this machine, which share its cores: `threads` for each."""
    torch.set_num_threads(threads)
    join(rank, size, rendezvous, device, backend or None)  # type: ignore[arg-type]


def join_alone() -> World:
    """Make a group of one, where this process has joined none: what runs on N runs on 1 too."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return current_world()


def leave() -> None:
    """Leave the group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _gpu_of(local_rank: int, backend: Backend) -> int:
    count = torch.cuda.device_count()
    if local_rank < count:
        return local_rank
    if backend == "gloo" and count:
        return local_rank % count
    raise UserError(
        f"Rank {local_rank} of this machine has no GPU of its own: there are {count}.",
        "Start fewer ranks, or let them share a GPU with --backend gloo.",
    )


def _whole(name: str) -> int:
    word = os.environ.get(name, "")
    if not word.isdecimal():
        raise UserError(f"The environment variable {name} is {word!r}, not a number.")
    return int(word)
