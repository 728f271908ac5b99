"""Analysis: a Trace with every piece of work in its place. What rules, tables and pages read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.record.budget import Budget
from steplab.trace.events import Codes, Ints, Trace

Floats = NDArray[np.float64]

UNATTRIBUTED = "unattributed"


@dataclass(frozen=True)
class Window:
    """One step of the trace."""

    number: int  # as in ProfilerStep#<number>; 0 where the trace has no steps
    start: int  # ns
    end: int  # ns


@dataclass(frozen=True)
class Work:
    """One row per kernel, copy or fill; without a GPU one row per operator, by its self time.

    Codes index `labels`; code 0 is always UNATTRIBUTED.
    """

    labels: tuple[str, ...]
    start: Ints  # ns
    duration: Ints  # ns; of an operator its self time
    name: Codes
    category: Codes  # steplab.trace.categories
    step: Ints  # Window.number of the step that *launched* it, -1: none
    phase: Codes  # forward, backward, clip, optimizer, data, or any other outermost range
    module: Codes  # "blocks.3.attention" or "Linear_0"
    line: Codes  # "model.py:12 (forward)", innermost line outside torch
    op: Codes  # innermost operator around the launch
    op_row: Ints  # its row in Trace.ops (of the detailed trace, where there is one), -1: none
    launched: Ints  # ns: when the host's launch call returned, -1: unknown
    flops: Floats  # nan: no model
    bytes: Floats  # least traffic by shapes, nan: no model
    ideal: Floats  # ns by the roofline, nan: no model
    matmul_dtype: Codes  # how a matrix product multiplies: fp32, tf32, bf16, fp16; 0: none, unsure

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Syncs:
    """Host calls that waited for the device; codes index `Work.labels`."""

    start: Ints  # ns
    duration: Ints  # ns
    call: Codes  # cudaStreamSynchronize, ...
    op: Codes  # aten::item, aten::nonzero, ...
    line: Codes
    step: Ints
    idle: Ints  # ns of device idleness that followed from it


@dataclass(frozen=True)
class Analysis:
    """The whole of it."""

    trace: Trace  # whose times count
    detail: Trace | None  # whose stacks and shapes were borrowed, if another
    windows: tuple[Window, ...]
    work: Work
    syncs: Syncs
    budget: Budget
