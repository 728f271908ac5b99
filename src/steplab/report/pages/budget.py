"""The budget of a step: one bar, and the table of what it is made of."""

from __future__ import annotations

from steplab.core import Budget, Category, StepBudget, units
from steplab.core.budget import TERMS
from steplab.report.charts.colors import category_class, term_class
from steplab.report.markup import NOTHING, Html, element, join


def budget_html(budget: Budget) -> Html:
    """Return bar, table and remarks for the typical step."""
    step = budget.typical
    parts = [_bar(step, budget), _legend(step), _table(step, budget)]
    return join([*parts, *(element("p", note, class_="note") for note in _remarks(budget))])


def _parts(step: StepBudget, budget: Budget) -> list[tuple[str, str, float, Category | None]]:
    """Class, name, milliseconds and category of every segment, in the order of the terms.

    The term `kernels` is shown as its categories, where there are any.
    """
    parts: list[tuple[str, str, float, Category | None]] = []
    for term in TERMS:
        if term == "kernels" and step.categories:
            parts += [
                (category_class(c.name), budget.term_name(c.name), c.ms, c) for c in step.categories
            ]
        else:
            parts.append((term_class(term), term, step.terms.get(term, 0.0), None))
    return [*parts, (term_class("residual"), "residual", max(step.residual_ms, 0.0), None)]


def _bar(step: StepBudget, budget: Budget) -> Html:
    segments, strips = [], []
    for css, name, ms, category in _parts(step, budget):
        if ms <= 0:
            continue
        width = f"width:{step.share(ms) * 100:.3f}%"
        text = f"{name}\n{units.milliseconds(ms)}, {units.percent(step.share(ms))}"
        segments.append(element("i", class_=css, style=width, data_tip=text))
        strips.append(_strip(category, width))
    strip = element("div", *strips, class_="strip") if _has_ideal(step) else NOTHING
    return join([element("div", *segments, class_="bar"), strip])


def _strip(category: Category | None, width: str) -> Html:
    """Below a segment: how much of it the roofline needs, and how much is lost."""
    if category is None or category.ideal_ms is None or not category.ms:
        return element("i", style=width)
    ideal = min(category.ideal_ms, category.modeled_ms) / category.ms * 100
    lost = max(category.lost_ms or 0.0, 0.0) / category.ms * 100
    parts = (
        element("i", class_="ideal", style=f"width:{ideal:.2f}%"),
        element("i", class_="lost", style=f"width:{lost:.2f}%"),
    )
    return element("i", *parts, style=f"{width};display:flex")


def _legend(step: StepBudget) -> Html:
    if not _has_ideal(step):
        return NOTHING
    ideal = element("span", element("i", class_="swatch ideal"), "ideal by the roofline")
    lost = element("span", element("i", class_="swatch lost"), "lost")
    return element("div", ideal, lost, class_="legend")


def _table(step: StepBudget, budget: Budget) -> Html:
    """Terms and categories; the columns of the ideal only where a category has one."""
    rows = []
    for term in TERMS:
        ms = step.terms.get(term, 0.0)
        if ms or term == "kernels":
            mark, name = term_class(term), term_label(term, budget)
            own = Category.total("all", step.categories) if term == "kernels" else None
            rows.append(_row(mark, name, ms, step, own))
        if term == "kernels":
            rows += [
                _row(category_class(c.name), budget.term_name(c.name), c.ms, step, c, css="inner")
                for c in step.categories
            ]
    rows.append(_row(term_class("residual"), "residual", step.residual_ms, step))
    rows.append(_row("", "the whole step", step.wall_ms, step, css="sum"))
    count = "launches" if budget.on_device else "calls"
    titles = ["term", "time [ms]", "of the step [%]", count]
    titles += ["ideal [ms]", "lost [ms]", "with an ideal [%]"] if _has_ideal(step) else []
    headings = [element("th", t, class_="number" if i else None) for i, t in enumerate(titles)]
    head = element("thead", element("tr", *headings))
    table = element("table", head, element("tbody", *rows), class_="budget")
    return element("div", table, class_="scroll")


def _row(
    swatch: str,
    name: str,
    ms: float,
    step: StepBudget,
    category: Category | None = None,
    css: str | None = None,
) -> Html:
    mark = element("i", class_=f"swatch {swatch}") if swatch else NOTHING
    decimals = step.decimals
    times = [ms, None, None] if category is None else [ms, category.ideal_ms, category.lost_ms]
    whole, ideal, lost = (None if t is None else f"{t + 0.0:,.{decimals}f}" for t in times)
    cells = [whole, f"{step.share(ms) * 100:.1f}"]
    cells.append(None if category is None else f"{category.launches:,}")
    if _has_ideal(step):
        share = category.modeled_ms / category.ms if category and category.ms else 0.0
        cells += [ideal, lost, f"{share * 100:.0f}" if category else None]
    numbers = [element("td", cell or "", class_="number") for cell in cells]
    return element("tr", element("td", mark, name), *numbers, class_=css)


def _has_ideal(step: StepBudget) -> bool:
    return any(category.ideal_ms is not None for category in step.categories)


def _remarks(budget: Budget) -> list[str]:
    step = budget.typical
    count = len(budget.steps)
    which = f"step {step.number}, the median of {count}" if count > 1 else "the only profiled step"
    remarks = [f"Shown is {which}. {units.percent(step.share(step.residual_ms))} is unexplained."]
    if budget.profiled_ratio is not None:
        unprofiled, ratio = units.milliseconds(budget.unprofiled_ms), budget.profiled_ratio
        remarks[0] += f" Without the profiler {unprofiled}: the profiled step takes {ratio:.2f}x."
    remarks += [f"{what}: {source}" for what, source in budget.peaks.items()]
    return [*remarks, *budget.notes]


def term_label(term: str, budget: Budget) -> str:
    """Return a term's name; that of the host says what it is made of."""
    name = budget.term_name(term)
    return "host: Python and framework" if name == "host" else name
