"""What a picture of forecasts shows: a few series, each with its past, forecast and band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steplab.core.errors import Unsupported, UserError

SUFFIXES = (".html", ".png")
MAX_PANELS = 12
MIN_PAST = 64  # points drawn before the forecast, where there are as many


@dataclass(frozen=True)
class Panel:
    """One series; missing points are NaN."""

    title: str
    past: Sequence[float]
    forecast: Sequence[float]
    start_time: str  # of the first forecast point
    end_time: str  # of the last
    low: Sequence[float] | None = None  # the band; None for a point model
    high: Sequence[float] | None = None
    band: str = ""  # what the band is, as in "0.1 to 0.9"

    @property
    def before(self) -> str:
        """Where the drawing begins."""
        return f"{len(self.past):,} points before"


@dataclass(frozen=True)
class Picture:
    """Panels with the line above them and the lines below."""

    title: str
    note: str
    panels: tuple[Panel, ...]
    foot: tuple[str, ...] = ()


def drawn_past(horizon: int) -> int:
    """Return how many points of the past are drawn beside a forecast of `horizon` points."""
    return max(MIN_PAST, 3 * horizon)


def check_picture(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is computed for it."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"Cannot draw to {path}.", f"Use {' or '.join(SUFFIXES)}.")
    if path.suffix.lower() == ".png":
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise Unsupported(
                f"To draw {path}, matplotlib must be installed.",
                "pip install 'steplab[plots]', or name it .html, which needs nothing.",
            )


def write_picture(picture: Picture, path: Path) -> None:
    """Draw to the format that the file's suffix names."""
    check_picture(path)
    if path.suffix.lower() == ".png":
        from steplab.forecasting.panel_png import write_png

        write_png(picture, path)
        return
    from steplab.forecasting.panel_page import write_forecast_page

    write_forecast_page(picture, path)
