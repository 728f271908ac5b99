import numpy as np
import pytest

from steplab.core.errors import UserError
from steplab.data.series import JoinedSeries, chunks
from steplab.data.stats import bytes_on_disk, series_stats

from .stubs import ListSeries

ARRAYS = [[1, 1, np.nan, np.nan, 2, 2, 2], [5], [np.inf, 3, 3, 4], []]


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_counts(chunk):
    reads = []
    stats = series_stats(ListSeries(ARRAYS), reads.append, chunk)
    assert (stats.series, stats.points, sum(reads)) == (4, 12, 12)
    assert (stats.shortest, stats.median, stats.longest) == (0, 2.5, 7)
    assert stats.missing == 3 and stats.missing_share == 0.25
    assert stats.repeated == 4 and stats.flat_share == 4 / 8
    assert stats.time_steps == {}


def test_steps_of_all_members_are_counted():
    hourly, daily = ListSeries([[1, 2]]), ListSeries([[1, 2], [3, 4]])
    hourly.time_steps, daily.time_steps = {"1 hour": 1}, {"1 day": 2}
    joined = JoinedSeries("all", [hourly, JoinedSeries("inner", [daily]), ListSeries([[1]])])
    assert series_stats(joined).time_steps == {"1 day": 2, "1 hour": 1}


def test_bytes_of_files_and_folders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, size in (("a/x", 7), ("y", 5), (".hidden/z", 100)):
        (tmp_path / name).write_bytes(b"0" * size)
    assert bytes_on_disk(tmp_path) == 12 and bytes_on_disk(tmp_path / "y") == 5


def test_the_error_of_a_reader_names_the_series_and_the_point():
    class Broken(ListSeries):
        def read(self, index, start, stop):
            if start >= 2:
                raise OSError("gone")
            return super().read(index, start, stop)

    with pytest.raises(UserError, match="broken: series 0 cannot be read from point 2: gone"):
        list(chunks(Broken([[1, 2, 3]], "broken"), 0, 2))
