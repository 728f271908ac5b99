"""The sections that pages are made of. A section without data is empty and left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steplab.core import Budget, Cell, Column, Finding, Run, Table, units
from steplab.report.charts.colors import category_class
from steplab.report.charts.memory import memory_svg
from steplab.report.charts.rank_lanes import rank_lanes
from steplab.report.charts.roofline import roofline_chart
from steplab.report.charts.timeline import Names, timeline_chart
from steplab.report.markup import NOTHING, Html, data_block, element, join
from steplab.report.memory import memory_tables
from steplab.report.pages.budget import budget_html, term_label
from steplab.report.pages.document import (
    Section,
    paragraphs,
    run_figures,
    run_foot,
    run_title,
    table_html,
    tiles,
)
from steplab.report.ranks import collectives_table, communication_table, ranks_table
from steplab.trace.analysis import Analysis, run_budget
from steplab.trace.kernel_table import kernel_table, phases_by_time
from steplab.trace.ranks.analysis import RanksAnalysis
from steplab.trace.roofline import trace_card, trace_device_name

NOTE_BELOW = 0.03  # of the step: less at stake is a note, not a finding
MAX_KERNELS = 25  # of one phase; the rest is one row
MAX_PHASES = 12  # foreign traces may have hundreds of ranges
WAITING = ("copies", "data wait", "synchronization", "launch", "dispatch")


def budget_section(run: Run | None, analysis: Analysis | None) -> Section:
    """Where the wall time of a step went; of several ranks, that of the one whose trace it is."""
    budget = run_budget(run, analysis)
    place = analysis.trace.place if analysis is not None else None
    of_rank = f", rank {place.rank}" if place and (place.ranks or 1) > 1 else ""
    content = budget_html(budget) if budget else NOTHING
    return Section("budget", f"Budget of a step{of_rank}", content)


def timeline_section(analysis: Analysis | None) -> Section:
    """One step over time, with the names for hovering."""
    if analysis is None:
        return Section("timeline", "Timeline", NOTHING)
    names = Names()
    drawn = timeline_chart(analysis, names)
    note = "One step; short events side by side are drawn as one box. Hover for names."
    return Section("timeline", "Timeline", join([drawn, data_block("names", names.texts)]), note)


def ranks_section(ranks: RanksAnalysis | None) -> Section:
    """All ranks of a step over time, their collectives and their waits."""
    if ranks is None:
        return Section("ranks", "Ranks", NOTHING)
    made = (communication_table(ranks), ranks_table(ranks), collectives_table(ranks))
    tables = [table_html(table) for table in made if table.rows]
    note = "One step on one clock. Above what a rank computes, below its collectives"
    if ranks.tells_waits:
        note += ": first the wait for the last rank, then the transfer. Lines join the ranks of one"
        note += " collective"
    told = [ranks.missing_sentence, *ranks.notes]
    foot = paragraphs([text for text in told if text])
    return Section("ranks", "Ranks", join([rank_lanes(ranks), *tables, foot]), f"{note}.")


def categories_section(analysis: Analysis | None) -> Section:
    """Kernels by kind: one bar per category of the step, the longest first."""
    known = analysis is not None and analysis.budget.steps
    bars = _category_bars(analysis.budget) if analysis and known else NOTHING
    return Section("categories", "Kinds of work", bars)


def _category_bars(budget: Budget) -> Html:
    step = budget.typical
    longest = max((category.ms for category in step.categories), default=0.0)
    rows = []
    for category in sorted(step.categories, key=lambda c: -c.ms):
        width = category.ms / longest * 100 if longest else 0.0
        bar = element("i", class_=category_class(category.name), style=f"width:{width:.2f}%")
        value = f"{units.milliseconds(category.ms)}, {units.percent(step.share(category.ms))}"
        cells = (
            element("div", budget.term_name(category.name), class_="label"),
            element("div", bar, class_="track"),
            element("div", value, class_="value"),
        )
        rows.append(element("div", *cells, class_="hbar"))
    return join(rows)


def kernels_section(analysis: Analysis | None) -> Section:
    """Tables of kernels, one per phase, the longest phase first and open."""
    if analysis is None:
        return Section("kernels", "Kernels", NOTHING)
    parts: list[Html] = []
    for phase in phases_by_time(analysis)[:MAX_PHASES]:
        table = _name_first(kernel_table(analysis, phase=phase, top=MAX_KERNELS))
        total = sum(row[2] for row in table.rows if isinstance(row[2], (int, float)))
        per_step = total / max(len(analysis.windows), 1)
        summary = element("summary", phase, element("span", f"{per_step:.4g} ms per step"))
        parts.append(_details(summary, table_html(table), is_open=not parts))
    title = "Kernels" if analysis.budget.on_device else "Operators"
    return Section("kernels", f"{title} by phase", join(parts))


def _name_first(table: Table) -> Table:
    """Move the name from the last column to the first, which is what a narrow screen shows."""
    rows = tuple((row[-1], *row[:-1]) for row in table.rows)
    return replace(table, columns=(table.columns[-1], *table.columns[:-1]), rows=rows)


def memory_section(run: Run | None) -> Section:
    """Memory over one step: the picture, and the tables, of which the first is open."""
    timeline = run.profile.memory if run is not None and run.profile is not None else None
    if timeline is None:
        return Section("memory", "Memory", NOTHING)
    tables = [
        _details(element("summary", table.title), table_html(table), is_open=number == 0)
        for number, table in enumerate(memory_tables(timeline))
    ]
    picture = element("div", Html(memory_svg(timeline)), class_="picture")  # already escaped
    return Section("memory", "Memory", join([picture, *tables]))


def _details(summary: Html, content: Html, is_open: bool) -> Html:
    return element("details", summary, content, open="" if is_open else None)


def roofline_section(run: Run | None, analysis: Analysis | None) -> Section:
    """Kernels against the limits of the card."""
    if analysis is None:
        return Section("roofline", "Roofline", NOTHING)
    named = run.environment.device_name if run is not None and run.spec.device == "cuda" else ""
    card = trace_card(analysis.trace, named)
    where = f" of the {card.name} ({card.source})" if card else ""
    note = f"FLOP/s over FLOP/byte by shapes, under the dense peaks{where}; larger is longer."
    return Section("roofline", "Roofline", roofline_chart(analysis, card), note)


def headroom_section(budget: Budget | None) -> Section:
    """What a step could still gain: time above the roofline, and time spent waiting."""
    return Section("headroom", "What is left", _headroom(budget) if budget else NOTHING)


def _headroom(budget: Budget) -> Html:
    step = budget.typical
    rows: list[tuple[str, float, float | None]] = [
        (budget.term_name(c.name), c.ms, None if c.lost_ms is None else max(c.lost_ms, 0.0))
        for c in step.categories
    ]
    waits = {term_label(term, budget): step.terms.get(term, 0.0) for term in WAITING}
    rows += [(name, ms, ms) for name, ms in waits.items() if ms > 0]
    rows.sort(key=lambda row: -(row[2] or 0.0))
    could = sum(row[2] or 0.0 for row in rows)
    unknown = sum(row[1] for row in rows if row[2] is None)
    words = f"Of {units.milliseconds(step.wall_ms)}, {units.milliseconds(could)} "
    words += f"({units.percent(step.share(could))}) lie above the roofline or are spent waiting"
    if unknown:
        words += f"; {units.milliseconds(unknown)} is work whose ideal time is not known"
    columns = (Column("part"), Column("time", "ms"), Column("could go", "ms"))
    shown: tuple[tuple[Cell, ...], ...] = tuple(rows)
    return join([element("p", f"{words}."), table_html(Table("headroom", columns, shown))])


def findings_section(findings: Sequence[Finding], step_ms: float | None) -> Section:
    """One card per Finding, the largest stake first; those with little at stake are gray."""
    cards = [_card(finding, step_ms) for finding in findings]
    nothing = element("p", "No rule finds anything.", class_="soft")
    return Section("findings", "Findings", join(cards) if cards else nothing)


def _card(finding: Finding, step_ms: float | None) -> Html:
    gain = finding.gain_ms if finding.gain_ms is not None else finding.stake_ms
    small = finding.ordinary or (step_ms and gain is not None and gain < NOTE_BELOW * step_ms)
    stakes = _stakes(finding, step_ms)
    badge = element("span", stakes, class_="badge") if stakes else NOTHING
    parts = [
        element("h3", finding.claim, badge),
        element("p", element("code", finding.rule), ", a note" if small else "", class_="soft"),
    ]
    if finding.evidence:
        parts.append(element("ul", *(element("li", line) for line in finding.evidence)))
    if finding.why:
        parts.append(element("p", finding.why))
    parts.append(element("p", element("b", "Remedy: "), finding.remedy))
    if finding.gain_ms is not None:
        expected = f"Expected gain: {units.milliseconds(finding.gain_ms)}"
        parts.append(element("p", expected, class_="soft"))
    return element("article", *parts, class_="finding small" if small else "finding")


def _stakes(finding: Finding, step_ms: float | None) -> str:
    words = []
    if finding.stake_ms is not None:
        share = f" ({units.percent(finding.stake_ms / step_ms)})" if step_ms else ""
        words.append(f"{units.milliseconds(finding.stake_ms)}{share}")
    if finding.stake_bytes is not None:
        words.append(units.bytes_(finding.stake_bytes))
    return ", ".join(words)


def page_title(run: Run | None, analysis: Analysis | None) -> str:
    """What the page is about."""
    if run is not None:
        return run_title(run)
    name = trace_device_name(analysis.trace) if analysis else ""
    return f"A trace of {name}" if name else "A trace"


def page_head(run: Run | None) -> Html:
    """The figures that a reader looks for first."""
    return tiles(run_figures(run)) if run is not None else NOTHING


def page_foot(run: Run | None, analysis: Analysis | None) -> Html:
    """The conditions that the numbers were measured under."""
    if run is not None:
        return run_foot(run)
    steps = len(analysis.windows) if analysis else 0
    return paragraphs([f"A trace of {steps} steps, without a Run: its spec is not known."])
