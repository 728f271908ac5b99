"""Allocations on a CUDA device, from the history that the caching allocator keeps on request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from steplab.errors import MeasurementError, Unsupported
from steplab.probes.allocations.lines import is_outside, line_text
from steplab.probes.allocations.recording import Change, Recording
from steplab.probes.allocations.segments import SegmentChange
from steplab.units import bytes_

SOURCE = "cuda allocator"
MOST_ENTRIES = 1_000_000  # an eager step makes about 500 per transformer block
# A free counts from its request: so does torch.cuda.memory_allocated().
SIGNS = {"alloc": 1, "free_requested": -1}
SEGMENT_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
SHARED_POOL = (0, 0)


@contextlib.contextmanager
def cuda_recording() -> Iterator[Recording]:
    """Record what happens inside on the current device; complete when the block ends."""
    if torch.cuda.get_allocator_backend() != "native":
        raise Unsupported(
            "The memory timeline needs torch's own CUDA allocator.",
            "Unset backend:cudaMallocAsync in PYTORCH_ALLOC_CONF.",
        )
    recording = Recording(SOURCE)
    history = torch.cuda.memory._record_memory_history
    history("all", context="alloc", stacks="python", max_entries=MOST_ENTRIES, clear_history=True)
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
    """Fill a Recording with what was held before the step, and with the history of the step."""
    if len(history) >= MOST_ENTRIES:
        raise MeasurementError(
            f"The step made more than {MOST_ENTRIES:,} allocations and frees: its beginning is "
            "lost.",
            "Record a smaller step.",
        )
    ours = [segment for segment in segments if segment["device"] == device]
    blocks = [block for segment in ours for block in segment["blocks"]]
    recording.held = {
        block["address"]: block["requested_size"]
        for block in blocks
        if block["state"] == "active_allocated"
    }
    private = [one for one in ours if tuple(one["segment_pool_id"]) != SHARED_POOL]
    recording.segments = [
        SegmentChange(-1, one["address"], one["total_size"], bool(one.get("is_expandable")))
        for one in ours
        if one not in private
    ]
    # What is free in a graph's own pool is free for its replays only: it is not there to be had.
    recording.segments += [
        SegmentChange(-1, block["address"], block["size"])
        for one in private
        for block in one["blocks"]
        if block["state"] == "active_allocated"
    ]
    latest = 0
    for entry in history:
        action, size = entry["action"], entry["size"]
        if action in SEGMENT_SIGNS:
            place = (len(recording.changes), entry["addr"], SEGMENT_SIGNS[action] * size)
            recording.segments.append(SegmentChange(*place, grows=action == "segment_map"))
        elif action in SIGNS:
            # Two threads may read the clock in another order than they take the lock.
            latest = max(latest, entry["time_us"] * 1000)
            line = innermost_line(entry.get("frames", ()))
            change = Change(latest, entry["addr"], SIGNS[action] * size, line)
            recording.changes.append(change)
    if private:
        size = bytes_(sum(one["total_size"] for one in private))
        recording.notes = (
            f"CUDA graphs hold {size} in pools of their own; what is taken and freed inside a "
            "replay is not seen",
        )


def innermost_line(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line outside torch; "" where Python did not ask (backward)."""
    for frame in frames:
        if is_outside(frame["filename"]):
            return line_text(frame["filename"], frame["line"], frame["name"])
    return ""
