"""Builds the tables of a Trace from decoded events, chunk by chunk, as columns of numbers.

Names and threads are stored once each, in order of first appearance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from decimal import Decimal, InvalidOperation
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from steplab.trace.events import (
    COPY,
    FILL,
    KERNEL,
    Calls,
    Codes,
    Device,
    Ints,
    MemoryEvents,
    Ops,
    Spans,
    Trace,
)
from steplab.trace.reading.decode import (
    NO_TIME,
    Begin,
    CallArgs,
    DeviceArgs,
    End,
    Event,
    Instant,
    MemoryArgs,
    OpArgs,
    Span,
    TrackId,
    decode_args,
    nanoseconds,
)

NOT_RECORDED = -1
DEVICE_KINDS = {
    "kernel": KERNEL,
    "Kernel": KERNEL,
    "gpu_memcpy": COPY,
    "Memcpy": COPY,
    "gpu_memset": FILL,
    "Memset": FILL,
}

Columns = tuple[NDArray[np.generic], ...]

UNREAD, EARLY_OPERATOR = "unread", "early operator"
TABLE_OF = {
    "cpu_op": "ops",
    "Operator": EARLY_OPERATOR,
    "python_function": "python",
    "user_annotation": "ranges",
    "gpu_user_annotation": "device_ranges",
    **dict.fromkeys(DEVICE_KINDS, "device"),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "Runtime"), "calls"),
    **dict.fromkeys(("xpu_runtime", "xpu_driver", "mtia_runtime"), "calls"),
    **dict.fromkeys(("privateuse1_runtime", "privateuse1_driver"), "calls"),
}
# Until torch 1.10 ranges had the category of operators; these are the ones torch opens itself.
RANGE_PREFIXES = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#")
MEMORY_EVENT = "[memory]"
# Types of the columns that are not 64-bit integers.
COLUMN_TYPES = {
    **dict.fromkeys(("name", "thread", "shapes", "strides", "dtypes", "values"), np.int32),
    "device": np.int32,
    "kind": np.int8,
    "on_device": np.bool_,
}

Table = TypeVar("Table", bound=Spans | MemoryEvents)


class TraceBuilder:
    """Collects chunks of events; `trace` joins them."""

    def __init__(self) -> None:
        self._maker = maker = ColumnBuilder()
        self._columns_of = {"ops": maker.ops, "calls": maker.calls, "device": maker.device}
        self._parts: dict[str, list[Columns]] = defaultdict(list)
        self._open = OpenSpans()
        self._seen = 0
        self.kept = 0  # rows in all tables

    def add(self, events: Sequence[Event | None]) -> None:
        """Add a chunk of events."""
        self._seen += len(events)
        paired = [event for event in events if isinstance(event, (Begin, End))]
        spans = [event for event in events if type(event) is Span]
        closed = list(self._open.closed_by(paired))
        self._seen -= len(closed)  # two events, one row
        self._add_spans(spans + closed)
        instants = [event for event in events if type(event) is Instant]
        memory = [event for event in instants if event.name == MEMORY_EVENT]
        if memory:
            self._keep("memory", self._maker.memory(memory))

    def _add_spans(self, spans: Sequence[Span]) -> None:
        sorted_by_table: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            sorted_by_table[TABLE_OF.get(span.cat, UNREAD)].append(span)
        for span in sorted_by_table.pop(EARLY_OPERATOR, ()):
            is_range = span.name.startswith(RANGE_PREFIXES)
            sorted_by_table["ranges" if is_range else "ops"].append(span)
        sorted_by_table.pop(UNREAD, None)
        for table, rows in sorted_by_table.items():
            columns_of = self._columns_of.get(table, self._maker.spans)
            self._keep(table, columns_of(rows))

    def _keep(self, table: str, columns: Columns) -> None:
        timed = columns[0] != NO_TIME
        if table != "memory":
            timed &= columns[1] != NO_TIME
        if not timed.all():
            columns = tuple(column[timed] for column in columns)
        self._parts[table].append(columns)
        self.kept += len(columns[0])

    def trace(self, properties: Mapping[str, object], base: int) -> Trace:
        """Return everything that was added as a Trace, with `base` (ns) added to all times."""
        ops = self._sorted(Ops, "ops", base)
        python = self._sorted(Spans, "python", base)
        ranges = self._sorted(Spans, "ranges", base)
        device_ranges = self._sorted(Spans, "device_ranges", base)
        calls = self._sorted(Calls, "calls", base)
        device = self._sorted(Device, "device", base)
        memory = self._sorted(MemoryEvents, "memory", base)
        tables = (ops, python, ranges, device_ranges, calls, device)
        starts = [table.start for table in tables] + [memory.time]
        ends = [table.end for table in tables] + [memory.time]
        return Trace(
            texts=tuple(self._maker.texts),
            threads=tuple(self._maker.threads.names),
            ops=ops,
            python=python,
            ranges=ranges,
            device_ranges=device_ranges,
            calls=calls,
            device=device,
            memory=memory,
            start=min(int(column[0]) for column in starts if len(column)),
            end=max(int(column.max()) for column in ends if len(column)),
            properties=properties,
            skipped=self._seen - self.kept,
        )

    def _sorted(self, kind: type[Table], name: str, base: int) -> Table:
        """Join the parts of a table, sorted by start; of equal starts the longest comes first."""
        parts = self._parts.pop(name, [])
        types = [COLUMN_TYPES.get(field.name, np.int64) for field in fields(kind)]
        empty: Columns = tuple(np.empty(0, column_type) for column_type in types)
        columns = [np.concatenate(column) for column in zip(empty, *parts, strict=True)]
        columns[0] += base
        if kind is MemoryEvents:
            order = np.argsort(columns[0], kind="stable")
        else:
            np.maximum(columns[1], 0, out=columns[1])
            order = np.lexsort((-columns[1], columns[0]))
        return kind(*(column[order] for column in columns))


class ColumnBuilder:
    """Turns events of one kind into columns, in the order of the fields of their table."""

    def __init__(self) -> None:
        self.texts = StringTable()
        self.threads = ThreadTable()
        self._values = JsonStrings(self.texts)

    def spans(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Spans."""
        return self._spans(spans, [(span.pid, span.tid) for span in spans])

    def ops(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Ops."""
        args = decode_args(spans, OpArgs)
        return (
            *self.spans(spans),
            integers([one.sequence for one in args]),
            integers([one.forward_thread for one in args]),
            self._values.codes([one.shapes or one.early_shapes for one in args]),
            self._values.codes([one.strides for one in args]),
            self._values.codes([one.dtypes for one in args]),
            self._values.codes([one.values for one in args]),
        )

    def calls(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Calls."""
        args = decode_args(spans, CallArgs)
        return *self.spans(spans), integers([one.correlation for one in args])

    def device(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Device."""
        args = decode_args(spans, DeviceArgs)
        tracks = [
            (
                span.pid if one.device is None else one.device,
                span.tid if one.stream is None else one.stream,
            )
            for span, one in zip(spans, args, strict=True)
        ]
        return (
            *self._spans(spans, tracks),
            np.array([DEVICE_KINDS[span.cat] for span in spans], np.int8),
            np.array([_number(device) for device, _ in tracks], np.int32),
            integers([one.correlation for one in args]),
            integers([one.bytes for one in args]),
            integers([one.graph for one in args]),
            integers([math.prod(one.grid) for one in args]),
        )

    def memory(self, instants: Sequence[Instant]) -> Columns:
        """Return the columns of MemoryEvents."""
        args = decode_args(instants, MemoryArgs)
        return (
            nanoseconds([instant.ts for instant in instants]),
            integers([one.bytes for one in args]),
            integers([one.address for one in args]),
            integers([one.allocated for one in args]),
            np.array([one.device_type != 0 for one in args], np.bool_),
        )

    def _spans(self, spans: Sequence[Span], tracks: Sequence[tuple[TrackId, TrackId]]) -> Columns:
        return (
            nanoseconds([span.ts for span in spans]),
            nanoseconds([span.dur for span in spans]),
            self.texts.codes([span.name for span in spans]),
            self.threads.codes(tracks),
        )


def integers(values: Sequence[int]) -> Ints:
    """Return 64-bit integers; larger values, such as unsigned addresses, wrap around."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([(value + 2**63) % 2**64 - 2**63 for value in values], np.int64)


def _number(device: TrackId) -> int:
    return device if isinstance(device, int) else 0


class OpenSpans:
    """Spans written as two events, beginning and end, as tools other than Kineto do.

    The format orders both by time on each thread.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[TrackId, TrackId], list[Begin]] = defaultdict(list)

    def closed_by(self, events: Iterable[Begin | End]) -> Iterator[Span]:
        """Yield the spans that end among `events`; an end without a beginning is skipped."""
        for event in events:
            waiting = self._open[event.pid, event.tid]
            if isinstance(event, Begin):
                # Copies: views would keep the whole chunk alive while the span is open.
                event.ts, event.args = event.ts.copy(), event.args.copy()
                waiting.append(event)
            elif waiting and (span := _joined(waiting.pop(), event)):
                yield span


def _joined(begin: Begin, end: End) -> Span | None:
    try:
        duration = Decimal(bytes(end.ts).decode()) - Decimal(bytes(begin.ts).decode())
    except InvalidOperation:
        return None
    dur = Raw(f"{duration:f}".encode())
    return Span(begin.ts, begin.name, begin.cat, begin.pid, begin.tid, dur, begin.args)


class StringTable(dict[str, int]):
    """Numbers strings in order of first appearance."""

    def __missing__(self, text: str) -> int:
        self[text] = number = len(self)
        return number

    def codes(self, texts: Iterable[str]) -> Codes:
        """Return the number of each text."""
        return np.array([self[text] for text in texts], np.int32)


class JsonStrings(dict[bytes, int]):
    """Numbers JSON values, kept as text on one line, in a StringTable."""

    def __init__(self, texts: StringTable) -> None:
        super().__init__({b"": NOT_RECORDED, b"null": NOT_RECORDED})
        self._texts = texts

    def __missing__(self, value: bytes) -> int:
        # Tools that indent their files spread every list of shapes over several lines.
        line = msgspec.json.format(value, indent=0) if b"\n" in value else value
        self[value] = number = self._texts[line.decode(errors="replace")]
        return number

    def codes(self, values: Iterable[Raw]) -> Codes:
        """Return the number of each value; NOT_RECORDED for none."""
        return np.array([self[bytes(value)] for value in values], np.int32)


class ThreadTable(dict[tuple[TrackId, TrackId], int]):
    """Numbers pairs of process and thread, or of device and stream."""

    def __init__(self) -> None:
        super().__init__()
        self.names = StringTable()

    def __missing__(self, pair: tuple[TrackId, TrackId]) -> int:
        # Early versions of torch named the threads of a device "stream 7".
        first, second = pair
        self[pair] = number = self.names[f"{first}/{str(second).removeprefix('stream ')}"]
        return number

    def codes(self, pairs: Iterable[tuple[TrackId, TrackId]]) -> Codes:
        """Return the number of each pair."""
        return np.array([self[pair] for pair in pairs], np.int32)
