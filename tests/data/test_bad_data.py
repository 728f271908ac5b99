"""Every fault of a file is one UserError that names it; nothing else comes out."""

import json
import os

import numpy as np
import pytest

from steplab.core.errors import UserError
from steplab.data.formats import open_series
from steplab.data.windows import Windows

from .stubs import write_raw

PARTS = {"data-1-of-1.bin": np.arange(10, dtype=np.float32)}
SCALES = [{"offset": 0, "length": 6}, {"offset": 6, "length": 4}]


def refuses(path, message):
    with pytest.raises(UserError, match=message) as caught:
        open_series(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float64"}, "truncated: it has 40 bytes"),
        ({"dtype": "int16"}, "has 40 bytes, but 10 elements of int16 are 20"),
        ({"dtype": "bfloat16"}, "unknown dtype 'bfloat16'. Did you mean 'float16'"),
        ({"dtype": ["float32"]}, "unknown dtype"),
        ({"files": {"data-1-of-1.bin": 11}}, "truncated"),
        ({"files": {"data-1-of-1.bin": 10**30}}, "a number of 100 bits"),
        ({"files": {"data-1-of-1.bin": 9.5}}, r"has 9\.5 elements"),
        ({"files": {"data-1-of-2.bin": 10}}, "listed among 1 files"),
        ({"files": {"../../data-1-of-1.bin": 10}}, "is not called data"),
        ({"files": {}}, "'files' must name"),
        ({"files": ["data-1-of-1.bin"]}, "'files' must name"),
        ({"num_sequences": 3}, "'num_sequences' is 3, but 'scales' has 2"),
        ({"num_sequences": 0, "scales": []}, "holds no series"),
        ({"scales": {"offset": 0}}, "'scales' must be a list of objects"),
        ({"scales": [[0, 6], [6, 4]]}, "'scales' must be a list of objects"),
    ],
)
def test_a_wrong_meta(tmp_path, changes, message):
    refuses(write_raw(tmp_path, PARTS, SCALES, **changes), message)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ({"offset": 6, "length": 5}, r"series 1 ends at element 11, but its files hold 10"),
        ({"offset": 11, "length": 0}, "series 1 ends at element 11"),
        ({"offset": 2**63, "length": 1}, "'offset' of series 1 is 9223372036854775808"),
        ({"offset": 2**61, "length": 2**61}, "run past the end"),
        ({"offset": -1, "length": 1}, "'offset' of series 1 is -1"),
        ({"offset": 0, "length": -4}, "'length' of series 1 is -4"),
        ({"offset": 0, "length": 1.5}, "'length' of series 1 is 1.5"),
        ({"offset": 0, "length": "4"}, "'length' of series 1 is \"4\""),
        ({"offset": 0, "length": True}, "'length' of series 1 is true"),
        ({"offset": 0}, "'length' of series 1 is missing"),
        ({"offset": 0, "length": 1, "mean": 0}, "only one of 'mean' and 'std'"),
        ({"offset": 0, "length": 1, "mean": 0, "std": -1}, "'std' of series 1 is negative"),
        ({"offset": 0, "length": 1, "mean": None, "std": 1}, "'mean' of series 1 is null"),
        ({"offset": 0, "length": 1, "mean": float("nan"), "std": 1}, "'mean' of series 1 is NaN"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path, scale, message):
    refuses(write_raw(tmp_path, PARTS, [SCALES[0], scale]), message)


