import json
import os

import numpy as np
import pytest

from steplab.core.errors import UserError
from steplab.data.formats import open_series, openers
from steplab.data.formats.time300b import write_time300b


def test_a_folder_is_walked_and_joined_in_the_order_of_paths(tmp_path):
    write_time300b(tmp_path / "nature" / "b", [[5, 6]])
    write_time300b(tmp_path / "energy" / "a", [[1, 2], [3, 4, 4]])
    (tmp_path / "loose.jsonl").write_text('{"sequence": [0, 0.5]}\n\n[7, 8]\n')
    np.save(tmp_path / "web.npy", np.array([[9, 10]]))
    (tmp_path / "README.md").write_text("not a series")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "broken.json").write_text("{")
    series = open_series(tmp_path)
    read = [series.read(i, 0, int(n)).tolist() for i, n in enumerate(series.lengths)]
    assert read == [[0, 0.5], [7, 8], [9, 10], [1, 2], [3, 4, 4], [5, 6]]
    assert len(series) == 6 and series.name == str(tmp_path)
    assert series.read(4, 1, 3).tolist() == [4, 4]
    for index in (-1, 6):
        with pytest.raises(IndexError):
            series.read(index, 0, 1)


def test_a_dataset_is_opened_by_its_folder_or_its_meta(tmp_path):
    write_time300b(tmp_path / "a", [[1, 2]])
    assert open_series(str(tmp_path / "a")).read(0, 0, 2).tolist() == [1, 2]
    assert open_series(tmp_path / "a" / "meta.json").read(0, 0, 2).tolist() == [1, 2]


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="no links here")
def test_linked_folders_are_followed_once(tmp_path):
    write_time300b(tmp_path / "elsewhere" / "a", [[1, 2]])
    (tmp_path / "mix").mkdir()
    (tmp_path / "mix" / "one").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "mix" / "circle").symlink_to(tmp_path / "mix")
    assert len(open_series(tmp_path / "mix")) == 1


def test_json_as_a_list_of_series_or_as_one(tmp_path):
    path = tmp_path / "x.json"
    for data, lengths in (
        ([[1, 2, 3], {"sequence": [4]}, []], [3, 1, 0]),
        ([1, None, 2.5], [3]),
        ({"sequence": [1, 2], "freq": "H"}, [2]),
    ):
        path.write_text(json.dumps(data))
        assert open_series(path).lengths.tolist() == lengths
    path.write_text("[1, null, NaN, Infinity]")
    assert np.array_equal(open_series(path).read(0, 0, 4), [1, np.nan, np.nan, np.inf], True)


def test_arrays_of_one_and_two_dimensions(tmp_path):
    rows = np.arange(6.0).reshape(2, 3)
    for array in (rows, np.asfortranarray(rows), rows.astype(np.int16), rows.astype(">f8")):
        np.save(tmp_path / "x.npy", array)
        series = open_series(tmp_path / "x.npy")
        assert series.lengths.tolist() == [3, 3] and series.read(1, 1, 3).tolist() == [4, 5]
    np.save(tmp_path / "x.npy", np.arange(5))
    assert open_series(tmp_path / "x.npy").read(0, 3, 5).tolist() == [3, 4]
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", a=np.arange(4), b=np.arange(2), c=rows)
        series = open_series(tmp_path / "x.npz")
        assert series.lengths.tolist() == [4, 2, 3, 3] and series.read(3, 0, 3).tolist() == [
            3,
            4,
            5,
        ]


@pytest.mark.parametrize("name", ["x.pkl", "x.pickle", "X.PKL"])
def test_a_pickle_is_refused_with_the_reason_wherever_it_lies(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04N.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match="can run any code when it is opened"):
            open_series(path)


def test_an_object_array_is_refused_and_runs_no_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    bombs = np.array([Bomb()], dtype=object)
    np.save(tmp_path / "x.npy", bombs, allow_pickle=True)
    np.savez(tmp_path / "x.npz", a=bombs)
    for name in ("x.npy", "x.npz"):
        with pytest.raises(UserError, match=rf"{name}.*object array.*can run any code"):
            open_series(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


def test_every_format_is_found_by_its_suffix_or_its_file_name():
    suffixes = {".csv", ".json", ".jsonl", ".npy", ".npz", ".parquet"}
    assert set(openers()) >= {*suffixes, "meta.json"}
