"""The page of a ladder: what was tried, what it gained, and what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from steplab.core import Finding, Run, Table, units
from steplab.core.ladder import Ladder
from steplab.report.charts.step_times import ladder_chart
from steplab.report.markup import NOTHING, Html, element, join
from steplab.report.pages.document import Section, paragraphs, table_html, tiles, write_page
from steplab.report.pages.sections import (
    budget_section,
    findings_section,
    headroom_section,
    roofline_section,
)
from steplab.trace.analysis import Analysis, run_budget, run_step_ms


def write_ladder_page(
    ladder: Ladder,
    tables: Mapping[str, Table],
    recipe_text: str,
    winner: Run | None,
    analysis: Analysis | None,
    findings: Sequence[Finding],
    path: Path,
    flag: str = "--out",
) -> None:
    """Write the ladder as one self-contained file.

    `tables` by section: "impact", "why", "gate", "untried", "batches"; `winner` is the profiled Run
    of the last recipe (the baseline where nothing won), `analysis` its trace, `findings` what is in
    its way; `flag` named the path.
    """
    note = "Time of a step, measured in turns with the recipe below. Hover for the reasons."
    sections = [
        Section("ladder", "The ladder", ladder_chart(ladder), note),
        _table("impact", "Performance impact", tables),
        Section("recipe", "The recipe", _recipe(ladder, recipe_text)),
        _table("why", "Why", tables),
        headroom_section(run_budget(winner, analysis)),
        roofline_section(winner, analysis),
        findings_section(findings, run_step_ms(winner, analysis)),
        budget_section(winner, analysis),
        _table("gate", "The gate", tables),
        _table("untried", "Not tried", tables),
    ]
    if ladder.batches:
        sections.insert(3, _table("batches", "At the best batch of each", tables))
    title = f"Tuning {ladder.spec.title}"
    write_page(path, title, _head(ladder), sections, _foot(ladder), flag)


def _table(key: str, title: str, tables: Mapping[str, Table]) -> Section:
    table = tables.get(key)
    return Section(key, title, table_html(table) if table and table.rows else NOTHING)


def _head(ladder: Ladder) -> Html:
    change = ladder.total
    if change is None or ladder.before is None or ladder.after is None or ladder.has_winner_already:
        has = f"The script has {ladder.winner.label} already: nothing to gain."
        none = has if ladder.has_winner_already else "No recipe beats the baseline."
        verdict = element("p", none, class_="verdict")
        return join([verdict, tiles({"recipes tried": str(len(ladder.rungs))})])
    factor = units.ratio(1 / (1 + change.value))
    sure = change.high < 0 or change.low > 0
    claim = f"{factor} the speed" if sure else f"Not distinguishable from the baseline ({factor})"
    words = element("b", claim), f" with {ladder.winner.label}"
    css = "faster" if change.high < 0 else "slower" if change.low > 0 else ""
    figures = {
        "baseline, median step": units.milliseconds(ladder.before.median),
        "winner, median step": units.milliseconds(ladder.after.median),
        "speed-up, 95 % interval": f"{1 / (1 + change.high):.2f} to {1 / (1 + change.low):.2f}",
        "recipes tried": str(len(ladder.rungs)),
        "of them with a green gate": str(sum(rung.green for rung in ladder.rungs)),
    }
    return join([element("p", *words, class_=f"verdict {css}"), tiles(figures)])


def _recipe(ladder: Ladder, text: str) -> Html:
    if not ladder.winner.techniques:
        return element("p", "plain: the step as it is", class_="soft")
    return element("pre", element("code", text))


def _foot(ladder: Ladder) -> Html:
    spec = ladder.spec
    lines = [
        f"Ladder {ladder.id}, {ladder.created}, objective {ladder.objective}",
        ladder.environment.conditions_on(spec.device),
        f"numerics against fp64 {'; '.join(ladder.gate_shapes)}",
        f"stopped: {ladder.stopped or 'interrupted'}",
        f"took {units.milliseconds(ladder.seconds * 1e3)}",
    ]
    lines += [f"no time was left for: {', '.join(ladder.left)}"] if ladder.left else []
    return paragraphs(lines)
