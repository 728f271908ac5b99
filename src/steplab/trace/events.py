"""Trace: what a profiler saw, as columns. One row per event, times in whole nanoseconds.

Every table is sorted by start. Names, shapes and dtypes are kept once each in `texts`, and rows
hold their number: a million events of a training step have a few hundred distinct names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Codes = NDArray[np.int32]


@dataclass(frozen=True)
class Spans:
    """Events with a beginning and a length: columns of equal length n, sorted by start."""

    start: Ints  # ns
    duration: Ints  # ns
    name: Codes  # number in Trace.texts
    thread: Codes  # number in Trace.threads; for device events the stream

    def __len__(self) -> int:
        return len(self.start)

    @property
    def end(self) -> Ints:
        """Start plus duration, ns."""
        return self.start + self.duration


@dataclass(frozen=True)
class Ops(Spans):
    """CPU operators, Triton launches and autograd nodes (Kineto's `cpu_op`)."""

    sequence: Ints  # autograd sequence number, -1: none; forward and backward share it
    forward_thread: Ints  # for an op of the backward: thread of the forward one; 0: none
    shapes: Codes  # Input Dims as JSON text, number in Trace.texts; -1: not recorded
    strides: Codes  # Input Strides likewise
    dtypes: Codes  # Input type likewise
    values: Codes  # Concrete Inputs likewise


@dataclass(frozen=True)
class Calls(Spans):
    """CUDA runtime and driver calls of the host."""

    correlation: Ints  # joins a call with the device work it started


@dataclass(frozen=True)
class Device(Spans):
    """Kernels, copies and fills on the device."""

    kind: NDArray[np.int8]  # KERNEL, COPY or FILL
    device: Codes
    correlation: Ints
    bytes: Ints  # of a copy or fill, else 0
    graph: Ints  # id of the CUDA graph that replayed it; 0: none
    grid: Ints  # blocks of the launch, 0 if unknown


KERNEL, COPY, FILL = 0, 1, 2


@dataclass(frozen=True)
class MemoryEvents:
    """Allocations (+) and frees (-), as the profiler saw them."""

    time: Ints  # ns
    bytes: Ints
    address: Ints
    allocated: Ints  # total after the event
    on_device: NDArray[np.bool_]


@dataclass(frozen=True)
class Trace:
    """All tables of one file."""

    texts: tuple[str, ...]
    threads: tuple[str, ...]  # "<pid>/<tid>", or "<device>/<stream>" for device events
    ops: Ops
    python: Spans  # Python functions ("file.py(12): f") and modules ("nn.Module: Linear_0")
    ranges: Spans  # record_function on the host (Kineto's `user_annotation`), ProfilerStep# too
    device_ranges: Spans  # the same ranges as the device saw them (`gpu_user_annotation`)
    calls: Calls
    device: Device
    memory: MemoryEvents
    start: int  # ns, first event
    end: int  # ns, last end
    # schemaVersion, deviceProperties
    properties: Mapping[str, object] = field(default_factory=dict)
    skipped: int = 0  # events of kinds that nothing here reads (flow arrows, metadata)

    def text(self, code: int) -> str:
        """Return the text behind a code; "" for -1."""
        return self.texts[code] if code >= 0 else ""
