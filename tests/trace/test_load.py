import gzip
import io
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steplab.trace.events import COPY, FILL, KERNEL, Gpu
from steplab.trace.load import load_trace, read_trace
from tests.trace import traces
from tests.trace.rows import rows_in_file, rows_of
from tests.trace.traces import kineto, trace_of, write_trace

NAMES = st.text(max_size=8) | st.sampled_from(
    ['a"}], {"ph"', "}\\\\", '\\"},{', "f(){[", "aten::mm"]
)
TIMES = st.integers(0, 2 * 10**15)
LENGTHS = st.integers(0, 10**10)
NUMBERS = st.integers(0, 2**40)
VALUES = st.none() | st.lists(NAMES, max_size=3)
SHAPES = st.none() | st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=3)
EVENTS = st.one_of(
    st.builds(traces.op, NAMES, TIMES, LENGTHS, shapes=SHAPES, strides=SHAPES, values=VALUES),
    st.builds(traces.op, NAMES, TIMES, LENGTHS, sequence=NUMBERS, forward_thread=NUMBERS),
    st.builds(traces.python, NAMES, TIMES, LENGTHS),
    st.builds(traces.range_, NAMES, TIMES, LENGTHS),
    st.builds(traces.device_range, NAMES, TIMES, LENGTHS),
    st.builds(traces.call, NAMES, TIMES, LENGTHS, NUMBERS),
    st.builds(traces.kernel, NAMES, TIMES, LENGTHS, NUMBERS, graph=NUMBERS),
    st.builds(traces.copy, NAMES, TIMES, LENGTHS, NUMBERS, NUMBERS),
    st.builds(traces.fill, TIMES, LENGTHS, NUMBERS, NUMBERS),
    st.builds(traces.memory, TIMES, NUMBERS, NUMBERS, NUMBERS, st.booleans()),
)


def test_every_table_holds_what_was_written() -> None:
    grid = (4, 2, 1)
    trace = trace_of(
        [
            traces.op("aten::mm", 10, 500, sequence=3, shapes=[[8, 4], [4, 2]], dtypes=["float"]),
            traces.python("nn.Module: Linear_0", 5, 600),
            traces.range_("forward", 1, 900),
            traces.device_range("forward", 1_000, 50),
            *traces.launched("gemm", 20, 30, 1_000, 40, correlation=7, graph=2, grid=grid),
            traces.copy("Memcpy HtoD (Pageable -> Device)", 1_100, 9, 8, bytes_=4096),
            traces.fill(1_200, 3, 9, bytes_=64),
            traces.memory(15, -512, address=99, allocated=1024),
        ],
        base=10**18,
        properties={"deviceProperties": [{"name": "NVIDIA H200"}]},
    )
    at = 10**18
    assert rows_of(trace) == {
        "ops": [
            (at + 10, 500, "aten::mm", "100/100", 3, 0, [[8, 4], [4, 2]], None, ["float"], None)
        ],
        "python": [(at + 5, 600, "nn.Module: Linear_0", "100/100")],
        "ranges": [(at + 1, 900, "forward", "100/100")],
        "device_ranges": [(at + 1_000, 50, "forward", "0/7")],
        "calls": [(at + 20, 10, "cudaLaunchKernel", "100/100", 7)],
        "device": [
            (at + 1_000, 40, "gemm", "0/7", KERNEL, 0, 7, 0, 2, 8),
            (at + 1_100, 9, "Memcpy HtoD (Pageable -> Device)", "0/7", COPY, 0, 8, 4096, 0, 0),
            (at + 1_200, 3, "Memset (Device)", "0/7", FILL, 0, 9, 64, 0, 0),
        ],
        "memory": [(at + 15, -512, 99, 1024, True)],
    }
    assert (trace.start, trace.end) == (at + 1, at + 1_203)
    assert trace.skipped == 2  # the two ends of the arrow
    assert trace.gpus == (Gpu(None, "NVIDIA H200", None),)
    assert trace.omissions == ()


