"""The memory of a step as a drawing: stacked areas by kind, phases above, the peak marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from steplab.core.memory import MemoryTimeline
from steplab.core.units import bytes_, milliseconds

WIDTH, HEIGHT = 960, 416
LEFT, RIGHT, TOP, BOTTOM = 76, 28, 66, 78
LETTER = 7  # px, about the width of a 12 px letter
RIGHT_EDGE, FLOOR = WIDTH - RIGHT, HEIGHT - BOTTOM

# Bottom to top: what stays the same lies below what moves. Colors of Okabe and Ito, which
# color-blind people can tell apart too.
LAYERS = {
    "weights": "#0072b2",
    "optimizer state": "#56b4e9",
    "other": "#8c8c8c",
    "gradients": "#009e73",
    "activations": "#e69f00",
    "temporaries": "#cc79a7",
}
STYLE = """
.steplab-memory { --paper: #ffffff; --ink: #1f2328; --faint: #d8dee4; --band: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  .steplab-memory { --paper: #16181d; --ink: #e6e8eb; --faint: #3a3f47; --band: #1f232a; }
}
.steplab-memory text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.steplab-memory .strong { font-weight: 600; }
.steplab-memory .paper { fill: var(--paper); }
.steplab-memory .band { fill: var(--band); }
.steplab-memory .grid { stroke: var(--faint); }
.steplab-memory .mark { stroke: var(--ink); stroke-dasharray: 4 3; }
.steplab-memory .dot { fill: var(--ink); stroke: var(--paper); }
"""


def memory_svg(timeline: MemoryTimeline) -> str:
    """Return a drawing that stands alone, light or dark as the reader's system is."""
    ends = [end for _, end in timeline.phases_ms.values()]
    plot = _Plot(max([*timeline.times_ms, *ends, 1e-6]), max(timeline.peak_bytes, 1))
    label = f"Memory of one step: peak {bytes_(timeline.peak_bytes)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="steplab-memory" role="img" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" aria-label="{escape(label)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>',
        *_bands(timeline, plot),
        *_grid(plot),
        *_areas(timeline, plot),
        *_phase_names(timeline, plot),
        *_peak(timeline, plot),
        *_legend(timeline),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Plot:
    """Maps milliseconds and bytes to the drawing; a tenth of the height stays free on top."""

    def __init__(self, most_ms: float, most_bytes: int) -> None:
        self.most_ms = most_ms
        self.unit, self.unit_name = _unit(most_bytes)
        self.tick = _nice(most_bytes / self.unit / 5) * self.unit
        self.most_bytes = most_bytes * 1.1

    def x(self, ms: float) -> float:
        return LEFT + (RIGHT_EDGE - LEFT) * ms / self.most_ms

    def y(self, size: float) -> float:
        return FLOOR - (FLOOR - TOP) * size / self.most_bytes


def _unit(most: float) -> tuple[int, str]:
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if most >= size:
            return size, name
    return 1, "B"


