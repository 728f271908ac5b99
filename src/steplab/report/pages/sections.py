"""The parts that pages of one Run or trace share. A part without data is empty and left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steplab.record import Finding, Run
from steplab.record.budget import Budget
from steplab.report.pages.budget import budget_html
from steplab.report.pages.categories import categories_html
from steplab.report.pages.conditions import paragraphs, run_figures, run_foot, run_title, tiles
from steplab.report.pages.document import Section
from steplab.report.pages.findings import findings_html
from steplab.report.pages.kernels import kernels_html
from steplab.report.pages.markup import NOTHING, Html, data_block, join
from steplab.report.pages.memory import memory_html
from steplab.report.pages.roofline import roofline_html
from steplab.report.pages.timeline import Names, timeline_html
from steplab.trace.analysis import Analysis
from steplab.trace.costs import card_of, device_name_of

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
    drawn = timeline_html(analysis, names)
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
    card = card_of(analysis.trace, named)
    where = f" of the {card.name} ({card.source})" if card else ""
    note = f"FLOP/s over FLOP/byte by shapes, under the dense peaks{where}; larger is longer."
    return Section("roofline", "Roofline", roofline_html(analysis, card), note)


def findings_section(findings: Sequence[Finding], step_ms: float | None) -> Section:
    """What is in the way."""
    return Section("findings", "Findings", findings_html(findings, step_ms))


def page_title(run: Run | None, analysis: Analysis | None) -> str:
    """What the page is about."""
    if run is not None:
        return run_title(run)
    name = device_name_of(analysis.trace) if analysis else ""
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
