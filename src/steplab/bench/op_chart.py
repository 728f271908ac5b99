"""What a chart of a study shows, before it is drawn. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from steplab.bench.op_bench import Objective, OpBench
from steplab.bench.op_results import cell_result
from steplab.core import Run
from steplab.core.errors import Unsupported, UserError

SUFFIXES = (".svg", ".png")
# Of Okabe and Ito, which colour-blind people can tell apart too.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c8c8c", "#b8a800")


@dataclass
class ChartPanel:
    """All shapes that differ along the x axis only; values by way, then by x."""

    title: str
    lines: dict[str, dict[int, float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)  # in words


@dataclass(frozen=True)
class Chart:
    """Panels with one x axis, one y axis and one colour per way."""

    title: str
    x_name: str
    y_name: str
    panels: tuple[ChartPanel, ...]

    @property
    def ways(self) -> list[str]:
        """Every way of every panel, in order of appearance."""
        return list(dict.fromkeys(way for panel in self.panels for way in panel.lines))

    @property
    def xs(self) -> list[int]:
        """Every x that has a value."""
        lines = [line for panel in self.panels for line in panel.lines.values()]
        return sorted({x for line in lines for x in line})

    @property
    def ys(self) -> list[float]:
        """Every value."""
        return [y for p in self.panels for line in p.lines.values() for y in line.values()]

    def colour(self, way: str) -> str:
        """Return the colour of a way; beyond eight ways they come again."""
        return COLORS[self.ways.index(way) % len(COLORS)]


def chart_of(bench: OpBench, runs: Sequence[Run], objective: Objective) -> Chart:
    """Return the chart of an objective along the op's x axis; rows that failed are named."""
    axes = [name for name in bench.shape if name != bench.x_axis]
    panels: dict[str, ChartPanel] = {}
    for run in runs:
        config, found = run.spec.config, cell_result(run)
        title = bench.shape_text(config, axes)
        panel = panels.setdefault(title, ChartPanel(title))
        way, x, value = bench.variant_text(config), config[bench.x_axis], found.value(objective)
        if run.status == "ok" and value:
            scale = 2**20 if objective == "memory" else 1
            panel.lines.setdefault(way, {})[x] = value / scale
        else:
            panel.failed.append(f"{way} at {x:,}: {found.status}")
    first = runs[0]
    unit = "extra memory [MiB]" if objective == "memory" else f"{objective} [ms]"
    title = f"{bench.name} on {first.environment.conditions_on(first.spec.device)}"
    return Chart(title, bench.x_axis.replace("_", " "), unit, tuple(panels.values()))


def check_plot(path: Path) -> None:
    """Refuse a chart that cannot be drawn, before anything is measured for it."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"Cannot draw to {path}.", f"Use {' or '.join(SUFFIXES)}.")
    if path.suffix.lower() == ".png":
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise Unsupported(
                f"To draw {path}, matplotlib must be installed.",
                "pip install 'steplab[plots]', or name it .svg, which needs nothing.",
            )


def write_chart(chart: Chart, path: Path) -> None:
    """Draw to the format that the file's suffix names."""
    check_plot(path)
    from steplab.store.atomic import disk_errors, write_file

    if path.suffix.lower() == ".png":
        from steplab.bench.op_chart_png import chart_png

        data = chart_png(chart)
    else:
        from steplab.bench.op_chart_svg import chart_svg

        data = chart_svg(chart).encode()
    with disk_errors(path.parent, "--plot"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
