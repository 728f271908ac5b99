"""Files that no profiler wrote: each gets a sentence, or a note of what was left out. No traceback,
no warning, and nothing that steers the terminal.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from steplab.cli.main import main
from steplab.core.errors import UserError
from steplab.core.input_file import set_memory_limit
from steplab.trace.analyze import analyze
from steplab.trace.load import load_trace, read_trace
from steplab.trace.reading import limits
from tests.trace import traces
from tests.trace.hostile import (
    DEVICE,
    event_json,
    file_json,
    honest_events,
    hostile_traces,
    joined,
    open_trace,
)
from tests.trace.traces import trace_of, write_trace


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def explained(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return exit code and output of `explain PATH --page`, which holds no control characters."""
    code = main(["explain", str(path), "--page", str(path) + ".html"])
    out, err = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in out + err)
    assert code == 0 or err.count("\n") == 1
    return code, out + err


@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(data=hostile_traces())
def test_any_file_is_a_sentence_or_a_budget(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile.json").write_bytes(data)
    honest = write_trace(folder / "honest.json", honest_events())
    codes = open_trace(folder / "hostile.json", folder / "page.html", honest)
    assert set(codes) <= {0, 2}


def written(tmp_path: Path, events: list[str], **properties: str) -> Path:
    path = tmp_path / "t.json"
    path.write_text(file_json(events, **properties))
    return path


HONEST = [event_json(event) for event in honest_events()]
KERNEL = traces.kernel("odd \x1b[31mkernel", 30_000, 1_000, 99)


# Times and durations.


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dur": "NaN"}, "left out: 1 event without a finite duration (the first: odd"),
        ({"dur": "-Infinity"}, "left out: 1 event without a finite duration"),
        ({"dur": "1e300"}, "left out: 1 event without a finite duration"),
        ({"dur": "1e999999999"}, "left out: 1 event without a finite duration"),
        ({"dur": '"soon"'}, "left out: 1 event without a finite duration"),
        ({"dur": "-5.000"}, "left out: 1 event with a negative duration"),
        ({"dur": "40000000000000"}, "left out: 1 event longer than a year"),
        ({"ts": "NaN"}, "left out: 1 event without a finite time"),
        ({"ts": "9223372036854775808"}, "left out: 1 event without a finite time"),
        ({"ts": "1700000000000000.000"}, "left out: 1 event more than a year from the others"),
        ({"ph": '"?"'}, "left out: 1 event that cannot be read"),
        ({"pid": "[1]"}, "left out: 1 event that cannot be read"),
        ({"name": "5"}, "left out: 1 event that cannot be read"),
        ({"ph": '"B"'}, "left out: 1 event that begin and never end"),
    ],
)
def test_an_event_that_cannot_be_is_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], words: str
) -> None:
    path = written(tmp_path, [*HONEST, event_json(KERNEL, **changes)])
    code, out = explained(path, capsys)
    assert code == 0 and words in out
    honest = tmp_path / "honest.json"
    honest.write_text(file_json(HONEST))
    assert analyze(load_trace(path)).budget.steps == analyze(load_trace(honest)).budget.steps
    assert main(["compare", str(honest), str(path)]) == 0
    assert f"B: {words}" in capsys.readouterr().out


@pytest.mark.parametrize("dur", ["NaN", "Infinity", "-1", "1e300", "null"])
def test_a_device_whose_work_is_all_left_out_is_not_called_no_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dur: str
) -> None:
    device = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [
        event_json(event, **({"dur": dur} if event.get("cat") in device else {}))
        for event in honest_events()
    ]
    code, out = explained(written(tmp_path, events), capsys)
    assert code == 2 and "None of the kernels, copies and fills" in out
    assert "left out: 10 events" in out


def test_events_that_last_longer_together_than_64_bits_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = event_json(KERNEL, dur="31000000000000")
    code, out = explained(written(tmp_path, [*HONEST, *[long] * 300]), capsys)
    assert code == 2 and "days apart, or last that long" in out


@pytest.mark.parametrize("base", ["1e300", '"x"', "-5", "4611686018427387904", "[]", "9" * 30])
def test_a_base_time_that_cannot_be_changes_nothing(tmp_path: Path, base: str) -> None:
    trace = load_trace(written(tmp_path, HONEST, baseTimeNanoseconds=base))
    assert trace.start == 0


