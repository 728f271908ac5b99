"""Run a function in N gloo ranks: `run_ranks(function, 2, *arguments)` returns what each returned.

Processes are forked from a clean interpreter (spawn), one thread each; a rank's exception is the
test's.
"""

import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from steplab.parallel.world import join, leave


def run_ranks(function, size, *arguments):
    """Call `function(*arguments)`, defined at module level, in every rank; return the results."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (size, folder, function, arguments), nprocs=size)
        return [torch.load(Path(folder, f"{r}.pt"), weights_only=False) for r in range(size)]


def _rank(rank, size, folder, function, arguments):
    torch.set_num_threads(1)
    join(rank, size, f"file://{folder}/store", "cpu", timeout=60)
    try:
        torch.save(function(*arguments), Path(folder, f"{rank}.pt"))
    finally:
        leave()
