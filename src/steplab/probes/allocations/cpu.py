"""Allocations on the CPU, as torch.profiler sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch._C._profiler import RecordScope, _EventType
from torch.profiler import ProfilerActivity, profile

from steplab.probes.allocations.lines import is_outside, line_text
from steplab.probes.allocations.recording import Change, Recording

SOURCE = "profiler memory events"
NOTES = (
    "on a CPU, of what was held before the step only the model, its gradients and its optimizer "
    "state are known",
    "an operator such as a * b is booked to the first line of its function",
)
# Operators that only take memory; who called them is the one that asked for it.
TAKERS = ("aten::empty", "aten::new_empty", "aten::resize_")
OPERATORS = (RecordScope.FUNCTION, RecordScope.BACKWARD_FUNCTION)
CALLS = (_EventType.PyCall, _EventType.PyCCall)


@contextlib.contextmanager
def cpu_recording() -> Iterator[Recording]:
    """Record what happens inside; the Recording is complete when the block ends."""
    recording = Recording(SOURCE, notes=NOTES)
    activities = [ProfilerActivity.CPU]
    with profile(
        activities=activities, profile_memory=True, with_stack=True, acc_events=True
    ) as profiler:
        yield recording
    recording.changes = read_tree(profiler.profiler.kineto_results.experimental_event_tree())


def read_tree(roots: Iterable[Any]) -> list[Change]:
    """Return all allocations and frees of the profiler's event tree, in order of time."""
    changes = []
    # The tree is as deep as the Python stack, so the way down is kept here.
    waiting = [(root, "", "") for root in roots]
    while waiting:
        event, line, op = waiting.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                change = Change(event.start_time_ns, fields.ptr, fields.alloc_size, line, op)
                changes.append(change)
            continue
        if event.tag in CALLS:
            line = _line(event.extra_fields) or line
        elif event.tag == _EventType.TorchOp and event.extra_fields.scope in OPERATORS:
            op = op if op and event.name.startswith(TAKERS) else event.name
        waiting += [(child, line, op) for child in event.children]
    return sorted(changes, key=lambda change: change.time_ns)


def _line(call: Any) -> str:
    """Return the line outside torch that a Python call shows: in the function, or its caller.

    Of a running function the profiler knows the first line only; of its caller the exact one.
    """
    for frame in (getattr(call, "callsite", None), call.caller):
        if frame is not None and is_outside(frame.file_name):
            return line_text(frame.file_name, frame.line_number, frame.function_name)
    return ""