def test_beginnings_and_ends_of_any_size_take_no_memory() -> None:
    where = {"pid": 1, "tid": 1, "cat": "cpu_op"}
    pair = [
        {"ph": "B", "name": "a", "ts": "1.0", **where},
        {"ph": "E", "ts": "1e999999999", **where},
    ]
    trace = trace_of([traces.op("b", 0, 1), *pair])
    assert trace.omissions == ("left out: 1 event without a finite duration (the first: a)",)


def test_calls_that_share_a_correlation_id_launch_nothing_for_sure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = event_json(traces.call("cudaLaunchKernel", 50_000, 10, correlation=1))
    path = written(tmp_path, [*HONEST, twin])
    code, out = explained(path, capsys)
    assert code == 0
    assert "launch unknown: 1 pieces of work with the correlation id of several calls" in out
    work = analyze(load_trace(path)).work
    assert (work.launched < 0).sum() == 1 + 2  # and the two fills, which no call launched


# Arguments, properties and names.


@pytest.mark.parametrize(
    "key, value",
    [
        ("Input Dims", '"x"'),
        ("Input Dims", "[8, 64]"),
        ("Input Dims", '[["a"]]'),
        ("Input Dims", "[[-1, 5], [5, 9]]"),
        ("Input Dims", "[[1e300, 2], [2, 3]]"),
        ("Input Dims", f"[[{'9' * 25}, 2], [2, 3]]"),
        ("Input Dims", f"[[{'9' * 5_000}]]"),
        ("Input Dims", "[[4294967296, 4294967296], [2]]"),
        ("Input Dims", f"[[{', '.join(['2'] * 65)}], [2]]"),
        ("Input Dims", "[" * 90 + "]" * 90),
        ("Input Dims", '{"a": 1}'),
        ("Input Strides", "[5]"),
        ("Input type", "5"),
        ("Input type", "[5, null]"),
        ("Input type", '[["float"]]'),
        ("Concrete Inputs", '[{"a": 1}]'),
        ("Concrete Inputs", "7"),
        ("Sequence number", '"many"'),
        ("Sequence number", "18446744073709551616"),
    ],
)
def test_arguments_of_another_form_count_as_not_recorded_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    args = {"Input Dims": "[[8, 64], [64, 8]]", "Input type": '["float", "float"]', key: value}
    odd = event_json(traces.op("aten::mm", 1_500, 900), args=joined(args))
    code, out = explained(written(tmp_path, [*HONEST, odd]), capsys)
    words = "arguments that cannot be read count as not recorded: 1 event (the first: aten::mm)"
    assert code == 0 and words in out


@pytest.mark.parametrize(
    "devices",
    ['"x"', "[1]", "[[1]]", '[{"id": [1], "name": "a"}]', '[{"id": {}}]', '[{"name": 5}]',
     '[{"totalGlobalMem": 1e400}]', '[{"id": 99999999999999999999}]', '{"id": 0}'],
)  # fmt: skip
def test_device_properties_of_another_form_name_no_device_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], devices: str
) -> None:
    code, out = explained(written(tmp_path, HONEST, deviceProperties=devices), capsys)
    assert code == 0 and "deviceProperties cannot be read: the device is not named" in out


def test_a_device_of_a_large_number_takes_no_memory(tmp_path: Path) -> None:
    """A table with a row for each number below would have 16 GiB."""
    cards = json.dumps([DEVICE, {"id": 1, "name": "another"}])
    far = [event_json(traces.kernel("k", at, 1, device=2**31 - 1)) for at in range(30)]
    far.append(event_json(KERNEL, args='{"device": 99999999999}'))
    trace = load_trace(written(tmp_path, [*HONEST, *far], deviceProperties=cards))
    assert analyze(trace).budget.notes[-2].startswith("the trace does not name its device")


@pytest.mark.parametrize(
    "nest", ["[" * 200_000 + "]" * 200_000, '{"a":' * 9_000 + "1" + "}" * 9_000]
)
@pytest.mark.parametrize("where", ["event", "field", "args", "argument", "property", "behind"])
def test_a_deep_nest_anywhere_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], nest: str, where: str
) -> None:
    op = traces.op("aten::mm", 1, 1)
    odd = {
        "event": nest,
        "field": event_json(op, extra=nest),
        "args": event_json(op, args=nest),
        "argument": event_json(op, args=joined({"Input Dims": nest})),
    }
    path = written(tmp_path, [*HONEST, *([odd[where]] if where in odd else [])])
    if where == "property":
        path = written(tmp_path, HONEST, other=nest)
    elif where == "behind":
        path.write_text(path.read_text()[:-1] + f', "other": {nest}' + "}")
    code, out = explained(path, capsys)
    assert code == 2 and "nested too deep to read" in out


