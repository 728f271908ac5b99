"""Least traffic of clipping and of the optimizer's update, by the number of weights.

The profiler leaves the sizes out of lists longer than 30 tensors, and a kernel that nothing but
Python launches has no operator around it; but a step goes over all weights once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from steplab.hardware.catalog import Card
from steplab.trace.analysis import Work
from steplab.trace.events import Ints
from steplab.trace.shapes import item_bytes_of_kernel


@dataclass(frozen=True)
class _Pass:
    """Kernels that go over all weights, by name and phase."""

    kernel: re.Pattern[str]
    phase: str
    numbers: int  # moved per weight
    item: int | None = None  # bytes of each; None: the kernel's name tells


_PASSES = (
    # Gradient, weight and two moments in; the last three out.
    _Pass(re.compile(r"FusedAdamMathFunctor<\w[\w:]*, 4\b"), "optimizer", 7),
    # With fp32 weights kept beside 16-bit ones it is 28 bytes too: 2 + 2 for 4.
    _Pass(re.compile(r"^adamw_kernel$"), "optimizer", 7, 4),
    _Pass(re.compile(r"\bLpNormFunctor<"), "clip", 1),
    _Pass(re.compile(r"BinaryOpScalarTensorFunctor<.*std::multiplies"), "clip", 2),
)


def with_updates(work: Work, weights: int | None, card: Card | None) -> Work:
    """Return `work` with the costs of its passes over all `weights`.

    What a pass moves in a step is spread over its kernels there by their durations. `weights`
    counts those that a step updates; None: unknown.
    """
    if not weights or card is None:
        return work
    flops, moved, ideal = work.flops.copy(), work.bytes.copy(), work.ideal.copy()
    for one in _PASSES:
        item = _item_bytes(work, one)[work.name]
        in_phase = np.array([label == one.phase for label in work.labels])[work.phase]
        rows = np.flatnonzero((item > 0) & in_phase & (work.step >= 0))
        _, step = np.unique(work.step[rows], return_inverse=True)
        share = work.duration[rows] / np.maximum(np.bincount(step, work.duration[rows]), 1)[step]
        flops[rows] = 0.0
        moved[rows] = share * weights * one.numbers * item[rows]
        ideal[rows] = np.minimum(moved[rows] / card.bandwidth_gbs, work.duration[rows])
    return replace(work, flops=flops, bytes=moved, ideal=ideal)


def _item_bytes(work: Work, one: _Pass) -> Ints:
    """Bytes of a number by label; 0 where the label is no kernel of the pass."""
    sizes = np.zeros(len(work.labels), np.int64)
    for code in np.unique(work.name).tolist():
        if one.kernel.search(work.labels[code]):
            sizes[code] = one.item or item_bytes_of_kernel(work.labels[code]) or 0
    return sizes
