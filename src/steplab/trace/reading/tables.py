"""Builds the tables of a Trace from decoded events, chunk by chunk, as columns of numbers.

Names and threads are stored once each, in order of first appearance.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from steplab.core.input_file import shorten
from steplab.costs.op_call import are_sizes, are_strides, are_types, are_values
from steplab.trace.compiled import INDUCTOR
from steplab.trace.events import (
    COPY,
    FILL,
    KERNEL,
    Calls,
    Codes,
    Device,
    Gpu,
    Ints,
    MemoryEvents,
    Messages,
    Ops,
    Place,
    Spans,
    Trace,
)
from steplab.trace.lines import LINE_RANGE
from steplab.trace.reading import omissions as reasons
from steplab.trace.reading.decode import (
    LATEST,
    NO_TIME,
    Begin,
    CallArgs,
    DeviceArgs,
    DeviceProperties,
    End,
    Event,
    GroupProperties,
    Instant,
    MemoryArgs,
    MessageArgs,
    OpArgs,
    Properties,
    Span,
    TrackId,
    decode_args,
    decode_or,
    exact_ns,
    nanoseconds,
)
from steplab.trace.reading.limits import ReadingLimits
from steplab.trace.reading.omissions import Omissions
from steplab.trace.reading.refusals import no_events_error, too_long_error, unusable_error

NOT_RECORDED, UNREADABLE = -1, -2  # instead of the number of a text
ENTRY = 200  # bytes of the entries of hash tables that lead to one text
MTIA = "mtia_ccp_events"  # the kernels of a device that has no properties in a trace
DEVICE_KINDS = {
    "kernel": KERNEL,
    "Kernel": KERNEL,
    "gpu_memcpy": COPY,
    "Memcpy": COPY,
    "gpu_memset": FILL,
    "Memset": FILL,
    MTIA: KERNEL,
}

Columns = tuple[NDArray[Any], ...]
DAY = 86_400 * 10**9  # ns
YEAR = 365 * DAY

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
    **dict.fromkeys(("hip_runtime", "hip_driver"), "calls"),
    **dict.fromkeys(("privateuse1_runtime", "privateuse1_driver"), "calls"),
}
# Until torch 1.10 ranges had the category of operators; these are the ones torch opens itself.
RANGE_PREFIXES = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#")
MEMORY_EVENT = "[memory]"
# Events that describe a collective: the beginnings of their names, and the kinds they are of.
MESSAGES = "messages"
MESSAGE_NAMES = ("nccl", "gloo:", "record_param_comms")
MESSAGE_TABLES = ("ops", "ranges", "device")
# Types of the columns that are not 64-bit integers.
COLUMN_TYPES = {
    **dict.fromkeys(("name", "thread", "shapes", "strides", "dtypes", "values"), np.int32),
    **dict.fromkeys(("collective", "group", "members", "purpose", "dtype"), np.int32),
    "device": np.int32,
    "kind": np.int8,
    "on_device": np.bool_,
}

KINDS: dict[str, type[Spans] | type[MemoryEvents]] = {
    "ops": Ops,
    "python": Spans,
    "ranges": Spans,
    "device_ranges": Spans,
    "calls": Calls,
    "device": Device,
    "memory": MemoryEvents,
    MESSAGES: Messages,
}
LONGEST_NAME = 8_192  # letters; demangled templates have up to 5,000, and rules search in names

Table = TypeVar("Table", bound=Spans | MemoryEvents)


class TraceBuilder:
    """Collects chunks of events; `trace` joins them."""

    def __init__(self, limits: ReadingLimits) -> None:
        self._limits = limits
        self.omissions = Omissions()
        self._maker = maker = ColumnBuilder(self.omissions)
        self._columns_of = {"ops": maker.ops, "calls": maker.calls, "device": maker.device}
        self._parts: dict[str, list[Columns]] = defaultdict(list)
        self._open = OpenSpans()
        self._texts = 0  # bytes that the limits know of
        self._seen = 0
        self._given: Counter[str] = Counter()  # rows of each table, those left out too
        self.kept = 0  # rows in all tables

    def add(self, events: Sequence[Event | None]) -> None:
        """Add a chunk of events."""
        self._seen += len(events)
        self._limits.check_unreadable(self.omissions.add(reasons.NOT_AN_EVENT, events.count(None)))
        paired = [event for event in events if isinstance(event, (Begin, End))]
        spans = [event for event in events if type(event) is Span]
        closed = list(self._open.closed_by(paired))
        self._seen -= len(closed)  # two events, one row
        self._add_spans(spans + closed)
        instants = [event for event in events if type(event) is Instant]
        memory = [event for event in instants if event.name == MEMORY_EVENT]
        if memory:
            self._keep("memory", self._maker.memory(memory), memory)
        self._limits.hold(len(paired), self._maker.text_bytes - self._texts)
        self._texts = self._maker.text_bytes

    def _add_spans(self, spans: Sequence[Span]) -> None:
        sorted_by_table: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            table = TABLE_OF.get(span.cat, UNREAD)
            # With shapes Inductor opens a range around its kernels, without them an operator.
            is_graph = table == "ops" and span.name.startswith(INDUCTOR)
            sorted_by_table["ranges" if is_graph else table].append(span)
        for span in sorted_by_table.pop(EARLY_OPERATOR, ()):
            is_range = span.name.startswith(RANGE_PREFIXES)
            sorted_by_table["ranges" if is_range else "ops"].append(span)
        sorted_by_table.pop(UNREAD, None)
        for table, rows in sorted_by_table.items():
            columns_of = self._columns_of.get(table, self._maker.spans)
            usable = self._keep(table, columns_of(rows), rows)
            if table in MESSAGE_TABLES:
                self._keep_messages(
                    [
                        span
                        for row, span in enumerate(rows)
                        if span.name.startswith(MESSAGE_NAMES) and usable[row]
                    ]
                )

    def _keep_messages(self, spans: Sequence[Span]) -> None:
        """Keep what collectives say of themselves; as events they are counted already."""
        if spans:
            self._parts[MESSAGES].append(self._maker.messages(spans))
            self._limits.hold(len(spans))

    def _keep(
        self, table: str, columns: Columns, events: Sequence[Span | Instant]
    ) -> NDArray[np.bool_]:
        """Keep the rows that can be used, and return which those are."""
        self._given[table] += len(events)
        usable = self._usable(columns[0], None if table == "memory" else columns[1], events)
        if not usable.all():
            columns = tuple(column[usable] for column in columns)
        self._parts[table].append(columns)
        self.kept += len(columns[0])
        self._limits.hold(len(columns[0]))
        return usable

    def _usable(
        self, start: Ints, duration: Ints | None, events: Sequence[Span | Instant]
    ) -> NDArray[np.bool_]:
        """Whether each event has a time and a possible duration; what has not is counted."""
        timed = start != NO_TIME
        faults = [(reasons.NO_TIME, ~timed)]
        if duration is not None:
            known = timed & (duration != NO_TIME)
            faults += [
                (reasons.NO_DURATION, timed & ~known),
                (reasons.NEGATIVE, known & (duration < 0)),
                (reasons.TOO_LONG, known & (duration > YEAR)),
            ]
        for reason, rows in faults:
            self.omissions.add_rows(reason, rows, lambda row: events[row].name)
        return ~np.logical_or.reduce([rows for _, rows in faults])

    def trace(self, name: str, properties: Properties) -> Trace:
        """Return everything that was added as a Trace, with the base time added to all times.

        A time below 0 would stand for an unknown one: with any, all count from the first event.
        """
        self.omissions.add(reasons.NEVER_ENDS, *self._open.never_ended())
        columns = {table: self._joined(table) for table in KINDS}
        columns["ops"], columns["lines"] = self._apart(columns["ops"])
        self._leave_out_strays(columns)
        self._check_some(name, columns)
        low, high = _extent(columns)
        self._check_extent(name, columns, high - low)
        base = decode_or(int, properties.base, 0)
        base = base if -low <= base < LATEST - high else max(0, -low)
        gpus = decode_or(list[DeviceProperties], properties.devices, None)
        if gpus is None:
            self.omissions.add(reasons.NO_DEVICE_NAMES, 1)
        named = tuple(Gpu(one.id, shorten(one.name), one.memory) for one in gpus or ())
        unnamed = (Gpu(None, "MTIA", None),) if self._maker.on_mtia else ()
        return Trace(
            texts=tuple(self._maker.texts),
            threads=tuple(self._maker.threads.names),
            ops=_sorted(Ops, columns.pop("ops"), base),
            python=_sorted(Spans, columns.pop("python"), base),
            lines=_sorted(Spans, columns.pop("lines"), base),
            ranges=_sorted(Spans, columns.pop("ranges"), base),
            device_ranges=_sorted(Spans, columns.pop("device_ranges"), base),
            calls=_sorted(Calls, columns.pop("calls"), base),
            device=_sorted(Device, columns.pop("device"), base),
            memory=_sorted(MemoryEvents, columns.pop("memory"), base),
            messages=_sorted(Messages, columns.pop(MESSAGES), base),
            start=low + base,
            end=high + base,
            gpus=named or unnamed,
            place=_place(properties),
            skipped=self._seen - self.kept,
            omissions=self.omissions.sentences(),
        )

    def _joined(self, table: str) -> Columns:
        parts = self._parts.pop(table, [])
        types = [COLUMN_TYPES.get(field.name, np.int64) for field in fields(KINDS[table])]
        empty: Columns = tuple(np.empty(0, column_type) for column_type in types)
        return tuple(np.concatenate(column) for column in zip(empty, *parts, strict=True))

    def _apart(self, ops: Columns) -> tuple[Columns, Columns]:
        """Return the operators, and the lines of code: torch records both as operators."""
        texts = [text.startswith(LINE_RANGE) for text in self._maker.texts]
        is_line = np.array(texts, np.bool_)[ops[2]] if texts else np.zeros(0, np.bool_)
        if not is_line.any():
            return ops, tuple(column[:0] for column in ops[:4])
        return tuple(c[~is_line] for c in ops), tuple(c[is_line] for c in ops[:4])

    def _leave_out_strays(self, columns: dict[str, Columns]) -> None:
        """Leave out what lies more than a year from the middle event, as a clock of 1970 does."""
        low, high = _extent(columns)
        if high - low <= YEAR:
            return
        middle = int(np.median(np.concatenate([part[0] for part in columns.values()])))
        names = list(self._maker.texts)
        for table, part in columns.items():
            near = (part[0] >= middle - YEAR) & (part[0] <= middle + YEAR)
            if near.all():
                continue
            columns[table] = tuple(column[near] for column in part)
            if table != MESSAGES:
                first = "" if table == "memory" else names[part[2][int(near.argmin())]]
                self.omissions.add(reasons.TOO_FAR, int((~near).sum()), first)
                self.kept -= int((~near).sum())

    def _check_some(self, name: str, columns: dict[str, Columns]) -> None:
        """Refuse a trace of which nothing is left, or nothing of the device."""
        if self._given["device"] and not len(columns["device"][0]):
            raise unusable_error(name, "kernels, copies and fills", self.omissions.sentences())
        if not self.kept and self._given:
            raise unusable_error(name, "events", self.omissions.sentences())
        if not self.kept:
            raise no_events_error(name, self._seen)

    def _check_extent(self, name: str, columns: dict[str, Columns], length: int) -> None:
        """Refuse times that are too long to be added up, or laid out thread by thread."""
        spans = [part for table, part in columns.items() if table != "memory"]
        sums = [float(part[1].sum(dtype=np.float64)) for part in spans]
        side_by_side = float(length + 9) * len(self._maker.threads.names)
        if max(*sums, side_by_side) > LATEST:
            raise too_long_error(name, length / DAY)


def _place(properties: Properties) -> Place:
    """Return the rank that recorded a file; what cannot be read is unknown."""
    group = decode_or(GroupProperties, properties.group, GroupProperties())
    host = decode_or(str, properties.host, "")
    return Place(group.rank, group.ranks, shorten(host), group.groups)


def _extent(columns: dict[str, Columns]) -> tuple[int, int]:
    """Return the first start and the last end, ns; 0 and 0 of nothing."""
    filled = {table: part for table, part in columns.items() if len(part[0])}
    lows = [int(part[0].min()) for part in filled.values()]
    ends = [part[0] if table == "memory" else part[0] + part[1] for table, part in filled.items()]
    return min(lows, default=0), max((int(end.max()) for end in ends), default=0)


def _sorted(kind: type[Table], columns: Columns, base: int) -> Table:
    """Return a table sorted by start; of equal starts the longest comes first."""
    start = columns[0] + base
    if kind is MemoryEvents:
        order = np.argsort(start, kind="stable")
    else:
        order = np.lexsort((-columns[1], start))
    return kind(start[order], *(column[order] for column in columns[1:]))


class ColumnBuilder:
    """Turns events of one kind into columns, in the order of the fields of their table."""

    def __init__(self, omissions: Omissions) -> None:
        self.texts = StringTable()
        self.threads = ThreadTable()
        self.on_mtia = False
        self._omissions = omissions
        self._names = NameTable(self.texts)
        self._sizes = JsonStrings(self.texts, are_sizes)
        self._strides = JsonStrings(self.texts, are_strides)
        self._types = JsonStrings(self.texts, are_types)
        self._values = JsonStrings(self.texts, are_values)

    @property
    def text_bytes(self) -> int:
        """Memory of all distinct texts."""
        return self.texts.bytes + self.threads.names.bytes

    def spans(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Spans."""
        return self._spans(spans, [(span.pid, span.tid) for span in spans])

    def ops(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Ops."""
        args, timed = decode_args(spans, OpArgs, self._omissions), self.spans(spans)
        described = np.stack(
            [
                self._sizes.codes([one.shapes or one.early_shapes for one in args]),
                self._strides.codes([one.strides for one in args]),
                self._types.codes([one.dtypes for one in args]),
                self._values.codes([one.values for one in args]),
            ]
        )
        unreadable = (described == UNREADABLE).any(axis=0)
        self._omissions.add_rows(reasons.NO_ARGUMENTS, unreadable, lambda row: spans[row].name)
        return (
            *timed,
            integers([one.sequence for one in args]),
            integers([one.forward_thread for one in args]),
            *np.maximum(described, NOT_RECORDED),
        )

    def calls(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Calls."""
        args = decode_args(spans, CallArgs, self._omissions)
        return *self.spans(spans), integers([one.correlation for one in args])

    def device(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Device."""
        args = decode_args(spans, DeviceArgs, self._omissions)
        self.on_mtia = self.on_mtia or any(span.cat == MTIA for span in spans)
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
            integers([min(math.prod(one.grid), LATEST) for one in args]),
        )

    def messages(self, spans: Sequence[Span]) -> Columns:
        """Return the columns of Messages."""
        args = decode_args(spans, MessageArgs, Omissions())  # their own table has said what lacks
        given = [_tensors(one) for one in args]

        def codes(texts: Iterable[str]) -> Codes:
            return np.array(
                [self._names[text] if text else NOT_RECORDED for text in texts], np.int32
            )

        return (
            *self.spans(spans),
            codes(one.collective for one in args),
            codes(one.group for one in args),
            codes(one.members for one in args),
            codes(one.purpose for one in args),
            integers([one.size for one in args]),
            integers([max(one.sent, size) for one, (size, _) in zip(args, given, strict=True)]),
            integers([one.received for one in args]),
            codes(one.dtype or kind for one, (_, kind) in zip(args, given, strict=True)),
            integers([one.sequence for one in args]),
            integers([one.correlation for one in args]),
        )

    def memory(self, instants: Sequence[Instant]) -> Columns:
        """Return the columns of MemoryEvents."""
        args = decode_args(instants, MemoryArgs, self._omissions)
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
            self._names.codes([span.name for span in spans]),
            self.threads.codes(tracks),
        )


def _tensors(args: MessageArgs) -> tuple[int, str]:
    """Return elements and dtype of the tensors of a range around a collective; -1, "": unknown."""
    shapes = decode_or(list[list[int]], args.shapes, [])
    dtypes = decode_or(list[str], args.dtypes, [])
    sizes = [math.prod(shape) for shape in shapes if shape]
    if not sizes or not dtypes or not 0 <= sum(sizes) < LATEST:
        return -1, ""
    return sum(sizes), dtypes[0]


def integers(values: Sequence[int]) -> Ints:
    """Return 64-bit integers; larger values, such as unsigned addresses, wrap around."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([(value + 2**63) % 2**64 - 2**63 for value in values], np.int64)


def _number(device: TrackId) -> int:
    """Return the number of a device; 0 where a process stands in its place."""
    return device if isinstance(device, int) and abs(device) < 2**31 else 0


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
            elif waiting:
                yield _joined(waiting.pop(), event)

    def never_ended(self) -> tuple[int, str]:
        """Return how many spans of kinds that are read are still open, and the name of one."""
        waiting = [one for listed in self._open.values() for one in listed if one.cat in TABLE_OF]
        return len(waiting), waiting[0].name if waiting else ""


def _joined(begin: Begin, end: End) -> Span:
    first, last = exact_ns(bytes(begin.ts)), exact_ns(bytes(end.ts))
    known = first != NO_TIME and last != NO_TIME
    dur = Raw(f"{Decimal(last - first) / 1000:f}".encode() if known else b"null")
    return Span(begin.ts, begin.name, begin.cat, begin.pid, begin.tid, dur, begin.args)


class StringTable(dict[str, int]):
    """Numbers strings in order of first appearance."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0  # of memory, with the entries of tables that lead to a text

    def __missing__(self, text: str) -> int:
        self[text] = number = len(self)
        self.bytes += 2 * sys.getsizeof(text) + ENTRY
        return number


class NameTable(dict[str, int]):
    """Numbers names in a StringTable; very long ones lose their middle."""

    def __init__(self, texts: StringTable) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, name: str) -> int:
        half = LONGEST_NAME // 2
        short = name if len(name) <= LONGEST_NAME else f"{name[:half]}...{name[-half:]}"
        self[name] = number = self._texts[short]
        return number

    def codes(self, names: Iterable[str]) -> Codes:
        """Return the number of each name."""
        return np.array([self[name] for name in names], np.int32)


class JsonStrings(dict[bytes, int]):
    """Numbers JSON values, kept as text on one line, in a StringTable."""

    def __init__(self, texts: StringTable, is_readable: Callable[[str], bool]) -> None:
        super().__init__({b"": NOT_RECORDED, b"null": NOT_RECORDED})
        self._texts = texts
        self._is_readable = is_readable

    def __missing__(self, value: bytes) -> int:
        # Tools that indent their files spread every list of shapes over several lines.
        line = msgspec.json.format(value, indent=0) if b"\n" in value else value
        text = line.decode(errors="replace")
        self[value] = number = self._texts[text] if self._is_readable(text) else UNREADABLE
        return number

    def codes(self, values: Iterable[Raw]) -> Codes:
        """Return the number of each value; NOT_RECORDED for none, UNREADABLE for another form."""
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
