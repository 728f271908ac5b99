import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import MeasurementError, UserError
from steplab.data.formats import open_series, time300b
from steplab.data.formats.time300b import SeriesWriter, pack_sets, write_time300b

from .stubs import ListSeries

QUICK = settings(max_examples=60)
POINTS = st.lists(st.floats(width=32), max_size=12)


def points_of(series):
    return [series.read(i, 0, length).tolist() for i, length in enumerate(series.lengths.tolist())]


@given(st.lists(POINTS, min_size=1, max_size=8), st.integers(1, 30), st.integers(1, 5))
@QUICK
def test_what_is_packed_is_read_back_bit_for_bit(arrays, part_elements, chunk):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        real = time300b.chunks
        patch.setattr(time300b, "chunks", lambda series, index: real(series, index, chunk))
        out = Path(folder, "out")
        writes = []
        packed = pack_sets([ListSeries(arrays)], out, writes.append, part_elements)
        assert packed.series == len(arrays)
        assert packed.points == sum(writes) == sum(map(len, arrays))
        found = open_series(out)
        assert found.lengths.tolist() == [len(array) for array in arrays]
        for index, array in enumerate(arrays):
            expected = np.array(array, np.float32)
            assert found.read(index, 0, len(array)).tobytes() == expected.tobytes()
        for path in out.glob("*.bin"):
            assert path.stat().st_size <= 4 * part_elements


def test_the_layout_is_that_of_the_other_writer(tmp_path):
    arrays = [np.arange(5.0), np.empty(0), np.arange(3.0)]
    pack_sets([ListSeries(arrays)], tmp_path / "a", part_elements=3)
    write_time300b(tmp_path / "b", arrays, 3)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        a, b = (tmp_path / "a" / name).read_bytes(), (tmp_path / "b" / name).read_bytes()
        assert a == b if name.endswith(".bin") else json.loads(a) == json.loads(b)


def test_several_inputs_of_several_formats(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(6.0).reshape(2, 3))
    (tmp_path / "b.jsonl").write_text('{"sequence": [7, null]}\n[8]\n')
    sets = [open_series(tmp_path / name) for name in ("a.npy", "b.jsonl")]
    pack_sets(sets, tmp_path / "out")
    found = points_of(open_series(tmp_path / "out"))
    assert found[:2] == [[0, 1, 2], [3, 4, 5]] and found[2][0] == 7 and found[3] == [8]
    assert np.isnan(found[2][1])


def test_an_error_leaves_nothing_behind(tmp_path):
    class Broken(ListSeries):
        def read(self, index, start, stop):
            if index == 1:
                raise ValueError("a bad sector")
            return super().read(index, start, stop)

    with pytest.raises(UserError, match="series 1 cannot be read from point 0: a bad sector"):
        pack_sets([Broken([[1, 2], [3]], "broken")], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="no series to write"):
        pack_sets([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "x").write_text("mine")
    for path in (tmp_path, tmp_path / "x"):
        with pytest.raises(UserError, match="is not an empty folder"):
            pack_sets([ListSeries([[1]])], path)
    assert (tmp_path / "x").read_text() == "mine"


def test_a_disk_that_writes_other_bytes_is_noticed(tmp_path, monkeypatch):
    class Forgetful(SeriesWriter):
        def append(self, points):
            super().append(points)
            self.checksum += 1

    monkeypatch.setattr(time300b, "SeriesWriter", Forgetful)
    with pytest.raises(MeasurementError, match="does not read back as it was written"):
        pack_sets([ListSeries([[1, 2]])], tmp_path / "out")
