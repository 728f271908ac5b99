"""The files of a recording: Chrome traces that Perfetto opens as they are, and key_averages.txt.

Torch puts a copy of every range on the device's timeline, from the first to the last kernel that
the range's own thread launched outside inner ranges, and its table counts the copy as work. A step
that waits for launches then has 2,856 % of the kernels' time; a backward, whose kernels another
thread launches, has 3 %. So the copies are left out, and the device time of ranges is summed here.
"""

from __future__ import annotations

import errno
import gzip
import os
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import profile

from steplab.core.atomic import disk_errors
from steplab.core.output_file import output_draft

# Of a trace of 700 kB, level 6 makes 49 kB in 4 ms, level 9 (the default) 44 kB in 18 ms.
LEVEL = 6
CHUNK = 2**20  # bytes copied at a time: traces of a large model do not fit in memory twice
KEPT_ROWS = 100
ON_HOST = "Ranges of all recorded steps, inner ones included; host: from begin to end."
ON_DEVICE = (
    "Ranges of all recorded steps, inner ones included; host: from begin to end; device: the work\n"
    "launched meanwhile, by any thread, without waits. Torch's table has device time under its\n"
    "operator and again under its kernel: each kind sums up to 100 % at most."
)


def export_trace(profiler: profile, path: Path, flag: str) -> None:
    """Write the trace as plain JSON to a file that a user asked for; `flag` named it."""
    with output_draft(path, flag) as draft:
        _export(profiler, draft)


def _export(profiler: profile, path: Path) -> None:
    """Let torch write its trace; of a full disk it says nothing, here that is an OSError."""
    profiler.export_chrome_trace(str(path))
    if not path.exists():  # torch renames its draft only when that is complete
        path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_trace(profiler: profile, path: Path) -> None:
    """Write the trace to `path`, which ends in .json.gz."""
    plain = path.with_suffix("")
    with disk_errors(path.parent):
        try:
            _export(profiler, plain)
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=LEVEL) as target:
                shutil.copyfileobj(source, target, CHUNK)
        finally:
            plain.unlink(missing_ok=True)


def write_averages(profiler: profile, path: Path, on_cuda: bool) -> None:
    """Write ranges and torch's table of operators, sorted by their own device (or CPU) time."""
    order = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    text = Averages(profiler.events()).text(order, KEPT_ROWS)
    with disk_errors(path.parent):
        path.write_text(text, encoding="utf-8")


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
        """Return the ranges, and torch's table, sorted by falling `order`, at most `rows` rows."""
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
    """Return all ranges by name, in the order in which they first started."""
    launched_us = _launched_us(events)
    found: dict[str, RangeTotals] = {}
    for index, event in enumerate(events):
        if event.is_user_annotation and event.device_type == DeviceType.CPU:
            total = found.setdefault(event.name, RangeTotals())
            total.host_us += event.cpu_time_total
            total.device_us += sum(launched_us[index : _end(events, index)])
            total.calls += 1
    return found


def _launched_us(events: EventList) -> list[float]:
    """Return the device time that each event launched, found by their common id.

    All kernels of a replayed graph have the id of its one launch. Operators have ids of their own
    series: only calls of the CUDA API are launches.
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


def _end(events: EventList, index: int) -> int:
    """Return the index after the last event that began while the range at `index` was open.

    The events of a cycle are sorted by their start, and every cycle has a clock of its own:
    an event that starts earlier than the one before belongs to another cycle.
    """
    opened = events[index].time_range
    before = opened.start
    for after in range(index, len(events)):
        start = events[after].time_range.start
        if not before <= start < opened.end:
            return after
        before = start
    return len(events)
