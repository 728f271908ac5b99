"""Attention's first calls in a process: python benchmarks/hydra_first.py [DEVICE [FOLDER]]

HYDRA as it was profiled, forward, waiting after the attention of every block. hydra_notes.py calls
it, because whoever measured something before has loaded what a first call loads.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hydra_cells import Desk, synchronize
from hydra_notes import AS_PROFILED, EAGER, spec_of

from steplab.cli.flags import exit_without_gpu
from steplab.core import Column, RunSpec
from steplab.step.assemble import assemble

CALLS = 6
COLUMNS = (
    *(Column("block"), Column("first", "ms"), Column("second", "ms")),
    *(Column("later", "ms"), Column("status")),
)


def main() -> None:
    """Measure and print, and write the table where a folder is given."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    if device == "cuda":
        exit_without_gpu(__file__)
    desk = Desk(device, CALLS, math.inf, Path(sys.argv[2]) if len(sys.argv) > 2 else None)
    first_calls(desk, spec_of(desk, "as-profiled", EAGER, **AS_PROFILED))


def first_calls(desk: Desk, spec: RunSpec) -> None:
    """Attention of every block in its first, second and later calls."""
    sheet = desk.sheet("first", "Attention's first calls in a process, forward", COLUMNS)
    step = assemble(spec)
    batch = next(step.workload.batches(spec.batch, step.parts.device, 0))
    times: list[list[float]] = []
    began: list[float] = []

    def before(*_: Any) -> None:
        synchronize(step)
        began.append(time.perf_counter())

    for block in step.model.blocks:  # type: ignore[union-attr]
        times.append([])

        def after(*_: Any, kept: list[float] = times[-1]) -> None:
            synchronize(step)
            kept.append((time.perf_counter() - began.pop()) * 1e3)

        block.attention.register_forward_pre_hook(before)
        block.attention.register_forward_hook(after)
    for _ in range(CALLS):
        with torch.no_grad(), step.parts.forward_context():
            step.workload.loss(step.model, batch)
    for index, found in enumerate(times):
        later = sorted(found[2:])[len(found) // 2 - 1]
        sheet.add(str(index), found[0], found[1], later, "ok", sum(found) / 1e3)


if __name__ == "__main__":
    main()
