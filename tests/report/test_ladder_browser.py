"""The ladder's page in a real browser: light and dark, wide and narrow."""

import shutil
import subprocess

import pytest

pytest.importorskip("rich")
image = pytest.importorskip("matplotlib.image")

from steplab.report.pages import write_ladder_page
from steplab.tune.report import gate_table, impact_table
from tests.compare.sides import run_of
from tests.report.analyses import analysis_of
from tests.tune.test_report import ladder

BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium (Debian: chromium)")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 500], ids=["wide", "narrow"])
def test_the_page_is_drawn(tmp_path, dark, width):
    """Most of a page is its background; the ladder's bars are green, gray and red."""
    tables = {"impact": impact_table(ladder()), "gate": gate_table(ladder())}
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    write_ladder_page(ladder(), tables, "", run_of(), analysis_of(), (), page)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--force-dark-mode"] if dark else []
    flags += [
        f"--window-size={width},900",
        f"--screenshot={picture}",
        f"--user-data-dir={tmp_path}",
    ]
    subprocess.run([BROWSER, *flags, f"file://{page}"], check=True, capture_output=True, timeout=60)
    pixels = image.imread(picture)[..., :3]
    assert pixels.shape[1] == width
    assert pixels.mean() < 0.35 if dark else pixels.mean() > 0.8
    red, green, blue = (pixels[..., channel] for channel in range(3))
    is_green = (green > red + 0.15) & (green > blue + 0.15)
    assert is_green.sum() > 500, "the kept rung's bar"
