"""Trace: what a profiler recorded, as columns. One row per event, times in whole nanoseconds.

Every table is sorted by start. Names, shapes and dtypes are stored once each in `texts`, and rows
hold their number: a million events of a training step have a few hundred distinct names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steplab.costs.op_call import OpCall, read_call

Ints = NDArray[np.int64]
Codes = NDArray[np.int32]


@dataclass(frozen=True)
class Spans:
    """Events with a start and a duration: columns of equal length, sorted by start."""

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
    forward_thread: Ints  # of a backward op: thread of its forward op; 0: none
    shapes: Codes  # Input Dims as JSON text, number in Trace.texts; -1: not recorded
    strides: Codes  # Input Strides likewise
    dtypes: Codes  # Input type likewise
    values: Codes  # Concrete Inputs likewise


@dataclass(frozen=True)
class Calls(Spans):
    """CUDA runtime and driver calls of the host."""

    correlation: Ints  # joins a call with the device work it launched


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
class Messages(Spans):
    """What the file says of collectives, wherever it says it.

    NCCL's kernels, the host's `record_param_comms` around their launch, and the ranges `nccl:` and
    `gloo:`. The same rows stand in the tables of their kind.
    """

    collective: Codes  # "allreduce", "_allgather_base"; -1: the name of the event tells it
    group: Codes  # name of the process group, -1: unknown
    members: Codes  # its ranks, "[0, 1]"; -1: unknown
    purpose: Codes  # what the group is for, "mesh_tp"; -1: unknown
    size: Ints  # number of its ranks, 0: unknown
    sent: Ints  # elements that go in, -1: unknown
    received: Ints  # elements that come out, -1: unknown
    dtype: Codes  # "BFloat16" or "c10::BFloat16", -1: unknown
    sequence: Ints  # number of the collective in its group, -1: unknown
    correlation: Ints  # of a kernel, -1: an event of the host


@dataclass(frozen=True)
class MemoryEvents:
    """Allocations (+) and frees (-)."""

    time: Ints  # ns
    bytes: Ints
    address: Ints
    allocated: Ints  # total after the event
    on_device: NDArray[np.bool_]


@dataclass(frozen=True)
class Gpu:
    """One of a trace's deviceProperties."""

    id: int | None
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class Place:
    """Which rank of how many recorded a file, and on which machine."""

    rank: int | None = None
    ranks: int | None = None
    host: str = ""
    groups: int | None = None  # process groups it had joined


@dataclass(frozen=True)
class Trace:
    """All tables of one file."""

    texts: tuple[str, ...]
    threads: tuple[str, ...]  # "<pid>/<tid>", or "<device>/<stream>" for device events
    ops: Ops
    python: Spans  # Python functions ("file.py(12): f") and modules ("nn.Module: Linear_0")
    lines: Spans  # lines of user code while they ran ("line:file.py:14 (f)"), if steplab recorded
    ranges: Spans  # record_function on the host (Kineto's `user_annotation`), ProfilerStep# too
    device_ranges: Spans  # the same ranges on the device (`gpu_user_annotation`)
    calls: Calls
    device: Device
    memory: MemoryEvents
    messages: Messages
    start: int  # ns, first event
    end: int  # ns, last end
    gpus: tuple[Gpu, ...] = ()
    place: Place = Place()
    skipped: int = 0  # events of kinds that nothing here reads (arrows, metadata), or left out
    omissions: tuple[str, ...] = ()  # what of the file cannot be used and why, a sentence each

    def text(self, code: int) -> str:
        """Return the text behind a code; "" for -1."""
        return self.texts[code] if code >= 0 else ""

    def op_call(self, row: int) -> OpCall | None:
        """Return the call of the operator in a row of `ops`; None if shapes were not recorded."""
        ops = self.ops
        return read_call(
            self.text(ops.name[row]),
            dtypes=self.text(ops.dtypes[row]),
            shapes=self.text(ops.shapes[row]),
            strides=self.text(ops.strides[row]),
            values=self.text(ops.values[row]),
        )

    def distinct_calls(self, rows: Ints, beside: Ints | None = None) -> tuple[Ints, Ints]:
        """Return the number of each call among the distinct ones, and where each is found first.

        `rows` are rows of `ops`. Calls of one operator with equal arguments are the same, unless
        the numbers `beside` them differ; the second result counts in `rows`.
        """
        ops = self.ops
        key: Ints = ops.name[rows].astype(np.int64)
        columns: list[Codes | Ints]
        columns = [column[rows] for column in (ops.shapes, ops.strides, ops.dtypes, ops.values)]
        for column in [*columns, beside] if beside is not None else columns:
            pair = key * (len(self.texts) + 1) + column + 1
            key = np.unique(pair, return_inverse=True)[1].ravel().astype(np.int64)
        _, first, number = np.unique(key, return_index=True, return_inverse=True)
        return number.ravel(), first

    def named(self, spans: Spans, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Return for every span whether its name is wanted; every distinct name is tested once."""
        used = np.bincount(spans.name, minlength=len(self.texts)) > 0
        chosen = [bool(u) and wanted(text) for u, text in zip(used, self.texts, strict=True)]
        return np.array(chosen, np.bool_)[spans.name] if len(spans) else np.zeros(0, np.bool_)


def at_rows(values: NDArray[Any], row: Ints) -> Ints:
    """Return the values at rows; -1 for row -1."""
    if not len(values):
        return np.full(len(row), -1, np.int64)
    return np.where(row >= 0, values[row], -1).astype(np.int64)
