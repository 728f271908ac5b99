"""The memory of one step: stacked areas by kind, phases above, the peak marked."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.core import MemoryTimeline
from steplab.core.units import bytes_, milliseconds
from steplab.report.charts.plot import Scale, grid_line, nice_step, svg_file, swatch, text
from steplab.report.markup import Html, element

WIDTH, HEIGHT = 960, 416  # px
LEFT, RIGHT, TOP, FLOOR = 76, WIDTH - 28, 66, HEIGHT - 78  # the drawn area
LETTER_WIDTH = 7  # px; phase names get a little more room than other texts

# Bottom to top: what stays the same lies below what moves.
LAYERS = {
    "weights": "#0072b2",
    "optimizer state": "#56b4e9",
    "other": "#8c8c8c",
    "gradients": "#009e73",
    "activations": "#e69f00",
    "temporaries": "#cc79a7",
}


def memory_svg(timeline: MemoryTimeline) -> str:
    """Return a standalone picture, light or dark with the reader's system."""
    ends = [end for _, end in timeline.phases_ms.values()]
    x = Scale(0.0, max([*timeline.times_ms, *ends, 1e-6]), LEFT, RIGHT)
    # A tenth of the height stays free on top.
    y = Scale(0.0, max(timeline.peak_bytes, 1) * 1.1, FLOOR, TOP)
    parts = [
        *_bands(timeline, x),
        *_grid(x, y, max(timeline.peak_bytes, 1)),
        *_areas(timeline, x, y),
        *_phase_names(timeline, x),
        *_peak(timeline, x, y),
        *_legend(timeline),
    ]
    return svg_file(WIDTH, HEIGHT, f"Memory of one step: peak {bytes_(timeline.peak_bytes)}", parts)


def _bands(timeline: MemoryTimeline, x: Scale) -> list[Html]:
    return [
        _box(x.at(begin), TOP, x.at(end) - x.at(begin), FLOOR - TOP)
        for begin, end in timeline.phases_ms.values()
    ]


def _box(x: float, y: float, width: float, height: float, *children: Html) -> Html:
    place = {"x": round(x, 1), "y": y, "width": round(width, 1), "height": height}
    return element("rect", *children, class_="band", **place)


def _grid(x: Scale, y: Scale, peak: int) -> list[Html]:
    """Lines at round numbers of bytes, and numbers at round times."""
    unit, unit_name = _unit(peak)
    step = nice_step(peak / unit, 5) * unit
    parts = []
    for number in range(int(y.high / step) + 1):
        height = y.at(number * step)
        parts.append(grid_line(LEFT, height, RIGHT, height))
        parts.append(text(LEFT - 8, height + 4, f"{number * step / unit:g} {unit_name}", "end"))
    return parts + [text(x.at(ms), FLOOR + 18, f"{ms:g} ms", "middle") for ms in x.ticks(8)]


def _unit(most: float) -> tuple[int, str]:
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if most >= size:
            return size, name
    return 1, "B"


def _areas(timeline: MemoryTimeline, x: Scale, y: Scale) -> list[Html]:
    """Draw every layer from the floor to its upper edge, the highest first, one over the other."""
    edges: list[tuple[str, list[int]]] = []
    height = [0] * len(timeline.times_ms)
    for kind in LAYERS:
        height = [a + b for a, b in zip(height, timeline.bytes_by_kind[kind], strict=True)]
        edges.append((kind, height))
    parts = []
    for kind, edge in reversed(edges):
        tip = element("title", f"{kind}: {bytes_(timeline.peak_by_kind[kind])} at the peak")
        path = _staircase(timeline.times_ms, edge, x, y)
        parts.append(element("path", tip, fill=LAYERS[kind], d=path))
    return parts


def _staircase(times_ms: Sequence[float], edge: Sequence[int], x: Scale, y: Scale) -> str:
    """Return a path that keeps each value until the next one, closed at the floor."""
    words = [f"M{x.at(times_ms[0]):.1f} {FLOOR}"]
    last = ""
    for ms, size in zip(times_ms, edge, strict=True):
        height = f"{y.at(size):.1f}"
        if height != last:
            words.append(f"H{x.at(ms):.1f}V{height}")
            last = height
    return "".join([*words, f"H{x.at(x.high):.1f}V{FLOOR}Z"])


def _phase_names(timeline: MemoryTimeline, x: Scale) -> list[Html]:
    """Name the phases above their bands: a narrow one one line higher, if there is room."""
    parts = []
    free_from = float(LEFT)
    for name, (begin, end) in timeline.phases_ms.items():
        left, right = x.at(begin), x.at(end)
        parts += [grid_line(edge, TOP, edge, FLOOR) for edge in (left, right)]
        tip = element("title", f"{name}: {milliseconds(end - begin)}")
        parts.append(_box(left, TOP - 18, right - left, 18, tip))
        middle, width = (left + right) / 2, LETTER_WIDTH * len(name)
        if right - left > width:
            parts.append(text(middle, TOP - 5, name, "middle"))
            continue
        start = min(max(middle - width / 2, free_from), RIGHT - width)
        if free_from <= start <= right:
            parts.append(text(start, TOP - 22, name))
            free_from = start + width
    return parts


def _peak(timeline: MemoryTimeline, x: Scale, y: Scale) -> list[Html]:
    at, height = x.at(timeline.peak_ms), y.at(timeline.peak_bytes)
    words = f"peak {bytes_(timeline.peak_bytes)} at {milliseconds(timeline.peak_ms)}"
    left = at > (LEFT + RIGHT) / 2
    return [
        grid_line(at, TOP, at, FLOOR, "mark"),
        element("circle", class_="dot", cx=round(at, 1), cy=round(height, 1), r=4),
        text(at - 8 if left else at + 8, height - 8, words, "end" if left else "start", "strong"),
    ]


def _legend(timeline: MemoryTimeline) -> list[Html]:
    """Name the layers, each with its size at the peak."""
    parts = [
        text(LEFT, 18, "memory of one step by kind", style="strong"),
        text(RIGHT, 18, f"{timeline.source}; sizes below are those at the peak", "end"),
    ]
    column = (RIGHT - LEFT) / len(LAYERS)
    for number, (kind, color) in enumerate(LAYERS.items()):
        x, y = LEFT + number * column, HEIGHT - 30
        parts.append(swatch(x, y, color, kind))
        parts.append(text(x + 17, y + 16, bytes_(timeline.peak_by_kind[kind])))
    return parts
