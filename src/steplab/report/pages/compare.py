"""The page of a comparison."""

from __future__ import annotations

from pathlib import Path

from steplab.core import units
from steplab.core.comparison import Comparison
from steplab.report.charts.step_times import change_chart, samples_chart
from steplab.report.markup import Html, element, join
from steplab.report.pages.document import Section, paragraphs, table_html, tiles, write_page

SUMMED = "budget"  # the last row of this table is the sum


def write_compare_page(comparison: Comparison, path: Path) -> None:
    """Write verdict, samples, what differs and what changed as one self-contained file."""
    sections = [
        Section(
            "samples",
            "Every sample",
            join([change_chart(comparison.change), samples_chart(comparison)]),
            comparison.method,
        )
    ]
    for name, table in comparison.tables.items():
        content = table_html(table, last_is_sum=name == SUMMED)
        sections.append(Section(name, f"{table.title[:1].upper()}{table.title[1:]}", content))
    title = f"{comparison.b} against {comparison.a}"
    write_page(path, title, _head(comparison), sections, paragraphs([*comparison.conditions]))


def _head(comparison: Comparison) -> Html:
    words = element("b", comparison.headline), f": {comparison.reason}"
    verdict = element("p", *words, class_=f"verdict {comparison.verdict.replace(' ', '-')}")
    figures = {
        "A, median step": units.milliseconds(comparison.samples_a.median),
        "B, median step": units.milliseconds(comparison.samples_b.median),
    }
    if comparison.change is not None:
        change = comparison.change
        figures["change in time"] = f"{change.value * 100:+.1f} %"
        figures["speed-up"] = units.ratio(1 / (1 + change.value))
        figures["least change that would be seen"] = units.percent(change.detectable)
    return join([verdict, tiles(figures)])
