"""What becomes of every kind of event that one version of torch or another writes."""

from typing import Any

import pytest

from steplab.trace.events import COPY, FILL, KERNEL
from tests.trace import traces
from tests.trace.rows import rows_of
from tests.trace.traces import complete, microseconds, trace_of


@pytest.mark.parametrize(
    "category, table",
    [
        ("cpu_op", "ops"),
        ("Operator", "ops"),
        ("cuda_runtime", "calls"),
        ("cuda_driver", "calls"),
        ("Runtime", "calls"),
        ("kernel", "device"),
        ("Kernel", "device"),
        ("gpu_memcpy", "device"),
        ("Memcpy", "device"),
        ("gpu_memset", "device"),
        ("Memset", "device"),
        ("user_annotation", "ranges"),
        ("gpu_user_annotation", "device_ranges"),
        ("python_function", "python"),
    ],
)
def test_categories(category: str, table: str) -> None:
    rows = rows_of(trace_of([complete(category, "name", 3, 4)]))
    assert [name for name, listed in rows.items() if listed] == [table]
    assert rows[table][0][:3] == (3, 4, "name")


@pytest.mark.parametrize("category", ["Trace", "overhead", "cuda_sync", "ac2g", "unheard of"])
def test_other_categories_are_counted_and_left_out(category: str) -> None:
    trace = trace_of([complete(category, "x", 0, 1), traces.op("a", 0, 1)])
    assert (trace.skipped, len(trace.ops)) == (1, 1)


@pytest.mark.parametrize(
    "category, kind",
    [("Kernel", KERNEL), ("Memcpy", COPY), ("Memset", FILL)],
)
def test_a_device_thread_of_early_versions(category: str, kind: int) -> None:
    """They wrote "tid": "stream 7"; the arguments say the same."""
    event = complete(category, "x", 0, 1, 1, "stream 7", device=1, stream=7, correlation=5)
    trace = trace_of([event, complete("gpu_user_annotation", "r", 0, 1, 1, "stream 7")])
    assert trace.threads == ("1/7",)
    assert (trace.device.kind[0], trace.device.device[0]) == (kind, 1)


def test_ranges_of_early_versions_are_told_from_operators_by_name() -> None:
    names = ["ProfilerStep#3", "Optimizer.step#SGD.step", "aten::mm", "forward"]
    rows = rows_of(trace_of([complete("Operator", name, 0, 1) for name in names]))
    assert [row[2] for row in rows["ranges"]] == ["Optimizer.step#SGD.step", "ProfilerStep#3"]
    assert [row[2] for row in rows["ops"]] == ["aten::mm", "forward"]


def test_shapes_of_early_versions() -> None:
    trace = trace_of([complete("Operator", "aten::mm", 0, 1, Input_dims=[[2, 3], [3, 4]])])
    assert trace.text(trace.ops.shapes[0]) == "[[2, 3], [3, 4]]"


def test_arguments_of_unexpected_types_do_not_cost_the_event() -> None:
    odd: list[dict[str, Any]] = [
        {**traces.call("cudaMemcpyAsync", 0, 1, 4), "args": {"correlation": 4, "stream": "0x7f"}},
        {**traces.call("cudaFree", 1, 1), "args": {"correlation": "5"}},
        {**traces.call("cudaMalloc", 2, 1), "args": {"correlation": ["?"]}},
        {**traces.call("cudaLaunchKernel", 3, 1), "args": None},
        {**traces.call("cudaLaunchKernel", 4, 1, 6), "extra": {"nested": [{}, {}]}},
    ]
    assert trace_of(odd).calls.correlation.tolist() == [4, 5, -1, -1, 6]


def test_elements_that_are_no_events_are_counted() -> None:
    events: list[Any] = [traces.op("a", 0, 1), {"ph": "?"}, {"name": 5}]
    trace = trace_of(events)
    assert (len(trace.ops), trace.skipped) == (1, 2)


def test_an_unsigned_address_wraps_into_64_bits() -> None:
    trace = trace_of([traces.memory(0, 8, address=2**64 - 1), traces.memory(1, 8, address=3)])
    assert trace.memory.address.tolist() == [-1, 3]


def test_shapes_broken_into_lines_are_kept_on_one() -> None:
    event = traces.op("aten::mm", 0, 1, shapes=[[2, 3], []], values=["a, b"])
    trace = trace_of([event], indent=2)
    assert trace.text(trace.ops.shapes[0]) == "[[2, 3], []]"
    assert trace.text(trace.ops.values[0]) == '["a, b"]'


def test_texts_are_kept_once() -> None:
    events = [traces.op("aten::mm", at, 1, shapes=[[2, 3]]) for at in range(9)]
    trace = trace_of([*events, traces.python("aten::mm", 0, 1)])
    assert trace.texts == ("aten::mm", "[[2, 3]]")
    assert trace.threads == ("100/100",)


def pair(name: str, start: int, end: int, tid: int = 1) -> list[traces.Event]:
    where = {"pid": 1, "tid": tid, "cat": "cpu_op"}
    return [
        {"ph": "B", "name": name, "ts": microseconds(start), **where},
        {"ph": "E", "ts": microseconds(end), **where},
    ]


def test_beginnings_and_ends_are_joined_by_thread() -> None:
    outer, inner, other = pair("outer", 10, 90), pair("inner", 20, 30), pair("other", 15, 95, 2)
    stray = {"ph": "E", "ts": "0.001", "pid": 9, "tid": 9}
    unended = pair("unended", 99, 100)[0]
    events = [stray, outer[0], other[0], *inner, outer[1], unended, other[1]]
    trace = trace_of(events)
    assert [row[:4] for row in rows_of(trace)["ops"]] == [
        (10, 80, "outer", "1/1"),
        (15, 80, "other", "1/2"),
        (20, 10, "inner", "1/1"),
    ]
    assert trace.skipped == 2


def test_arrows_counters_and_marks_are_counted_not_kept() -> None:
    arrow = {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": "1.000", "cat": "ac2g", "name": "ac2g"}
    counter = {"ph": "C", "name": "c", "ts": "1.0", "args": {"x": 1}}
    instant = {"ph": "i", "name": "Iteration Start", "ts": "1.0", "s": "g"}
    trace = trace_of([traces.op("a", 0, 1), *[arrow] * 10_000, counter, instant])
    assert (len(trace.ops), trace.skipped) == (1, 10_002)
