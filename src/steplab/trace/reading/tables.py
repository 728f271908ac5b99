"""Tables: sorts decoded events into the tables of a Trace, chunk by chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TypeVar

import numpy as np

from steplab.trace.events import Calls, Device, MemoryEvents, Ops, Spans, Trace
from steplab.trace.reading.columns import DEVICE_KINDS, ColumnMaker, Columns
from steplab.trace.reading.decode import Begin, End, Event, Instant, Span
from steplab.trace.reading.nanoseconds import NO_TIME
from steplab.trace.reading.pairs import OpenSpans

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
# Of the columns that are not 64-bit integers.
COLUMN_TYPES = {
    **dict.fromkeys(("name", "thread", "shapes", "strides", "dtypes", "values"), np.int32),
    "device": np.int32,
    "kind": np.int8,
    "on_device": np.bool_,
}

Table = TypeVar("Table", bound=Spans | MemoryEvents)


class Tables:
    """Columns that grow by chunks of events."""

    def __init__(self) -> None:
        self._maker = maker = ColumnMaker()
        self._columns_of = {"ops": maker.ops, "calls": maker.calls, "device": maker.device}
        self._parts: dict[str, list[Columns]] = defaultdict(list)
        self._open = OpenSpans()
        self._seen = 0
        self.kept = 0  # rows in all tables

    def add(self, events: Sequence[Event | None]) -> None:
        """Take in a chunk of events."""
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
        """Return all that was added; `base` (ns) is added to all times."""
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
        """Join the parts of a table; what starts together is sorted from outer to inner."""
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
