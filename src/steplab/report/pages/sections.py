"""The parts that pages of one Run or trace share. A part without data is empty and left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steplab.core import (
    Budget,
    Cell,
    Column,
    Finding,
    MemoryTimeline,
    Run,
    StepBudget,
    Table,
    units,
)
from steplab.report.charts.colors import category_class
from steplab.report.charts.roofline import roofline_chart
from steplab.report.charts.timeline import Names, timeline_chart
from steplab.report.markup import NOTHING, Html, data_block, element, join
from steplab.report.memory import memory_svg, memory_tables
from steplab.report.pages.budget import budget_html
from steplab.report.pages.document import (
    Section,
    paragraphs,
    run_figures,
    run_foot,
    run_title,
    table_html,
    tiles,
)
from steplab.trace.analysis import Analysis
from steplab.trace.kernel_table import kernel_table, phases_by_time
from steplab.trace.roofline import trace_card, trace_device_name

READ_ANEW = "read anew from the first trace: the budget stored with the Run is another"


def budget_section(run: Run | None, analysis: Analysis | None) -> Section:
    """Where the wall time of a step went."""
    budget = budget_of(run, analysis)
    return Section("budget", "Budget of a step", budget_html(budget) if budget else NOTHING)


def timeline_section(analysis: Analysis | None) -> Section:
    """One step over time, with the names for hovering."""
    if analysis is None:
        return Section("timeline", "Timeline", NOTHING)
    names = Names()
    drawn = timeline_chart(analysis, names)
    note = "One step; short events side by side are drawn as one box. Hover for names."
    return Section("timeline", "Timeline", join([drawn, data_block("names", names.texts)]), note)


def categories_section(analysis: Analysis | None) -> Section:
    """Kernels by kind."""
    known = analysis is not None and analysis.budget.steps
    drawn = categories_html(analysis.budget.typical) if analysis and known else NOTHING
    return Section("categories", "Kinds of work", drawn)


def kernels_section(analysis: Analysis | None) -> Section:
    """Tables of kernels, one per phase."""
    if analysis is None:
        return Section("kernels", "Kernels", NOTHING)
    title = "Kernels" if analysis.budget.on_device else "Operators"
    return Section("kernels", f"{title} by phase", kernels_html(analysis))


def memory_section(run: Run | None) -> Section:
    """Memory over one step."""
    timeline = run.profile.memory if run is not None and run.profile is not None else None
    return Section("memory", "Memory", memory_html(timeline) if timeline else NOTHING)


def roofline_section(run: Run | None, analysis: Analysis | None) -> Section:
    """Kernels against the limits of the card."""
    if analysis is None:
        return Section("roofline", "Roofline", NOTHING)
    named = run.environment.device_name if run is not None and run.spec.device == "cuda" else ""
    card = trace_card(analysis.trace, named)
    where = f" of the {card.name} ({card.source})" if card else ""
    note = f"FLOP/s over FLOP/byte by shapes, under the dense peaks{where}; larger is longer."
    return Section("roofline", "Roofline", roofline_chart(analysis, card), note)


def findings_section(findings: Sequence[Finding], step_ms: float | None) -> Section:
    """What is in the way."""
    return Section("findings", "Findings", findings_html(findings, step_ms))


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
    """The conditions."""
    if run is not None:
        return run_foot(run)
    steps = len(analysis.windows) if analysis else 0
    return paragraphs([f"A trace of {steps} steps, without a Run: its spec is not known."])


def budget_of(run: Run | None, analysis: Analysis | None) -> Budget | None:
    """Return the budget stored with the Run, which has the steps of all its traces.

    What the first trace gives now, where nothing is stored or an older version read it otherwise.
    """
    stored = run.profile.budget if run is not None and run.profile is not None else None
    budget = stored or (analysis.budget if analysis else None)
    if stored and analysis and analysis.budget.steps and not stored.begins_with(analysis.budget):
        budget = replace(analysis.budget, notes=(*analysis.budget.notes, READ_ANEW))
    return budget if budget and budget.steps else None


def step_ms_of(run: Run | None, analysis: Analysis | None) -> float | None:
    """Return what a step takes: timed where it was, else as the trace shows it."""
    if run is not None and run.clock is not None and run.clock.step.values:
        return run.clock.step.median
    budget = budget_of(run, analysis)
    return budget.typical.wall_ms if budget else None


NOTE_BELOW = 0.03  # of the step: less at stake is a note, not a finding


def findings_html(findings: Sequence[Finding], step_ms: float | None) -> Html:
    """Return one card per Finding; those with little at stake are drawn in gray."""
    if not findings:
        return element("p", "No rule finds anything.", class_="soft")
    return join(_card(finding, step_ms) for finding in findings)


def _card(finding: Finding, step_ms: float | None) -> Html:
    gain = finding.gain_ms if finding.gain_ms is not None else finding.stake_ms
    small = step_ms and gain is not None and gain < NOTE_BELOW * step_ms
    stakes = _stakes(finding, step_ms)
    badge = element("span", stakes, class_="badge") if stakes else NOTHING
    title = element("h3", finding.claim, badge)
    rule = element("p", element("code", finding.rule), class_="soft")
    evidence = element("ul", *(element("li", line) for line in finding.evidence))
    why = element("p", finding.why) if finding.why else NOTHING
    remedy = element("p", element("b", "Remedy: "), finding.remedy)
    parts = (title, rule, evidence if finding.evidence else NOTHING, why, remedy, _gain(finding))
    return element("article", *parts, class_="finding small" if small else "finding")


def _stakes(finding: Finding, step_ms: float | None) -> str:
    words = []
    if finding.stake_ms is not None:
        share = f" ({units.percent(finding.stake_ms / step_ms)})" if step_ms else ""
        words.append(f"{units.milliseconds(finding.stake_ms)}{share}")
    if finding.stake_bytes is not None:
        words.append(units.bytes_(finding.stake_bytes))
    return ", ".join(words)


def _gain(finding: Finding) -> Html:
    if finding.gain_ms is None:
        return NOTHING
    return element("p", f"Expected gain: {units.milliseconds(finding.gain_ms)}", class_="soft")


MAX_KERNELS = 25  # of one phase; the rest is one row
MAX_PHASES = 12  # foreign traces may have hundreds of ranges


def kernels_html(analysis: Analysis) -> Html:
    """Return one table per phase, the longest phase first and open."""
    parts = []
    for number, phase in enumerate(phases_by_time(analysis)[:MAX_PHASES]):
        table = _name_first(kernel_table(analysis, phase=phase, top=MAX_KERNELS))
        total = sum(row[2] for row in table.rows if isinstance(row[2], (int, float)))
        per_step = total / max(len(analysis.windows), 1)
        count = element("span", f"{per_step:.4g} ms per step")
        title = element("summary", phase, count)
        opened = "" if number == 0 else None
        parts.append(element("details", title, table_html(table), open=opened))
    return join(parts)


def _name_first(table: Table) -> Table:
    """Move the name from the last column to the first, which is what a narrow screen shows."""
    rows = tuple((row[-1], *row[:-1]) for row in table.rows)
    return replace(table, columns=(table.columns[-1], *table.columns[:-1]), rows=rows)


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


WAITING = ("copies", "data wait", "synchronization", "launch", "dispatch")


def headroom_html(budget: Budget | None) -> Html:
    """Return a sentence and a table of what could go, the most first; nothing without a budget."""
    if budget is None or not budget.steps:
        return NOTHING
    step = budget.typical
    rows: list[tuple[str, float, float | None]] = [
        (c.name, c.ms, c.lost_ms if c.lost_ms is None else max(c.lost_ms, 0.0))
        for c in step.categories
    ]
    host = {} if budget.on_device else {"launch": "host: Python and framework"}
    terms = {name: step.terms.get(name, 0.0) for name in WAITING}
    rows += [(host.get(name, name), ms, ms) for name, ms in terms.items() if ms > 0]
    rows.sort(key=lambda row: -(row[2] or 0.0))
    could = sum(row[2] or 0.0 for row in rows)
    unknown = sum(row[1] for row in rows if row[2] is None)
    share = could / step.wall_ms if step.wall_ms else 0.0
    words = f"Of {units.milliseconds(step.wall_ms)}, {units.milliseconds(could)} "
    words += f"({units.percent(share)}) lie above the roofline or are spent waiting"
    if unknown:
        words += f"; {units.milliseconds(unknown)} is work whose ideal time is not known"
    columns = (Column("part"), Column("time", "ms"), Column("could go", "ms"))
    shown: tuple[tuple[Cell, ...], ...] = tuple(rows)
    return join([element("p", f"{words}."), table_html(Table("headroom", columns, shown))])


def memory_html(timeline: MemoryTimeline) -> Html:
    """Return the picture of the timeline with its tables; the first is open."""
    # The drawing escapes its own texts.
    parts = [element("div", Html(memory_svg(timeline)), class_="picture")]
    for number, table in enumerate(memory_tables(timeline)):
        opened = "" if number == 0 else None
        title = element("summary", table.title)
        parts.append(element("details", title, table_html(table), open=opened))
    return join(parts)
