"""One step of all ranks over time: what each computed, and its collectives, linked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from steplab.core import units
from steplab.report.charts.colors import term_class
from steplab.report.charts.plot import Scale, axis_lane, legend
from steplab.report.markup import NOTHING, Html, element, join
from steplab.trace.analysis import Floats, Window
from steplab.trace.collectives import KIND_NAMES
from steplab.trace.ranks.analysis import RanksAnalysis
from steplab.trace.ranks.rank_trace import RankTrace
from steplab.trace.spans import Intervals, union

MOST_RANKS = 32
MOST_LINKED = 300  # collectives, the longest
FINEST = 1500  # boxes over the width: closer ones are drawn as one
ROW = 56  # px of one rank: its name, what it computes, its collectives
COMPUTING, COLLECTIVES, BOX = 16, 34, 16  # px from the top of the row, and height


def rank_lanes(ranks: RanksAnalysis) -> Html:
    """Return the lanes of the typical step, on the clock of the first rank."""
    if not ranks.waits.steps:
        return NOTHING
    number = ranks.budget.typical.number
    shown = ranks.ranks[:MOST_RANKS]
    windows = [_window(rank, number, int(ranks.clocks.ahead[i])) for i, rank in enumerate(shown)]
    low, high = min(w.start for w in windows), max(w.end for w in windows)
    scale = Scale(0.0, (high - low) / 1e6)
    drawn = [_lane(ranks, place, low, high, scale) for place in range(len(shown))]
    picture = element(
        "svg",
        *_links(ranks, low, high, scale, len(shown)),
        *drawn,
        style=f"height:{ROW * len(shown)}px;background:none",
    )
    lane = element("div", element("div", "", class_="label"), picture, class_="lane")
    return join([_legend(ranks.tells_waits), lane, axis_lane(scale)])


def _legend(tells_waits: bool) -> Html:
    """Return what the colors of the boxes mean."""
    names = {"computing": "kernels", "waiting": "launch", "transfer": "communication"}
    if not tells_waits:
        names = {"computing": "kernels", "transfer or waiting": "communication"}
    # Without the hatching that idle terms have elsewhere: boxes are too small for it.
    return legend((name, f".{term_class(term).split()[0]}") for name, term in names.items())


def _window(rank: RankTrace, number: int, ahead: int) -> Window:
    """Return a step of a rank on the clock of the first one."""
    own = next(window for window in rank.windows if window.number == number)
    return Window(number, own.start - ahead, own.end - ahead)


def _lane(ranks: RanksAnalysis, place: int, low: int, high: int, scale: Scale) -> Html:
    """Return name, boxes of computing, and boxes of collectives of one rank."""
    rank, ahead, top = ranks.ranks[place], int(ranks.clocks.ahead[place]), ROW * place
    parts = [element("text", f"rank {ranks.rows[place].rank}", x="0", y=str(top + 11))]
    computing = rank.computing.clip(low + ahead, high + ahead)
    for start, end in _coarse(computing, (high - low) // FINEST):
        span = (start - ahead - low, end - ahead - low)
        parts.append(_box(span, top + COMPUTING, scale, "kernels", "computing"))
    own = rank.collectives
    arrived = _arrivals(ranks, place)
    for row in np.flatnonzero((own.end - ahead > low) & (own.start - ahead < high)).tolist():
        kind, size = KIND_NAMES[own.kind[row]], own.bytes[row]
        name = f"{kind} of {units.bytes_(size)}" if np.isfinite(size) else kind
        begin, end = int(own.start[row]) - ahead - low, int(own.end[row]) - ahead - low
        moves = min(max(arrived.get(row, begin + low) - low, begin), end)
        if moves > begin:
            parts.append(
                _box((begin, moves), top + COLLECTIVES, scale, "launch", f"{name}, waiting")
            )
        parts.append(_box((moves, end), top + COLLECTIVES, scale, "communication", name))
    return join(parts)


def _arrivals(ranks: RanksAnalysis, place: int) -> dict[int, int]:
    """Return by row of a rank's collectives when the last rank came, on the first one's clock."""
    waits, rows = ranks.waits, ranks.matches.row[:, place]
    known = (rows >= 0) & np.isfinite(waits.arrived)
    times = waits.arrived[known].astype(np.int64) + waits.origin
    return dict(zip(rows[known].tolist(), times.tolist(), strict=True))


def _coarse(found: Intervals, gap: int) -> Iterator[tuple[int, int]]:
    """Yield intervals, those closer than `gap` as one."""
    near = union(found.start, found.end + gap)
    yield from zip(near.start.tolist(), (near.end - gap).tolist(), strict=True)


def _box(span: tuple[int, int], y: int, scale: Scale, term: str, name: str) -> Html:
    begin, end = (max(ns, 0) / 1e6 for ns in span)
    end = min(end, scale.high)
    return element(
        "rect",
        x=scale.percent(begin),
        y=str(y),
        width=f"{max(scale.at(end) - scale.at(begin), 0.03):.3f}%",
        height=str(BOX),
        class_=f"box {term_class(term)}",
        data_tip=f"{name}\n{units.milliseconds((span[1] - span[0]) / 1e6)}",
    )


def _links(ranks: RanksAnalysis, low: int, high: int, scale: Scale, shown: int) -> Iterator[Html]:
    """Yield a line from rank to rank where the ranks of one collective began it."""
    start = ranks.matches.times(ranks.ranks, "start", low) - ranks.clocks.ahead
    end = ranks.matches.times(ranks.ranks, "end", low) - ranks.clocks.ahead
    with np.errstate(invalid="ignore"):
        inside = (start >= 0) & (start < high - low)
        length = np.where(inside, end - start, 0.0).max(axis=1, initial=0.0)
    for row in np.argsort(-length, kind="stable")[:MOST_LINKED].tolist():
        there = [place for place in range(shown) if inside[row, place]]
        yield from _line(start[row], there, scale)


def _line(start: Floats, there: Sequence[int], scale: Scale) -> Iterator[Html]:
    for one, other in pairwise(there):
        yield element(
            "line",
            x1=scale.percent(float(start[one]) / 1e6),
            y1=str(ROW * one + COLLECTIVES + BOX),
            x2=scale.percent(float(start[other]) / 1e6),
            y2=str(ROW * other + COLLECTIVES),
            class_="grid",
        )