def test_tables_are_sorted_by_start_and_outer_spans_come_first() -> None:
    trace = trace_of(
        [
            traces.op(name, *span)
            for name, span in {
                "late": (9, 1),
                "inner": (2, 3),
                "outer": (2, 7),
                "early": (1, 1),
            }.items()
        ]
    )
    assert [trace.text(code) for code in trace.ops.name] == ["early", "outer", "inner", "late"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(EVENTS, min_size=1, max_size=12),
    piece=st.integers(13, 400),
    base=st.sampled_from([0, 1_790_857_026_000_000_000]),
    indent=st.sampled_from([None, 1]),
    compressed=st.booleans(),
)
def test_the_borders_of_pieces_change_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[traces.Event],
    piece: int,
    base: int,
    indent: int | None,
    compressed: bool,
) -> None:
    path = write_trace(tmp_path_factory.getbasetemp() / "t.json", events, base=base, indent=indent)
    data = path.read_bytes()
    stream = io.BytesIO(gzip.compress(data) if compressed else data)
    assert rows_of(read_trace(stream, "pieces", piece)) == rows_in_file(path)


def test_pieces_of_a_single_byte() -> None:
    text = kineto([traces.op('a "},{" in a name', 5, 7), traces.python("f", 6, 1)]).encode()
    assert rows_of(read_trace(io.BytesIO(text), "bytes", piece=1)) == rows_of(
        read_trace(io.BytesIO(text), "whole")
    )


def test_a_real_trace_of_the_cpu_reads_as_the_standard_library_reads_it(
    cpu_trace_file: Path,
) -> None:
    trace = load_trace(cpu_trace_file)
    assert rows_of(trace) == rows_in_file(cpu_trace_file)
    names = {trace.text(code) for code in trace.ranges.name}
    assert {"forward", "backward", "optimizer", "ProfilerStep#1", "ProfilerStep#2"} <= names
    assert len(trace.ops) and len(trace.python) and len(trace.memory.time)
    mm = next(row for row, code in enumerate(trace.ops.name) if trace.text(code) == "aten::addmm")
    assert json.loads(trace.text(trace.ops.shapes[mm])) == [[32], [8, 16], [16, 32], [], []]


def test_gzip_is_known_by_its_content_not_by_its_name(tmp_path: Path) -> None:
    events = [traces.op("aten::mm", 1, 2)]
    plain = load_trace(write_trace(tmp_path / "t.json", events))
    packed = load_trace(write_trace(tmp_path / "t.json.gz", events))
    (tmp_path / "t.json.gz").rename(tmp_path / "packed.json")
    renamed = load_trace(tmp_path / "packed.json")
    assert rows_of(plain) == rows_of(packed) == rows_of(renamed)


def test_gzip_members_in_a_row_are_one_file() -> None:
    data = kineto([traces.op("aten::mm", 1, 2)]).encode()
    members = gzip.compress(data[:50]) + gzip.compress(data[50:]) + bytes(512)
    assert len(read_trace(io.BytesIO(members), "members").ops) == 1


@pytest.mark.parametrize(
    "start", [1_234_567_890_123_456, 1_711_964_646_123_456_789, 0, 999, 2**53 + 1]
)
def test_nanoseconds_survive_where_floats_would_round(start: int) -> None:
    trace = trace_of([traces.op("a", start, 2**53 + 1), traces.op("b", start + 1, 1)])
    assert trace.ops.start.tolist() == [start, start + 1]
    assert trace.ops.duration.tolist() == [2**53 + 1, 1]


@pytest.mark.parametrize(
    "ts, ns",
    [
        ("7", 7_000),
        ("7.5", 7_500),
        ("7.25", 7_250),
        ("1.5e3", 1_500_000),
        ('"7.125"', 7_125),
        ("0.1234", 123),
    ],
)
def test_times_in_other_forms(ts: str, ns: int) -> None:
    events = [traces.op("one", 1, 1), {**traces.op("two", 0, 1), "ts": ts}]
    assert ns in trace_of(events).ops.start


