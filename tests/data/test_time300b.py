import numpy as np
import pytest

from steplab.core.errors import UserError
from steplab.data.formats import open_series
from steplab.data.formats.time300b import Time300B, write_time300b

from .stubs import write_raw


def read_all(series):
    return [series.read(i, 0, int(n)) for i, n in enumerate(series.lengths)]


@pytest.mark.parametrize("per_file", [1, 3, 7, 10**6])
def test_what_is_written_is_read_back_whatever_the_cut(tmp_path, per_file):
    arrays = [np.arange(n, dtype=np.float32) + 100 * n for n in (5, 0, 1, 12, 7)]
    write_time300b(tmp_path / "set", arrays, per_file)
    series = open_series(tmp_path / "set")
    assert series.lengths.tolist() == [5, 0, 1, 12, 7]
    for array, read in zip(arrays, read_all(series), strict=True):
        assert read.dtype == np.float32 and (read == array).all()
    for start in range(12):
        for stop in range(start, 13):
            assert (series.read(3, start, stop) == arrays[3][start:stop]).all()


def test_files_follow_their_numbers_and_not_their_letters(tmp_path):
    parts = {f"data-{k}-of-11.bin": np.full(2, k, np.float32) for k in (1, 10, 11, *range(2, 10))}
    folder = write_raw(tmp_path, parts, [{"offset": 0, "length": 22}])
    assert Time300B(folder).read(0, 0, 22).tolist() == np.repeat(np.arange(1, 12), 2).tolist()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "uint16"])
def test_every_dtype_is_read_as_float32(tmp_path, dtype):
    parts = {"data-1-of-1.bin": np.array([1, 2, 3, 100], dtype)}
    series = Time300B(write_raw(tmp_path, parts, [{"offset": 1, "length": 3}]))
    read = series.read(0, 0, 3)
    assert read.dtype == np.float32 and read.tolist() == [2, 3, 100]


def test_stored_scaling_is_undone_per_series(tmp_path):
    x = np.array([10.0, 20.0, 60.0])
    parts = {"data-1-of-1.bin": np.concatenate([(x - x.mean()) / x.std(), x]).astype(np.float32)}
    scaled = {"offset": 0, "length": 3, "mean": x.mean(), "std": x.std()}
    series = Time300B(write_raw(tmp_path, parts, [scaled, {"offset": 3, "length": 3}]))
    assert series.read(0, 0, 3) == pytest.approx(x, rel=1e-6)
    assert series.read(1, 0, 3).tolist() == x.tolist()


def test_a_value_beyond_float32_is_infinite_and_no_warning(tmp_path):
    parts = {"data-1-of-1.bin": np.array([1e300, 1.0])}
    series = Time300B(write_raw(tmp_path, parts, [{"offset": 0, "length": 2}]))
    assert series.read(0, 0, 2).tolist() == [np.inf, 1.0]


def test_a_read_owns_its_points(tmp_path):
    write_time300b(tmp_path / "set", [np.arange(4)])
    window = open_series(tmp_path / "set").read(0, 0, 4)
    window[:] = 0
    assert open_series(tmp_path / "set").read(0, 0, 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("where", [(0, -1, 2), (0, 3, 2), (0, 0, 5), (1, 0, 1), (-1, 0, 1)])
def test_a_range_outside_is_refused(tmp_path, where):
    write_time300b(tmp_path / "set", [np.arange(4)])
    with pytest.raises(IndexError):
        open_series(tmp_path / "set").read(*where)


def test_a_file_truncated_while_in_use_is_an_error_and_no_crash(tmp_path):
    write_time300b(tmp_path / "set", [np.zeros(10_000)])
    series = open_series(tmp_path / "set")
    with (tmp_path / "set" / "data-1-of-1.bin").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(UserError, match=r"data-1-of-1\.bin was truncated while it was in use"):
        series.read(0, 5000, 6000)


def test_the_writer_refuses_what_it_cannot_keep(tmp_path):
    with pytest.raises(UserError, match="Series 1 has 2 dimensions"):
        write_time300b(tmp_path / "a", [np.zeros(3), np.zeros((2, 2))])
    with pytest.raises(UserError, match="no series"):
        write_time300b(tmp_path / "b", [])
    with pytest.raises(UserError, match="at least 1"):
        write_time300b(tmp_path / "c", [np.zeros(3)], 0)
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").write_text("")
    with pytest.raises(UserError, match="not an empty folder"):
        write_time300b(tmp_path, [np.zeros(3)])
