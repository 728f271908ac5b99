"""Functions that the program calls in its tests."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from steplab.core import Environment, Run, RunSpec, Samples
from steplab.core.errors import Unsupported


def scaled(samples: Samples, factor: float, progress: Callable[[str], None]) -> Samples:
    progress(f"scaling by {factor:g}")
    return Samples(tuple(value * factor for value in samples.values), samples.unit)


def refuse(reason: str) -> None:
    raise Unsupported(f"{reason}.", "Try something else.")


def fail() -> None:
    raise ZeroDivisionError("nothing left")


class Counter:
    def __init__(self, folder: Path, start: int) -> None:
        self.folder, self.count = folder, start

    def add(self, steps: int) -> int:
        self.count += steps
        return self.count

    def name(self) -> str:
        return self.folder.name


def sum_of_ranks() -> float:
    """The sum of 0, 1, ... over the ranks of the group."""
    import torch
    import torch.distributed as dist

    own = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(own)
    return own.item()


def one_rank_fails() -> float:
    """The last rank fails; the others wait for it."""
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        fail()
    return sum_of_ranks()


def one_rank_tells(fate: str) -> Run:
    """The last rank ends by its fate, the others in a Run that says how they noticed."""
    import os

    import torch.distributed as dist

    empty = Run("run", RunSpec("gpt"), Environment("0", "3.11", "Linux", "cpu", 2, None))
    if dist.get_rank() == dist.get_world_size() - 1:
        if fate == "die":
            os.kill(os.getpid(), 9)
        return replace(empty, status="oom", reason="no memory")
    try:
        sum_of_ranks()
    except RuntimeError as error:
        return replace(empty, status="failed", reason=str(error))
    return empty


def wait_for_ever() -> None:
    time.sleep(3600)


class RankCounter:
    def __init__(self, start: int) -> None:
        self.start = start

    def sum(self) -> float:
        """The starts and the ranks of the group, added up."""
        import torch
        import torch.distributed as dist

        own = torch.tensor(float(self.start + dist.get_rank()))
        dist.all_reduce(own)
        return own.item()


def forked_process_ends() -> int:
    """Fork a process as a DataLoader does; return its exit code, -1 if it did not end."""
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(20)
    if child.exitcode is None:
        child.kill()
        return -1
    return child.exitcode
