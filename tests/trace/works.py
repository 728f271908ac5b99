"""Work and Syncs of a trace for tests, without any attribution: categories by plain names."""

from __future__ import annotations

import numpy as np

from steplab.trace.analysis import UNATTRIBUTED, Syncs, WorkTable
from steplab.trace.events import Trace

LABELS = (UNATTRIBUTED, "matmul bf16", "elementwise", "communication", "copy", "memset", "bf16")
BY_NAME = {"mm": 1, "add": 2, "nccl": 3}


def work_on(trace: Trace, ideal: float = float("nan")) -> WorkTable:
    """The rows of trace.device, or of its operators taken for leaves."""
    on_device = len(trace.device) > 0
    rows = trace.device if on_device else trace.ops
    ends = dict(zip(trace.calls.correlation.tolist(), trace.calls.end.tolist(), strict=True))
    ends.pop(0, None)
    keys = rows.correlation.tolist() if on_device else []
    none = np.zeros(len(rows), np.int32)
    unknown = np.full(len(rows), np.nan)
    return WorkTable(
        labels=LABELS,
        start=rows.start,
        duration=rows.duration,
        name=none,
        category=np.array([BY_NAME.get(trace.text(n), 4) for n in rows.name], np.int32),
        step=np.zeros(len(rows), np.int64),
        phase=none,
        module=none,
        line=none,
        function=none,
        op=none,
        op_row=np.full(len(rows), -1),
        launched=np.array([ends.get(key, -1) for key in keys] or none, np.int64),
        flops=unknown,
        bytes=unknown,
        ideal=np.full(len(rows), ideal),
        matmul_dtype=none,
    )


def syncs_on(trace: Trace) -> Syncs:
    rows = [i for i, n in enumerate(trace.calls.name) if "Synchronize" in trace.text(n)]
    none = np.zeros(len(rows), np.int32)
    times = trace.calls.start[rows], trace.calls.duration[rows]
    whole = none.astype(np.int64)
    return Syncs(*times, none, none, none, whole, whole, whole)