def test_a_name_that_is_not_utf8_beside_an_element_that_is_no_event() -> None:
    data = file_json([*HONEST, "5", event_json(traces.op("NAME", 1, 1))]).encode()
    trace = read_trace(io.BytesIO(data.replace(b"NAME", b"\xff")), "t")
    assert "\ufffd" in trace.texts


def test_a_very_long_name_loses_its_middle() -> None:
    trace = trace_of([traces.op("a" * 9_000 + "b" * 9_000, 0, 1)])
    assert trace.texts == ("a" * 4_096 + "..." + "b" * 4_096,)


@pytest.mark.parametrize("digits", [19, 30, 5_000])
def test_a_step_with_a_number_of_many_digits_is_a_range(tmp_path: Path, digits: int) -> None:
    odd = event_json(traces.range_("ProfilerStep#" + "9" * digits, 0, 5))
    assert [w.number for w in analyze(load_trace(written(tmp_path, [*HONEST, odd]))).windows] == [
        0,
        1,
    ]


def test_names_that_steer_a_terminal_are_printed_harmlessly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steer = "\x1b]0;owned\x07\x1b[2J\u202e\r"
    events = [
        {**event, "name": event["name"] + steer} for event in honest_events() if "name" in event
    ]
    devices = json.dumps([{**DEVICE, "name": f"Card {steer}"}])
    path = written(tmp_path, [event_json(event) for event in events], deviceProperties=devices)
    code, out = explained(path, capsys)
    assert code == 0 and "Card" in out and "owned" in out
    honest = tmp_path / "honest.json"
    honest.write_text(file_json(HONEST))
    assert main(["compare", str(path), str(honest)]) == 0
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().out)


@pytest.mark.parametrize(
    "call",
    [
        "aten::mm",
        "aten::convolution",
        "aten::_grouped_mm",
        "aten::topk",
        "aten::scaled_dot_product_attention",
        "steplab::rotary",
    ],
)
@pytest.mark.parametrize("sizes", ["[]", "[[], []]", "[[0], [0, 0, 0]]", "[[1, 2, 3, 4, 5, 6]]"])
def test_shapes_that_an_operator_does_not_take_have_no_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str, sizes: str
) -> None:
    args = {"Input Dims": sizes, "Input type": json.dumps(["float"] * 6)}
    args["Concrete Inputs"] = json.dumps(["?", "2", "[0]", "[0]", "[0, 0]", "0.x"])
    events = [*HONEST, event_json(traces.op(call, 1_500, 5_000), args=joined(args))]
    assert explained(written(tmp_path, events), capsys)[0] == 0


def test_steps_without_length_can_be_looked_at_but_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"dur": "0.000"}
    events = [
        event_json(event, **(odd if event["name"].startswith("ProfilerStep") else {}))
        for event in honest_events()
    ]
    path = written(tmp_path, events)
    assert explained(path, capsys)[0] == 0
    (tmp_path / "honest.json").write_text(file_json(HONEST))
    assert main(["compare", str(path), str(tmp_path / "honest.json")]) == 2
    assert "cannot be compared: 2 of 2 steps take 0 ms" in capsys.readouterr().err


# How much of a file is read.


@pytest.fixture
def little_memory() -> Iterator[None]:
    set_memory_limit(64 << 20)
    yield
    set_memory_limit(None)


def refused(data: bytes) -> str:
    with pytest.raises(UserError) as found:
        read_trace(io.BytesIO(data), "t.json.gz")
    return str(found.value)


HEAD = b'{"traceEvents": [' + event_json(traces.op("a", 1, 1)).encode()