def test_all_times_whole_microseconds() -> None:
    event = {**traces.op("a", 0, 0), "ts": "1711964646123456", "dur": "12"}
    trace = trace_of([event])
    assert (trace.ops.start[0], trace.ops.duration[0]) == (1_711_964_646_123_456_000, 12_000)


def test_an_event_without_a_length_is_a_moment() -> None:
    endless = {key: value for key, value in traces.op("b", 5, 1).items() if key != "dur"}
    trace = trace_of([endless])
    assert [row[:3] for row in rows_of(trace)["ops"]] == [(5, 0, "b")]
    assert (trace.skipped, trace.omissions) == (0, ())


def test_with_a_time_below_0_all_count_from_the_first_event() -> None:
    trace = trace_of([traces.op("a", -7_000, 1_000), traces.op("b", 2_000, 1)])
    assert trace.ops.start.tolist() == [0, 9_000] and trace.start == 0


def _text(events: list[traces.Event], form: str) -> str:
    listed = ",".join(traces.event_text(event) for event in events)
    return form.replace("EVENTS", listed)


@pytest.mark.parametrize(
    "form",
    [
        "[EVENTS]",
        " \n[ EVENTS\n]\n",
        "\ufeff[EVENTS,]",
        '{"traceEvents":[EVENTS]}',
        '{"traceEvents" : [EVENTS, ], "other": [{"a": 1},{"b": "]}"}]}',
        '{"meta": {"traceEvents": [1]}, "name": "\\"traceEvents\\": [", "traceEvents": [EVENTS]}',
        '{"a": NaN, "traceEvents": [EVENTS, {"ph": "M", "args": {"x": -Infinity}}]}',
    ],
)
@pytest.mark.parametrize("piece", [20, 1 << 20])
def test_forms_of_the_file(form: str, piece: int) -> None:
    events = [traces.op("aten::mm", 1, 2), traces.python("f[{", 3, 4)]
    text = _text(events, form).encode()
    trace = read_trace(io.BytesIO(text), "form", piece)
    assert rows_of(trace) == rows_of(trace_of(events))


def test_the_base_time_may_stand_behind_the_events() -> None:
    form = '{"traceEvents": [EVENTS], "baseTimeNanoseconds": 1790857026000000000}'
    text = _text([traces.op("a", 7, 1)], form).encode()
    assert read_trace(io.BytesIO(text), "t").start == 1_790_857_026_000_000_007


@pytest.mark.parametrize(
    "written, read",
    [(b"\xff", "\ufffd"), (b"a\tb\n", "a b "), (b"nan", "nan"), (b'\\": NaN', '": NaN')],
)
@pytest.mark.parametrize("piece", [50, 1 << 20])
def test_names_that_json_forbids_are_read_as_well_as_can_be(
    written: bytes, read: str, piece: int
) -> None:
    events = [traces.op("before", 0, 1), traces.op("NAME", 1, 1, values=["NAME"])]
    data = kineto(events).encode().replace(b"NAME", written)
    trace = read_trace(io.BytesIO(data), "t", piece)
    assert trace.text(trace.ops.name[1]) == read
    assert len(trace.ops) == 2


def test_the_text_is_never_held_as_a_whole() -> None:
    shapes = [[64, 64]] * 20
    text = kineto(traces.op("aten::cat", at, 1, shapes=shapes) for at in range(10_000)).encode()
    stream = io.BytesIO(text)
    tracemalloc.start()
    try:
        trace = read_trace(stream, "t", piece=1 << 16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(trace.ops) == 10_000
    columns = 10_000 * 56  # bytes
    assert peak < 4 * columns < len(text)