def _nice(step: float) -> float:
    """Return the next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= step * (1 - 1e-9))


def _text(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _bands(timeline: MemoryTimeline, plot: _Plot) -> list[str]:
    return [
        f'<rect class="band" x="{plot.x(begin):.1f}" y="{TOP}" '
        f'width="{plot.x(end) - plot.x(begin):.1f}" height="{FLOOR - TOP}"/>'
        for begin, end in timeline.phases_ms.values()
    ]


def _phase_names(timeline: MemoryTimeline, plot: _Plot) -> list[str]:
    """Name the phases above their bands: a narrow one one line higher, if there is room."""
    parts = []
    free_from = float(LEFT)
    for name, (begin, end) in timeline.phases_ms.items():
        left, right = plot.x(begin), plot.x(end)
        parts += [_line(edge, TOP, edge, FLOOR, "grid") for edge in (left, right)]
        tip = f"<title>{escape(name)}: {milliseconds(end - begin)}</title>"
        parts.append(
            f'<rect x="{left:.1f}" y="{TOP - 18}" width="{right - left:.1f}" height="18" '
            f'class="band">{tip}</rect>'
        )
        middle, width = (left + right) / 2, LETTER * len(name)
        if right - left > width:
            parts.append(_text(middle, TOP - 5, name, "middle"))
            continue
        start = min(max(middle - width / 2, free_from), RIGHT_EDGE - width)
        if free_from <= start <= right:
            parts.append(_text(start, TOP - 22, name))
            free_from = start + width
    return parts


def _grid(plot: _Plot) -> list[str]:
    parts = []
    for number in range(int(plot.most_bytes / plot.tick) + 1):
        height = plot.y(number * plot.tick)
        parts.append(_line(LEFT, height, RIGHT_EDGE, height, "grid"))
        words = f"{number * plot.tick / plot.unit:g} {plot.unit_name}"
        parts.append(_text(LEFT - 8, height + 4, words, "end"))
    tick = _nice(plot.most_ms / 8)
    for number in range(int(plot.most_ms / tick) + 1):
        words = f"{number * tick:g} ms"
        parts.append(_text(plot.x(number * tick), FLOOR + 18, words, "middle"))
    return parts


def _areas(timeline: MemoryTimeline, plot: _Plot) -> list[str]:
    """Draw every layer from the floor to its upper edge, the highest first, one over the other."""
    edges: list[tuple[str, list[int]]] = []
    height = [0] * len(timeline.times_ms)
    for kind in LAYERS:
        height = [a + b for a, b in zip(height, timeline.bytes_by_kind[kind], strict=True)]
        edges.append((kind, height))
    parts = []
    for kind, edge in reversed(edges):
        tip = f"{kind}: {bytes_(timeline.peak_by_kind[kind])} at the peak"
        path = _staircase(timeline.times_ms, edge, plot)
        parts.append(f'<path fill="{LAYERS[kind]}" d="{path}"><title>{tip}</title></path>')
    return parts


def _staircase(times_ms: Sequence[float], edge: Sequence[int], plot: _Plot) -> str:
    """Return a path that keeps each value until the next one, closed at the floor."""
    words = [f"M{plot.x(times_ms[0]):.1f} {FLOOR}"]
    last = ""
    for ms, size in zip(times_ms, edge, strict=True):
        height = f"{plot.y(size):.1f}"
        if height != last:
            words.append(f"H{plot.x(ms):.1f}V{height}")
            last = height
    return "".join([*words, f"H{plot.x(plot.most_ms):.1f}V{FLOOR}Z"])


def _peak(timeline: MemoryTimeline, plot: _Plot) -> list[str]:
    x, y = plot.x(timeline.peak_ms), plot.y(timeline.peak_bytes)
    words = f"peak {bytes_(timeline.peak_bytes)} at {milliseconds(timeline.peak_ms)}"
    left = x > (LEFT + RIGHT_EDGE) / 2
    return [
        _line(x, TOP, x, FLOOR, "mark"),
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        _text(x - 8 if left else x + 8, y - 8, words, "end" if left else "start", "strong"),
    ]


def _legend(timeline: MemoryTimeline) -> list[str]:
    """Name the layers, each with its size at the peak."""
    parts = [
        _text(LEFT, 18, "memory of one step by kind", style="strong"),
        _text(RIGHT_EDGE, 18, f"{timeline.source}; sizes below are those at the peak", "end"),
    ]
    column = (RIGHT_EDGE - LEFT) / len(LAYERS)
    for number, (kind, color) in enumerate(LAYERS.items()):
        x = LEFT + number * column
        y = HEIGHT - 30
        parts.append(f'<rect x="{x:.0f}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        parts.append(_text(x + 17, y, kind))
        parts.append(_text(x + 17, y + 16, bytes_(timeline.peak_by_kind[kind])))
    return parts
