"""The JSON text of a trace: brackets, and files that are not traces: one sentence each."""

import gzip
import io
import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steplab.core.errors import UserError
from steplab.trace.load import load_trace, read_trace
from steplab.trace.reading.json_text import complete_elements, find_brackets
from tests.trace import traces
from tests.trace.traces import kineto, write_trace

TEXTS = st.text(alphabet='ab"\\[]{},\n\u00e9', max_size=6)
VALUES = st.recursive(
    st.integers(0, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def depth_by_steps(text: bytes) -> list[int]:
    """Walk through the text byte by byte; return the depth after each, -99 inside strings."""
    depths, depth, inside, escaped = [], 0, False, False
    for byte in text.decode("latin-1"):
        if inside:
            inside = escaped or byte != '"'
            escaped = byte == "\\" and not escaped
        else:
            inside = byte == '"'
            depth += (byte in "[{") - (byte in "]}")
        depths.append(-99 if inside else depth)
    return depths


@given(st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), max_size=4), st.data())
def test_complete_elements_of_any_beginning_of_a_list(values: list[object], data: st.DataObject):
    text = json.dumps(values)[1:-1].encode()
    cut = data.draw(st.integers(0, len(text)))
    steps = depth_by_steps(text[:cut])
    ends = [i + 1 for i, depth in enumerate(steps) if depth == 0 and text[i : i + 1] == b"}"]
    found = complete_elements(text[:cut])
    assert (found.end, found.closed) == (ends[-1] if ends else 0, False)


@given(st.lists(VALUES, max_size=4), VALUES)
def test_the_end_of_the_list_is_found(values: list[object], other: object) -> None:
    listed = json.dumps(values)[1:-1].encode()
    found = complete_elements(listed + b'], "other": ' + json.dumps(other).encode() + b"}")
    assert (found.end, found.closed) == (len(listed), True)


@given(VALUES)
def test_depth(value: object) -> None:
    text = b'{"a": [' + json.dumps(value).encode()
    assert find_brackets(text).depths_at([0, 1, len(text)]) == [0, 1, 2]


TWO = [traces.op("aten::mm", 0, 1), traces.op("aten::add", 2, 1)]


def refusal(data: bytes, piece: int = 1 << 20) -> str:
    with pytest.raises(UserError) as refused:
        read_trace(io.BytesIO(data), "t.json", piece)
    return str(refused.value)


def test_a_missing_file_and_what_lies_beside_it(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace_1.json", TWO)
    with pytest.raises(UserError, match=r"no file .*Did you mean 'trace_1.json'"):
        load_trace(tmp_path / "trace_2.json")
    with pytest.raises(UserError, match="no file"):
        load_trace(tmp_path / "nowhere" / "trace.json")
    with pytest.raises(UserError, match="is a folder"):
        load_trace(tmp_path)


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (b"hello", "is not JSON: it begins with b'hello'"),
        (pickle.dumps({"segments": []}), "a pickle, such as torch.cuda.memory._dump_snapshot"),
        (gzip.compress(pickle.dumps([1]), mtime=0), "is a pickle"),
        (b"PK\x03\x04rest", "is a zip archive"),
        (b'{"segments": [], "device_traces": []}', "is JSON, but not a trace"),
        (b'{"traceEvents": {}}', "is JSON, but not a trace"),
        (b'{"traceEvents": []}', "holds no events"),
        (b"[]", "holds no events"),
        (b"[1, 2, 3]", "holds 3 events, but no operator"),
        (b'[{"ph": "M", "name": "process_name"}]', "holds 1 events, but no operator"),
        (b'{"a" 1}', "not valid JSON at byte 5"),
        (b'{"a": 1', "ends too early, at byte 7 after 0 complete events"),
    ],
)
def test_files_of_another_kind(data: bytes, words: str) -> None:
    assert words in refusal(data)
    assert "\n" not in refusal(data)


@pytest.mark.parametrize("piece", [16, 100, 1 << 20])
def test_every_truncated_text_is_refused_with_its_length(piece: int) -> None:
    data = kineto(TWO).encode()
    first, second = (data.index(name) for name in (b"aten::mm", b"aten::add"))
    for size in (first, second, len(data) - 30, len(data) - 1):
        message = refusal(data[:size], piece)
        assert f"ends too early, at byte {size:,}" in message
    assert "after 0 complete events" in refusal(data[:first], piece)
    assert "after 1 complete events" in refusal(data[:second], piece)
    assert "after 2 complete events" in refusal(data[:-1], piece)


@pytest.mark.parametrize("piece", [16, 100, 1 << 20])
def test_a_mistake_in_an_event_is_named_with_its_byte(piece: int) -> None:
    data = kineto([*TWO, *TWO]).encode()
    place = data.rindex(b'"cat"')
    broken = data[:place] + b"?" + data[place + 1 :]
    assert f"not valid JSON at byte {place:,}" in refusal(broken, piece)


def test_a_mistake_behind_the_events_is_named_with_its_byte() -> None:
    data = kineto(TWO).encode()
    place = data.index(b'"traceName"')
    broken = data[:place] + b"?" + data[place + 1 :]
    assert f"not valid JSON at byte {place:,}" in refusal(broken)


def test_a_quote_without_a_partner_is_a_mistake_not_a_truncated_file() -> None:
    data = kineto(TWO * 50).encode()
    broken = data.replace(b"aten::mm", b'aten"::mm', 1)
    assert "not valid JSON at byte" in refusal(broken, 64)


def test_gzip_that_ends_too_early_or_is_damaged() -> None:
    packed = gzip.compress(kineto(TWO * 100).encode())
    assert "gzip file that ends too early" in refusal(packed[:-20])
    assert "gzip file that ends too early" in refusal(packed[:5])
    assert "damaged gzip file" in refusal(packed[:-6] + b"\0\0" + packed[-4:])


def test_a_file_that_may_not_be_read_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_trace(tmp_path / "t.json", TWO)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"t.json cannot be read: no permission"):
        load_trace(path)
