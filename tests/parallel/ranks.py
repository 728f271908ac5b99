"""Run a function in N gloo ranks: `run_ranks(function, 2, *arguments)` returns what each returned.

The ranks stay for the next test: joining costs a second, importing torch three. They are forked
from one process that has imported everything, one thread each. When one fails or is late its group
is ended, and the next call makes another.
"""

import atexit
import gc
import io
import os
import tempfile
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

import torch

from steplab.parallel.world import join
from tests.forked import forkserver

TIMEOUT_S = 120.0  # of one call: ten times the longest, on a busy machine
_groups: dict[int, "RankPool"] = {}


def run_ranks(function, size, *arguments):
    """Call `function(*arguments)`, defined at module level, in every rank; return the results."""
    if size not in _groups:
        _groups[size] = RankPool(size)
    try:
        return _groups[size].call(function, arguments)
    except BaseException:
        _groups.pop(size).close()
        raise


class RankPool:
    """A group of ranks that serve calls until it is closed."""

    def __init__(self, size):
        self.folder = tempfile.TemporaryDirectory()
        context = forkserver()
        pipes = [context.Pipe() for _ in range(size)]
        self.ranks = [
            context.Process(target=_serve, args=(r, size, self.folder.name, theirs), daemon=True)
            for r, (_, theirs) in enumerate(pipes)
        ]
        for rank in self.ranks:
            rank.start()
        for _, theirs in pipes:
            theirs.close()
        self.pipes = [ours for ours, _ in pipes]

    def call(self, function, arguments):
        """Return every rank's result; the first rank that fails ends the wait for the others."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        waiting, results = dict(zip(self.pipes, range(len(self.pipes)), strict=True)), {}
        deadline = monotonic() + TIMEOUT_S
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - monotonic()))
            if not ready:
                raise TimeoutError(f"no answer from ranks {sorted(waiting.values())}")
            for pipe in ready:
                rank = waiting.pop(pipe)
                results[rank] = _read(pipe, rank)
        return [results[rank] for rank in range(len(self.pipes))]

    def close(self):
        """End the ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.join()
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()


def _read(pipe, rank):
    try:
        failure, result = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    except EOFError:
        raise RuntimeError(f"rank {rank} has died") from None
    if failure:
        raise RuntimeError(f"rank {rank}:\n{failure}")
    return result


def _serve(rank, size, folder, pipe):
    gc.freeze()
    torch.set_num_threads(1)
    join(rank, size, Path(folder, "store").as_uri(), "cpu", timeout=60)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)  # without the farewell of the group, which would wait for the others
        try:
            answer = ("", function(*arguments))
        except BaseException:
            answer = (traceback.format_exc(), None)
        buffer = io.BytesIO()
        torch.save(answer, buffer)
        pipe.send_bytes(buffer.getvalue())


@atexit.register
def _close_all():
    for pool in _groups.values():
        pool.close()
    _groups.clear()
