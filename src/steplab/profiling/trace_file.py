"""The files that a recording leaves: Chrome traces, and key_averages.txt.

Torch puts a copy of a range on the device's timeline, from the first to the last kernel that the
range's own thread launched outside inner ranges. Its table counts the copy as work: a step that
waits for launches has 2,856 % of the kernels' time, a backward, whose kernels another thread
launches, 3 %. So the copies are left out, and a range's device time is summed up here.
"""

from __future__ import annotations

import gzip
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import profile

from steplab.store.atomic import disk_errors

ON_HOST = "Ranges of all recorded steps, inner ones included; host: from begin to end."
ON_DEVICE = (
    "Ranges of all recorded steps, inner ones included; host: from begin to end; device: the work\n"
    "launched meanwhile, by any thread, without waits. Torch's table has device time under its\n"
    "operator and again under its kernel: each kind sums up to 100 % at most."
)


@dataclass
class RangeTotals:
    """What all calls of one range add up to, in microseconds."""

    host_us: float = 0.0
    device_us: float = 0.0
    calls: int = 0


class Averages:
    """Sums over the events of a finished profile, as text."""

    def __init__(self, events: EventList) -> None:
        self.on_device = any(event.device_type != DeviceType.CPU for event in events)
        self.ranges = _ranges(events)
        self.operators = events.key_averages()
        self.operators[:] = [row for row in self.operators if not _is_copy(row)]

    def text(self, order: str, rows: int) -> str:
        """Return the ranges, and torch's table by falling `order` with `rows` rows at most."""
        width = max(map(len, ["range", *self.ranges]))
        device = f"{'device ms':>14}" if self.on_device else ""
        lines = [ON_DEVICE if self.on_device else ON_HOST, ""]
        lines.append(f"{'range':>{width}}{'host ms':>14}{device}{'calls':>9}")
        for name, found in self.ranges.items():
            device = f"{found.device_us / 1e3:14.3f}" if self.on_device else ""
            lines.append(f"{name:>{width}}{found.host_us / 1e3:14.3f}{device}{found.calls:9}")
        return "\n".join([*lines, "", self.operators.table(sort_by=order, row_limit=rows), ""])


def _is_copy(event: FunctionEvent) -> bool:
    return bool(event.is_user_annotation) and event.device_type != DeviceType.CPU


def _ranges(events: EventList) -> dict[str, RangeTotals]:
    """Return all ranges by name, in the order of their first begin."""
    launched_us = _launched_us(events)
    found: dict[str, RangeTotals] = {}
    for place, event in enumerate(events):
        if event.is_user_annotation and event.device_type == DeviceType.CPU:
            total = found.setdefault(event.name, RangeTotals())
            total.host_us += event.cpu_time_total
            total.device_us += sum(launched_us[place : _end(events, place)])
            total.calls += 1
    return found


def _launched_us(events: EventList) -> list[float]:
    """Return the device time that each event launched, by the number that both share.

    All kernels of a replayed graph have the number of its one launch. Operators are numbered
    too, but apart: only calls of CUDA's are launches.
    """
    waiting: dict[int, float] = defaultdict(float)
    for event in events:
        if event.device_type != DeviceType.CPU and not _is_copy(event):
            waiting[event.id] += event.time_range.elapsed_us()
    return [waiting.pop(event.id, 0.0) if _is_cuda_call(event) else 0.0 for event in events]


def _is_cuda_call(event: FunctionEvent) -> bool:
    """Whether an event is cudaLaunchKernel, cuLaunchKernelEx, cudaMemcpyAsync, ..."""
    on_host = event.device_type == DeviceType.CPU and not event.is_user_annotation
    return on_host and event.name.startswith("cu") and "::" not in event.name


def _end(events: EventList, place: int) -> int:
    """Return the place after the last event that began while the range at `place` was open.

    The events of a cycle are sorted by their begin, and every cycle's clock begins anew: an
    earlier begin is another cycle's.
    """
    opened = events[place].time_range
    before = opened.start
    for index in range(place, len(events)):
        start = events[index].time_range.start
        if not before <= start < opened.end:
            return index
        before = start
    return len(events)


# Of a trace of 700 kB, level 6 makes 49 kB in 4 ms, level 9 (the default) 44 kB in 18 ms.
LEVEL = 6
CHUNK = 2**20  # bytes copied at a time: traces of a large model do not fit in memory twice
KEPT_ROWS = 100


def write_trace(profiler: profile, path: Path) -> None:
    """Write the trace to `path`, which ends in .json.gz."""
    plain = path.with_suffix("")
    with disk_errors(path.parent):
        try:
            profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=LEVEL) as target:
                shutil.copyfileobj(source, target, CHUNK)
        finally:
            plain.unlink(missing_ok=True)


def write_averages(profiler: profile, path: Path, on_cuda: bool) -> None:
    """Write ranges and torch's table of operators, the most own device (or CPU) time first."""
    order = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    text = Averages(profiler.events()).text(order, KEPT_ROWS)
    with disk_errors(path.parent):
        path.write_text(text, encoding="utf-8")