@pytest.mark.parametrize(
    "begin, filler",
    [
        (b"", b" "),
        (b"{", b" "),
        (b'{"a": "', b"a"),
        (b'{"a": ', b"["),
        (HEAD, b" "),
        (HEAD + b', {"ph": "X", "name": "', b"a"),
        (HEAD + b', {"ph": "X", "args": {"Input Dims": [', b"1,"),
        (HEAD + b", ", b"["),
        (HEAD + b"], ", b" "),
        (HEAD + b'], "a": "', b"\\\\"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_text_without_an_end_is_refused_long_before_memory_is(
    monkeypatch: pytest.MonkeyPatch, begin: bytes, filler: bytes, packed: bool
) -> None:
    monkeypatch.setattr(limits, "LONGEST_TEXT", 3 << 20)
    data = begin + filler * (6_000_000 // len(filler))
    words = refused(gzip.compress(data, 1) if packed else data)
    assert "has more than 3.00 MiB of text in one event or around the events" in words


def test_a_gzip_file_that_unpacks_to_much_more_than_traces_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SMALL", 1 << 20)
    arrow = b', {"ph": "s", "ts": 1}'
    data = gzip.compress(HEAD + arrow * 200_000 + b"]}")
    assert "unpacks to more than 200 times its size" in refused(data)
    assert "gunzip" in refused(data)
    assert len(read_trace(io.BytesIO(gzip.decompress(data)), "t").ops) == 1


def test_more_events_than_memory_may_hold_are_refused(little_memory: None) -> None:
    events = b", ".join([event_json(traces.op("a", 1, 1)).encode()] * 1_000)
    many = b"[" + b", ".join([events] * 500) + b"]"
    assert "needs more than 64.0 MiB of memory, which is the limit" in refused(many)
    assert "--max-memory 1GiB" in refused(many)


def test_more_texts_than_memory_may_hold_are_refused(little_memory: None) -> None:
    names = (f"{number:04}{'a' * 8_000}" for number in range(8_000))
    texts = (event_json(traces.op(name, 1, 1)) for name in names)
    assert "of memory, which is the limit" in refused(f"[{', '.join(texts)}]".encode())


def test_a_list_of_anything_else_is_refused_before_all_of_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MOST_UNREADABLE", 50_000)
    assert "is no trace: 50,000 elements in it are not events" in refused(b"[" + b"{}," * 9**6)


def test_many_keys_that_look_like_the_list_of_events() -> None:
    data = b'{"a": [' + b'{"traceEvents": [1]}, ' * 100_000 + b"0], " + HEAD[1:] + b"]}"
    assert len(read_trace(io.BytesIO(data), "t").ops) == 1


# Names on the command line that are no trace.


def a_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def a_loop(path: Path) -> Path:
    path.symlink_to(path)
    return path


def a_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    return path


def a_folder(path: Path) -> Path:
    (path / "inner.json").mkdir(parents=True)
    return path


def a_folder_with_traces(path: Path) -> Path:
    path.mkdir()
    for number in range(7):
        write_trace(path / f"{number}.json", honest_events(1))
    return path


def an_empty_file(path: Path) -> Path:
    path.touch()
    return path


def null(path: Path) -> Path:
    return Path(os.devnull)


def a_long_name(path: Path) -> Path:
    return path.with_name("a" * 5_000)


@pytest.mark.parametrize(
    "make, words",
    [
        (a_pipe, "is a pipe. Give a regular file."),
        (a_loop, "is a symbolic link that leads back to itself"),
        (a_socket, "is a socket or a pipe that nobody serves"),
        (a_folder, "is a folder, not a trace, and has no .json or .gz in it"),
        (a_folder_with_traces, "Name one of: 0.json, 1.json, 2.json, 3.json, 4.json and 2 more"),
        (an_empty_file, "is empty"),
        (null, "is a device. Give a regular file."),
        (a_long_name, "is longer than a file name may be"),
    ],
)
@pytest.mark.parametrize("relative", [True, False])
def test_what_is_not_a_file_is_called_what_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[Path], Path],
    words: str,
    relative: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    path: Any = make(tmp_path / "it")
    if relative and path.parent == tmp_path and make is not a_long_name:
        path = path.name
    for command in (["explain", str(path)], ["compare", str(path), str(path)]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert words in error and len(error) < 500 and "Run" not in error


def test_a_folder_of_the_current_one_may_still_be_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "20260101-a").mkdir()
    (tmp_path / "20260101-a" / "run.json").touch()
    assert main(["explain", "20260101-a"]) == 2
    assert "There are no Runs" in capsys.readouterr().err
