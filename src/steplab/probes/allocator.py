"""Every allocation and free of one step, on CPU and on CUDA, with the line that asked for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._profiler import RecordScope, _EventType

from steplab.core.errors import MeasurementError, Unsupported
from steplab.core.units import bytes_
from steplab.probes.line_ranges import line_ranges
from steplab.probes.ran import RawProfile
from steplab.trace.lines import LINE_RANGE, frame_line

CPU_SOURCE = "profiler memory events"
CPU_NOTES = (
    "on a CPU, of what was held before the step only the model, its gradients and its optimizer "
    "state are known",
)
# Operators that only allocate; the operator that called them is the one that needs the memory.
ALLOCATING_OPS = ("aten::empty", "aten::new_empty", "aten::resize_")
OPERATOR_SCOPES = (RecordScope.FUNCTION, RecordScope.BACKWARD_FUNCTION)
CUDA_SOURCE = "cuda allocator"
MAX_ENTRIES = 1_000_000  # an eager step makes about 500 per transformer block
# A free counts from its request, as in torch.cuda.memory_allocated().
SIGNS = {"alloc": 1, "free_requested": -1}
SEGMENT_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
SHARED_POOL = (0, 0)  # id of the pool of everything that no CUDA graph owns

AddressRange = tuple[int, int]  # first address, and the one after the last


@dataclass(frozen=True)
class Change:
    """One allocation (bytes above 0) or one free (bytes below 0)."""

    time_ns: int  # since the Unix epoch, like time.time_ns()
    address: int
    bytes: int
    line: str = ""
    op: str = ""


@dataclass
class Recording:
    """What an allocator did; complete when its context manager ends, `changes` in order."""

    source: str
    changes: list[Change] = field(default_factory=list)
    held: Mapping[int, int] | None = None  # address -> bytes before the step; None: unknown
    segments: list[SegmentChange] | None = None  # None: the allocator does not reserve
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SegmentChange:
    """Memory reserved from the driver (bytes above 0) or returned to it (bytes below 0)."""

    after: int  # allocations and frees that happened before it; -1: it was there before the step
    address: int
    bytes: int
    grows: bool = False  # an expandable segment: adjacent ones are one piece


@contextlib.contextmanager
def cpu_recording() -> Iterator[Recording]:
    """Record allocations inside the block; the Recording is complete when it ends."""
    recording = Recording(CPU_SOURCE, notes=CPU_NOTES)
    with RawProfile(on_cuda=False, profile_memory=True) as profiler, line_ranges():
        yield recording
    recording.changes = read_tree(profiler.profiler.kineto_results.experimental_event_tree())


def read_tree(roots: Iterable[Any]) -> list[Change]:
    """Return all allocations and frees of the profiler's event tree, in order of time."""
    changes = []
    # A stack and no recursion: the tree is as deep as the Python stack.
    waiting = [(root, "", "") for root in roots]
    while waiting:
        event, line, op = waiting.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                change = Change(event.start_time_ns, fields.ptr, fields.alloc_size, line, op)
                changes.append(change)
            continue
        if event.name.startswith(LINE_RANGE):
            line = event.name.removeprefix(LINE_RANGE)
        elif event.tag == _EventType.TorchOp and event.extra_fields.scope in OPERATOR_SCOPES:
            op = op if op and event.name.startswith(ALLOCATING_OPS) else event.name
        waiting += [(child, line, op) for child in event.children]
    return sorted(changes, key=lambda change: change.time_ns)


@contextlib.contextmanager
def cuda_recording() -> Iterator[Recording]:
    """Record allocations on the current device inside the block; complete when it ends."""
    if torch.cuda.get_allocator_backend() != "native":
        raise Unsupported(
            "The memory timeline needs torch's own CUDA allocator.",
            "Unset backend:cudaMallocAsync in PYTORCH_ALLOC_CONF.",
        )
    recording = Recording(CUDA_SOURCE)
    history = torch.cuda.memory._record_memory_history
    history("all", context="alloc", stacks="python", max_entries=MAX_ENTRIES, clear_history=True)
    try:
        before = torch.cuda.memory._snapshot()
        yield recording
        torch.cuda.synchronize()
        after = torch.cuda.memory._snapshot()
    finally:
        history(None)
    device = torch.cuda.current_device()
    read_snapshots(recording, before["segments"], after["device_traces"][device], device)


