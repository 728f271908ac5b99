import re

import pytest

pytest.importorskip("rich")

from steplab.core.errors import Unsupported, UserError
from steplab.forecasting.forecast_report import (
    Picture,
    forecast_panel,
    past_to_draw,
    write_picture,
)
from tests.report.reading import Page

EVIL = """</svg><script>alert(1)</script>'"&$\\frac{1}{0}$"""
NAN = float("nan")


def panel(title="a", past=(1.0, 2.0, NAN, 4.0), forecast=(5.0, 6.0), **more):
    return forecast_panel(title, past, forecast, ("2024-01-05", "2024-01-06"), **more)


def read(tmp_path, *panels):
    path = tmp_path / "x.html"
    write_picture(Picture("title", "note", panels, ("foot",)), path)
    return Page(path.read_text())


def paths(page):
    return [attributes["d"] for attributes in page.all("path")]


def test_past_forecast_and_band_are_drawn(tmp_path):
    banded = panel(band=((4.0, 4.0), (6.0, 8.0)), band_name="quantiles 0.1 to 0.9")
    page = read(tmp_path, banded)
    area, past, forecast = paths(page)
    assert area.endswith("Z") and area.count("L") == 3
    assert past.count("M") == 2 and past.count("L") == 1  # a gap where a point is missing
    assert forecast.count("M") == 1 and forecast.count("L") == 2  # from the last known point on
    assert "quantiles 0.1 to 0.9" in page.text() and "4 points before" in page.text()
    tips = [a["data-tip"] for a in page.all("rect") if "data-tip" in a]
    assert tips[1] == "forecast point 2: 6.000\nquantiles 0.1 to 0.9: 4.000 to 8.000"


def test_a_point_model_has_no_band(tmp_path):
    page = read(tmp_path, panel(), panel("b"))
    assert len(paths(page)) == 4 and "quantiles" not in page.text()


def test_heights_are_true_to_the_values(tmp_path):
    page = read(tmp_path, panel(past=(0.0, 10.0), forecast=(5.0,)))
    numbers = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", paths(page)[0])]
    (x0, low), (x1, high) = numbers
    middle = float(re.findall(r"L[\d.]+ ([\d.]+)", paths(page)[1])[0])
    assert x0 < x1 and high < low and middle == pytest.approx((low + high) / 2, abs=0.1)


@pytest.mark.parametrize(
    ("past", "forecast"),
    [((3.0,), (3.0,)), ((0.0, 0.0), (0.0,)), ((NAN, NAN), (1.0,)), ((1e300, -1e300), (0.0,) * 300)],
)
def test_odd_series_are_drawn(tmp_path, past, forecast):
    for path in paths(read(tmp_path, panel(past=past, forecast=forecast))):
        assert "nan" not in path and "inf" not in path
    assert len(read(tmp_path, panel(past=past, forecast=forecast)).all("rect")) <= 150


def test_hostile_names_stay_text(tmp_path):
    page = read(tmp_path, panel(EVIL))
    assert page.text().count("alert(1)") == 1
    assert len(page.all("script")) == 1
    policy = next(a["content"] for a in page.all("meta") if "content" in a)
    assert policy.startswith("default-src 'none'")


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    banded = panel(band=((4.0, 4.0), (6.0, 8.0)), band_name="quantiles 0.1 to 0.9")
    for count in (1, 3):
        path = tmp_path / f"{count}.png"
        write_picture(Picture(EVIL, "", (panel(EVIL), banded, panel())[:count]), path)
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.png", "3.png"]


def test_formats_are_checked_first(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"Use \.html or \.png"):
        write_picture(Picture("", "", (panel(),)), tmp_path / "x.pdf")
    monkeypatch.setattr("steplab.report.charts.plot.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"pip install 'steplab\[plots\]'"):
        write_picture(Picture("", "", (panel(),)), tmp_path / "x.png")


def test_some_of_the_past_is_drawn():
    assert past_to_draw(1) == 64 and past_to_draw(96) == 288