@pytest.mark.parametrize("key", ["dtype", "files", "scales", "num_sequences"])
def test_a_missing_key_is_named(tmp_path, key):
    meta = write_raw(tmp_path, PARTS, SCALES) / "meta.json"
    data = json.loads(meta.read_text())
    del data[key]
    meta.write_text(json.dumps(data))
    refuses(tmp_path, f"lacks '{key}'")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "not json", "[" * 100_000, "9" * 5000, "\x00", "\ud800"]
)
def test_a_meta_that_is_no_object(tmp_path, text):
    write_raw(tmp_path, PARTS, SCALES)
    (tmp_path / "meta.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refuses(tmp_path, r"meta\.json (is not JSON|must be a JSON object|nests deeper)")


def test_parts_without_meta_and_meta_without_parts(tmp_path):
    write_raw(tmp_path / "a", PARTS, SCALES)
    (tmp_path / "a" / "meta.json").unlink()
    refuses(tmp_path, r"data-1-of-1\.bin has no meta\.json beside it")
    refuses(tmp_path / "a" / "data-1-of-1.bin", "Give its folder")
    write_raw(tmp_path / "b", PARTS, SCALES)
    (tmp_path / "b" / "data-1-of-1.bin").unlink()
    refuses(tmp_path / "b", r"data-1-of-1\.bin is missing")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", "", "is empty"),
        ("x.jsonl", "\n \n", "holds no series"),
        ("x.jsonl", "[1, 2]\n[1, 'a']\n", "line 2 is not JSON"),
        ("x.jsonl", '[1, 2]\n[3, "four"]\n', "line 2, point 1 is the text 'four', not a number"),
        ("x.jsonl", "[1, true]", "line 1, point 1 is true"),
        ("x.jsonl", '{"values": [1]}', "line 1 has no key 'sequence' .its keys: 'values'"),
        ("x.jsonl", '{"sequence": 3}', "line 1 is 3, not a list"),
        ("x.jsonl", '"text"', "line 1 is the text 'text', not a list"),
        ("x.jsonl", "[[1, 2], [3, 4]]", "point 0 is a list, not a number. Write each channel"),
        ("x.jsonl", "[" * 100_000, "line 1 is nested too deeply"),
        ("x.jsonl", "[1" + "0" * 400 + "]", "line 1 has an integer that does not fit into a float"),
        ("x.json", "", "is empty"),
        ("x.json", "[]", "holds no series"),
        ("x.json", "null", "is null, not a list of series"),
        ("x.json", "[1, 2]\n[3]\n", r"is not JSON: Extra data.*name the file \.jsonl"),
        ("x.json", "[[1, 2], 3]", "series 1 is 3, not a list"),
        ("x.json", "[1, [2, 3]]", "point 1 is a list"),
        ("x.json", "[[1], [[2, 3], [4]]]", "series 1, point 0 is a list"),
        ("x.json", '[{"sequence": [1]}, {"sequence": "2"}]', "series 1 is the text '2'"),
        ("x.npy", "", "is empty"),
        ("x.npy", "1,2,3", r"is not a valid \.npy file"),
        ("x.npz", "1,2,3", r"is not a valid \.npz file"),
        ("x.txt", "1,2,3", "is not a file of series that steplab can read"),
    ],
)
def test_wrong_text(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    refuses(tmp_path / name, message)


def test_bytes_that_are_no_text(tmp_path):
    for name in ("x.json", "x.jsonl"):
        (tmp_path / name).write_bytes(b"[1, \xff\xfe]")
        refuses(tmp_path / name, "is not UTF-8 text")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array(["a", "b"]), "not real numbers"),
        (np.array([1j]), "not real numbers"),
        (np.array([True]), "not real numbers"),
        (np.zeros(2, [("a", "f4")]), "not real numbers"),
        (np.array(3.0), "has 0 dimensions"),
        (np.zeros((2, 2, 2)), "has 3 dimensions"),
        (np.zeros((0, 4)), "no points"),
        (np.zeros(0), "no points"),
    ],
)
def test_wrong_arrays(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array)
    refuses(tmp_path / "x.npy", message)
    np.savez(tmp_path / "x.npz", a=array)
    refuses(tmp_path / "x.npz", message)


def test_a_truncated_array(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(1000))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-8])
    refuses(tmp_path / "x.npy", "truncated")
    (tmp_path / "x.npy").write_bytes(whole[:50])
    refuses(tmp_path / "x.npy", "not a valid")


def test_nothing_there(tmp_path):
    refuses(tmp_path, "holds no series")
    refuses(tmp_path / "missing", "does not exist")
    (tmp_path / "series.jsonl").write_text("[1, 2]")
    refuses(tmp_path / "serie.jsonl", r"does not exist\. Did you mean '.*series\.jsonl'")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("[1, 2]")
    path.chmod(0)
    refuses(path, "cannot be read: Permission denied")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "x.npy")
    refuses(tmp_path / "x.npy", "is a pipe")


def test_one_point_series_only(tmp_path):
    (tmp_path / "x.jsonl").write_text("[1]\n[]\n[2]\n")
    with pytest.raises(UserError, match=r"x\.jsonl has no series with 2 points .3 series"):
        Windows(open_series(tmp_path / "x.jsonl"), 8, 8)


@pytest.mark.parametrize("normalize", ["series", "max", "none"])
def test_all_nan_series_only(tmp_path, normalize):
    (tmp_path / "x.jsonl").write_text("[null, null, null]\n[NaN, 1, Infinity]\n")
    windows = Windows(open_series(tmp_path / "x.jsonl"), 2, 1, normalize)
    with pytest.raises(UserError, match=r"x\.jsonl has no window with 2 finite points"):
        windows.read(0)


def test_a_table_of_countless_columns_is_refused_at_once(tmp_path):
    """pandas compares 70,000 equal names for minutes."""
    pytest.importorskip("pandas")
    path = tmp_path / "wide.csv"
    path.write_text(",".join("a" * 70_000) + "\na,2026-01-01,1\n")
    with pytest.raises(UserError, match="70,000 columns"):
        open_series(path)