def read_snapshots(
    recording: Recording,
    segments: Sequence[Mapping[str, Any]],
    history: Sequence[Mapping[str, Any]],
    device: int,
) -> None:
    """Fill a Recording from the snapshot before the step and the history of the step."""
    if len(history) >= MAX_ENTRIES:
        raise MeasurementError(
            f"The step made more than {MAX_ENTRIES:,} allocations and frees: its beginning is "
            "lost.",
            "Record a smaller step.",
        )
    ours = [segment for segment in segments if segment["device"] == device]
    private = [segment for segment in ours if _is_private(segment)]
    active = [block for segment in ours for block in _active_blocks(segment)]
    recording.held = {block["address"]: block["requested_size"] for block in active}
    recording.segments = [
        SegmentChange(-1, one["address"], one["total_size"], bool(one.get("is_expandable")))
        for one in ours
        if not _is_private(one)
    ]
    # Free memory in a graph's own pool is for its replays only: nobody else can have it.
    recording.segments += [
        SegmentChange(-1, block["address"], block["size"])
        for one in private
        for block in _active_blocks(one)
    ]
    shown = functools.cache(frame_line)  # a step allocates thousands of times at a few lines

    def line_of(entry: Mapping[str, Any]) -> str:
        """Return the user's innermost line; "" where no Python code asked, as in backward."""
        frames = ((f["filename"], f["line"], f["name"]) for f in entry.get("frames", ()))
        return next((line for line in map(shown, frames) if line), "")

    latest = 0
    for entry in history:
        action, size = entry["action"], entry["size"]
        if action in SEGMENT_SIGNS:
            before, signed = len(recording.changes), SEGMENT_SIGNS[action] * size
            grows = action == "segment_map"
            recording.segments.append(SegmentChange(before, entry["addr"], signed, grows))
        elif action in SIGNS:
            # Two threads may read the clock in one order and take the lock in the other.
            latest = max(latest, entry["time_us"] * 1000)
            change = Change(latest, entry["addr"], SIGNS[action] * size, line_of(entry))
            recording.changes.append(change)
    if private:
        size = bytes_(sum(one["total_size"] for one in private))
        recording.notes = (
            f"CUDA graphs hold {size} in pools of their own; what a replay takes and frees in them "
            "is not seen",
        )


def _is_private(segment: Mapping[str, Any]) -> bool:
    """Whether a segment belongs to the pool of a CUDA graph."""
    return tuple(segment["segment_pool_id"]) != SHARED_POOL


def _active_blocks(segment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [block for block in segment["blocks"] if block["state"] == "active_allocated"]


def reserved_ranges(changes: Iterable[SegmentChange], position: int) -> list[AddressRange]:
    """Return what was reserved after `position` allocations and frees, sorted."""
    ranges: list[tuple[int, int, bool]] = []
    for change in changes:
        if change.after >= position:
            break
        begin, end = change.address, change.address + abs(change.bytes)
        if change.bytes > 0:
            ranges.append((begin, end, change.grows))
        else:
            # An expandable segment may return a part of what it had mapped in one piece.
            pieces = [
                piece
                for first, last, grows in ranges
                for piece in ((first, min(last, begin), grows), (max(first, end), last, grows))
            ]
            ranges = [piece for piece in pieces if piece[0] < piece[1]]
    joined: list[tuple[int, int, bool]] = []
    for first, last, grows in sorted(ranges):
        if joined and grows and joined[-1][2] and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last, True)
        else:
            joined.append((first, last, grows))
    return [(first, last) for first, last, _ in joined]


def largest_gap(reserved: Iterable[AddressRange], used: Iterable[AddressRange]) -> int:
    """Return the bytes of the longest reserved piece that no used range touches."""
    largest = 0
    taken = sorted(used, reverse=True)
    for first, last in sorted(reserved):
        begin = first
        while taken and taken[-1][0] < last:
            low, high = taken.pop()
            largest = max(largest, low - begin)
            begin = max(begin, high)
        largest = max(largest, last - begin)
    return largest
