"""The group of ranks that this process belongs to; a process alone is a group of one."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from steplab.core.errors import SteplabError, UserError
from steplab.core.spec import Backend
from steplab.parallel import environment

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


def join_launched(device: str, backend: Backend | None = None, timeout: float = TIMEOUT_S) -> World:
    """Join the group that the launcher describes in the environment; take this rank's GPU."""
    rank, size = environment.launched_rank(), environment.launched_size()
    host, port = environment.master_address()
    rendezvous: str | dist.Store = "env://"
    if environment.is_launcher_the_host() and environment.is_one_machine():
        # After a restart the launcher's store still holds the addresses of the dead ranks.
        store = dist.TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout))
        rendezvous = dist.PrefixStore(f"restart-{environment.restarts()}", store)
    return join(rank, size, rendezvous, device, backend, environment.local_rank(), timeout)


def join(
    rank: int,
    size: int,
    rendezvous: str | dist.Store,
    device: str,
    backend: Backend | None = None,
    local_rank: int | None = None,
    timeout: float = TIMEOUT_S,
) -> World:
    """Join a group of `size` ranks that meet at `rendezvous` (`env://`, `file:///path`, a store).

    `device` is "cpu" or "cuda"; without `backend` it is nccl on GPUs and gloo on CPUs. Several
    gloo ranks may share a GPU, NCCL ranks may not. Tensors on the CPU always travel by gloo.
    `timeout` in seconds.
    """
    local_rank = rank if local_rank is None else local_rank
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(_gpu_of(local_rank, backend))
    elif backend == "nccl":
        raise UserError("nccl moves data between GPUs only.", "Use --backend gloo on a CPU.")
    where = {"init_method": rendezvous} if isinstance(rendezvous, str) else {"store": rendezvous}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        **where,
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


def in_order(values: Tensor) -> Tensor:
    """Return what all ranks have, where item i of rank r is number i * ranks + r of the whole.

    `values` has this rank's items in its first dimension. Called by all ranks together.
    """
    size = current_world().size
    if size == 1:
        return values
    every = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(every, values)
    return torch.stack(every, 1).flatten(0, 1)


def gather_texts(text: str) -> list[str]:
    """Return every rank's text, in the order of the ranks. Called by all ranks together."""
    size, data = current_world().size, text.encode()
    if size == 1:
        return [text]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = max(1, *(int(length) for length in lengths))
    padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
    every = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(every, padded)
    found = zip(every, lengths, strict=True)
    return [row.numpy().tobytes()[: int(length)].decode() for row, length in found]


def share_text(text: str) -> str:
    """Return rank 0's text on every rank. Called by all ranks together."""
    return gather_texts(text if current_world().is_first else "")[0]


def together(work: Callable[[], str]) -> list[str]:
    """Do `work` on every rank and return every rank's text; if one fails, all fail with its words.

    Called by all ranks together. What is no SteplabError is raised where it happened.
    """
    text, failure, suggestion = "", "", ""
    try:
        text = work()
    except SteplabError as error:
        if current_world().size == 1:
            raise
        failure, suggestion = error.message, error.suggestion
    answer = json.dumps([text, failure, suggestion])
    answers = [json.loads(each) for each in gather_texts(answer)]
    for _, failure, suggestion in answers:
        if failure:
            raise UserError(failure, suggestion)
    return [text for text, _, _ in answers]


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
