"""Bars of the categories of kernels, the longest first."""

from __future__ import annotations

from steplab import units
from steplab.record.budget import StepBudget
from steplab.report.pages.colours import category_class
from steplab.report.pages.markup import Html, element, join


def categories_html(step: StepBudget) -> Html:
    """Return one bar per category of the step, with its share of the step."""
    longest = max((category.ms for category in step.categories), default=0.0)
    rows = []
    for category in sorted(step.categories, key=lambda c: -c.ms):
        width = category.ms / longest * 100 if longest else 0.0
        bar = element("i", class_=category_class(category.name), style=f"width:{width:.2f}%")
        share = units.percent(category.ms / step.wall_ms if step.wall_ms else None)
        value = f"{units.milliseconds(category.ms)}, {share}"
        cells = (
            element("div", category.name, class_="label"),
            element("div", bar, class_="track"),
            element("div", value, class_="value"),
        )
        rows.append(element("div", *cells, class_="hbar"))
    return join(rows)
