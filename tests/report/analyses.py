"""Analyses for tests, built directly: steps of a few kernels with known times and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steplab.core import Budget, Category, StepBudget
from steplab.core.budget import TERMS
from steplab.trace.analysis import UNATTRIBUTED, Analysis, Syncs, Window, WorkTable
from tests.trace.traces import call, kernel, op, range_, trace_of

STEP_NS = 10_000_000


@dataclass(frozen=True)
class Kernel:
    """One kernel of every step; times in ns from the step's begin."""

    name: str
    start: int
    duration: int
    category: str = "matmul bf16"
    phase: str = "forward"
    module: str = "blocks.0.attention"
    flops: float = float("nan")
    bytes: float = float("nan")
    ideal: float = float("nan")
    stream: int = 7


KERNELS = (
    Kernel("ampere_bf16_s16816gemm", 1_000_000, 2_000_000, flops=2e11, bytes=1e8, ideal=1e6),
    Kernel("vectorized_elementwise_kernel", 3_000_000, 1_000_000, "elementwise", flops=1e6,
           bytes=1e7, ideal=4e5, module="blocks.1.attention"),
    Kernel("layer_norm", 4_500_000, 500_000, "normalization", "backward", "blocks.0.norm"),
    Kernel("FusedAdam", 6_000_000, 1_500_000, "optimizer", "optimizer", UNATTRIBUTED, stream=9),
)  # fmt: skip
PHASES = (("forward", 0, 4), ("backward", 4, 6), ("optimizer", 6, 9))  # ms


def analysis_of(
    kernels: Sequence[Kernel] = KERNELS, steps: int = 3, device: bool = True
) -> Analysis:
    """Return an Analysis of `steps` equal steps; without a device the kernels are operators."""
    trace = trace_of([e for step in range(steps) for e in _events(kernels, step, device)])
    windows = tuple(Window(n, n * STEP_NS, (n + 1) * STEP_NS) for n in range(steps))
    budget = _budget(kernels, steps, device)
    return Analysis(trace, None, windows, _work(kernels, steps), _syncs(), budget)


def _events(kernels, step, device):
    begin = step * STEP_NS
    events = [range_(f"ProfilerStep#{step}", begin, STEP_NS)]
    events += [range_(name, begin + a * 10**6, (b - a) * 10**6) for name, a, b in PHASES]
    for number, k in enumerate(kernels):
        at = begin + k.start
        if not device:
            events.append(op(k.name, at, k.duration))
            continue
        host = begin + number * 100_000
        events.append(op(f"aten::op{number}", host, 90_000))
        events.append(call("cudaLaunchKernel", host + 10_000, 5_000, step * 100 + number + 1))
        events.append(kernel(k.name, at, k.duration, step * 100 + number + 1, stream=k.stream))
    return events


def _work(kernels, steps) -> WorkTable:
    rows = [(step, k) for step in range(steps) for k in kernels]
    labels = [UNATTRIBUTED]

    def codes(texts):
        for text in texts:
            if text not in labels:
                labels.append(text)
        return np.array([labels.index(text) for text in texts], dtype=np.int32)

    def column(values, kind):
        return np.array(list(values), dtype=kind)

    columns = {
        "name": codes([k.name for _, k in rows]),
        "category": codes([k.category for _, k in rows]),
        "phase": codes([k.phase for _, k in rows]),
        "module": codes([k.module for _, k in rows]),
        "line": codes(["model.py:12 (forward)" for _ in rows]),
        "function": codes(["model.py:9 (forward)" for _ in rows]),
        "op": codes(["aten::mm" for _ in rows]),
        "matmul_dtype": codes([UNATTRIBUTED for _ in rows]),
    }
    return WorkTable(
        labels=(*labels, "cudaStreamSynchronize", "aten::item"),
        start=column((s * STEP_NS + k.start for s, k in rows), np.int64),
        duration=column((k.duration for _, k in rows), np.int64),
        step=column((s for s, _ in rows), np.int64),
        op_row=column((-1 for _ in rows), np.int64),
        launched=column((-1 for _ in rows), np.int64),
        flops=column((k.flops for _, k in rows), np.float64),
        bytes=column((k.bytes for _, k in rows), np.float64),
        ideal=column((k.ideal for _, k in rows), np.float64),
        **columns,
    )


def _syncs() -> Syncs:
    one = np.array([8_000_000], dtype=np.int64)
    zero = np.zeros(1, dtype=np.int32)
    return Syncs(one, one // 20, zero, zero, zero, np.zeros(1, dtype=np.int64), one // 20, one)


def _budget(kernels, steps, device) -> Budget:
    categories = {}
    for k in kernels:
        before = categories.get(k.category, Category(k.category, 0.0, 0))
        modeled = k.ideal == k.ideal
        ideal = (before.ideal_ms or 0.0) + k.ideal / 1e6 if modeled else before.ideal_ms
        categories[k.category] = Category(
            name=k.category,
            ms=before.ms + k.duration / 1e6,
            launches=before.launches + 1,
            ideal_ms=ideal,
            modeled_ms=before.modeled_ms + (k.duration / 1e6 if modeled else 0.0),
        )
    busy = sum(k.duration for k in kernels) / 1e6
    terms = {**dict.fromkeys(TERMS, 0.0), "kernels": busy}
    terms |= {"synchronization": 0.4, "launch": 3.5, "dispatch": 0.2}
    ranked = tuple(sorted(categories.values(), key=lambda c: -c.ms))
    wall = STEP_NS / 1e6
    return Budget(tuple(StepBudget(n, wall, terms, ranked) for n in range(steps)), device)
