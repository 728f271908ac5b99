"""The dtype of a step's matrix products, read from its profile: it decides which peak counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Protocol

import torch

from steplab import units

MATMULS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
)
# An fp32 router in a bf16 model is under 1 % of its multiply-adds and changes no peak.
ENOUGH = 0.95
ADDING = frozenset(("aten::addmm", "aten::baddbmm"))  # their first tensor is only added
FLOAT = "float"  # the profiler's word for fp32 tensors, whatever the units make of them
HALVES = {"c10::BFloat16": "bf16", "c10::Half": "fp16"}


class TracedCall(Protocol):
    """What is used of a Kineto event."""

    def name(self) -> str:
        """The operation, as in "aten::mm"."""
        ...

    def dtypes(self) -> list[str]:
        """C++ type of every argument."""
        ...

    def shapes(self) -> list[list[int]]:
        """Sizes of every argument; empty for one that is no tensor."""
        ...

    def start_thread_id(self) -> int:
        """The thread that made the call."""
        ...

    def start_ns(self) -> int:
        """When the call began."""
        ...

    def end_ns(self) -> int:
        """When the call returned."""
        ...


def judge_products(events: Iterable[TracedCall], device: torch.device) -> tuple[str | None, str]:
    """Return ("bf16", "fp16", "tf32" or "fp32", "") or (None, why that is not known).

    The dtype is that of at least 95 % of the multiply-adds.
    """
    shares = shares_by_dtype(events)
    if not shares:
        return None, "called no matrix product (a replayed CUDA graph shows none)"
    traced, share = next(iter(shares.items()))
    if share < ENOUGH:
        parts = (f"{units.percent(part)} {_word(name, device)}" for name, part in shares.items())
        return None, f"ran its matrix products in {', '.join(parts)}"
    if traced != FLOAT and traced not in HALVES:
        return None, f"ran its matrix products in {traced}"
    return _word(traced, device), ""


def shares_by_dtype(events: Iterable[TracedCall]) -> Mapping[str, float]:
    """Return the share of the multiply-adds by C++ type, largest first; empty where none ran."""
    work: Counter[str] = Counter()
    for call in innermost_products(events):
        first = 1 if call.name() in ADDING else 0
        dtypes, shapes = call.dtypes()[first:], call.shapes()[first:]
        if dtypes and len(shapes) > 1:
            work[dtypes[0]] += _multiply_adds(shapes[0], shapes[1])
    total = work.total()
    return {name: part / total for name, part in work.most_common() if part}


def innermost_products(events: Iterable[TracedCall]) -> list[TracedCall]:
    """Return the calls of matrix products, without those that only hand on to another one.

    Autocast shows an fp32 `aten::bmm` around the bf16 one that it calls, a grouped product
    without a kernel of its own shows one `aten::mm` per group.
    """
    calls = [event for event in events if event.name() in MATMULS]
    ordered = sorted(calls, key=lambda call: (call.start_thread_id(), call.start_ns()))
    handed_on = {
        id(outer)
        for outer, inner in pairwise(ordered)
        if outer.start_thread_id() == inner.start_thread_id() and inner.start_ns() < outer.end_ns()
    }
    return [call for call in ordered if id(call) not in handed_on]


def _multiply_adds(left: list[int], right: list[int]) -> int:
    """M x K x N, times the batch where both have one; a grouped product's groups share M or N."""
    if len(left) < 2 or len(right) < 2:
        return 0
    batch = left[0] if len(left) == len(right) == 3 else 1
    return batch * left[-2] * left[-1] * right[-1]


def _word(traced: str, device: torch.device) -> str:
    """Our word for a C++ type; float is tf32 where the device may round fp32 products."""
    if traced != FLOAT:
        return HALVES.get(traced, traced)
    # Not torch.get_float32_matmul_precision(), which raises where a loop set one backend only.
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return "fp32" if backend.matmul.fp32_precision in ("none", "ieee") else "tf32"
