"""The pages of one profiled Run or trace, of its findings, and of many Runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from steplab.core import Cell, Column, Finding, Run, Table, units
from steplab.core.run import rate_name
from steplab.report.charts.step_times import runs_chart
from steplab.report.markup import NOTHING, Html, element, join
from steplab.report.pages.budget import budget_html
from steplab.report.pages.document import Section, paragraphs, table_html, tiles, write_page
from steplab.report.pages.sections import (
    budget_section,
    categories_section,
    findings_section,
    kernels_section,
    memory_section,
    page_foot,
    page_head,
    page_title,
    ranks_section,
    roofline_section,
    timeline_section,
)
from steplab.trace.analysis import Analysis, run_budget, run_step_ms
from steplab.trace.ranks.analysis import RanksAnalysis


def write_profile_page(
    run: Run | None, analysis: Analysis | None, path: Path, ranks: RanksAnalysis | None = None
) -> None:
    """Write everything that the traces and the Run tell as one self-contained file of the store.

    `ranks` are those that share the step, where there are several.
    """
    sections = [
        budget_section(run, analysis),
        ranks_section(ranks),
        timeline_section(analysis),
        categories_section(analysis),
        kernels_section(analysis),
        memory_section(run),
        roofline_section(run, analysis),
    ]
    if run is not None and run.findings:
        sections.append(findings_section(run.findings, run_step_ms(run, analysis)))
    title, foot = page_title(run, analysis), page_foot(run, analysis)
    write_page(path, title, page_head(run), sections, foot, "--store")


def write_explain_page(
    run: Run | None,
    analysis: Analysis | None,
    findings: Sequence[Finding],
    path: Path,
    trace: str = "",
    flag: str = "--out",
    ranks: RanksAnalysis | None = None,
) -> None:
    """Write budget, findings and timeline of a Run, or of a trace that is no Run's.

    `trace` is the name of such a trace, or of a folder with those of several `ranks`; `flag` named
    the path.
    """
    sections = [
        budget_section(run, analysis),
        findings_section(findings, run_step_ms(run, analysis)),
        ranks_section(ranks),
        timeline_section(analysis),
    ]
    title = trace or page_title(run, analysis)
    write_page(path, title, page_head(run), sections, page_foot(run, analysis), flag)


def write_runs_page(runs: Sequence[Run], path: Path) -> None:
    """Write one section for every workload, size, batch, mode and device among the Runs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_title(run), []).append(run)
    sections = [
        Section(f"group-{number}", title, _group_html(members))
        for number, (title, members) in enumerate(groups.items(), 1)
    ]
    failed = sum(run.status != "ok" for run in runs)
    head = tiles({"Runs": str(len(runs)), "without a result": str(failed)})
    conditions = {run.environment.conditions_on(run.spec.device): None for run in runs}
    foot = paragraphs([*conditions, "Only Runs of one machine and moment can be compared closely."])
    write_page(path, f"Report of {units.counted(len(runs), 'Run')}", head, sections, foot)


def _title(run: Run) -> str:
    """What Runs have in common that are drawn over one axis."""
    environment = run.environment
    where = environment.device_name if run.spec.device == "cuda" else environment.cpu
    # A sweep over a field of the config is one group, whose rows name the field.
    return f"{replace(run.spec, overrides=()).title}, {where}"


def _group_html(runs: Sequence[Run]) -> Html:
    names = run_names(runs)
    rows = tuple(_row(name, run) for name, run in zip(names, runs, strict=True))
    budgets = [_budget(name, run) for name, run in zip(names, runs, strict=True)]
    columns = (
        Column("name"),
        Column("step median", "ms"),
        Column("spread", "%"),
        Column(rate_name(runs)),
        Column("MFU", "%"),
        Column("peak", "GiB"),
        Column("first step", "s"),
        Column("status"),
    )
    table = Table("", columns, rows).without_unknown_columns()
    return join([runs_chart(names, runs), table_html(table), *budgets])


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return each Run's recipe and what else tells it from the others of its group."""
    keys = sorted({key for run in runs for key in run.spec.config})
    differing = [k for k in keys if len({repr(run.spec.config.get(k)) for run in runs}) > 1]
    names = []
    for run in runs:
        words = [f"{key}={run.spec.config.get(key)}" for key in differing]
        names.append(", ".join([run.spec.recipe.label, *words]))
    return names


def _row(name: str, run: Run) -> tuple[Cell, ...]:
    clock, figures, memory = run.clock, run.figures, run.memory
    mfu = figures.possible_mfu if figures is not None else None
    return (
        name,
        clock.step.median if clock else None,
        100 * clock.step.spread if clock else None,
        run.tokens_per_second,
        100 * mfu if mfu is not None else None,
        memory.peak / 2**30 if memory else None,
        run.compilation.first_seconds if run.compilation else None,
        run.status if run.status == "ok" else f"{run.status}: {run.reason}",
    )


def _budget(name: str, run: Run) -> Html:
    budget = run_budget(run, None)
    if budget is None:
        return NOTHING
    about = element("summary", f"Budget of a step: {name}", element("span", run.id))
    return element("details", about, budget_html(budget))
