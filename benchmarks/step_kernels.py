"""The kernels of one step on a GPU: their time by kind, the time between them, what fills are for.

A replayed graph has no operators on the host, so nothing in a trace of it says who asked for a
kernel. The order on the device does: a library that clears memory before one of its kernels is told
by the kernel that follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from steplab.trace.categories import kernel_category

FILL = "memset"
NAME = 160  # characters of a kernel's name that are kept


class Kernel(NamedTuple):
    """One kernel, copy or fill, in microseconds of the device's clock."""

    name: str
    start: float
    duration: float


def recorded(call: Callable[[], Any]) -> list[Kernel]:
    """Run a step twice and return what the device did in the second; nothing without a GPU."""
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return []
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.self_device_time_total)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)
    ]


def summary(kernels: Sequence[Kernel], most: int = 40) -> dict[str, Any]:
    """Return milliseconds and counts by kind, idle time by what ends it, what fills are for.

    `idle` is the time in which nothing runs, by the kind of the kernel that ends it; `fills` counts
    the fills by the kernel that comes next.
    """
    ms: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    idle: Counter[str] = Counter()
    fills: Counter[str] = Counter()
    by_name: dict[str, list[float]] = {}
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    free, waiting = 0.0, 0  # since when nothing runs; fills whose kernel is still to come
    for number, kernel in enumerate(ordered):
        kind = kernel_category(kernel.name)
        ms[kind] += kernel.duration / 1e3
        counts[kind] += 1
        by_name.setdefault(kernel.name, []).append(kernel.duration / 1e3)
        if number and kernel.start > free:
            idle[kind] += (kernel.start - free) / 1e3
        free = max(free, kernel.start + kernel.duration)
        if kind == FILL:
            waiting += 1
        elif waiting:
            fills[kernel.name[:NAME]] += waiting
            waiting = 0
    longest = sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:most]
    return {
        "kinds": dict(ms.most_common()),
        "counts": dict(counts.most_common()),
        "idle": dict(idle.most_common()),
        "fills": dict(fills.most_common()),
        "kernels": [(sum(times), len(times), name[:NAME]) for name, times in longest],
    }


def lines(seen: Mapping[str, Any]) -> list[str]:
    """Say in a few lines what a summary shows."""

    def told(times: Mapping[str, float]) -> str:
        return ", ".join(f"{kind} {value:.2f}" for kind, value in times.items())

    if not seen.get("kinds"):
        return ["no kernels: there is no GPU"]
    found = [f"kernels {sum(seen['kinds'].values()):.2f} ms: {told(seen['kinds'])}"]
    before = f"between {sum(seen['counts'].values())} kernels {sum(seen['idle'].values()):.2f} ms"
    found.append(f"{before}, before: {told(seen['idle'])}")
    if seen["fills"]:
        kernels = ", ".join(f"{count} x {name[:60]}" for name, count in seen["fills"].items())
        found.append(f"{sum(seen['fills'].values())} fills, before: {kernels}")
    return found
